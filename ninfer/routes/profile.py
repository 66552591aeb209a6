"""Measured device profiles: for an op of given shapes and a range of widths, the route that won.

A band exists only where a measurement beat the default order; everywhere else the first accepting route of the
registry serves. Profiles never change what is computed beyond a route's stated tolerance.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from ninfer.devices.base import DeviceInfo
from ninfer.errors import UsageError
from ninfer.ir.op import Op
from ninfer.ir.types import Types

SCHEMA = "ninfer.device-profile"
SCHEMA_VERSION = 1
SHIPPED = Path(__file__).resolve().parent.parent / "profiles"

Bands = tuple[tuple[int, str], ...]  # (last width, candidate id), ascending


def op_key(op: Op, types: Types) -> str:
    """`linear/49152x576:q8_0`: what a profile calls an op. Row dimensions do not appear; weights do, with formats."""
    parts = [
        f"{'x'.join(str(d) for d in t.shape)}:{t.fmt.name}" if t.fmt is not None else str(t.shape[-1])
        for t in types
        if len(t.shape) == 2
    ]
    return f"{op.profile_key}/{'+'.join(parts)}"


@frozen
class DeviceProfile:
    """routes: bands by op key; digests: of each band's kernels when they were measured (routes/digest.py); measured:
    microseconds by key, width and candidate, the default first."""

    hardware_class: str
    routes: Mapping[str, Bands] = field(factory=dict)
    digests: Mapping[str, Sequence[str]] = field(factory=dict)
    measured: Mapping[str, Mapping[str, Mapping[str, float]]] = field(factory=dict)
    device: Mapping[str, Any] = field(factory=dict)  # units, driver, date, ceilings

    def lookup(self, key: str, width: int) -> str | None:
        for last, candidate in self.routes.get(key, ()):
            if width <= last:
                return candidate or None
        return None

    def has_measured(self, key: str, candidate: str) -> bool:
        """Whether the candidate took part when the key was measured, at any width."""
        return any(candidate in times for times in self.measured.get(key, {}).values())

    def layered(self, over: DeviceProfile | None) -> DeviceProfile:
        """This profile with the keys of another one on top; where it measured and chose nothing, nothing stays."""
        if over is None:
            return self
        return evolve(
            self,
            routes={k: b for k, b in self.routes.items() if k not in over.measured} | dict(over.routes),
            digests={k: d for k, d in self.digests.items() if k not in over.routes} | dict(over.digests),
            measured={**self.measured, **over.measured},
            device={**self.device, **over.device},
        )

    def to_json(self) -> str:
        return json.dumps(
            {
                "schema": SCHEMA,
                "schema_version": SCHEMA_VERSION,
                "hardware_class": self.hardware_class,
                "device": dict(self.device),
                "routes": {k: [list(b) for b in bands] for k, bands in sorted(self.routes.items())},
                "digests": {k: list(d) for k, d in sorted(self.digests.items())},
                "measured": {k: {w: dict(c) for w, c in ws.items()} for k, ws in sorted(self.measured.items())},
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str, origin: str) -> DeviceProfile:
        """Raises UsageError naming the file and the key."""
        try:
            data = json.loads(text)
            if data.get("schema") != SCHEMA or data.get("schema_version") != SCHEMA_VERSION:
                raise ValueError(f"schema {data.get('schema')} {data.get('schema_version')} is not {SCHEMA} 1")
            routes = {str(k): _bands(k, v) for k, v in data["routes"].items()}
            return DeviceProfile(
                str(data["hardware_class"]),
                routes,
                {str(k): tuple(map(str, d)) for k, d in data.get("digests", {}).items() if isinstance(d, list)},
                dict(data.get("measured", {})),
                dict(data.get("device", {})),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{origin} is not a device profile ({error}); delete it or run ninfer-calibrate") from None


def _bands(key: str, rows: Sequence[Sequence[Any]]) -> Bands:
    bands = tuple((int(last), str(candidate)) for last, candidate in rows)
    if any(a[0] >= b[0] for a, b in pairwise(bands)):
        raise ValueError(f"bands of {key} do not ascend")
    return bands


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ninfer"


def user_path(info: DeviceInfo) -> Path:
    return cache_dir() / "profiles" / f"{info.hardware_class}.json"


def load_profile(
    info: DeviceInfo,
    path: Path | None = None,
    *,
    check: Callable[[DeviceProfile], DeviceProfile] = lambda profile: profile,
) -> DeviceProfile:
    """The shipped profile of this hardware class, under the user's own, under `path`.   check: what is left of each."""
    profile = DeviceProfile(info.hardware_class)
    for candidate in (SHIPPED / f"{info.hardware_class}.json", user_path(info), path):
        if candidate is not None and (candidate == path or candidate.exists()):
            try:
                text = candidate.read_text()
            except OSError as error:
                raise UsageError(f"cannot read device profile {candidate}: {error.strerror}") from None
            profile = profile.layered(check(DeviceProfile.from_json(text, str(candidate))))
    return profile


def save_profile(profile: DeviceProfile, path: Path) -> None:
    """Atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(profile.to_json())
    partial.replace(path)
