"""The JSON directory of a `.ninfer` artifact, checked member by member.

Structure is checked here, once; formats, encoded sizes and alignment belong to whoever uses an object. A directory may
have 70,000 bindings: nothing here compares all pairs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

from attrs import frozen

from ninfer.errors import ArtifactError

U64_MAX = (1 << 64) - 1
MAX_RANK = 16
COMPONENTS = ("text", "vision", "mtp", "dflash", "dflash2", "ngram")
POLICIES = ("A16Only", "AllowA8", "AllowA4")
AUXILIARIES = ("activation_input_divisor", "hadamard_signs", "input_columns")
RAW = "raw_bytes_v1"


@frozen
class FileEntry:
    """path: "" for the entry file itself."""

    path: str
    payload_bytes: int


@frozen
class Object:
    """A tensor, or a resource (format ""). offset: into the payload."""

    id: str
    index: int
    offset: int
    nbytes: int
    shape: tuple[int, ...] = ()
    format: str = ""
    layout: str = ""
    divisors: int = 1

    @property
    def is_tensor(self) -> bool:
        return bool(self.format)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def where(self) -> str:
        return f"objects[{self.index}] {self.id!r} (payload offset {self.offset})"


@frozen
class Piece:
    """Elements begin .. end of an object, counted in C order."""

    object: str
    begin: int
    end: int


@frozen
class Use:
    parameter: str
    input: str
    policy: str | None
    auxiliaries: Mapping[str, tuple[Piece, ...]]


@frozen
class Component:
    config: Mapping[str, Any]
    target: str | None
    resources: Mapping[str, str]
    proposal: Mapping[str, Any] | None


@frozen
class Directory:
    files: tuple[FileEntry, ...]
    objects: Mapping[str, Object]
    components: Mapping[str, Component]
    bindings: Mapping[str, tuple[Piece, ...]]
    uses: tuple[Use, ...]
    metadata: Mapping[str, Any]
    provenance: Any


def parse_json(where: str, raw: bytes) -> dict[str, Any]:
    """Strict UTF-8 JSON with unique member names."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ArtifactError(f"{where} cannot be read as JSON: {reason[:200]}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{where} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = sorted(k for k, _ in pairs)
        twice = next(a for a, b in pairwise(names) if a == b)
        raise ValueError(f"the member {twice[:80]!r} occurs twice")
    return out


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


