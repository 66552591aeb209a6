"""Proposal heads: drafts come from some rows of the head, texts do not depend on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from ninfer.artifacts import Artifact, open_artifact, synthetic
from ninfer.artifacts.artifact import PROPOSAL_HEAD
from ninfer.artifacts.beside import Beside
from ninfer.artifacts.convert import Plan, make_plan
from ninfer.artifacts.convert_objects import to_artifact
from ninfer.artifacts.ninfer_write import NewArtifact, raw_object, write_artifact
from ninfer.artifacts.ranking import shortlist
from ninfer.artifacts.recipes import recipe
from ninfer.cli.convert import body
from ninfer.config import EngineConfig
from ninfer.errors import ArtifactError, NinferError, UsageError
from ninfer.formats.kv import by_name
from ninfer.formats.quant import by_name as by_format
from ninfer.ir.graph import Graph
from ninfer.ir.ops.journal import NEVER
from ninfer.ir.types import L, TensorType
from ninfer.models import dflash, identify
from ninfer.models.family import Rounds, Stored
from ninfer.models.proposal import draft_scores, parse_proposal
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.load import load, open_model
from ninfer.runtime.reference import reference_runner
from ninfer.runtime.request import GenerateRequest, Sampling
from ninfer.runtime.steps import fill_step
from ninfer.runtime.weights import bind_weights
from tests.checkpoints import DATA, GREEDY, TINY_GGUF, limits, oracle, part, runner, tiny_cases
from tests.drawn_drafter import drafter_checkpoint
from tests.models.test_rotation import Rotated

ROUNDS = Rounds(hidden_rows=160, journal_rows=8)
DENSE = DATA / "qwen3_5_dense"


def converted(tmp_path: Path, model: Path, chosen: str, rows: int, *more: str) -> Path:
    out = tmp_path / f"{model.stem}-{chosen}-{rows}.ninfer"
    argv = ["--model", str(model), "--recipe", chosen, "--components", "text,mtp", "--out", str(out), "--verify",
            "--proposal", "--proposal-rows", str(rows), *more]  # fmt: skip
    assert body(argv) == 0
    return out


def ranking(tmp_path: Path, domain: int) -> tuple[list[int], Path]:
    order = np.random.default_rng(5).permutation(domain).tolist()
    path = tmp_path / "ranking.json"
    path.write_text(json.dumps(order))
    return order, path


@pytest.mark.parametrize("chosen", ["bf16", "q4", "q8"])
def test_the_head_is_rows_of_the_whole_in_its_encoding(tmp_path: Path, chosen: str) -> None:
    order, path = ranking(tmp_path, 512)
    artifact = open_artifact(converted(tmp_path, DENSE, chosen, 96, "--ranking", str(path)))
    ids = artifact.proposal_ids()
    assert artifact.has_proposal and ids is not None and ids.tolist() == order[:96]
    head, own = artifact.get("lm_head.weight"), artifact.get(PROPOSAL_HEAD)
    assert f"proposal head of 96 tokens in {own.format.name}" in artifact.details()
    assert own.format is head.format
    assert np.array_equal(own.raw, head.format.gather_rows(head.raw, head.shape, ids.astype(np.intp)))


def test_the_start_tells_of_the_head_and_rounds_stay_one_plan(tmp_path: Path) -> None:
    told: dict[str, str] = {}
    config = EngineConfig(
        model=str(converted(tmp_path, TINY_GGUF, "gguf", 300)), device="cpu", max_context=128, max_concurrency=1,
        spec="mtp", ngram_draft_tokens=0,
    )  # fmt: skip
    loaded = load(config, lambda label, text: told.update({label: text}))
    assert told["drafts"].endswith("by a proposal head of 300 tokens")
    assert loaded.speculation is not None and loaded.speculation.chain is not None


@pytest.mark.parametrize("chosen", ["bf16", "q4"])
def test_drafts_are_the_best_listed_tokens_of_the_whole_head(tmp_path: Path, chosen: str) -> None:
    """Scores of listed tokens are the head's own, so a draft is its argmax wherever that is listed."""
    _, path = ranking(tmp_path, 512)
    artifact = open_artifact(converted(tmp_path, DENSE, chosen, 96, "--ranking", str(path)))
    want, ids = oracle("qwen3_5_dense"), artifact.proposal_ids()
    assert ids is not None
    tokens = want["input_ids"].tolist()
    target = runner(artifact, rounds=ROUNDS)
    target.outputs([part(tokens)])
    states = {name: state.copy() for name, state in target.states.items()}  # drafting leaves hidden values of its own
    rows = [part([*tokens[1:], int(want["greedy_ids"][0])])]
    whole = runner(artifact, "draft_logits", rounds=ROUNDS, share=target).outputs(rows)["logits"]
    family, spec = identify(artifact.config)
    spec = attrs.evolve(spec, proposal=parse_proposal(ids, spec.vocab_size))
    made = {}
    for mode in ("draft_logits", "draft"):
        graph = family.build(spec, artifact.info, kv=by_name("f32"), mode=mode, rounds=ROUNDS)
        assert "lm_head.weight" not in {w.name for w in graph.weights}, "the whole head is not read"
        sized = limits(spec)
        run = reference_runner(graph, bind_weights(graph, artifact), sized, decode_weights=True, logit_rows=256)
        for name, state in states.items():
            run.states[name] = state.copy()
        made[mode] = run.outputs(rows)
    scores, drafts = made["draft_logits"]["logits"], made["draft"]["draft"]
    np.testing.assert_allclose(scores[:, ids], whole[:, ids], rtol=0, atol=1e-5)
    assert (np.delete(scores, ids, axis=1) == NEVER).all()
    best = whole.argmax(axis=1)
    listed = np.isin(best, ids)
    assert 5 < listed.sum() < len(best) - 5, "both kinds occur"
    np.testing.assert_array_equal(drafts[listed], best[listed])
    np.testing.assert_array_equal(drafts, ids[whole[:, ids].argmax(axis=1)])


