"""Drafts on real models through the whole compiler: the text is the text without drafts, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ninfer.config import EngineConfig
from ninfer.errors import UsageError
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.load import load
from ninfer.runtime.request import Delta, GenerateRequest, Sampling, TokenOut
from tests.checkpoints import DATA, TINY_GGUF, tiny_cases

CASES = tiny_cases()


def engine(spec: str, **changes: Any) -> Engine:
    settings = {"model": str(TINY_GGUF), "max_context": 512, "device": "cpu", "deterministic": True, "spec": spec}
    config = EngineConfig(**{**settings, **changes})
    loaded = load(config)
    return Engine(loaded.runner, config, speculation=loaded.speculation)


def requests(count: int, *, max_tokens: int = 60, seed: int = 0, **more: Any) -> list[GenerateRequest]:
    """Prompts of mixed lengths, replies of mixed lengths, and a temperature for each third of them."""
    made = []
    for i in range(count):
        case = CASES[(i + seed) % len(CASES)]
        prompt = case["prompt_ids"] * (1 + i % 3)
        sampling = Sampling(temperature=(0.0, 0.7, 1.3)[i % 3], seed=1000 * seed + i, top_p=(1.0, 0.95)[i % 2])
        r = GenerateRequest(
            id=str(i), prompt_ids=tuple(prompt), sampling=sampling, max_tokens=max_tokens - 7 * (i % 5), **more
        )
        made.append(r)
    return made


def said(deltas: Sequence[Delta]) -> list[TokenOut]:
    return [token for delta in deltas for token in delta.tokens]


Plain = Callable[[GenerateRequest], list[TokenOut]]


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    """What a request is told without drafts and alone."""
    texts: dict[object, list[TokenOut]] = {}
    with engine("none") as bare:

        def text(r: GenerateRequest) -> list[TokenOut]:
            penalties = (r.sampling.repetition_penalty, r.sampling.presence_penalty, r.sampling.frequency_penalty)
            key = (r.prompt_ids, r.sampling.seed, r.sampling.temperature, r.max_tokens, r.logprobs, penalties)
            if key not in texts:
                texts[key] = said(drive(bare, [r])[r.id])
            return texts[key]

        yield text


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        ("mtp", {"draft_tokens": 1}),
        ("mtp", {"draft_tokens": 3}),
        ("mtp", {"draft_tokens": 7, "ngram_min_match": 4}),
        ("mtp", {"draft_tokens": 15, "ngram_draft_tokens": 0}),
        ("mtp", {"adaptive_mtp": True}),
        ("ngram", {"ngram_min_match": 4}),
        ("ngram", {"draft_tokens": 5, "ngram_min_match": 6}),
    ],
    ids=str,
)
def test_drafts_never_change_a_text(plain: Plain, spec: str, changes: dict[str, Any]) -> None:
    with engine(spec, **changes) as drafted:
        for seed in range(3):
            batch = requests(8, seed=seed, logprobs=2)
            together = drive(drafted, batch)
            alone = drive(drafted, batch[seed : seed + 1])
            for r in batch:
                # log-probabilities are compared too: they are the target's
                assert said(together[r.id]) == plain(r), f"{spec} {changes}: {r}"
            assert said(alone[str(seed)]) == said(together[str(seed)])
        stats = drafted.stats().drafts
        assert stats is not None and stats.num_accepted > 10


def test_more_slots_than_drafted_rows_and_long_prompts(plain: Plain) -> None:
    """Prompts of several chunks, and more requests than slots."""
    with engine("mtp", max_concurrency=3, prefill_chunk=64) as drafted:
        batch = [
            GenerateRequest(
                id=str(i),
                prompt_ids=tuple((CASES[i]["prompt_ids"] * 40)[: 60 + 41 * i]),
                sampling=Sampling(temperature=0.8, seed=i),
                max_tokens=40,
            )
            for i in range(8)
        ]
        together = drive(drafted, batch)
        for r in batch:
            assert said(together[r.id]) == plain(r)


@pytest.mark.parametrize("changes", [{}, {"ngram_draft_tokens": 0}, {"spec": "ngram"}], ids=str)
def test_penalties_count_along_the_drafts(plain: Plain, changes: dict[str, Any]) -> None:
    """Copies and one graph after another, rounds in one plan, copies alone; beside requests without penalties."""
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 1.02},
        {"presence_penalty": 0.4, "frequency_penalty": 0.02},
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.8},  # hardly a draft is kept
    ]
    with engine(**{"spec": "mtp", "ngram_min_match": 4, **changes}) as drafted:
        batch = [evolve(r, sampling=evolve(r.sampling, **penalties[i % 4])) for i, r in enumerate(requests(8, seed=3))]
        together = drive(drafted, batch)
        alone = drive(drafted, batch[:2])
        kept = [deltas[-1].timings.num_accepted_tokens for deltas in together.values() if deltas[-1].timings]
        for r in batch:
            assert said(together[r.id]) == plain(r), r
        assert [said(d) for d in alone.values()] == [said(together[i]) for i in alone]
        least = 10 if "spec" not in changes else 1  # penalties leave little to copy
        assert sum(kept[0::4]) + sum(kept[1::4]) > least, "requests with penalties are drafted for"


def test_the_head_drafts_as_its_reference_says() -> None:
    """The first drafts of greedy decoding are the checkpoint's own, where weights of six bits leave them alone."""
    greedy = json.loads((DATA / "tiny-qwen35" / "greedy.json").read_text())["cases"]
    with engine("mtp", draft_tokens=3, ngram_draft_tokens=0) as drafted:
        for i, case in enumerate(greedy):
            n = len(case["greedy_ids"])
            drive(
                drafted,
                [
                    GenerateRequest(
                        id=str(i), prompt_ids=tuple(case["prompt_ids"]), sampling=Sampling(temperature=0), max_tokens=n
                    )
                ],
            )
        stats = drafted.stats().drafts
    assert stats is not None
    assert stats.accepted_at[0] > 0.6 * (stats.num_rounds - stats.num_plain_rounds), "the head is trained"


