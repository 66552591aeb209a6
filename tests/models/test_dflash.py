"""DFlash and DFlash2: blocks against arrays computed in plain PyTorch, and drafts through the whole engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ninfer.artifacts import open_artifact
from ninfer.artifacts.beside import Beside
from ninfer.cli.convert import body as convert
from ninfer.config import EngineConfig
from ninfer.devices.cuda_sim import sim_info
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.kv import KV_FORMATS, by_name
from ninfer.ir.ops.attention import Attention, KvAppend
from ninfer.ir.types import Env
from ninfer.models import dflash, identify
from ninfer.models.family import Rounds
from ninfer.runtime.batch import Draw, SeqRows
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.load import load
from ninfer.runtime.reference import ReferenceRunner, reference_runner
from ninfer.runtime.request import GenerateRequest, Sampling
from ninfer.runtime.steps import fill_step
from ninfer.runtime.weights import bind_weights
from tests.checkpoints import DATA, GREEDY, TINY_GGUF, limits, oracle, tiny_cases
from tests.cuda.parity import lowering_for
from tests.drawn import checkpoint
from tests.drawn_drafter import drafter_checkpoint, shapes

ATOL = 1e-4  # float32 in another order of summation
TARGETS = {"dflash": "qwen3_5_moe", "dflash2": "qwen3_5_dense"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    found = {name: drafter_checkpoint(DATA / name, root / name) for name in TARGETS}
    return found | {
        "qwen3_5_moe": checkpoint(DATA / "qwen3_5_moe", root / "moe"),
        "qwen3_5_dense": DATA / "qwen3_5_dense",
    }


class Pair:
    """A target and its drafter on one memory."""

    def __init__(self, folders: Mapping[str, Path], name: str, *, bidirectional: bool = False) -> None:
        target, drafter = open_artifact(folders[TARGETS[name]]), open_artifact(folders[name])
        both = Beside(target, drafter, dflash.PREFIX)
        family, spec = identify(target.config)
        self.own = dflash.parse(drafter.config)
        self.own.check(spec)
        if bidirectional:
            self.own = attrs.evolve(self.own, causal=(False,) * self.own.num_layers)
        rounds = Rounds(hidden_rows=0, journal_rows=16, taps=self.own.taps, tap_rows=64)
        kv, sized = by_name("f32"), limits(spec)
        self.runs: dict[str, ReferenceRunner] = {}
        states: dict[str, NDArray[Any]] = {}
        for mode in ("logits", *dflash.MODES):
            if mode == "logits":
                graph = family.build(spec, both.info, kv=kv, mode=mode, rounds=rounds)
            else:
                graph = dflash.build(self.own, spec, both.info, kv=kv, mode=mode, rounds=rounds)
            made = reference_runner(
                graph, bind_weights(graph, both), sized, decode_weights=True, logit_rows=sized.max_rows
            )
            for key, state in made.states.items():
                states.setdefault(key, state)
            made.states = states
            self.runs[mode] = made
        self.runs["logits"].set_pages(1, 0, [3, 1, 2, 0])

    def run(self, mode: str, tokens: Sequence[int], kv_len: int, draw: Draw | None = None) -> dict[str, NDArray[Any]]:
        """With `draw`, all rows but the first are logit rows."""
        rows = SeqRows(
            slot=1, kv_len=kv_len, tokens=tuple(tokens), generated=True, draw=draw, num_draws=max(1, len(tokens) - 1)
        )
        if mode == "logits":
            return self.runs[mode].outputs([rows])
        run = self.runs[mode]
        fill_step([rows], run.step_arrays, run.header)
        return run._run()

    def block(self, anchor: int, count: int, kv_len: int, draw: Draw = GREEDY) -> dict[str, NDArray[Any]]:
        return self.run(dflash.BLOCK_LOGITS, [anchor, *[self.own.mask_id] * count], kv_len, draw)


@pytest.mark.parametrize("count", [1, 3, 7, 15])
@pytest.mark.parametrize(("name", "prefix"), [("dflash", ""), ("dflash", "bidir_"), ("dflash2", "")])
def test_two_rounds_are_the_references(folders: Mapping[str, Path], name: str, prefix: str, count: int) -> None:
    """A block behind the prompt, a verification of its drafts, a block behind those that count as accepted."""
    want, key = oracle(name), f"{prefix}k{count}_"
    pair = Pair(folders, name, bidirectional=bool(prefix))
    prompt = oracle(TARGETS[name])["input_ids"].tolist()
    first = pair.run("logits", prompt, 0)["logits"]
    anchor = int(first[-1].argmax())
    assert anchor == want["anchor"]
    pair.run(dflash.CONTEXT, prompt, 0)
    got = pair.block(anchor, count, 48)
    drafts = got["draft"].tolist()
    assert drafts == want[key + "r1_draft_ids"].tolist()
    if name == "dflash2":
        np.testing.assert_array_equal(np.sort(got["candidates"]), np.sort(want[key + "r1_cand_ids"]))
    verified = pair.run("logits", [anchor, *drafts], 48)["logits"]
    kept = int(want[key + "accepted"])
    then = int(verified[kept].argmax())
    assert then == want[key + "next_anchor"]
    pair.run(dflash.CONTEXT, [anchor, *drafts[:kept]], 48)
    again = pair.block(then, count, 49 + kept)
    assert again["draft"].tolist() == want[key + "r2_draft_ids"].tolist()
    for values, which in ((got, "r1_logits"), (again, "r2_logits")):
        if key + which in want:
            np.testing.assert_allclose(values["logits"][:, ::32], want[key + which], rtol=0, atol=ATOL)


def test_proposals_are_drawn_from_the_probabilities_that_are_kept(folders: Mapping[str, Path]) -> None:
    want = oracle("dflash2")
    pair = Pair(folders, "dflash2")
    prompt = oracle("qwen3_5_dense")["input_ids"].tolist()
    pair.run("logits", prompt, 0)
    pair.run(dflash.CONTEXT, prompt, 0)
    anchor = int(want["anchor"])
    first = np.zeros(16)
    for seed in range(200):
        got = pair.block(anchor, 7, 48, Draw(sampling=Sampling(temperature=0.8), seed=seed))
        np.testing.assert_allclose(got["q"].sum(axis=1), 1, rtol=1e-5)
        ranks = [row.tolist().index(d) for row, d in zip(got["candidates"], got["draft"].tolist(), strict=True)]
        first[ranks[0]] += 1
        # along the greedy walk the probabilities are the reference's
        np.testing.assert_allclose(got["q"][0], want["k7_r1_q"][0], rtol=0, atol=1e-5)
    q = want["k7_r1_q"][0]
    assert np.abs(first / 200 - q).max() < 4 * np.sqrt(0.25 / 200), "four standard errors"


# Through the engine: a drafter that proposes its mask's token, or little else


COMMA = tiny_cases()[3]["greedy_ids"][1]


def comma_drafter(folder: Path, name: str, **changes: Any) -> Path:
    """For tiny-qwen35: layers so weak that a mask keeps its embedding, which is the comma's."""
    config = json.loads((DATA / name / "config.json").read_text())
    config |= {"hidden_size": 256, "vocab_size": 4096, "num_target_layers": 8, **changes}
    config["dflash_config"] |= {"mask_token_id": COMMA, "target_layer_ids": [1, 4, 6]}
    dice = np.random.default_rng(5)
    tensors: dict[str, NDArray[Any]] = {}
    for key, shape in shapes(config):
        x = dice.standard_normal(shape).astype(np.float32)
        weak = "o_proj" in key or "down_proj" in key or "codebook" in key
        tensors[key] = np.ones(shape, np.float32) if "norm" in key else x * (0.002 if weak else 0.05)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    assert load_file(folder / "model.safetensors").keys() == tensors.keys()
    return folder