def texts(model: Path, device: str = "cpu", **changes: Any) -> tuple[list[list[Any]], float]:
    """What eight prompts are told, with log-probabilities, and the share of drafts that are kept."""
    config = EngineConfig(model=str(model), max_context=256, device=device, deterministic=True, **changes)
    loaded = load(config)
    count, tokens = (8, 24) if device == "cpu" else (1, 5)
    with Engine(loaded.runner, config, speculation=loaded.speculation) as engine:
        batch = [
            GenerateRequest(
                id=str(i), prompt_ids=tuple(case["prompt_ids"]), max_tokens=tokens, logprobs=2,
                sampling=Sampling(temperature=0.7 * (i % 2), seed=i),
            )
            for i, case in enumerate(tiny_cases()[:count])
        ]  # fmt: skip
        said = drive(engine, batch)
        stats = engine.stats().drafts
    kept = 0.0 if stats is None else stats.num_accepted / max(1, stats.num_drafted)
    return [[t for d in said[r.id] for t in d.tokens] for r in batch], kept


def test_a_text_never_depends_on_the_head(tmp_path: Path) -> None:
    """An exact head of all but rare tokens drafts nearly as the whole one; one of a few tokens drafts badly."""
    vocab = open_artifact(TINY_GGUF).config["vocab_size"]
    exact = converted(tmp_path, TINY_GGUF, "gguf", vocab)
    plain, _ = texts(exact, spec="none")
    mtp: dict[str, Any] = {"spec": "mtp", "ngram_draft_tokens": 0}
    found = {
        "whole": texts(exact, full_draft_head=True, **mtp),
        "exact": texts(exact, lm_head_draft=True, **mtp),
        "short": texts(converted(tmp_path, TINY_GGUF, "gguf", 300), **mtp),
    }
    assert [said for said, _ in found.values()] == [plain] * 3
    assert found["exact"][1] == found["whole"][1] > 0.3, "the same drafts"
    assert found["short"][1] < found["whole"][1]


@pytest.mark.slow
def test_the_simulated_gpu_drafts_by_the_head(tmp_path: Path) -> None:
    model = converted(tmp_path, TINY_GGUF, "gguf", 600)
    mtp: dict[str, Any] = {"spec": "mtp", "ngram_draft_tokens": 0, "max_concurrency": 1}
    plain, _ = texts(model, "cuda-sim", spec="none", max_concurrency=1)
    assert texts(model, "cuda-sim", **mtp)[0] == plain


