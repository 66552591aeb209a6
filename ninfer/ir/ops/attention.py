"""Rotary positions, the paged KV cache, and causal attention over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.formats.dtypes import I32, U8
from ninfer.formats.kv import KV_FORMATS, KVFormat, Side
from ninfer.formats.kv_codes import hadamard
from ninfer.ir import casework as cw
from ninfer.ir.graph import Graph, Value
from ninfer.ir.op import Case, Op, Work, require, same_shape
from ninfer.ir.ops.checks import are_ints, is_rows, is_vector
from ninfer.ir.step import PAGE
from ninfer.ir.types import Arrays, B, Env, M, P, S, T, TensorType, Types, f32_array, ints, plain


@frozen
class Rope(Op):
    """Rotate pairs (r, r + F) of the first 2F values of each head by position * freq_r (split-half, NeoX order).

    The angle is the exact product of the position and the float32 frequency.

    x: [R, H*D]; positions: i32 [R]; freqs: [F] in radians per token -> [R, H*D]. cos and sin are multiplied by
    `mscale` (YaRN's attention factor). Su et al. 2021.
    """

    head_dim: int
    mscale: float = 1.0

    def infer(self, args: Types) -> Types:
        x, positions, freqs = args
        n, f = is_rows(self, "x", x), is_vector(self, "freqs", freqs)
        require(self, n % self.head_dim == 0, f"{x} is not heads of {self.head_dim}")
        are_ints(self, "positions", x.shape[:1], positions)
        require(self, 2 * f <= self.head_dim, f"{freqs} rotate more than {self.head_dim}")
        return (x,)

    def reference(self, args: Arrays) -> Arrays:
        x, positions, freqs = f32_array(args[0]), ints(args[1]), f32_array(args[2])
        f = len(freqs)
        angle = (positions.astype(np.float64)[:, None] * freqs)[:, None]  # in float32 0.03 rad off at a million
        cos, sin = (g(angle).astype(np.float32) * np.float32(self.mscale) for g in (np.cos, np.sin))
        y = x.reshape(len(x), -1, self.head_dim).copy()
        a, b = y[..., :f].copy(), y[..., f : 2 * f].copy()
        y[..., :f] = a * cos - b * sin
        y[..., f : 2 * f] = b * cos + a * sin
        return (y.reshape(x.shape),)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for d, f, n_heads in ((64, 32, 3), (256, 32, 2), (128, 64, 1)):
            (xt, x), (pt, p) = cw.rows(T, 4, n_heads * d), cw.ints(T, [0, 77, 8000, (1 << 20) - 1])
            freqs = (10000.0 ** -(np.arange(f) / f)).astype(np.float32)
            # sin and cos of libraries part by some 1e-6
            yield Case(
                cls(d), f"d{d}-f{f}", (xt, pt, TensorType((f,))), (x, p, freqs),
                Env(rows=4, logit_rows=1, seqs=1), rtol=2e-5, atol=2e-5,
            )  # fmt: skip


def _cache_type(fmt: KVFormat, kv_heads: int, head_dim: int) -> TensorType:
    return TensorType((P, fmt.page_bytes(kv_heads, head_dim)), U8)


def _check_paging(op: Op, x: TensorType, cache: TensorType, expected: TensorType, paging: Sequence[TensorType]) -> None:
    require(op, cache == expected, f"cache is {cache}, not {expected}")
    table, row_seq, *seqs = paging
    are_ints(op, "page_table", (S, M), table)
    are_ints(op, "row_seq", x.shape[:1], row_seq)
    are_ints(op, "row_start seq_slot kv_len", (B,), *seqs)


@frozen(eq=False)
class Rows:
    """Keys or values of a cache.   codes, scales: views [P, G, 64, bytes]."""

    side: Side
    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]

    def store(self, at: Any, x: NDArray[np.float32]) -> None:
        """at: an index of the first three axes; x: rows [..., D] for it."""
        self.codes[at], self.scales[at] = self.side.encode(x)

    def load(self, at: Any) -> NDArray[np.float32]:
        return self.side.decode(self.codes[at], self.scales[at])


def page_views(cache: NDArray[np.uint8], fmt: KVFormat, kv_heads: int, head_dim: int) -> tuple[Rows, Rows]:
    """Keys and values of a cache [P, page_bytes]."""

    def plane(start: int, width: int) -> NDArray[np.uint8]:
        return cache[:, start : start + kv_heads * PAGE * width].reshape(len(cache), kv_heads, PAGE, width)

    k, k_scales, v, v_scales = fmt.plane_offsets(kv_heads, head_dim)
    return (
        Rows(fmt.k, plane(k, fmt.k.code_bytes(head_dim)), plane(k_scales, fmt.k.scale_bytes(head_dim))),
        Rows(fmt.v, plane(v, fmt.v.code_bytes(head_dim)), plane(v_scales, fmt.v.scale_bytes(head_dim))),
    )


@frozen
class KvAppend(Op):
    """Store the rows' keys and values at their cache positions.

    k, v: [T, G*D]; cache: u8 state [P, page bytes]; page_table: i32 state [S, M]; row_seq [T], row_start,
    seq_slot, kv_len [B] -> nothing. Page layout: formats/kv.py.
    """

    fmt: KVFormat
    kv_heads: int
    head_dim: int
    mutates: ClassVar[tuple[int, ...]] = (2,)

    def infer(self, args: Types) -> Types:
        k, v, cache, *paging = args
        same_shape(self, k, v)
        width = is_rows(self, "k", k)
        require(self, width == self.kv_heads * self.head_dim, f"k is {k}, not {self.kv_heads} x {self.head_dim}")
        _check_paging(self, k, cache, _cache_type(self.fmt, self.kv_heads, self.head_dim), paging)
        return ()

    def reference(self, args: Arrays) -> Arrays:
        k, v = (f32_array(a).reshape(-1, self.kv_heads, self.head_dim) for a in args[:2])
        cache, table = plain(args[2]), ints(args[3])
        row_seq, row_start, seq_slot, kv_len = map(ints, args[4:8])
        k_rows, v_rows = page_views(cache, self.fmt, self.kv_heads, self.head_dim)
        for t, b in enumerate(row_seq):
            position = kv_len[b] + t - row_start[b]
            page = table[seq_slot[b], position // PAGE]
            at = (page, slice(None), position % PAGE)
            k_rows.store(at, k[t])
            v_rows.store(at, v[t])
        return ()

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for fmt in KV_FORMATS:
            for d in (64, 128, 256, 512):
                case = _paged_case(fmt, heads=2, kv_heads=2, d=d)
                (kt, k), (vt, v) = cw.rows(T, case.rows, 2 * d, seed=1), cw.rows(T, case.rows, 2 * d, seed=2)
                # rows of zeros, and of very different values
                plain(k)[0], plain(v)[1], plain(k)[2, :d:2] = 0, 0, 1e-3 * plain(k)[2, :d:2]
                types, arrays = (kt, vt, *case.types), (k, v, *case.arrays)
                yield Case(cls(fmt, 2, d), f"{fmt.name}-d{d}", types, arrays, case.env, rtol=0, atol=0)


@frozen
class Attention(Op):
    """Causal softmax attention of the step's rows over the cache, which already holds their own keys.

    q: [T, Hq*D]; cache, page_table, row_seq, row_start, seq_slot, kv_len as in KvAppend -> [T, Hq*D].
    Query head h reads KV head h // (Hq/G). window: a row sees its own and the window-1 tokens before it.
    """

    fmt: KVFormat
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None

    def infer(self, args: Types) -> Types:
        q, cache, *paging = args
        width = is_rows(self, "q", q)
        require(self, self.heads % self.kv_heads == 0, f"{self.heads} heads do not share {self.kv_heads} KV heads")
        require(self, width == self.heads * self.head_dim, f"q is {q}, not {self.heads} x {self.head_dim}")
        _check_paging(self, q, cache, _cache_type(self.fmt, self.kv_heads, self.head_dim), paging)
        return (q,)

    def hidden(self, key: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which keys a row does not see, by positions that broadcast."""
        later = key > row
        return later if self.window is None else later | (key <= row - self.window)

    def reference(self, args: Arrays) -> Arrays:
        q = f32_array(args[0]).reshape(-1, self.heads, self.head_dim)
        if self.fmt.k.rotate:  # as the stored keys are
            q = hadamard(q)
        cache, table = plain(args[1]), ints(args[2])
        row_seq, row_start, seq_slot, kv_len = map(ints, args[3:7])
        k_rows, v_rows = page_views(cache, self.fmt, self.kv_heads, self.head_dim)
        group = self.heads // self.kv_heads
        out = np.zeros_like(q)
        for b in np.unique(row_seq):
            rows = np.flatnonzero(row_seq == b)
            total = int(kv_len[b] + len(rows))
            pages = table[seq_slot[b], : (total + PAGE - 1) // PAGE]
            # [pages, G, 64, D] -> [G, tokens, D]
            k, v = (
                stored.load(pages).swapaxes(0, 1).reshape(self.kv_heads, -1, self.head_dim)[:, :total]
                for stored in (k_rows, v_rows)
            )
            for block in np.split(rows, range(PAGE, len(rows), PAGE)):  # bounds the scores' memory
                last = (kv_len[b] + block - row_start[b])[:, None]
                position = np.arange(total)
                hidden = self.hidden(position, last)
                # [G, group, n, D] against [G, 1, tokens, D]
                heads = q[block].reshape(-1, self.kv_heads, group, self.head_dim).transpose(1, 2, 0, 3)
                scores = heads @ k[:, None].swapaxes(2, 3) * np.float32(self.scale)
                scores[:, :, hidden] = -np.inf
                p = np.exp(scores - scores.max(axis=-1, keepdims=True))
                p /= p.sum(axis=-1, keepdims=True)
                out[block] = (p @ v[:, None]).transpose(2, 0, 1, 3).reshape(len(block), self.heads, self.head_dim)
        return (out.reshape(args[0].shape),)

    def work(self, args: Types, env: Env) -> Work:
        """Counts the whole page capacity of the step's sequences once: an upper bound."""
        tokens = env.seqs * min(env.max_pages, env.pages) * PAGE
        nbytes = tokens * self.fmt.bytes_per_token(self.kv_heads, self.head_dim)
        return Work(nbytes, 4 * env.rows * tokens * self.heads * self.head_dim)

    @classmethod
    def cases(cls) -> Iterable[Case]:
        for fmt in KV_FORMATS:
            for d, heads, kv_heads in ((64, 9, 3), (128, 4, 4), (256, 6, 1), (512, 8, 2)):
                case = _paged_case(fmt, heads=heads, kv_heads=kv_heads, d=d)
                qt, q = cw.rows(T, case.rows, heads * d, seed=3)
                both = fmt.is_plain and (d < 512 or fmt.name == "f16")
                for window in (None, 40) if both else (40 if d == 128 else None,):
                    op = cls(fmt, heads, kv_heads, d, d**-0.5, window)
                    name = f"{fmt.name}-d{d}-h{heads}-w{window or 'all'}"
                    # softmax over 130 float32 scores in another order
                    yield Case(op, name, (qt, *case.types), (q, *case.arrays), case.env, rtol=1e-4, atol=2e-5)


@frozen
class _PagedCase:
    rows: int
    types: Types
    arrays: Arrays
    env: Env


def _paged_case(fmt: KVFormat, *, heads: int, kv_heads: int, d: int) -> _PagedCase:
    """Three sequences: one in mid-context with one row, one with 5 rows across a page border, one that starts."""
    kv_len, counts = [130, 62, 0], [1, 5, 3]
    row_start = [0, 1, 6]
    pages, max_pages, slots = 9, 4, 4
    table = np.full((slots, max_pages), -1, np.int32)
    table[2, :3], table[0, :2], table[3, :1] = [7, 1, 3], [0, 5], [8]
    content = cw.rng(11).standard_normal((pages, kv_heads, PAGE, 2, d)).astype(np.float32)
    cache = np.zeros((pages, fmt.page_bytes(kv_heads, d)), np.uint8)
    k_rows, v_rows = page_views(cache, fmt, kv_heads, d)
    k_rows.store(..., content[..., 0, :])
    v_rows.store(..., content[..., 1, :])
    row_seq = [b for b, n in enumerate(counts) for _ in range(n)]
    typed = (
        (_cache_type(fmt, kv_heads, d), cache),
        (TensorType((S, M), I32), table),
        cw.ints(T, row_seq),
        cw.ints(B, row_start),
        cw.ints(B, [2, 0, 3]),
        cw.ints(B, kv_len),
    )
    env = Env(rows=len(row_seq), logit_rows=1, seqs=3, slots=slots, pages=pages, max_pages=max_pages)
    return _PagedCase(len(row_seq), tuple(t for t, _ in typed), tuple(a for _, a in typed), env)


def kv_state(g: Graph, layer: int, fmt: KVFormat, kv_heads: int, head_dim: int) -> Value:
    """Raises UsageError where the format does not fit the heads."""
    fmt.check(head_dim)
    return g.state(f"kv.{layer}", _cache_type(fmt, kv_heads, head_dim))


def _paging(g: Graph) -> tuple[Value, ...]:
    step = g.step
    return (g.states["page_table"], step["row_seq"], step["row_start"], step["seq_slot"], step["kv_len"])


def rope(g: Graph, x: Value, freqs: Value, *, head_dim: int, mscale: float = 1.0) -> Value:
    return g.one(Rope(head_dim, mscale), x, g.step["positions"], freqs)


def paged_attention(g: Graph, q: Value, k: Value, v: Value, cache: Value, op: Attention) -> Value:
    """Append k and v to the cache, then attend."""
    g.add(KvAppend(op.fmt, op.kv_heads, op.head_dim), k, v, cache, *_paging(g))
    return g.one(op, q, cache, *_paging(g))