def engine(**changes: Any) -> Engine:
    settings = {"model": str(TINY_GGUF), "max_context": 512, "device": "cpu", "deterministic": True}
    config = EngineConfig(**{**settings, **changes})
    loaded = load(config)
    return Engine(loaded.runner, config, speculation=loaded.speculation)


@pytest.mark.parametrize(("name", "drafts"), [("dflash", 3), ("dflash", 15), ("dflash2", 1), ("dflash2", 7)])
def test_drafts_never_change_a_text(tmp_path: Path, name: str, drafts: int) -> None:
    model = comma_drafter(tmp_path / "drafter", name)
    batch = [
        GenerateRequest(
            id=str(i),
            prompt_ids=tuple(case["prompt_ids"] * (1 + i % 2)),
            sampling=Sampling(temperature=0.8 if i % 2 and name == "dflash" else 0.0, seed=i),
            max_tokens=50 - 5 * (i % 3),
        )
        for i, case in enumerate([tiny_cases()[j] for j in (3, 3, 5, 8, 2)])
    ]
    with engine(spec=name, draft_model=model, draft_tokens=drafts, ngram_draft_tokens=0) as drafted, engine() as plain:
        got = drive(drafted, batch)
        for r in batch:
            alone = [t.id for d in drive(plain, [r])[r.id] for t in d.tokens]
            assert [t.id for d in got[r.id] for t in d.tokens] == alone
        stats = drafted.stats().drafts
    assert stats is not None and stats.num_accepted > 20


