"""The seam between a model family and the rest: a config becomes a spec, a spec and stored formats become graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

from attrs import evolve, field, frozen

from ninfer.artifacts import TensorInfo
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.kv import KVFormat
from ninfer.ir.graph import Graph, Rows, Value, WeightSpec
from ninfer.ir.ops.elementwise import gelu_mul, silu_mul, soft_cap
from ninfer.ir.ops.embed import take_rows
from ninfer.ir.ops.journal import ring_state, ring_store
from ninfer.ir.ops.linear import linear, linear_add, linear_swiglu
from ninfer.ir.ops.norm import rms_norm
from ninfer.ir.ops.reject import sample_rejecting
from ninfer.ir.ops.sample import sample, sample_ahead, score
from ninfer.ir.types import TensorType
from ninfer.models.fields import short
from ninfer.models.proposal import Proposal
from ninfer.models.rope import RopeSpec
from ninfer.models.rotation import Rotation

Config: TypeAlias = Mapping[str, Any]
Info: TypeAlias = Callable[[str], TensorInfo]  # of a stored parameter; raises ArtifactError where there is none

# What a graph gives: "sample" draws a token per logit row, "score" the log-probability of `targets` at the logit
# rows, "logits" the logits themselves.
MODES = ("sample", "score", "logits")

# Graphs for rounds of drafts; they need `rounds`. "verify" is "sample" with recurrent states left where they are and
# their inputs kept, and token counts left at a sequence's first row; "fold" moves the states over the rows that were
# accepted, one step row for each; "draft" gives the
# drafter's argmax at the logit rows, "draft_logits" its logits and hidden values. See models/mtp.py.
ROUND_MODES = ("verify", "fold", "draft", "draft_logits")


@frozen
class Rounds:
    """What rounds of drafts keep per slot. hidden_rows: most rows of a sequence in a step whose hidden values a drafter
    reads, 0: no drafter reads any; journal_rows: most rows of a sequence in a "verify" step. taps: layers whose outputs
    a drafter reads too, of tap_rows rows."""

    hidden_rows: int
    journal_rows: int
    taps: tuple[int, ...] = ()
    tap_rows: int = 0
    candidates: int = 0  # per draft that the drafter leaves with their probabilities: "verify" rejects by them


@frozen(kw_only=True)
class ModelSpec(ABC):
    """A config, checked. domain: token ids are below it; the embedding may have more rows.

    rotation: of matrices that are stored in another basis. proposal: the head that drafts are chosen by, if not the
    model's.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    domain: int
    context_len: int
    eps: float
    rope: RopeSpec
    tied: bool  # the head is the embedding
    rotation: Rotation = field(factory=Rotation)
    proposal: Proposal | None = None

    @property
    def summary(self) -> str:
        """For the start-up line."""
        return f"{self.num_layers} layers of {self.hidden_size}, vocabulary {self.vocab_size}"

    @property
    def num_mtp_layers(self) -> int:
        """Blocks that draft ("draft" graphs need one)."""
        return 0

    @property
    def is_recurrent(self) -> bool:
        """Whether rounds need "verify" and "fold"; otherwise "sample" verifies as well."""
        return False

    @abstractmethod
    def build(self, info: Info, *, kv: KVFormat, mode: str, rounds: Rounds | None = None) -> Graph:
        """Raises ArtifactError where a stored tensor is missing or has another shape than the config says."""

    def with_domain(self, num_tokens: int) -> Self:
        """The tokenizer's ids are below num_tokens: rows past them are never drawn."""
        return evolve(self, domain=min(num_tokens, self.vocab_size))

    def with_yarn(self, factor: float) -> Self:
        """A window `factor` times as long (`--rope-yarn`).   Raises UsageError."""
        rope = self.rope.stretched(factor, self.context_len)
        return evolve(self, rope=rope, context_len=int(self.context_len * factor))

    def with_f16_state(self) -> Self:
        """Recurrent states of 16 bits (`--gdn-state-fp16`).   Raises UsageError."""
        raise UsageError("--gdn-state-fp16: this model has no gated delta rule; leave it out")


