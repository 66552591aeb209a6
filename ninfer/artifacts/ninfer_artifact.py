"""A `.ninfer` file as an artifact: its parameters under checkpoint names.

Whole objects, and rows of formats whose rows are contiguous, are views of the mapped file. A matrix that is rows of a
larger object in a format with planes, or is stored in several objects, is put together when it is asked for. Vision and
n-gram components are kept in the file and not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ninfer.artifacts.artifact import PROPOSAL_HEAD, Artifact, Parameter, TensorInfo, TokenizerFiles
from ninfer.artifacts.drafters import DRAFTERS, Drafter, drafter_map
from ninfer.artifacts.logical import (
    GATE_UP,
    PLAIN,
    PROPOSAL,
    PROPOSAL_IDS,
    Tensor,
    checkpoint_config,
    part_name,
    tensor_map,
)
from ninfer.artifacts.ninfer_directory import Piece, parse_json
from ninfer.artifacts.ninfer_formats import format_of
from ninfer.artifacts.ninfer_uses import LEAST_BITS, Uses, words_of
from ninfer.artifacts.ninfer_v3 import NinferFile
from ninfer.errors import ArtifactError
from ninfer.formats.bits import U8Array
from ninfer.formats.quant import FloatFormat, QuantFormat, nvfp4

EMBEDDING_TENSOR = "model.embed_tokens.weight"
SERVED = ("text", "mtp", "dflash", "dflash2")  # components whose parameters are offered


@frozen
class Stored:
    """A run of rows of an object."""

    object: str
    format: QuantFormat
    row: int
    shape: tuple[int, ...]  # of the run


class NinferArtifact(Artifact):
    """`components` are those of the file; `policies` are activation permissions by (logical parameter, input)."""

    kind = "ninfer"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bits: dict[str, int] = {}
        self.file = NinferFile(path)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _error(self, text: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {text}")

    def _build(self) -> None:
        directory = self.file.directory
        if "text" not in directory.components:
            raise self._error("holds an n-gram table alone (components.ngram); give the model that it belongs to")
        self.components = directory.components
        text = self.components["text"]
        self.config: dict[str, Any] = checkpoint_config(text.config, "mtp" in self.components)
        self._tensors = self._find_tensors()
        self._uses = Uses(self.file, (*(c for c in self.components if c in SERVED), "proposal"))
        self.config |= self._inputs()
        self.generation_config = self._json("generation_config.json")
        self.chat_template = self._template()
        tokenizer = self.resource("tokenizer.json")
        config = self.resource("tokenizer_config.json")
        origin = f"{self.path}: resource tokenizer.json"
        self.tokenizer_source = None
        if tokenizer is not None:
            self.tokenizer_source = TokenizerFiles(tokenizer, config or b"", origin)
        elif self.resource("tokenizer.gguf.json") is not None:
            self.tokenizer_source = self._json("tokenizer.gguf.json")
        name, shapes = directory.metadata.get("name"), directory.metadata.get("shapes")
        self._shapes = {k: v for k, v in shapes.items() if _is_shape(v)} if isinstance(shapes, dict) else {}
        self.display_name = name if isinstance(name, str) and name else self.path.name.removesuffix(".ninfer")

    @property
    def model_id(self) -> str:
        return self.display_name

    def drafter(self, name: str) -> Artifact | None:
        if name not in self.components or name not in DRAFTERS:
            return None
        notes = self.file.directory.metadata.get("drafters")
        note = notes.get(name) if isinstance(notes, Mapping) else None
        return Drafter(self, name, self.components[name].config, note if isinstance(note, Mapping) else {})

    def details(self) -> tuple[str, ...]:
        d = self.file.directory
        other = [c for c in self.components if c not in SERVED]
        lines = [
            f"version 3, id {self.file.artifact_id.hex()}, {len(d.objects)} objects in {len(d.files)} file(s)",
            f"components {', '.join(c for c in self.components if c in SERVED)}"
            + (f"; kept and not used: {', '.join(other)}" if other else ""),
        ]
        if self.has_proposal:
            info = self.info(PROPOSAL_HEAD)
            lines.append(f"proposal head of {info.shape[0]} tokens in {info.format.name}")
        if isinstance(d.provenance, Mapping) and isinstance(d.provenance.get("recipe"), str):
            lines.append(f"recipe {d.provenance['recipe'][:100]!r}")
        return tuple(lines)

    # resources

    def resource(self, role: str, component: str = "text") -> bytes | None:
        """The original file's bytes."""
        id = self.components[component].resources.get(role)
        if id is None:
            return None
        o = self.file.directory.objects[id]
        return self.file.read(o.offset, o.nbytes, o.where).tobytes()

    def _json(self, role: str) -> dict[str, Any]:
        raw = self.resource(role)
        return {} if raw is None else parse_json(f"{self.path}: resource {role}", raw)

    def _template(self) -> str | None:
        raw = self.resource("chat_template.jinja")
        if raw is None:
            template = self._json("tokenizer_config.json").get("chat_template")
            return template if isinstance(template, str) else None
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error("resource chat_template.jinja is not UTF-8") from None

    # names

    def _find_tensors(self) -> dict[str, Tensor]:
        """Checkpoint names, from the bindings that are there."""
        bindings = self.file.directory.bindings
        found, covered = dict[str, Tensor](), set[str]()
        layers, experts = (self.config.get(n) for n in ("num_hidden_layers", "num_experts"))
        counts = [v for v in (layers, experts) if type(v) is int]
        if prod(counts) > len(bindings):
            raise self._error(f"components.text.config has {' layers of '.join(map(str, counts))}, but there are "
                              f"{len(bindings)} bindings: the file is damaged")  # fmt: skip
        for name, tensor in tensor_map(self.config).items():
            present = [p for p in tensor.parts if p in bindings]
            if not present or tensor.how == "expert":
                continue
            if len(present) != len(tensor.parts):
                absent = next(p for p in tensor.parts if p not in bindings)
                raise self._error(f"bindings has {present[0]!r} but not {absent!r}: the file is incomplete")
            found[name] = tensor
            covered.update(present)
        head, embedding = (found.get(n) for n in ("lm_head.weight", EMBEDDING_TENSOR))
        both = None if head is None or embedding is None else (self._pieces(head), self._pieces(embedding))
        if self.config.get("tie_word_embeddings") and both is not None and both[0] == both[1]:
            del found["lm_head.weight"]  # as in a checkpoint; the same bytes are not counted twice
        found |= self._proposal_head(found)
        for component in DRAFTERS:
            if component in self.components:
                own = drafter_map(component, self.components[component].config)
                found |= {n: t for n, t in own.items() if t.parts[0] in bindings}
        for name in [n for n in found if n.endswith(GATE_UP)]:
            # either name makes the model read the banks as they lie
            banks = [name.replace("gate_up_proj", f"{part}_proj") for part in ("gate", "up")]
            apart = len(self._pieces(found[name])) > 1 and all(len(self._pieces(found[b])) == 1 for b in banks)
            for other in [name] if apart else banks:
                del found[other]
        for part in bindings:
            component, _, name = part.partition("/")
            if part not in covered and component in PLAIN and "/" not in name:
                found[name] = Tensor((part,))
        return found

    def _proposal_head(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing where it is the model's own head under another name."""
        told = self.components["text"].proposal
        if told is None:
            return {}
        wanted = (PROPOSAL, PROPOSAL_IDS) if told["domain"] == "indexed" else (PROPOSAL,)
        for part in wanted:
            if part not in self.file.directory.bindings:
                raise self._error(f"components.text.proposal is {told['domain']}, but bindings has no {part!r}: the "
                                  "file is incomplete")  # fmt: skip
        tensor = Tensor((PROPOSAL,))
        head = found.get("lm_head.weight") or found.get(EMBEDDING_TENSOR)
        is_other = told["domain"] == "indexed" or head is None or self._pieces(head) != self._pieces(tensor)
        return {PROPOSAL_HEAD: tensor} if is_other else {}

    @property
    def has_proposal(self) -> bool:
        return PROPOSAL_HEAD in self._tensors

    def proposal_ids(self) -> NDArray[np.int32] | None:
        told = self.components["text"].proposal
        if told is None or told["domain"] != "indexed":
            return None
        ids = words_of(self.file, self.file.directory.bindings[PROPOSAL_IDS], "int32").astype(np.int32)
        if len(ids) != told["rows"]:
            raise self._error(f"components.text.proposal.rows is {told['rows']}, but {PROPOSAL_IDS} has {len(ids)}")
        return ids

    def _inputs(self) -> dict[str, Any]:
        """What the uses ask of activations, as config: rotations by name, and the tiled order that readers know."""
        names = {p: n for n, t in self._tensors.items() for p in t.parts}
        embedding = self._tensors.get(EMBEDDING_TENSOR)
        if embedding is not None:
            names.setdefault("text/output_head", EMBEDDING_TENSOR)  # tied
        found: dict[str, Any] = {}
        tiled, rotated = self._uses.tiled(names, self.config), self._uses.rotated(names)
        if tiled:
            found["gdn_tiled_out_columns"] = tiled
        # Published files have no use of the embedding that could say so: ternary rows are in the basis of the head's.
        head = rotated.get("lm_head.weight")
        if head is not None and embedding is not None and self._stored(embedding)[0].format.name == "t2_g128":
            rotated.setdefault(EMBEDDING_TENSOR, head)
        return found | ({"hadamard_signs": rotated} if rotated else {})

    @cached_property
    def _names(self) -> dict[str, Tensor]:
        """As offered: parts instead of a tensor that is stored in several formats, or as alternating heads."""
        found: dict[str, Tensor] = {}
        for name, tensor in self._tensors.items():
            found |= self._split(name, tensor) or {name: tensor}
        return found

    def _split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor's parts where it is not offered whole: alternating heads, and runs of rows of one format each."""
        if tensor.how == "heads":
            return {part_name(name, (p,)): Tensor((p,)) for p in tensor.parts}
        if tensor.how != "rows":
            return {}
        formats = [self._stored(Tensor((p,)))[0].format for p in tensor.parts]
        runs = list[list[str]]()
        for i, part in enumerate(tensor.parts):
            if i and formats[i] is formats[i - 1]:
                runs[-1].append(part)
            else:
                runs.append([part])
        return {} if len(runs) == 1 else {part_name(name, run): Tensor(tuple(run), "rows") for run in runs}

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def _tensor(self, name: str) -> Tensor:
        tensor = self._tensors.get(name) or self._names.get(name)
        if tensor is None:
            raise self.missing(name)
        return tensor

    # parameters

    def _stored(self, tensor: Tensor) -> list[Stored]:
        return [self._run(piece, tensor.parts[0]) for piece in self._pieces(tensor)]

    def _pieces(self, tensor: Tensor) -> list[Piece]:
        """Runs of elements, in order, adjacent ones joined."""
        merged: list[Piece] = []
        for part in tensor.parts:
            for piece in self.file.directory.bindings[part]:
                last = merged[-1] if merged else None
                if last is not None and last.object == piece.object and last.end == piece.begin:
                    merged[-1] = Piece(last.object, last.begin, piece.end)
                else:
                    merged.append(piece)
        return merged

    def _run(self, piece: Piece, part: str) -> Stored:
        o = self.file.directory.objects[piece.object]
        fmt = format_of(o, str(self.path))
        if (piece.begin, piece.end) == (0, o.elements):
            return Stored(o.id, fmt, 0, o.shape)
        k = o.shape[-1] if len(o.shape) > 1 else 1
        if isinstance(fmt, FloatFormat) and fmt.divisors > 1:
            fmt = self._part_of(fmt, piece, o.shape, part)
        if piece.begin % k or piece.end % k:
            raise self._error(f"binding {part!r} takes elements {piece.begin} to {piece.end} of {o.where}, which are "
                              f"not whole rows of {k}")  # fmt: skip
        rows = (piece.end - piece.begin) // k
        return Stored(o.id, fmt, piece.begin // k, (rows, k) if len(o.shape) > 1 else (rows,))

    def _part_of(self, fmt: FloatFormat, piece: Piece, shape: tuple[int, ...], part: str) -> FloatFormat:
        """The format of some of the sources that lie below each other in an object, or of rows of one."""
        each = shape[0] // fmt.divisors * shape[1]
        first, last = piece.begin // each, (piece.end - 1) // each
        if first != last and (piece.begin % each or piece.end % each):
            raise self._error(f"binding {part!r} takes parts of several matrices with divisors of their own")
        return nvfp4(last - first + 1)

    def _shape(self, name: str, tensor: Tensor, runs: list[Stored]) -> tuple[int, ...]:
        first = runs[0].shape
        if len(runs) == 1 and tensor.how == "whole":
            told = self._shapes.get(name)
            return tuple(told) if told is not None and prod(told) == prod(first) and told[-1] == first[-1] else first
        if any(len(r.shape) != len(first) or r.shape[1:] != first[1:] for r in runs):
            raise self._error(f"tensor {name!r} is bound to rows of different lengths: {[r.shape for r in runs]}")
        rows = sum(r.shape[0] for r in runs)
        if tensor.how == "taps" and len(first) == 2:
            return (first[1], 1, rows)
        if tensor.how == "experts":
            each = sum(tensor.rows)
            if not each or rows % each:
                raise self._error(f"tensor {name!r} has {rows} rows, which are not experts of {each}")
            return (rows // each, each, *first[1:])
        return (rows, *first[1:])

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensor(name)
        runs = self._stored(tensor)
        parts = tuple(self._split(name, tensor))
        return TensorInfo(self._shape(name, tensor, runs), runs[0].format, parts, self._least_bits(name))

    def _least_bits(self, name: str) -> int:
        if name not in self._bits:
            policy = self.policy(name)
            self._bits[name] = 0 if policy is None else LEAST_BITS[policy]
        return self._bits[name]

    def get(self, name: str) -> Parameter:
        tensor = self._tensor(name)
        runs = self._stored(tensor)
        shape = self._shape(name, tensor, runs)
        fmt = runs[0].format
        if any(r.format is not fmt for r in runs):
            found = ", ".join(dict.fromkeys(r.format.name for r in runs))
            raise self._error(f"tensor {name!r} is stored in several formats ({found}); its parts are "
                              f"{', '.join(self._split(name, tensor)) or 'not separable'}")  # fmt: skip
        raws = [self._bytes(r) for r in runs]
        raw = raws[0] if len(raws) == 1 else fmt.stack_rows(list(zip(raws, (_matrix(r) for r in runs), strict=True)))
        if tensor.how == "taps" and fmt.is_plain:
            taps, channels = shape[2], shape[0]
            words = raw.reshape(taps, channels, -1)
            raw = np.ascontiguousarray(words.swapaxes(0, 1)).reshape(-1)
        if tensor.how == "heads":
            raw = self._interleave(name, tensor, fmt, raw, shape)
        return Parameter(name, shape, fmt, raw)

    def _bytes(self, run: Stored) -> U8Array:
        o = self.file.directory.objects[run.object]
        raw = self.file.read(o.offset, o.nbytes, o.where)
        if run.shape == o.shape:
            return raw
        whole = o.shape if len(o.shape) > 1 else (*o.shape, 1)
        stored = format_of(o, str(self.path))
        if isinstance(run.format, FloatFormat) and isinstance(stored, FloatFormat):
            rows = {n: f[run.row : run.row + run.shape[0]] for n, f in stored.fields(raw, whole).items()}
            return run.format.from_fields(rows, whole[-1])
        return run.format.slice_rows(raw, whole, run.row, run.shape[0])

    def _interleave(self, name: str, tensor: Tensor, fmt: QuantFormat, raw: U8Array, shape: tuple[int, ...]) -> U8Array:
        each, total = sum(tensor.rows), shape[0]
        if not each or total % each:
            raise self._error(f"tensor {name!r} has {total} rows, which are not heads of {each}")
        heads, starts, index = total // each, 0, []
        for rows in tensor.rows:
            index.append(starts + np.arange(heads * rows).reshape(heads, rows))
            starts += heads * rows
        return fmt.gather_rows(raw, shape, np.concatenate(index, axis=1).reshape(-1))

    def policy(self, name: str) -> str | None:
        """Of a checkpoint tensor: A16Only, AllowA8 or AllowA4; the strictest of its uses. None: it has none.

        Raises ArtifactError for a use without a policy.
        """
        return self._uses.policy(self._tensor(name))

    def divisors(self, name: str) -> tuple[float, ...]:
        return self._uses.divisors(self._tensor(name))

    def close(self) -> None:
        self.file.close()


def _matrix(run: Stored) -> tuple[int, int]:
    shape = run.shape if len(run.shape) > 1 else (*run.shape, 1)
    return prod(shape[:-1]), shape[-1]


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 8 and all(type(d) is int and 0 < d < 1 << 40 for d in value)