@pytest.mark.parametrize("kind", ["rotated", "listed"])
def test_blocks_read_the_targets_embedding_and_heads_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    """DFlash2 over a target whose matrices are rotated, and by a proposal head of all tokens in another order."""
    drafter = open_artifact(drafter_checkpoint(DATA / "dflash2", tmp_path / "dflash2"))
    own, want = dflash.parse(drafter.config), oracle("dflash2")
    rounds = Rounds(hidden_rows=0, journal_rows=16, taps=own.taps, tap_rows=64)
    prompt = oracle("qwen3_5_dense")["input_ids"].tolist()
    target: Artifact = Rotated(open_artifact(DENSE))
    if kind == "listed":
        order = np.random.default_rng(5).permutation(512)
        plan = make_plan(recipe("bf16"), open_artifact(DENSE), {}, name="x", proposal=order.tolist())
        write_artifact(to_artifact(plan), tmp_path / "listed.ninfer")
        target = open_artifact(tmp_path / "listed.ninfer")
    both = Beside(target, drafter, dflash.PREFIX)
    spec = identify(target.config)[1]
    if kind == "listed":
        spec = attrs.evolve(spec, proposal=parse_proposal(both.proposal_ids(), spec.vocab_size))
    sized = limits(spec)
    first = runner(both, rounds=rounds)
    first.outputs([part(prompt)])

    def run(mode: str, rows: list[Any]) -> dict[str, Any]:
        graph = dflash.build(own, spec, both.info, kv=by_name("f32"), mode=mode, rounds=rounds)
        made = reference_runner(graph, bind_weights(graph, both), sized, decode_weights=True, logit_rows=256)
        made.set_pages(0, 0, [int(p) for p in first.states["page_table"][0]])
        for name, state in made.states.items():
            first.states.setdefault(name, state)
        made.states = first.states
        fill_step(rows, made.step_arrays, made.header)
        return dict(made._run())

    run(dflash.CONTEXT, [part(prompt)])
    block = part([int(want["anchor"]), *[own.mask_id] * 7], len(prompt), draw=GREEDY)
    got = run(dflash.BLOCK_LOGITS, [attrs.evolve(block, num_draws=7)])
    assert got["draft"].tolist() == want["k7_r1_draft_ids"].tolist()
    np.testing.assert_allclose(got["logits"][:, ::32], want["k7_r1_logits"], rtol=0, atol=3e-4)


def test_rows_of_a_ternary_head_keep_its_words_and_its_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = synthetic._qwen3_5(1024, 2, 1024, 4, 2, 8, vocab=512, key_heads=4) | {"full_attention_interval": 2}
    monkeypatch.setitem(synthetic.CONFIGS, "wide", config)
    monkeypatch.setitem(synthetic.ROTATED, "wide", 1024)
    source, base = synthetic.SyntheticArtifact("wide", "t2_g128"), synthetic.SyntheticArtifact("wide")
    tokens = [500, *range(3, 130)]
    plan = make_plan(recipe("bonsai2_27b_ternary"), base, {"ternary": source}, name="wide", proposal=tokens)
    write_artifact(to_artifact(plan), tmp_path / "wide.ninfer")
    result = open_artifact(tmp_path / "wide.ninfer")
    head, own, signs = result.get("lm_head.weight"), result.get(PROPOSAL_HEAD), result.config["hadamard_signs"]
    assert own.format is by_format("t2_g128") and np.array_equal(own.f32(), head.f32()[tokens])
    assert np.array_equal(signs[PROPOSAL_HEAD], signs["lm_head.weight"])
    spec = identify(result.config)[1]
    g = Graph()
    w = Stored(g, result.info, spec.rotation)
    x = g.state("x", TensorType((L, 1024)))
    draft_scores(w, spec, x)
    draft_scores(w, attrs.evolve(spec, proposal=parse_proposal(result.proposal_ids(), 512)), x)
    assert [n.op.key for n in g.nodes] == ["hadamard", "linear", "linear", "pick_columns"], "one rotation serves both"


Damage = Callable[[NewArtifact], Any]


def _component(change: dict[str, Any]) -> Damage:
    return lambda new: new.components["text"].update(proposal=change)


def _unbound(part: str) -> Damage:
    return lambda new: new.bindings.pop(part)  # type: ignore[attr-defined]


def _ids(values: list[int]) -> Damage:
    def change(new: NewArtifact) -> None:
        place = next(i for i, o in enumerate(new.objects) if o.id == "w.proposal/token_ids")
        raw = np.array(values, "<i4")
        assert isinstance(new.objects, list)
        new.objects[place] = raw_object("w.proposal/token_ids", raw.tobytes(), shape=raw.shape, format="int32",
                                        layout="contiguous_le_v1")  # fmt: skip

    return change