@frozen
class Family:
    """model_types, architectures: what a config may call it. parse raises ArtifactError.

    rotates: reads `hadamard_signs` of a config: signs of the rotation of an input, by the name of the matrix.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    parse: Callable[[Config], ModelSpec]
    rotates: bool = False

    def recognise(self, config: Config) -> bool:
        names = config.get("architectures")
        if isinstance(names, list | tuple) and names:
            return any(name in self.architectures for name in names)
        return config.get("model_type") in self.model_types

    def build(self, spec: ModelSpec, info: Info, *, kv: KVFormat, mode: str, rounds: Rounds | None = None) -> Graph:
        """rounds: makes a graph of MODES keep its hidden values for a drafter; graphs of ROUND_MODES need it."""
        modes = MODES if rounds is None else MODES + ROUND_MODES
        if mode not in modes:
            raise UsageError(f"no graph mode {mode!r}; there are {', '.join(modes)}")
        if mode.startswith("draft") and not spec.num_mtp_layers:
            raise UsageError(f"this {self.name} model has no MTP block to draft with; use another drafter or none")
        return spec.build(info, kv=kv, mode=mode, rounds=rounds)


def _refuse_rotations(family: Family, config: Config) -> None:
    if config.get("hadamard_signs") and not family.rotates:
        raise ArtifactError(
            f"config: {len(config['hadamard_signs'])} matrices ask for Hadamard-rotated inputs (hadamard_signs), which "
            f"{family.name} does not make; convert from weights that are not rotated"
        )


def identify(config: Config, families: tuple[Family, ...]) -> tuple[Family, ModelSpec]:
    """Raises ArtifactError that names the model's type and the supported ones."""
    for family in families:
        if family.recognise(config):
            _refuse_rotations(family, config)
            return family, family.parse(config)
    names, kind = config.get("architectures"), config.get("model_type")
    found = names[0] if isinstance(names, list | tuple) and names else kind
    known = "; ".join(f"{f.name} ({', '.join(f.architectures)})" for f in families)
    raise ArtifactError(f"config: the architecture {short(found)} is not supported; supported are {known}")