class _Reader:
    """Typed access to members, with their path in messages."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, path: str, problem: str) -> NoReturn:
        raise ArtifactError(f"{self.where}: {path} {problem}")

    def members(self, value: Any, path: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Any:
        if not isinstance(value, dict):
            self.fail(path, f"is {_short(value)}, not an object")
        for name in required:
            if name not in value:
                self.fail(path, f"has no member {name!r}")
        for name in value:
            if name not in required and name not in optional:
                self.fail(path, f"has the unknown member {_short(name)}")
        return value

    def mapping(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(path, f"is {_short(value)}, not an object")
        return value

    def list(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(path, f"is {_short(value)}, not a list")
        return value

    def whole(self, value: Any, path: str, least: int = 0) -> int:
        if type(value) is not int or not least <= value <= U64_MAX:
            self.fail(path, f"is {_short(value)}, not a whole number from {least}")
        return value

    def id(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            self.fail(path, f"is {_short(value)}, not a non-empty text")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_directory(where: str, root: dict[str, Any], entry_name: str) -> Directory:
    """Raises ArtifactError that names the member."""
    r = _Reader(where)
    names = ("components", "objects", "bindings", "uses", "files")
    r.members(root, "the root", names, ("metadata", "provenance"))
    files = _files(r, root["files"], entry_name)
    objects = _objects(r, root["objects"], sum(f.payload_bytes for f in files))
    bindings = {}
    for name, value in r.mapping(root["bindings"], "bindings").items():
        path = f"bindings[{_short(name)}]"
        bindings[r.id(name, path)] = _binding(r, value, path, objects)
    metadata = root.get("metadata")
    return Directory(
        files,
        objects,
        _components(r, root["components"], objects),
        bindings,
        _uses(r, root["uses"], objects, bindings),
        metadata if isinstance(metadata, dict) else {},
        root.get("provenance"),
    )


def _files(r: _Reader, value: Any, entry_name: str) -> tuple[FileEntry, ...]:
    found, names, total = [], {entry_name}, 0
    for i, entry in enumerate(r.list(value, "files")):
        path = f"files[{i}]"
        r.members(entry, path, ("path", "payload_bytes"))
        name, nbytes = entry["path"], r.whole(entry["payload_bytes"], f"{path}.payload_bytes", 1)
        if i == 0:
            if name is not None:
                r.fail(f"{path}.path", "must be null: the first file is the entry itself")
            name = ""
        else:
            r.id(name, f"{path}.path")
            if "/" in name or "\\" in name or name in (".", ".."):
                r.fail(f"{path}.path", f"is {_short(name)}, not the plain name of a file beside the entry")
            if name in names:
                r.fail(f"{path}.path", f"{_short(name)} occurs twice")
            names.add(name)
        found.append(FileEntry(name, nbytes))
        total += nbytes
    if not found or total > U64_MAX:
        r.fail("files", "is empty" if not found else "adds up to more than 64 bits")
    return tuple(found)


def _objects(r: _Reader, value: Any, payload_bytes: int) -> dict[str, Object]:
    found: dict[str, Object] = {}
    end, before = 0, ""
    for i, entry in enumerate(r.list(value, "objects")):
        path = f"objects[{i}]"
        kind = r.mapping(entry, path).get("kind")
        if kind == "tensor":
            r.members(entry, path, ("id", "kind", "shape", "format", "layout", "offset", "bytes"), ("divisors",))
        elif kind == "resource":
            r.members(entry, path, ("id", "kind", "encoding", "offset", "bytes"))
        else:
            r.fail(f"{path}.kind", f"is {_short(kind)}; there are tensor and resource")
        id = r.id(entry["id"], f"{path}.id")
        path = f"{path} {_short(id)}"
        if id in found:
            r.fail(f"{path}.id", "occurs twice")
        offset, nbytes = r.whole(entry["offset"], f"{path}.offset"), r.whole(entry["bytes"], f"{path}.bytes", 1)
        if offset < end:
            r.fail(
                f"{path}.offset", f"{offset} lies before the end {end} of {before}: objects overlap or are unordered"
            )
        if offset + nbytes > payload_bytes:
            r.fail(path, f"needs bytes {offset} to {offset + nbytes}, but the payload has {payload_bytes}")
        end, before = offset + nbytes, path
        if kind == "tensor":
            found[id] = _tensor(r, entry, path, Object(id, i, offset, nbytes))
        else:
            if entry["encoding"] != RAW:
                r.fail(f"{path}.encoding", f"is {_short(entry['encoding'])}; there is {RAW}")
            found[id] = Object(id, i, offset, nbytes)
    if not found:
        r.fail("objects", "is empty")
    return found


def _tensor(r: _Reader, entry: dict[str, Any], path: str, o: Object) -> Object:
    shape = r.list(entry["shape"], f"{path}.shape")
    if len(shape) > MAX_RANK:
        r.fail(f"{path}.shape", f"has {len(shape)} dimensions; at most {MAX_RANK} are possible")
    for d in shape:
        r.whole(d, f"{path}.shape", 1)
    if prod(shape) > U64_MAX:
        r.fail(f"{path}.shape", f"{_short(shape)} has more elements than 64 bits count")
    format, layout = r.id(entry["format"], f"{path}.format"), r.id(entry["layout"], f"{path}.layout")
    divisors = r.whole(entry.get("divisors", 1), f"{path}.divisors", 1)
    if divisors > 1 and format != "nvfp4":
        r.fail(f"{path}.divisors", f"is {divisors}, but only nvfp4 has several")
    return Object(o.id, o.index, o.offset, o.nbytes, tuple(shape), format, layout, divisors)


def _binding(r: _Reader, value: Any, path: str, objects: Mapping[str, Object]) -> tuple[Piece, ...]:
    if isinstance(value, dict) and "object" in value:
        r.members(value, path, ("object",))
        o = _tensor_of(r, value["object"], f"{path}.object", objects)
        return (Piece(o.id, 0, o.elements),)
    parts = r.list(r.members(value, path, ("parts",))["parts"], f"{path}.parts")
    if not parts:
        r.fail(f"{path}.parts", "is empty")
    found = []
    for i, part in enumerate(parts):
        where = f"{path}.parts[{i}]"
        r.members(part, where, ("object", "range"))
        o = _tensor_of(r, part["object"], f"{where}.object", objects)
        bounds = part["range"]
        if not isinstance(bounds, list) or len(bounds) != 2:
            r.fail(f"{where}.range", f"is {_short(bounds)}, not [begin, end]")
        begin, end = (r.whole(b, f"{where}.range") for b in bounds)
        if not begin < end <= o.elements:
            r.fail(f"{where}.range", f"is [{begin}, {end}], but object {_short(o.id)} has {o.elements} elements")
        found.append(Piece(o.id, begin, end))
    return tuple(found)


def _tensor_of(r: _Reader, id: Any, path: str, objects: Mapping[str, Object]) -> Object:
    o = objects.get(r.id(id, path))
    if o is None or not o.is_tensor:
        r.fail(path, f"names {_short(id)}, which is " + ("no object" if o is None else "a resource"))
    return o


def _uses(
    r: _Reader, value: Any, objects: Mapping[str, Object], bindings: Mapping[str, tuple[Piece, ...]]
) -> tuple[Use, ...]:
    found, seen = [], set()
    for i, entry in enumerate(r.list(value, "uses")):
        path = f"uses[{i}]"
        r.members(entry, path, ("parameter", "input"), ("activation_policy", "auxiliaries"))
        parameter, input = r.id(entry["parameter"], f"{path}.parameter"), r.id(entry["input"], f"{path}.input")
        if parameter not in bindings:
            r.fail(f"{path}.parameter", f"{_short(parameter)} has no binding")
        if (parameter, input) in seen:
            r.fail(path, f"of {_short(parameter)} with input {_short(input)} occurs twice")
        seen.add((parameter, input))
        policy = entry.get("activation_policy")
        if policy is not None and policy not in POLICIES:
            r.fail(f"{path}.activation_policy", f"is {_short(policy)}; there are {', '.join(POLICIES)}")
        auxiliaries = {}
        for role, binding in r.mapping(entry.get("auxiliaries", {}), f"{path}.auxiliaries").items():
            where = f"{path}.auxiliaries.{role[:60]}"
            if role not in AUXILIARIES:
                r.fail(where, f"is no known role; there are {', '.join(AUXILIARIES)}")
            auxiliaries[role] = _binding(r, binding, where, objects)
        found.append(Use(parameter, input, policy, auxiliaries))
    return tuple(found)


def _components(r: _Reader, value: Any, objects: Mapping[str, Object]) -> dict[str, Component]:
    found: dict[str, Component] = {}
    for name, entry in r.mapping(value, "components").items():
        path = f"components[{_short(name)}]"
        if name not in COMPONENTS:
            r.fail(path, f"is no known component; there are {', '.join(COMPONENTS)}")
        r.members(entry, path, ("config",), ("target", "resources", "proposal"))
        config, resources = r.mapping(entry["config"], f"{path}.config"), entry.get("resources", {})
        for role, id in r.mapping(resources, f"{path}.resources").items():
            o = objects.get(r.id(id, f"{path}.resources.{role[:60]}"))
            if o is None or o.is_tensor:
                r.fail(f"{path}.resources.{role[:60]}", f"names {_short(id)}, which is no resource")
        target, proposal = entry.get("target"), entry.get("proposal")
        if target is not None and (not isinstance(target, str) or target not in value):
            r.fail(f"{path}.target", f"is {_short(target)}, which is no component of the file")
        if proposal is not None:
            _proposal(r, proposal, f"{path}.proposal")
        found[name] = Component(config, target, resources, proposal)
    if "text" not in found and list(found) != ["ngram"]:
        r.fail("components", f"has no 'text' (it has {', '.join(found) or 'none'})")
    return found


def _proposal(r: _Reader, value: Any, path: str) -> None:
    domain = r.mapping(value, path).get("domain")
    if domain == "full":
        r.members(value, path, ("domain",))
    elif domain == "indexed":
        r.whole(r.members(value, path, ("domain", "rows"))["rows"], f"{path}.rows", 1)
    else:
        r.fail(f"{path}.domain", f"is {_short(domain)}; there are full and indexed")
