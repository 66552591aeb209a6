"""The context cache in the engine: what is reused, that it is right, and that nothing leaks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ninfer.config import EngineConfig
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.load import load
from ninfer.runtime.request import Delta, FinishReason, GenerateRequest, Sampling
from tests.checkpoints import TINY_GGUF
from tests.runtime.fake_runner import Clock, FakeRunner, FakeStore, config, engine, expected, limits, request, tokens


def recurrent(runner: FakeRunner | None = None) -> FakeRunner:
    runner = runner or FakeRunner()
    runner.cache_store = FakeStore(runner, recurrent=True)
    return runner


def ask(e: Engine, r: GenerateRequest) -> tuple[list[int], int]:
    """What was said, and how many prompt tokens came from the cache."""
    deltas = drive(e, [r])[r.id]
    e.check()
    assert tokens(deltas) == expected(r)
    timings = deltas[-1].timings
    assert timings is not None and timings.num_prompt_tokens == len(r.prompt_ids)
    return tokens(deltas), timings.num_cached_tokens


PROMPT = tuple(range(200))


def test_a_second_turn_goes_on_where_the_first_ended() -> None:
    for runner in (FakeRunner(), recurrent()):
        e = engine(runner)
        reply, cached = ask(e, request("a", PROMPT, max_tokens=20))
        assert cached == 0
        _, cached = ask(e, request("b", (*PROMPT, *reply, 5, 6, 7), max_tokens=5))
        assert cached == len(PROMPT) + 19  # the token drawn last is not in the cache


def test_a_reply_that_is_asked_for_again_starts_at_the_last_page_of_its_prompt() -> None:
    e = engine(recurrent())
    ask(e, request("a", PROMPT))
    assert ask(e, request("b", PROMPT))[1] == 192
    e = engine(FakeRunner())
    ask(e, request("a", PROMPT))
    assert ask(e, request("b", PROMPT))[1] == 199  # one token is always computed


def test_a_store_is_told_what_host_memory_will_keep() -> None:
    for runner, pages, images in ((FakeRunner(), 1 << 20, 0), (recurrent(), 1 << 19, None)):
        store = runner.cache_store = FakeStore(runner, recurrent=images is None)
        engine(runner, host_cache_mib=256)
        assert store.reserved == (pages, 0 if images == 0 else (128 << 20) // store.image_bytes)


def test_an_edited_turn_leaves_a_branch_that_the_next_edit_uses() -> None:
    e = engine(recurrent())
    long = tuple(range(600))
    ask(e, request("a", long))
    edits = [(*long[:300], *(900 + i for i in range(50 + n))) for n in range(3)]
    assert ask(e, request("b", edits[0]))[1] == 0  # pages are known up to 256, a state is not
    assert ask(e, request("c", (*long[:300], 1, 2, 3)))[1] == 256


def test_short_and_unrelated_prompts_share_nothing() -> None:
    e = engine(recurrent())
    ask(e, request("a", PROMPT))
    assert ask(e, request("b", tuple(range(500, 700))))[1] == 0
    assert ask(e, request("c", (1, 2)))[1] == 0
    assert ask(e, request("d", (0,)))[1] == 0


def test_no_prefix_reuse_computes_every_prompt() -> None:
    e = engine(FakeRunner(), no_prefix_reuse=True)
    ask(e, request("a", PROMPT))
    assert ask(e, request("b", PROMPT))[1] == 0 and not e.stats().tiers


@pytest.mark.parametrize("make", [FakeRunner, recurrent])
def test_a_deterministic_engine_goes_on_at_page_ends_of_prompts(make: type[FakeRunner]) -> None:
    e = engine(make(), deterministic=True, prefill_chunk=128)
    reply, _ = ask(e, request("a", PROMPT, max_tokens=100))
    assert ask(e, request("b", (*PROMPT, *reply, 1)))[1] == 192
    assert all(row.kv_len % 64 == 0 for step in e.runner.steps for row in step if not row.generated)  # type: ignore[attr-defined]


def test_running_requests_share_pages_only_when_asked_to() -> None:
    for shared, cached in ((False, 0), (True, 192)):
        e = engine(FakeRunner(), use_alt_prefix_caching=shared)
        got: list[Delta] = []
        e.submit(request("a", PROMPT, max_tokens=500), got.extend)
        for _ in range(5):
            e.step()
        free = e.scheduler.pages.num_free
        e.submit(request("b", PROMPT, max_tokens=1), got.extend)
        e.step()
        slots = [s["n_prompt_tokens_cache"] for s in e.stats().slots if s.get("request_id") == "b"]
        assert slots == [cached] or got[-1].timings.num_cached_tokens == cached  # type: ignore[union-attr]
        assert e.scheduler.pages.num_free >= free - 4 + cached // 64
        while e.step():
            e.check()


def test_pages_come_back_from_host_memory() -> None:
    for runner in (FakeRunner(limits(pages=8)), recurrent(FakeRunner(limits(pages=8)))):
        e = engine(runner, max_concurrency=1)
        ask(e, request("a", PROMPT))
        ask(e, request("b", tuple(range(300, 760))))  # takes all pages
        _, cached = ask(e, request("c", PROMPT))
        assert cached == 192
        host = next(t for t in e.stats().tiers if t["name"] == "host")
        assert host["hits"] == 3 and host["evicted"] == 0
        device = next(t for t in e.stats().tiers if t["name"] == "device")
        assert isinstance(device["evicted"], int) and device["evicted"] >= 3, "b took pages of a"
        e = engine(FakeRunner(limits(pages=8)), max_concurrency=1, host_cache_mib=0)
        for r in (request("a", PROMPT), request("b", tuple(range(300, 760)))):
            ask(e, r)
        assert ask(e, request("c", PROMPT))[1] < 192


def test_the_least_valuable_state_goes_first() -> None:
    runner = recurrent()
    e = engine(runner, host_cache_mib=0)
    assert e._cache is not None
    e._cache.images.capacity_bytes = 5 * runner.cache_store.image_bytes
    texts = [tuple((i * 97 + k * k) % 900 for k in range(150)) for i in range(6)]
    ask(e, request("hot", texts[0]))
    for i, text in enumerate(texts[1:]):
        assert ask(e, request(f"hit{i}", texts[0]))[1] == 128
        ask(e, request(f"cold{i}", text))
    assert ask(e, request("first", texts[1]))[1] == 0
    assert e._cache.images.num_evicted > 0
    images = next(t for t in e.stats().tiers if t["name"] == "images")
    assert int(str(images["used_bytes"])) <= int(str(images["capacity_bytes"]))


def test_penalties_know_the_prompt_that_was_not_computed() -> None:
    e = engine(FakeRunner())
    r = request("a", PROMPT, sampling=Sampling(seed=1, repetition_penalty=1.2))
    ask(e, r)
    ask(e, request("b", PROMPT, sampling=Sampling(seed=1, repetition_penalty=1.2)))


@pytest.mark.parametrize("seed", range(12))
def test_random_conversations_say_what_they_would_say_alone(seed: int) -> None:
    rng = random.Random(seed)
    sizes = limits(pages=rng.choice([16, 24, 64]), max_seqs=rng.choice([2, 8]), max_rows=rng.choice([64, 512]))
    runner = FakeRunner(sizes, fail=lambda rows: ValueError("now and then") if rng.random() < 0.01 else None)
    if seed % 2:
        recurrent(runner)
    e = engine(
        runner,
        Clock(),
        max_concurrency=rng.randint(1, 6),
        max_pending_requests=6,
        prefill_chunk=rng.choice([64, 100, 512]),
        deterministic=seed % 3 == 0,
        use_alt_prefix_caching=seed % 4 < 2,
        host_cache_mib=1 if seed % 2 else rng.choice([0, 1]),
    )
    got: dict[str, list[Delta]] = {}
    wanted: dict[str, GenerateRequest] = {}
    talks: list[tuple[int, ...]] = [tuple(rng.randrange(50) for _ in range(rng.randint(1, 300))) for _ in range(4)]
    for i in range(700):
        what = rng.random()
        if what < 0.2 and e.num_live < 6:
            base = rng.choice(talks)
            cut = rng.choice([len(base), rng.randint(1, len(base))])
            prompt = (*base[:cut], *(rng.randrange(50) for _ in range(rng.randint(0, 40))))[: e.context_len - 70]
            r = request(f"r{i}", prompt, rng.choice([0, 1, 30, 64]), sampling=Sampling(seed=3))
            e.submit(r, got.setdefault(r.id, []).extend)
            wanted[r.id] = r
        elif what < 0.23 and got:
            e.cancel(rng.choice(list(got)))
        else:
            e.step()
            e.check()
        for id, deltas in got.items():
            if deltas and deltas[-1].finish is FinishReason.LENGTH and len(talks) < 40:
                talks.append((*wanted[id].prompt_ids, *tokens(deltas)))
    while e.step():
        e.check()
    assert e.num_live == 0
    for id, deltas in got.items():
        assert tokens(deltas) == expected(wanted[id], len(tokens(deltas))), id
    assert e.stats().num_cached_tokens > 0 or seed % 3 == 0  # page ends alone are seldom met


# A real model: attention and delta rule, compiled


def compiled(**changes: object) -> Engine:
    settings = {"max_context": 1024, "device": "cpu", "prefill_chunk": 128, "max_concurrency": 2, **changes}
    engine_config = EngineConfig(model=str(TINY_GGUF), **settings)  # type: ignore[arg-type]
    loaded = load(engine_config)
    return Engine(loaded.runner, engine_config, speculation=loaded.speculation)


def said(e: Engine, id: str, prompt: tuple[int, ...], n: int = 24) -> tuple[list[int], list[float | None], int]:
    r = GenerateRequest(id=id, prompt_ids=prompt, max_tokens=n, sampling=Sampling(temperature=0), logprobs=0)
    deltas = drive(e, [r])[id]
    e.check()
    timings = deltas[-1].timings
    assert timings is not None
    return tokens(deltas), [t.logprob for d in deltas for t in d.tokens], timings.num_cached_tokens


@pytest.mark.parametrize(
    "changes",
    [{"kv_dtype": "bf16"}, {"kv_dtype": "rk4v4"}, {"kv_dtype": "bf16", "spec": "mtp", "draft_tokens": 3}],
    ids=["bf16", "rk4v4", "mtp"],
)
def test_a_deterministic_hit_gives_the_bits_of_a_cold_run(changes: dict[str, object]) -> None:
    cold = compiled(deterministic=True, no_prefix_reuse=True, **{"kv_dtype": changes["kv_dtype"]})
    warm = compiled(deterministic=True, **changes)
    prompt = tuple((i * i * 7 + 3 * i) % 3000 for i in range(300))
    turn, _, cached = said(warm, "a", prompt)
    assert cached == 0 and turn == said(cold, "a", prompt)[0]
    for id, text, reused in (
        ("again", prompt, 256),
        ("next", (*prompt, *turn, 17, 4, 5), 256),
        ("edited", (*prompt[:210], *prompt[:90]), 192),
        ("edited-again", (*prompt[:210], *prompt[5:80]), 192),
    ):
        ids, logprobs, cached = said(warm, id, text)
        want_ids, want_logprobs, _ = said(cold, id, text)
        assert (ids, logprobs) == (want_ids, want_logprobs), id
        assert cached == reused or (id == "edited" and cached == 0), id
    warm.close()
    cold.close()


@pytest.mark.parametrize("changes", [{}, {"spec": "mtp", "draft_tokens": 3}], ids=["plain", "mtp"])
def test_a_reply_is_reused_to_its_end_and_changes_little(changes: dict[str, object]) -> None:
    warm, cold = compiled(**changes), compiled(no_prefix_reuse=True)
    prompt = tuple((i * i * 7 + 3 * i) % 3000 for i in range(200))
    turn, _, _ = said(warm, "a", prompt)
    following = (*prompt, *turn, 17, 4, 5)
    _, logprobs, cached = said(warm, "b", following, n=1)
    assert cached == len(prompt) + len(turn) - 1
    _, want, _ = said(cold, "b", following, n=1)
    assert logprobs[0] is not None and want[0] is not None
    assert abs(logprobs[0] - want[0]) < 2e-2  # steps of one row and of many round bf16 keys of other sums
    drafts = warm.stats().drafts
    assert drafts is None or drafts.num_accepted > 0, "the image is that of a round"
    warm.close()
    cold.close()


def test_drafts_go_on_after_a_hit() -> None:
    warm = compiled(spec="mtp", draft_tokens=3)
    prompt = tuple(range(5, 100)) * 2
    said(warm, "a", prompt, n=40)
    cold = warm.stats().drafts
    _, _, cached = said(warm, "b", prompt, n=40)
    assert cached == 128
    after = warm.stats().drafts
    assert cold is not None and after is not None and cold.num_accepted > 0
    assert after.num_accepted - cold.num_accepted >= 0.7 * cold.num_accepted  # drafters have their own past too
    warm.close()


def test_a_restart_finds_contexts_on_disk(tmp_path: Path) -> None:
    settings = {"deterministic": True, "disk_kv_path": tmp_path, "disk_kv_restore": True}
    prompt = tuple((i * i * 7 + 3 * i) % 3000 for i in range(300))
    first = compiled(**settings)
    want = said(first, "a", prompt)
    first.close()
    second = compiled(**settings)
    assert said(second, "a", prompt) == (*want[:2], 256)
    disk = next(t for t in second.stats().tiers if t["name"] == "disk")
    assert disk["hits"] == 5 and disk["damaged"] == 0  # four pages and a state
    second.close()
    other = compiled(**settings, kv_dtype="int8")  # the same folder, bytes that mean something else
    assert said(other, "a", prompt)[2] == 0
    other.close()
    assert config().disk_kv_path is None


@pytest.mark.slow
def test_a_hit_on_the_simulated_gpu_says_the_same() -> None:
    e = compiled(device="cuda-sim", max_context=256, max_concurrency=1, prefill_chunk=64, kv_dtype="rk4v4")
    first, second = (said(e, id, tuple(range(5, 85)), n=2) for id in "ab")
    assert first[0] == second[0] and (first[2], second[2]) == (0, 64)
    e.close()