class Stored:
    """Adds weights to a graph, each compared with what is stored."""

    def __init__(self, g: Graph, info: Info, rotation: Rotation | None = None) -> None:
        self._g, self._info = g, info
        self.rotation = Rotation() if rotation is None else rotation

    @property
    def graph(self) -> Graph:
        return self._g

    def _check(self, name: str, *shape: int) -> TensorInfo:
        info = self._info(name)
        if info.shape != shape:
            raise ArtifactError(
                f"tensor {name!r} has shape {list(info.shape)}, but the config implies {list(shape)}: weights and "
                "config are of different models"
            )
        return info

    def matrix(self, name: str, n: int, k: int) -> Value:
        info = self._check(name, n, k)
        return self._g.matrix(name, (n, k), info.format, least_bits=info.least_bits)

    def rows(self, name: str, part: str, stored_rows: int, k: int, *, start: int, count: int, period: int) -> Value:
        """`count` of every `period` rows from `start` on, under the name `<name>/<part>`."""
        info = self._check(name, stored_rows, k)
        if f"{name}/{part}" in info.parts:
            return self.matrix(f"{name}/{part}", stored_rows // period * count, k)
        spec = WeightSpec((Rows(name, start, count, period),))
        shape = (stored_rows // period * count, k)
        return self._g.matrix(f"{name}/{part}", shape, info.format, spec, least_bits=info.least_bits)

    def stack(self, name: str, num: int, n: int, k: int) -> Value:
        """Matrices of `num` experts, [num, n, k] as stored, below each other -> [num * n, k]."""
        info = self._check(name, num, n, k)
        return self._g.matrix(name, (num * n, k), info.format, least_bits=info.least_bits)

    def gathered(self, name: str, pieces: Sequence[tuple[Rows, int]], stored: Mapping[str, int], k: int) -> Value:
        """Row pieces of matrices below each other, each with its number of rows. stored: rows of each matrix."""
        infos = {param: self._check(param, rows, k) for param, rows in stored.items()}
        formats = {param: info.format for param, info in infos.items()}
        first = next(iter(formats.values()))
        for param, fmt in formats.items():
            if fmt is not first:
                raise ArtifactError(
                    f"tensor {param!r} is {fmt}, but {next(iter(formats))!r} is {first}: the parts of {name} must have "
                    "one format; quantise them alike"
                )
        spec = WeightSpec(tuple(rows for rows, _ in pieces))
        bits = max(info.least_bits for info in infos.values())
        return self._g.matrix(name, (sum(count for _, count in pieces), k), first, spec, least_bits=bits)

    def has(self, name: str) -> bool:
        try:
            self._info(name)
        except ArtifactError:
            return False
        return True

    def matrices(self, name: str, n: int, k: int) -> tuple[Value, ...]:
        """The matrix, or the matrices below each other as which it is stored."""
        info = self._check(name, n, k)
        if not info.parts:
            return (self.matrix(name, n, k),)
        found = [(part, self._info(part)) for part in info.parts]
        return tuple(self._g.matrix(part, (i.shape[0], k), i.format, least_bits=i.least_bits) for part, i in found)

    def products(self, x: Value, *weights: Value) -> tuple[Value, ...]:
        """x times each matrix, whatever basis it is stored in; one launch for those that read the same."""
        inputs = [self.rotation.turned(self._g, x, w) for w in weights]
        found: dict[Value, Value] = {}
        for source in dict.fromkeys(inputs):
            own = [w for w, i in zip(weights, inputs, strict=True) if i is source]
            found.update(zip(own, linear(self._g, source, *own), strict=True))
        return tuple(found[w] for w in weights)

    def add_product(self, x: Value, weight: Value, residual: Value) -> Value:
        return linear_add(self._g, self.rotation.turned(self._g, x, weight), weight, residual)

    def vector(self, name: str, n: int) -> Value:
        """Decoded to float32."""
        self._check(name, n)
        return self._g.weight(name, TensorType((n,)))

    def tensor(self, name: str, *shape: int) -> Value:
        """Of any rank, decoded to float32."""
        self._check(name, *shape)
        return self._g.weight(name, TensorType(shape))

    def row(self, name: str, n: int) -> Value:
        """A matrix of one row as a vector, decoded to float32."""
        self._check(name, 1, n)
        return self._g.weight(name, TensorType((n,)))

    def taps(self, name: str, channels: int, taps: int) -> Value:
        """A depthwise convolution, stored [C, 1, taps] -> [C, taps], float32."""
        self._check(name, channels, 1, taps)
        return self._g.weight(name, TensorType((channels, taps)))


def mlp(g: Graph, w: Stored, prefix: str, h: Value, residual: Value, *, hidden: int, inner: int) -> Value:
    """residual + down(silu(gate h) * up h)."""
    gate, up = (w.matrix(f"{prefix}{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
    turned = w.rotation.turned(g, h, gate)
    if gate.type.fmt is up.type.fmt and turned is w.rotation.turned(g, h, up):
        y = linear_swiglu(g, turned, gate, up)
    else:
        y = silu_mul(g, *w.products(h, gate, up))
    return w.add_product(y, w.matrix(f"{prefix}down_proj.weight", hidden, inner), residual)


def geglu(g: Graph, w: Stored, prefix: str, h: Value, *, hidden: int, inner: int) -> Value:
    """down(gelu_tanh(gate h) * up h)."""
    gate, up = (w.matrix(f"{prefix}{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
    (y,) = linear(g, gelu_mul(g, *linear(g, h, gate, up)), w.matrix(f"{prefix}down_proj.weight", hidden, inner))
    return y


HIDDEN_RING = "mtp.hidden"  # final hidden values by cache position, after the norm


def finish(
    g: Graph,
    x: Value,
    norm: Value,
    head: Value,
    *,
    eps: float,
    offset: float,
    mode: str,
    domain: int,
    hidden_rows: int = 0,
    candidates: int = 0,
    cap: float = 0.0,
    rotation: Rotation | None = None,
) -> None:
    """Norm and head on the logit rows, and what `mode` makes of the logits.

    hidden_rows: of the drafter's ring; candidates: that a "verify" rejects by; cap: logits become cap * tanh(logits /
    cap), 0: they stay; rotation: of the head's input.
    """
    if hidden_rows:
        hidden = rms_norm(g, x, norm, eps=eps, offset=offset)
        ring_store(g, hidden, hidden_ring(g, width_of(hidden), hidden_rows))
        hidden = take_rows(g, hidden, g.step["logit_rows"])
    else:
        hidden = rms_norm(g, take_rows(g, x, g.step["logit_rows"]), norm, eps=eps, offset=offset)
    if rotation:
        hidden = rotation.turned(g, hidden, head)
    (logits,) = linear(g, hidden, head)
    if cap:
        logits = soft_cap(g, logits, cap)
    match mode:
        case "verify" if candidates:
            sample_rejecting(g, logits, domain=domain, count=candidates)
        case "verify":
            sample_ahead(g, logits, domain=domain)
        case "sample":
            sample(g, logits, domain=domain)
        case "score":
            score(g, logits, domain=domain)
        case "logits":
            g.outputs["logits"] = logits


def tap(g: Graph, x: Value, layer: int, rounds: Rounds | None) -> None:
    """Keep a layer's output for a drafter that reads it."""
    if rounds is not None and layer in rounds.taps:
        ring_store(g, x, tap_ring(g, layer, width_of(x), rounds.tap_rows))


def tap_ring(g: Graph, layer: int, width: int, rows: int) -> Value:
    return ring_state(g, f"tap.{layer}", rows, width)


def width_of(x: Value) -> int:
    n = x.type.shape[-1]
    assert isinstance(n, int)
    return n


def hidden_ring(g: Graph, width: int, rows: int) -> Value:
    """One place more than rows: a drafter stores its own hidden value one position ahead."""
    return ring_state(g, HIDDEN_RING, rows + 1, width)
