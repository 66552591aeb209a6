"""Templates to sources: the one Jinja2 environment that kernels are rendered with."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from attrs import define, field

from ninfer.devices.base import DeviceInfo, Source
from ninfer.formats import kv_codes
from ninfer.formats.rng import RNG_C
from ninfer.ir.op import Op
from ninfer.ir.step import HEADER, SAMPLE_PARAMS
from ninfer.ir.types import Env, Sym, TensorType, Types
from ninfer.routes.profile import cache_dir
from ninfer.routes.route import Candidate

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
_ENTRY = "KERNEL_ENTRY"
KV_TABLES: Mapping[str, Any] = {
    "lloyd_levels": kv_codes.LLOYD_LEVELS,
    "lloyd_bounds": kv_codes.LLOYD_BOUNDS,
    "e2m1_targets": kv_codes.E2M1_TARGETS,
    "e8_roots4": kv_codes.E8_ROOTS4,
    "e8_bounds": kv_codes.E8_BOUNDS,
    "e8_radii": kv_codes.E8_RADII,
}
_ROWS = {Sym.T: "hdr->rows", Sym.L: "hdr->logit_rows", Sym.B: "hdr->seqs"}


def row_count(type: TensorType) -> str:
    """The C expression of a type's run-time row count."""
    first = type.shape[0]
    return _ROWS[first] if isinstance(first, Sym) else str(first)


def c_float(x: float) -> str:
    """A float32 constant with all its bits."""
    x = float(x)
    return f"{x!r}f" if "e" in repr(x) or "." in repr(x) else f"{x!r}.0f"


class _Bytecode(jinja2.FileSystemBytecodeCache):
    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """A damaged entry is as good as none."""
        try:
            super().load_bytecode(bucket)
        except Exception:
            bucket.reset()


def _bytecode() -> jinja2.BytecodeCache | None:
    """Compiled templates of earlier processes, found by the hash of their text: a third of a second of each start."""
    folder = cache_dir() / "templates"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return _Bytecode(str(folder)) if os.access(folder, os.W_OK) else None


@define
class Renderer:
    """Renders for one device. Equal inputs give the same Source; nothing else is kept."""

    device: DeviceInfo
    _env: jinja2.Environment = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._env = jinja2.Environment(
            loader=jinja2.FileSystemLoader(TEMPLATES),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            bytecode_cache=_bytecode(),
        )
        self._env.filters["f32"] = c_float
        self._env.globals.update(
            rows=row_count,
            features=self.device.features,
            simd=16 if "avx512f" in self.device.features else 8 if "avx2" in self.device.features else 4,
            header_struct=HEADER.c_struct(),
            params_struct=SAMPLE_PARAMS.c_struct(),
            rng_c=RNG_C,
            kv_tables=KV_TABLES,
        )

    def render(
        self,
        candidate: Candidate,
        op: Op,
        types: Types,
        env: Env,
        *,
        template: str | None = None,
    ) -> Source:
        """One kernel of the candidate's route.   types: inputs, then outputs. template: another stage's."""
        route = candidate.route
        context = dict(route.context(op, types, env, candidate.tuning))
        return self.render_template(
            template or route.template,
            {"op": op, "types": types, "env": env, "t": candidate.tuning, **context},
        )

    def text(self, template: str, variables: Mapping[str, Any]) -> str:
        """A part of a kernel's text, in which KERNEL_ENTRY stands for the kernel's name."""
        return self._env.get_template(template).render(**variables, entry=_ENTRY)

    def render_template(self, template: str, variables: Mapping[str, Any], more: Sequence[str] = ()) -> Source:
        """more: headers of texts among the variables."""
        prelude = f"{template.split('/')[0]}/prelude.h.j2"
        headers: dict[str, None] = {self._header(prelude, {}, {}): None}

        def use(name: str, **kw: Any) -> str:
            headers[self._header(name, kw, headers)] = None
            return ""

        text = self._env.get_template(template).render(**variables, entry=_ENTRY, use=use)
        headers.update(dict.fromkeys(more))
        digest = hashlib.sha256("\0".join([*headers, text]).encode()).hexdigest()[:12]
        stem = re.sub(r"\W+", "_", template.split("/")[-1].split(".")[0])
        entry = f"ni_{stem}_{digest}"
        return Source(entry, text.replace(_ENTRY, entry), tuple(headers))

    def _header(self, name: str, kw: Mapping[str, Any], headers: dict[str, None]) -> str:
        """A shared piece; it may use others, which come before it."""

        def use(inner: str, **inner_kw: Any) -> str:
            headers[self._header(inner, inner_kw, headers)] = None
            return ""

        return self._env.get_template(name).render(**kw, use=use)
