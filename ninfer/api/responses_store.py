"""Responses that later requests may go on from: in memory, bounded, the least recently used go first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from attrs import frozen

MAX_RECORDS = 1024
MAX_BYTES = 256 << 20

Item = Mapping[str, Any]


@frozen(kw_only=True)
class Record:
    """input: everything the model was given, earlier turns included. tools are not part of it: they are sent anew."""

    response: Mapping[str, Any]
    input: tuple[Item, ...]
    num_bytes: int

    @property
    def history(self) -> tuple[Item, ...]:
        return (*self.input, *self.response["output"])


class ResponseStore:
    """Belongs to the event loop."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def put(self, response: Mapping[str, Any], input: tuple[Item, ...]) -> None:
        """Keep a response. One larger than the store is not kept."""
        size = len(json.dumps([response, input]))
        if size > self._max_bytes:
            return
        self.drop(response["id"])
        self._records[response["id"]] = Record(response=response, input=input, num_bytes=size)
        self._num_bytes += size
        while len(self._records) > self._max_records or self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._records)))

    def get(self, id: str) -> Record | None:
        record = self._records.get(id)
        if record is not None:
            self._records.move_to_end(id)
        return record

    def drop(self, id: str) -> bool:
        record = self._records.pop(id, None)
        if record is None:
            return False
        self._num_bytes -= record.num_bytes
        return True
