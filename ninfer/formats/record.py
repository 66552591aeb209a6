"""Record: fields in byte order, from which the numpy structured dtype and the C struct are derived.

Host view, device struct and bytes on disk come from one declaration, so they cannot drift.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen

from ninfer.formats.dtypes import DType


@frozen
class Field:
    """count > 1: a fixed array."""

    name: str
    dtype: DType
    count: int = 1

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes * self.count


@frozen
class Record:
    """Fields follow each other without gaps."""

    name: str
    fields: tuple[Field, ...]

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype([(f.name, f.dtype.numpy) if f.count == 1 else (f.name, f.dtype.numpy, (f.count,))
                         for f in self.fields])  # fmt: skip

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.fields)

    def offset(self, name: str) -> int:
        """Byte offset of a field. Raises KeyError for a name the record has not."""
        at = 0
        for f in self.fields:
            if f.name == name:
                return at
            at += f.nbytes
        raise KeyError(f"record {self.name} has no field {name!r}")

    @property
    def is_aligned(self) -> bool:
        """Every field lies at a multiple of its own size, and so does the record's end."""
        offsets_fit = all(self.offset(f.name) % f.dtype.nbytes == 0 for f in self.fields)
        return offsets_fit and self.nbytes % max(f.dtype.nbytes for f in self.fields) == 0

    def c_struct(self) -> str:
        """C text, over the type names u8 i8 u16 i16 u32 i32 u64 i64 f32 f64.

        Naturally aligned records go without `packed`, which would make compilers load them byte by byte.
        """
        lines = []
        for f in self.fields:
            extent = "" if f.count == 1 else f"[{f.count}]"
            lines.append(f"    {f.dtype.c_name} {f.name}{extent};  // +{self.offset(f.name)}")
        packed = "" if self.is_aligned else "__attribute__((packed)) "
        size = f"sizeof({self.name}) == {self.nbytes} ? 1 : -1"
        check = f"typedef char {self.name}_is_{self.nbytes}_bytes[{size}];"
        return "\n".join([f"typedef struct {packed}{self.name} {{", *lines, f"}} {self.name};", check, ""])