WRONG: dict[str, tuple[Damage, str]] = {
    "rows": (_component({"domain": "indexed", "rows": 7}), "proposal.rows is 7, but proposal/token_ids has 40"),
    "a domain": (_component({"domain": "some"}), "domain is 'some'; there are full and indexed"),
    "no rows": (_component({"domain": "indexed"}), "has no member 'rows'"),
    "a full head of few rows": (_component({"domain": "full"}), r"has shape \[40, 64\], but the config implies"),
    "no ids": (_unbound("proposal/token_ids"), "bindings has no 'proposal/token_ids'"),
    "no head": (_unbound("proposal/head"), "bindings has no 'proposal/head': the file is incomplete"),
    "an id twice": (_ids([1] * 40), "has a token twice"),
    "a negative id": (_ids([-1, *range(39)]), "has -1, but the vocabulary has 512 tokens"),
    "an id too high": (_ids([512, *range(39)]), "has 512, but the vocabulary has 512 tokens"),
    "fewer ids": (_ids(list(range(39))), "rows is 40, but proposal/token_ids has 39"),
}


def plan(rows: int = 40) -> Plan:
    return make_plan(
        recipe("bf16"), open_artifact(DENSE), {}, name="x", components=("text", "mtp"), proposal=range(rows)
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    damage, message = WRONG[name]
    new, path = to_artifact(plan()), tmp_path / "wrong.ninfer"
    damage(new)
    new = attrs.evolve(new, uses=[u for u in new.uses if u["parameter"] in new.bindings])
    write_artifact(new, path)
    config = EngineConfig(model=str(path), spec="mtp", device="cpu")
    with pytest.raises(NinferError, match=message) as error:
        model = open_model(config, tokenizer_needed=False)
        model.graph("draft", ROUNDS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("alias", [False, True], ids=["of its own", "the head itself"])
def test_a_head_of_all_tokens_needs_no_ids(tmp_path: Path, alias: bool) -> None:
    """Files of others may have one, in fewer bits than the head; a second name of the head is no other head."""
    new, path = to_artifact(plan(512)), tmp_path / "full.ninfer"
    _component({"domain": "full"})(new)
    _unbound("proposal/token_ids")(new)
    if alias:
        assert isinstance(new.bindings, dict)
        new.bindings["proposal/head"] = new.bindings["text/output_head"]
    write_artifact(new, path)
    artifact = open_artifact(path)
    assert artifact.has_proposal is not alias and artifact.proposal_ids() is None
    model = open_model(EngineConfig(model=str(path), spec="mtp", device="cpu"), tokenizer_needed=False)
    g = model.graph("draft", ROUNDS)
    assert not any(n.op.key == "pick_columns" for n in g.nodes)
    heads = {w.name for w in g.weights} & {PROPOSAL_HEAD, "lm_head.weight"}
    assert heads == {"lm_head.weight" if alias else PROPOSAL_HEAD}


def test_what_the_commands_refuse(tmp_path: Path) -> None:
    config = EngineConfig(model=str(DENSE), spec="mtp", device="cpu", lm_head_draft=True)
    for changes, message in (
        ({}, "has no proposal head; convert with --proposal"),
        ({"full_draft_head": True}, "exclude each other"),
        ({"spec": "ngram"}, "--spec ngram draws no drafts from a head"),
    ):
        with pytest.raises(UsageError, match=message):
            open_model(attrs.evolve(config, **changes), tokenizer_needed=False)
    bad = tmp_path / "ranking.json"
    for text, message in (
        ("{}", "not a list of token ids"),
        ("[1, 1]", "has a token twice"),
        ("[512]", "512 is no token of the model, whose ids are below 512"),
        ('["a"]', "a is no token"),
        ("[", "cannot be read as JSON"),
    ):
        bad.write_text(text)
        with pytest.raises(UsageError, match=message):
            converted(tmp_path, DENSE, "q8", 40, "--ranking", str(bad))
    with pytest.raises(UsageError, match="give both"):
        body(["--model", str(DENSE), "--recipe", "q8", "--out", str(tmp_path / "x"), "--ranking", str(bad)])
    with pytest.raises(ArtifactError, match="token twice"):
        parse_proposal([1, 1], 8)


def test_every_special_token_is_listed() -> None:
    assert shortlist(4, 10, {9, 2}) == (0, 1, 2, 9)
    assert shortlist(4, 10, {9, 2}, [7, 9, 5]) == (7, 9, 5, 2)
    with pytest.raises(UsageError, match="from 3 to 10 are possible"):
        shortlist(2, 10, {9, 2})
