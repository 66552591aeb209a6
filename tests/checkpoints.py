"""The small models under tests/data, and what tests do with them over and over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ninfer.artifacts import Artifact, open_artifact
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.formats.quant import by_name
from ninfer.models import identify
from ninfer.models.family import ModelSpec, Rounds
from ninfer.runtime.batch import Draw, Limits, SeqRows
from ninfer.runtime.reference import ReferenceRunner, reference_runner
from ninfer.runtime.request import Sampling
from ninfer.runtime.weights import bind_weights
from tests.gguf_writer import F32, write_gguf

DATA = Path(__file__).parent / "data"
TINY_GGUF = DATA / "tiny-qwen35.gguf"
GREEDY = Draw(sampling=Sampling(temperature=0), seed=0, logprobs=5)


def make_tiny_gguf(checkpoint: Path, target: Path) -> None:
    """How TINY_GGUF came from the bf16 checkpoint: matrices as Q6_K, everything else in float32."""
    q6 = by_name("q6_k")
    write_gguf(
        open_artifact(checkpoint),
        target,
        lambda name, shape: q6 if len(shape) == 2 and shape[1] % 256 == 0 else F32,
        tokenizer=checkpoint / "tokenizer.json",
        template=checkpoint / "chat_template.jinja",
    )


def tiny_qwen35_folder(folder: Path) -> Path:
    """TINY_GGUF as a Hugging Face folder with its tokenizer: the values of the GGUF in float32."""
    artifact = open_artifact(TINY_GGUF)
    tensors = {name: np.ascontiguousarray(artifact.get(name).f32()) for name in artifact.names()}
    for name, values in tensors.items():
        if (name.endswith("norm.weight") and "linear_attn.norm" not in name) or name.startswith("mtp.pre_fc_norm"):
            tensors[name] = values - np.float32(1)
        if name in artifact.config["gdn_tiled_out_columns"]:
            heads = values.reshape(len(values), -1, 2, 128)  # [out, place in group, key head, lane]
            tensors[name] = np.ascontiguousarray(heads.swapaxes(1, 2).reshape(values.shape))
    save_file(tensors, folder / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(DATA / "tiny-qwen35" / name, folder / name)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DATA / "tokenizer" / name, folder / name)
    return folder


def oracle(name: str) -> Mapping[str, NDArray[Any]]:
    with np.load(DATA / name / "oracle.npz") as file:
        return {key: file[key] for key in file.files}


def tiny_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((DATA / "tiny-qwen35" / "greedy.json").read_text())["cases"]
    return cases


def limits(spec: ModelSpec, *, rows: int = 256, seqs: int = 4, pages_each: int = 4) -> Limits:
    return Limits(
        max_rows=rows,
        max_seqs=seqs,
        slots=seqs,
        pages=seqs * pages_each,
        max_pages=pages_each,
        context_len=64 * pages_each,
        domain=spec.domain,
    )


def runner(
    source: Path | Artifact,
    mode: str = "logits",
    *,
    kv: str = "f32",
    rounds: Rounds | None = None,
    share: ReferenceRunner | None = None,
    **sizes: int,
) -> ReferenceRunner:
    """A reference runner with decoded weights; every slot has its pages, in no particular order.

    share: a runner of the same sizes whose states this one has too.
    """
    artifact = open_artifact(source) if isinstance(source, Path) else source
    family, spec = identify(artifact.config)
    graph = family.build(spec, artifact.info, kv=kv_by_name(kv), mode=mode, rounds=rounds)
    sized = limits(spec, **sizes)
    made = reference_runner(graph, bind_weights(graph, artifact), sized, decode_weights=True, logit_rows=sized.max_rows)
    pages = np.random.default_rng(3).permutation(sized.pages).reshape(sized.slots, sized.max_pages)
    for slot, own in enumerate(pages.tolist()):
        made.set_pages(slot, 0, own)
    if share is not None:
        for name, state in made.states.items():
            share.states.setdefault(name, state)
        made.states = share.states
    return made


def part(
    tokens: Sequence[int] | NDArray[np.integer[Any]], kv_len: int = 0, *, slot: int = 0, draw: Draw | None = None
) -> SeqRows:
    return SeqRows(slot=slot, kv_len=kv_len, tokens=tuple(int(t) for t in tokens), generated=False, draw=draw)
