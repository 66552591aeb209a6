"""From one integer format to another without going through values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer.errors import ArtifactError
from ninfer.formats.bits import U8Array
from ninfer.formats.format import QuantFormat, matrix_of


def recode(source: QuantFormat, target: QuantFormat, raw: U8Array, shape: Sequence[int]) -> U8Array:
    """The same codes and scale words in another layout. Both have one f16 scale for the same group.

    Raises ArtifactError for a code that the target has not.
    """
    n, k = matrix_of(shape)
    assert source.code is not None and target.code is not None and source.d is not None and target.d is not None
    assert source.block == source.group == target.block == target.group and k % source.group == 0
    have, out = source.fields(raw, shape), np.zeros(target.nbytes((n, k)), np.uint8)
    fields = target.fields(out, (n, k))
    per_row, target_row = k // source.group, target.blocks_per_row(k)
    at = (np.arange(n)[:, None] * target_row + np.arange(per_row)).reshape(-1)  # padding blocks stay zero
    step = max(1, (1 << 22) // source.block)
    for i in range(0, len(at), step):
        codes = source.code.read({f: v[i : i + step] for f, v in have.items()}, source.block)
        if codes.min() < target.code.map.low or codes.max() > target.code.map.high:
            raise ArtifactError(f"has codes from {codes.min()} to {codes.max()}, but {target.name} holds "
                                f"{target.code.map.low} to {target.code.map.high}: it is not ternary")  # fmt: skip
        part = {f: np.zeros((len(codes), v.shape[1]), np.uint8) for f, v in fields.items()}
        target.code.write(part, codes)
        part[target.d.field][:] = have[source.d.field][i : i + step]
        for f, v in part.items():
            fields[f][at[i : i + step]] = v
    return out