def test_a_drafter_that_the_checkpoint_lacks_is_one_line() -> None:
    config = EngineConfig(model="demo", device="cpu", spec="mtp")
    with pytest.raises(UsageError) as error:
        load(config)
    assert str(error.value) == (
        "--spec mtp: the checkpoint has no multi-token-prediction block (mtp.*); "
        "--spec ngram works with every model, --spec none without drafts"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"spec": "ngram", "ngram_draft_tokens": 0}, r"drafts nothing; use --spec none"),
        ({"spec": "ngram", "adaptive_mtp": True}, r"--adaptive-mtp .* use it with --spec mtp, not ngram"),
        ({"adaptive_mtp": True}, r"--adaptive-mtp .* use it with --spec mtp, not none"),
        ({"spec": "mtp", "draft_tokens": 16}, r"--draft-tokens: '16' is not a whole number from 1 to 15"),
        ({"spec": "eagle"}, r"--spec: 'eagle' is none of none, mtp, dflash, dflash2, ngram"),
    ],
    ids=str,
)
def test_flags_that_make_no_sense_are_one_line(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine(**{"spec": "none", **flags})


def test_copies_work_with_a_model_that_has_no_recurrence(tmp_path: Path) -> None:
    config = EngineConfig(model="demo", device="cpu", max_context=512, spec="ngram", ngram_min_match=4)
    plain_config = EngineConfig(model="demo", device="cpu", max_context=512)
    loaded, bare = load(config), load(plain_config)
    text = "The quick brown fox jumps over the lazy dog. " * 4
    prompt = tuple(loaded.tokenizer.encode(text))
    r = GenerateRequest(id="a", prompt_ids=prompt, sampling=Sampling(temperature=0), max_tokens=40)
    with Engine(loaded.runner, config, speculation=loaded.speculation) as e, Engine(bare.runner, plain_config) as p:
        got = drive(e, [r])["a"]
        assert [t.id for t in said(got)] == [t.id for t in said(drive(p, [r])["a"])]
        stats = e.stats().drafts
        assert stats is not None and stats.num_accepted > 20, "a loop is copied"
        assert len(got) < 20


def test_rounds_of_mtp_are_one_plan_and_say_what_graph_by_graph_rounds_say(plain: Plain) -> None:
    with engine("mtp", ngram_draft_tokens=0, max_concurrency=4) as e:
        speculation = e.speculation
        assert speculation is not None and speculation.chain is not None
        plans = [executable.plan for executable in speculation.chain.executables.values()]  # type: ignore[attr-defined]
        assert all(launch.source for plan in plans for launch in plan.launches), "a call of numpy between kernels"
        batch = requests(6, seed=5)
        verify, fold = speculation.run_verify, speculation.run_fold

        def never(rows: object) -> Any:
            raise AssertionError("a graph was run by itself")

        speculation.run_verify = speculation.run_fold = never
        together = drive(e, batch)
        chained = e.stats().drafts
        speculation.run_verify, speculation.run_fold, speculation.chain = verify, fold, None
        apart = drive(e, batch)
        for r in batch:
            assert said(together[r.id]) == said(apart[r.id]) == plain(r)
        both = e.stats().drafts
        assert chained is not None and both is not None and both.num_accepted == 2 * chained.num_accepted > 20


@pytest.mark.parametrize("changes", [{"ngram_draft_tokens": 0}, {"ngram_min_match": 4}], ids=["one plan", "by graph"])
def test_recurrent_states_are_those_of_plain_decoding_bit_for_bit(changes: dict[str, Any]) -> None:
    """After replies of several lengths, whose last rounds keep different numbers of rows."""
    batch = [evolve(r, max_tokens=n) for r, n in zip(requests(4, seed=2), (17, 30, 41, 60), strict=True)]
    found: list[dict[tuple[str, str], Any]] = []
    for spec, more in (("none", {}), ("mtp", changes)):
        with engine(spec, **more) as e:
            told = drive(e, batch)
            slots = {id: deltas[-1].timings.slot for id, deltas in told.items() if deltas[-1].timings}
            memory = e.runner.memory  # type: ignore[attr-defined]
            names = [n for n in memory.states if n.startswith(("conv.", "delta."))]
            found.append({(id, n): memory.read_state(n, slot).copy() for id, slot in slots.items() for n in names})
            stats = e.stats().drafts
    assert stats is not None and stats.num_accepted > 10 and len(found[0]) == 4 * 12
    for key, state in found[0].items():
        assert state.any() and (state == found[1][key]).all(), key