def test_rounds_are_one_plan_and_say_what_graph_by_graph_rounds_say(tmp_path: Path) -> None:
    """Replies that join rounds under way, and one after another in the same slots."""
    model = comma_drafter(tmp_path / "drafter", "dflash")
    batch = [
        GenerateRequest(
            id=str(i),
            prompt_ids=tuple(tiny_cases()[(3, 5)[i % 2]]["prompt_ids"] * (1 + i % 3)),
            sampling=Sampling(temperature=0.7 * (i % 2), seed=i),
            max_tokens=30 - 4 * i,
        )
        for i in range(5)
    ]
    alone: dict[str, Any] = {"spec": "dflash", "draft_model": model, "draft_tokens": 3, "ngram_draft_tokens": 0}
    with engine(max_concurrency=2, **alone) as e:
        speculation = e.speculation
        assert speculation is not None and speculation.chain is not None
        verify, fold = speculation.run_verify, speculation.run_fold

        def never(rows: object) -> Any:
            raise AssertionError("a graph was run by itself")

        speculation.run_verify = speculation.run_fold = never
        together, chained = drive(e, batch), e.stats().drafts
        speculation.run_verify, speculation.run_fold, speculation.chain = verify, fold, None
        apart, both = drive(e, batch), e.stats().drafts
    for r in batch:
        assert [t for d in together[r.id] for t in d.tokens] == [t for d in apart[r.id] for t in d.tokens]
    assert chained is not None and both is not None
    assert both.num_accepted == 2 * chained.num_accepted > 20 and both.num_drafted == 2 * chained.num_drafted
    copies = {**alone, "ngram_draft_tokens": 8, "ngram_min_match": 4}
    with engine(max_concurrency=2, **copies) as mixed:  # a copy's round leaves drafts of the one before behind
        copied, stats = drive(mixed, batch), mixed.stats().drafts
    assert {i: [t.id for d in found for t in d.tokens] for i, found in copied.items()} == {
        i: [t.id for d in found for t in d.tokens] for i, found in together.items()
    }
    assert stats is not None and stats.num_copied and stats.num_accepted > stats.num_copies_accepted


