"""Runs of launches woven into one persistent kernel.

Between two launches the memory bus of a GPU stands still for microseconds: the last sums, the end of the grid, the
first activations. A woven kernel keeps a block on each multiprocessor over many launches, its stages; where a launch
would end it has a barrier among all blocks, and while that is waited for its rings fill with the weights of the stages
to come. (The idea of a persistent "megakernel": Spector et al., "Look Ma, No Bubbles!", Hazy Research, 2025.)

Products with int8 activations have a stage of their own (templates/cuda/woven_linear.j2), whose work is dealt out in
chunks of K, so that every warp of the device streams the same number of them. Other kernels become stages as they are,
if they have a block's number of threads and no dynamic shared memory: their wait for the launch before is the barrier.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import asdict, evolve, field, frozen

from ninfer.devices.base import DeviceInfo, Geometry, Source
from ninfer.devices.plan import Launch, Plan
from ninfer.formats.quant import align_up
from ninfer.ir.ops.packed_act import FusedLinear
from ninfer.ir.types import Env
from ninfer.routes.cuda_layout import TILE_ROWS
from ninfer.routes.linear_cuda import (
    Body,
    Operands,
    Riders,
    height,
    make_bodies,
    make_riders,
    operands,
    parameter_names,
    parts_apart,
    rows_of,
    weighing,
)
from ninfer.routes.render import Renderer

LINEAR = "cuda/woven_linear.j2"
KERNEL = "cuda/woven.cu.j2"
LEAST = 3  # launches worth a woven kernel
_HEAD = re.compile(
    r'extern "C" __global__ void __launch_bounds__\([^)]*\) (\w+)\(const StepHeader\* hdr, (.*?)\) \{', re.S
)
_PARAMETER = re.compile(r"\s*((?:const )?\w+\*)\s+(?:__restrict__ )?(\w+)\s*")


@frozen(kw_only=True)
class WovenBody(Body):
    """The matrices of one format in a stage.

    all_chunks: of all tiles, a chunk being 16 rows by a tile's columns; run: chunks that lie side by side, of one tile
    and part of K; segments, runs: the most runs that a warp and a block have a share of; red: bytes before the sums of
    its warps in shared memory; group_parts: of K that one accumulator keeps apart.
    """

    all_chunks: int
    run: int
    segments: int
    runs: int
    red: int
    group_parts: int


@frozen
class Kind:
    """A distinct stage.   c: a product's context; call: the arguments of another kernel's text."""

    index: int
    name: str
    text: str
    bodies: tuple[WovenBody, ...] = ()
    c: Mapping[str, Any] = field(factory=dict, eq=False)
    grid: tuple[int, int, int] = (1, 1, 1)
    call: str = ""
    headers: tuple[str, ...] = ()


@frozen
class Weaver:
    """units: blocks; warps: of a block, beside the feeders that fill their rings if `bulk` (sm_90's copies); limit:
    bytes of shared memory; parts: of K, of which a block reads the activations of one or two (0: as few as keep them
    below x_limit bytes); flying: the most fills of a warp's ring that are on their way; stamps: blocks note when they
    reach each phase of a stage.
    """

    renderer: Renderer
    units: int
    warps: int = 16
    limit: int = 223 << 10
    bulk: bool = True
    parts: int = 0
    x_limit: int = 24 << 10
    stamps: bool = False
    flying: int = 3
    feeders: int = 4

    def weave(self, plan: Plan) -> Plan:
        """The plan with its runs of weavable launches woven."""
        launches: list[Launch] = []
        run: list[Launch] = []
        rendered: dict[object, tuple[Source, int] | None] = {}  # a model's layers repeat

        def end() -> None:
            joined = self._join(run, plan, rendered) if len(run) >= LEAST else None
            launches.extend(run if joined is None else [joined])
            run.clear()

        for launch in plan.launches:
            takes = self.takes(launch, plan)
            if not takes or (run and run[0].frame != launch.frame):
                end()
            (run if takes else launches).append(launch)
        end()
        return evolve(plan, launches=tuple(launches))

    def takes(self, launch: Launch, plan: Plan) -> bool:
        if launch.source is None:
            return False
        if isinstance(launch.op, FusedLinear):
            return self._takes_product(launch, plan.frames[launch.frame])
        geometry = launch.geometry
        return (
            geometry.block == 32 * self.warps and geometry.shared == 0 and geometry.grid[2] == 1
            and "PDL_WAIT" in launch.source.text and len(launch.args) == len(launch.types)
            and "__grid_constant__" not in launch.source.text  # its parameter is no pointer
        )  # fmt: skip

    def _takes_product(self, launch: Launch, env: Env) -> bool:
        assert isinstance(launch.op, FusedLinear)
        o = operands(launch.op, launch.types)
        if not o.packed or o.ahead or rows_of(o, env) > 8 or o.packed not in (32, 64):
            return False
        bodies, riders = self._formats(o)
        if not all(b.tiling and b.tiles * b.chunks >= self.units for b in bodies):
            return False  # each block must have a share of each body
        return bool(bodies) and (riders is not None or not self._plain(o))

    @staticmethod
    def _plain(o: Operands) -> list[int]:
        return [i for i, t in o.weights if t.fmt and t.fmt.dtype]

    def _formats(self, o: Operands) -> tuple[tuple[Body, ...], Riders | None]:
        plain = self._plain(o)
        bodies = make_bodies(o, 1, 1, 1, o.packed, 1, plain)
        riders = make_riders(o, plain, self.warps, self.units) if plain and bodies else None
        return bodies, riders

    # stages

    def _join(
        self, run: Sequence[Launch], plan: Plan, rendered: dict[object, tuple[Source, int] | None]
    ) -> Launch | None:
        """The woven launch; None where shared memory is too small."""
        keys = [(x.op, x.types, None if isinstance(x.op, FusedLinear) else x.source) for x in run]
        kinds = list(dict.fromkeys(keys))
        env, stride = plan.frames[run[0].frame], 1 + max(len(x.types) for x in run)
        shape = (tuple(kinds), len(run), stride, env)
        if shape not in rendered:
            found = [self._kind(i, run[keys.index(k)], env) for i, k in enumerate(kinds)]
            rendered[shape] = self._render(found, len(run), stride, env.rows)
        made = rendered[shape]
        if made is None:
            return None
        source, shared = made
        which = [kinds.index(k) for k in keys]
        stages = tuple(evolve(x, args=x.args[: len(x.types)], kind=i) for x, i in zip(run, which, strict=True))
        geometry = Geometry((self.units, 1, 1), 32 * (self.warps + (self.feeders if self.bulk else 0)), shared)
        first = run[0]
        return Launch(first.op, "woven", source, None, geometry, (), (), 0, first.layer, first.frame, stages=stages)

    def _kind(self, index: int, launch: Launch, env: Env) -> Kind:
        if isinstance(launch.op, FusedLinear):
            context = self._product(launch.op, launch, env)
            return Kind(index, f"KERNEL_ENTRY_{index}", "", context["bodies"], context)
        assert launch.source is not None
        text = launch.source.text
        head = _HEAD.search(text)
        assert head is not None, f"{launch.source.entry} has another signature than kernels have"
        parameters = [_PARAMETER.fullmatch(p) for p in head[2].split(",")]
        call = ", ".join(f"({p[1]})args[{i}]" for i, p in enumerate(parameters) if p)
        signature = f"{head[1]}(const StepHeader* hdr, {head[2]}, uint3 place, Weave& weave)"
        text = f"{text[: head.start()]}static __device__ __noinline__ void {signature} {{{text[head.end() :]}"
        changes = {"blockIdx": "place", "PDL_TRIGGER();": "", "PDL_WAIT();": "weave.wait();",
                   "ACTIVATIONS_DONE();": "if (weave.ends) weave.arrive();", "__syncthreads()": "SYNC()"}  # fmt: skip
        for name, becomes in changes.items():
            text = text.replace(name, becomes)
        return Kind(index, head[1], text, grid=launch.geometry.grid, call=call, headers=launch.source.headers)

    def _product(self, op: FusedLinear, launch: Launch, env: Env) -> dict[str, Any]:
        o = operands(op, launch.types)
        rows, ga = rows_of(o, env), o.packed
        nt, group = -(-rows // 8), o.quant or o.weigh
        formats, riders = self._formats(o)
        kp = max(b.tiling.num_tiles * b.tiling.columns for b in formats if b.tiling)
        parts = 1 if len(formats) > 1 or riders else self._parts(formats[0].chunks, kp * rows)
        at, offsets = 0, {}

        def place(name: str, nbytes: int) -> int:
            nonlocal at
            offsets[name] = at
            at += align_up(nbytes, 128)
            return offsets[name]

        most_parts = 1
        if parts > 1:
            most_parts = self._most(
                formats[0].tiles * formats[0].chunks, formats[0].tiles * formats[0].chunks // parts
            )[1]
        columns = kp // parts * most_parts
        x_stride = align_up(columns, 128) + 64
        sums = [b.sums for b in formats if b.sums]
        apart = parts_apart(formats, rows, ga)
        most_tiles = max(b.unit_tiles for b in formats)
        place("x", max(rows * x_stride, self.warps * most_tiles * TILE_ROWS * rows * 4))
        place("xd", columns // apart.step * apart.rows * 4 if apart else columns // ga * 8 * nt * 4)
        place("xs", max((columns // s * 8 * nt * 4 for s in sums), default=0))
        place("inverse", rows * 4 if o.norm is not None else 0)
        place("riders", riders.most * rows * self.warps * 4 if riders else 0)
        bodies, cuts = [], 0
        for b in formats:
            assert b.tiling is not None
            run, chunks = b.chunks // parts, b.tiles * b.chunks
            segments, runs = self._most(chunks, run)
            red = place("red", self.warps * segments * rows * TILE_ROWS * 4)
            woven = {"all_chunks": chunks, "run": run, "segments": segments, "runs": runs, "red": red, "cuts_at": cuts,
                     "group_parts": apart.parts(b) if apart else 0}  # fmt: skip
            bodies.append(WovenBody(**{**asdict(b, recurse=False), **woven}))
            cuts += self.units * runs * TILE_ROWS * rows
        x_pieces = -(-columns // (512 * self.warps))
        names = parameter_names(o, launch.types).split(", ")
        most_units = -(-bodies[0].runs // bodies[0].unit_tiles) + 1
        return {
            "op": op, "types": launch.types, "env": env, "T": rows, "nt": nt, "K": o.k, "N": height(o.weights[0][1]),
            "apart": apart, "ga": ga, "group": group, "parts": parts, "bodies": tuple(bodies), "at": offsets,
            "x": "a0", "x_scale": "a1", "x_codes": align_up(o.k, ga), "x_stride": x_stride, "x_pieces": x_pieces,
            "x_columns": columns, "sums": min(sums, default=0), "shared": at,
            "riders": riders and evolve(riders, pieces=min(x_pieces, 4)),
            "norm": "" if o.norm is None else f"a{o.norm}", "square_pieces": -(-(align_up(o.k, ga) // ga) // 32),
            "eps": o.eps, "offset": o.offset, "swiglu": o.swiglu, "quant": o.quant,
            "residual": "" if o.residual is None else f"a{o.residual}", **weighing(o),
            "hold": bool(o.weigh) and most_units <= self.warps, "cuts": cuts, "most_tiles": most_tiles,
            "locals": [{"type": n.rsplit(" ", 1)[0], "name": n.rsplit(" ", 1)[1]} for n in names],
        }  # fmt: skip

    def _parts(self, chunks: int, nbytes: int) -> int:
        """nbytes: of all activations."""
        allowed = [p for p in ((self.parts, 1) if self.parts else (1, 2, 4)) if chunks % p == 0]
        return next((p for p in allowed if self.parts or nbytes <= self.x_limit * p), allowed[-1])

    def _most(self, chunks: int, run: int) -> tuple[int, int]:
        """The most runs that a warp, and that a block, has a share of, when `chunks` are dealt out."""
        lo = np.arange(self.units + 1, dtype=np.int64) * chunks // self.units
        n = lo[1:] - lo[:-1]
        of_warps = lo[:-1, None] + n[:, None] * np.arange(self.warps + 1) // self.warps

        def most(first: Any, end: Any) -> int:
            return int(np.where(end > first, (end - 1) // run - first // run + 1, 0).max())

        return most(of_warps[:, :-1], of_warps[:, 1:]), most(lo[:-1], lo[1:])

    def _render(self, kinds: Sequence[Kind], stages: int, stride: int, rows: int) -> tuple[Source, int] | None:
        if not any(k.bodies for k in kinds):
            return None
        bodies = [(b.tiling, b.copies) for k in kinds for b in k.bodies if b.tiling is not None]
        slot = max(tiling.tile_bytes for tiling, _ in bodies)
        grids = sum(tiling.grid_bytes * copies for tiling, copies in bodies)
        at, places = max(k.c["shared"] for k in kinds if k.bodies), dict[str, int]()
        for name, nbytes in (("table", 8 * stages * stride), ("bars", 2 * self.warps * 16 * 8)):
            places[name] = at
            at += align_up(nbytes, 128)
        slots = min(16, (self.limit - grids - at) // (self.warps * slot))
        if slots < 2:
            return None
        places["ring"] = at
        shared = {"warps": self.warps, "threads": 32 * self.warps, "blocks": self.units, "slots": slots,
                  "slot_bytes": slot, "bulk": self.bulk,
                  "feeders": self.feeders if self.bulk else 0, "stride": stride, "T": rows, "stages": stages,
                  "stamps": self.stamps,
                  "flying": min(self.flying, slots) if self.bulk else slots,
                  "cuts": max(k.c["cuts"] for k in kinds if k.bodies)}  # fmt: skip
        texts = [evolve(k, text=self._text(k, shared, places)) if k.bodies else k for k in kinds]
        pieces = [(8 * k.index + i, k, b) for k in kinds for i, b in enumerate(k.bodies)]
        source = self.renderer.render_template(KERNEL, {**shared, "kinds": texts, "pieces": pieces, "at": places},
                                               more=[h for k in kinds for h in k.headers])  # fmt: skip
        return source, at + self.warps * slots * slot

    def _text(self, kind: Kind, shared: Mapping[str, Any], places: Mapping[str, int]) -> str:
        variables = {**kind.c, **shared, "name": kind.name, "at": {**kind.c["at"], **places}}
        return self.renderer.text(LINEAR, variables).replace("__syncthreads()", "SYNC()")


def weaver_for(info: DeviceInfo, renderer: Renderer) -> Weaver | None:
    """For cards with sm_90's bulk copies."""
    return Weaver(renderer, info.units) if "sm90a" in info.features else None