class Turns:
    """A grammar with memory: odd and even tokens take turns."""

    def __init__(self) -> None:
        self.count = 0

    def fill(self, row: Any) -> bool:
        row.view(np.uint32)[:] = 0xAAAAAAAA if self.count % 2 else 0x55555555
        return True

    def accept(self, token: int) -> bool:
        fits = token % 2 == self.count % 2
        self.count += fits
        return fits

    def rollback(self, num_tokens: int) -> None:
        self.count -= num_tokens


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_a_grammar_holds_under_drafts(tmp_path: Path, name: str) -> None:
    model = comma_drafter(tmp_path / "drafter", name)
    prompts = [tuple(tiny_cases()[i]["prompt_ids"]) for i in (3, 5)]

    def asked(temperature: float) -> list[GenerateRequest]:
        sampling = Sampling(temperature=temperature, seed=1)
        return [
            GenerateRequest(id=str(i), prompt_ids=ids, sampling=sampling, max_tokens=30, mask=Turns())
            for i, ids in enumerate(prompts)
        ]

    with engine(spec=name, draft_model=model, draft_tokens=3, ngram_draft_tokens=0) as drafted, engine() as plain:
        for temperature in (0.0, 1.0):
            got, alone = drive(drafted, asked(temperature)), drive(plain, asked(temperature))
            for id in alone:
                ids, want = ([t.id for d in deltas[id] for t in d.tokens] for deltas in (got, alone))
                assert [t % 2 for t in ids] == [i % 2 for i in range(30)]
                if name == "dflash" or not temperature:  # rejection has the distribution, not the text
                    assert ids == want
        stats = drafted.stats().drafts
    assert stats is not None and stats.num_accepted


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["bf16", "rk8v4"])
@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_the_simulated_gpu_drafts_as_the_processor(tmp_path: Path, name: str, kv: str) -> None:
    model = comma_drafter(tmp_path / "drafter", name)
    prompt = tuple(tiny_cases()[3]["prompt_ids"])
    requests = [
        GenerateRequest(
            id=str(i), prompt_ids=prompt, sampling=Sampling(temperature=t, top_p=p, seed=i), max_tokens=24, logprobs=1
        )
        for i, (t, p) in enumerate([(0.0, 1.0), (1.4, 1.0), (1.4, 0.9)])
    ]
    found = []
    for device in ("cpu", "cuda-sim"):
        settings = {"device": device, "max_context": 128, "max_concurrency": 3, "prefill_chunk": 64, "kv_dtype": kv}
        with engine(spec=name, draft_model=model, draft_tokens=3, ngram_draft_tokens=0, **settings) as drafted:
            deltas = drive(drafted, requests)
            tokens = [[t for d in deltas[r.id] for t in d.tokens] for r in requests]
            found.append(([[t.id for t in own] for own in tokens], drafted.stats().drafts))
            logprobs = np.array([[t.logprob for t in own] for own in tokens])
    assert found[0] == found[1] and found[0][1] is not None and found[0][1].num_accepted > 9
    assert np.isfinite(logprobs).all() and (logprobs <= 0).all()


def test_a_device_without_its_kernels_is_one_line(tmp_path: Path) -> None:
    model = comma_drafter(tmp_path / "drafter", "dflash2", head_dim=48)
    line = r"^--spec dflash2: no route for .* heads of multiples of 32 values, not 48.*; use --spec .* --device cpu$"
    with pytest.raises(UsageError, match=line):
        engine(device="cuda-sim", spec="dflash2", draft_model=model, max_context=128, prefill_chunk=64)


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_a_drafter_keeps_plain_values_beside_a_coded_cache(tmp_path: Path, name: str) -> None:
    """So that every --kv-dtype has kernels for it on a GPU."""
    target = open_artifact(TINY_GGUF)
    drafter = open_artifact(comma_drafter(tmp_path / "drafter", name))
    _, spec = identify(target.config)
    own = dflash.parse(drafter.config)
    rounds = Rounds(hidden_rows=0, journal_rows=8, taps=own.taps, tap_rows=64, candidates=16)
    info, lowering = Beside(target, drafter, dflash.PREFIX).info, lowering_for(sim_info())
    for kv in KV_FORMATS:
        for mode in (dflash.CONTEXT, dflash.BLOCK):
            graph = dflash.build(own, spec, info, kv=kv, mode=mode, rounds=rounds)
            found = {n.op.fmt for n in graph.nodes if isinstance(n.op, Attention | KvAppend)}
            assert found == {kv if kv.is_plain else by_name("bf16")}
            lowering.lower(graph, Env(rows=32, logit_rows=32, seqs=4, slots=4, pages=16, max_pages=4))


def test_a_drafter_in_the_models_own_file(tmp_path: Path) -> None:
    folder = comma_drafter(tmp_path / "drafter", "dflash2")
    out = tmp_path / "both.ninfer"
    argv = ["--model", str(TINY_GGUF), "--recipe", "gguf", "--components", "text,dflash2", "--out", str(out)]
    assert convert([*argv, "--source", f"dflash2={folder}"]) == 0
    case = tiny_cases()[3]
    request = GenerateRequest(
        id="0", prompt_ids=tuple(case["prompt_ids"]), sampling=Sampling(temperature=0), max_tokens=40
    )
    with engine(model=str(out), spec="dflash2", draft_tokens=7, ngram_draft_tokens=0) as drafted:
        got = [t.id for d in drive(drafted, [request])["0"] for t in d.tokens]
        stats = drafted.stats().drafts
    with engine() as plain:
        assert got == [t.id for d in drive(plain, [request])["0"] for t in d.tokens]
    assert stats is not None and stats.num_accepted > 0


def test_under_rejection_a_seed_is_a_text_whatever_shares_the_rounds(tmp_path: Path) -> None:
    """Sampled texts under DFlash2 have the model's distribution, but are not those without drafts."""
    case = tiny_cases()[3]
    batch = [
        GenerateRequest(
            id=str(i),
            prompt_ids=tuple(case["prompt_ids"]),
            sampling=Sampling(temperature=1.0, seed=i),
            max_tokens=60,
            logprobs=3,
        )
        for i in range(6)
    ]
    model = comma_drafter(tmp_path / "drafter", "dflash2")
    with engine(spec="dflash2", draft_model=model, draft_tokens=3, ngram_draft_tokens=0) as drafted:
        first = drive(drafted, batch)
        alone = [drive(drafted, [r])[r.id] for r in batch]
        stats = drafted.stats().drafts
    assert stats is not None and stats.num_accepted > 20
    for r, own in zip(batch, alone, strict=True):
        tokens = [t for d in first[r.id] for t in d.tokens]
        assert tokens == [t for d in own for t in d.tokens]
        for t in tokens:
            assert t.logprob is not None and t.logprob <= max(best for _, best in t.top) + 1e-6
            assert all(abs(t.logprob - value) < 1e-5 for id, value in t.top if id == t.id), "the token's own"


def with_block_size(config: dict[str, Any], size: int) -> dict[str, Any]:
    return {**config, "block_size": size, "dflash_config": {**config["dflash_config"], "block_size": size}}


def test_a_drafter_of_another_kind_or_model_is_one_line(tmp_path: Path, folders: Mapping[str, Path]) -> None:
    with pytest.raises(UsageError, match=r"^--spec dflash: .* give its folder with --draft-model"):
        engine(spec="dflash")
    model = comma_drafter(tmp_path / "d", "dflash")
    with pytest.raises(UsageError, match=r"is a drafter of --spec dflash, not of --spec dflash2$"):
        engine(spec="dflash2", draft_model=model)
    blocks = r"^--draft-tokens 15: this drafter fills blocks of 8 positions, .*; use --draft-tokens 7$"
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "short").mkdir()
    for file in model.iterdir():
        (tmp_path / "short" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "short" / "config.json").write_text(json.dumps(with_block_size(config, 8)))
    with pytest.raises(UsageError, match=blocks):
        engine(spec="dflash", draft_model=tmp_path / "short", draft_tokens=15)
    with pytest.raises(ArtifactError, match=r"hidden_size is 64, but the model has 256: it drafts for another"):
        engine(spec="dflash", draft_model=folders["dflash"])
    with pytest.raises(ArtifactError, match=r"is no drafter; known are DFlashDraftModel, DFlash2DraftModel"):
        engine(spec="dflash", draft_model=DATA / "llama")
