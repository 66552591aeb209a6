"""Drafts and their verification: the MTP block against its oracle, and rounds against plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifacts import open_artifact
from ninfer.errors import UsageError
from ninfer.models.family import Rounds
from ninfer.runtime.reference import ReferenceRunner
from tests.checkpoints import DATA, TINY_GGUF, oracle, part, runner, tiny_cases

ROUNDS = Rounds(hidden_rows=160, journal_rows=8)
ATOL = 1e-4  # float32 in another order of summation
SOURCES = {
    "qwen3_5_dense": DATA / "qwen3_5_dense",
    "qwen3_5_dense_hd256": DATA / "qwen3_5_dense_hd256",
    "qwen3_5_dense.gguf": DATA / "qwen3_5_dense.gguf",
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("chunks", [[48], [20, 28]], ids=str)
def test_the_mtp_block_is_its_oracle(name: str, chunks: list[int]) -> None:
    want = oracle(name.removesuffix(".gguf"))
    ids = want["input_ids"].tolist()
    target = runner(SOURCES[name], rounds=ROUNDS)
    mtp = runner(SOURCES[name], "draft_logits", rounds=ROUNDS, share=target)
    hidden, logits, at = [], [], 0
    following = [*ids[1:], int(want["greedy_ids"][0])]
    for n in chunks:
        target.outputs([part(ids[at : at + n], at)])
        got = mtp.outputs([part(following[at : at + n], at)])
        hidden.append(got["hidden"])
        logits.append(got["logits"])
        at += n
    np.testing.assert_allclose(np.concatenate(hidden)[:-1], want["mtp_hidden"], rtol=0, atol=ATOL)
    np.testing.assert_allclose(np.concatenate(logits)[:-1], want["mtp_logits"], rtol=0, atol=ATOL)
    drafts = [logits[-1][-1]]
    for s in range(3):
        drafts.append(mtp.outputs([part([int(drafts[-1].argmax())], 48 + s)])["logits"][0])
    assert [int(d.argmax()) for d in drafts] == want["mtp_draft_ids"].tolist()
    np.testing.assert_allclose(np.array(drafts), want["mtp_draft_logits"], rtol=0, atol=ATOL)


def states(r: ReferenceRunner) -> dict[str, Any]:
    return {k: v.copy() for k, v in r.states.items() if k.startswith(("conv.", "delta."))}


@pytest.mark.parametrize("name", ["qwen3_5_dense", "qwen3_5_dense_hd256"])
@pytest.mark.parametrize("kept", [1, 2, 3, 6])
def test_a_fold_is_plain_decoding(name: str, kept: int) -> None:
    ids = oracle(name)["long_ids"]
    plain = runner(SOURCES[name], rounds=ROUNDS)
    verify = runner(SOURCES[name], "verify", rounds=ROUNDS, share=plain)
    fold = runner(SOURCES[name], "fold", rounds=ROUNDS, share=verify)
    plain.outputs([part(ids[:70], slot=1), part(ids[:9], slot=3)])
    before = states(plain)
    verify.outputs([part(ids[70:76], 70, slot=1), part(ids[9:11], 9, slot=3)])
    for key, state in states(plain).items():
        np.testing.assert_array_equal(state, before[key], err_msg=f"{key} moved in a verify step")
    fold.outputs([part(ids[70 : 70 + kept], 70, slot=1)])
    folded = states(plain)
    plain.states.update({k: v.copy() for k, v in before.items()})
    plain.outputs([part(ids[70 : 70 + kept], 70, slot=1)])
    for key, state in states(plain).items():
        np.testing.assert_array_equal(folded[key][3], before[key][3], err_msg=f"{key} of another slot")
        # the projections of 6 rows and of `kept` rows may be summed in other orders
        np.testing.assert_allclose(folded[key], state, rtol=0, atol=1e-5, err_msg=key)
        assert np.abs(folded[key][1] - before[key][1]).max() > 1e-2


def test_a_fold_of_all_rows_is_bit_equal() -> None:
    ids = oracle("qwen3_5_dense")["long_ids"]
    plain = runner(SOURCES["qwen3_5_dense"], rounds=ROUNDS)
    verify = runner(SOURCES["qwen3_5_dense"], "verify", rounds=ROUNDS, share=plain)
    fold = runner(SOURCES["qwen3_5_dense"], "fold", rounds=ROUNDS, share=verify)
    plain.outputs([part(ids[:70])])
    before = states(plain)
    verify.outputs([part(ids[70:76], 70)])
    fold.outputs([part(ids[70:76], 70)])
    folded = states(plain)
    plain.states.update(before)  # all three have the same states
    plain.outputs([part(ids[70:76], 70)])
    for key, state in states(plain).items():
        np.testing.assert_array_equal(folded[key], state)


Propose = Callable[[list[int], int], list[int]]


class GreedyRounds:
    """A host loop of greedy rounds over the reference runners, as an engine would do it."""

    def __init__(self, source: Path, num_drafts: int, *, mtp: bool = True, corrupt: bool = False) -> None:
        self.k, self.corrupt = num_drafts, corrupt
        self.target = runner(source, "sample", rounds=ROUNDS)
        self.verify = runner(source, "verify", rounds=ROUNDS, share=self.target)
        self.fold = runner(source, "fold", rounds=ROUNDS, share=self.verify)
        self.mtp = runner(source, "draft", rounds=ROUNDS, share=self.fold) if mtp else None
        self.first_drafts: list[tuple[int, int]] = []  # (frontier, token)
        self.num_accepted = 0

    def drafts(self, following: list[int], kv_len: int) -> list[int]:
        """Run accepted rows again, each with the token after it; then draft one after the other."""
        if self.mtp is None:
            return [(following[-1] + 1 + i) % 512 for i in range(self.k)]
        out = [int(self.mtp.outputs([part(following, kv_len)])["draft"][-1])]
        frontier = kv_len + len(following)
        self.first_drafts.append((frontier, out[0]))
        for s in range(self.k - 1):
            out.append(int(self.mtp.outputs([part([out[-1]], frontier + s)])["draft"][0]))
        return [(d + 1) % 512 for d in out] if self.corrupt else out

    def generate(self, prompt: list[int], budget: int) -> list[int]:
        text = [int(self.target.outputs([part(prompt)])["token"][-1])]
        drafts = self.drafts([*prompt[1:], text[0]], 0)
        kv_len = len(prompt)
        while len(text) < budget:
            rows = [text[-1], *drafts[: budget - len(text) - 1]]
            tokens = self.verify.outputs([part(rows, kv_len)])["token"].tolist()
            n = 0
            while n + 1 < len(rows) and rows[n + 1] == tokens[n]:
                n += 1
            self.num_accepted += n
            self.fold.outputs([part(rows[: n + 1], kv_len)])
            text += tokens[: n + 1]
            drafts = self.drafts(tokens[: n + 1], kv_len)
            kv_len += n + 1
        return text


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_drafts_never_change_a_greedy_text(num_drafts: int) -> None:
    case = tiny_cases()[3]
    prompt, budget = case["prompt_ids"], len(case["greedy_ids"])
    loop = GreedyRounds(TINY_GGUF, num_drafts)
    assert loop.generate(prompt, budget) == case["greedy_ids"]
    assert loop.num_accepted >= budget // 4, "the head is trained: its drafts are worth something"


@pytest.mark.parametrize("loop", [{"corrupt": True}, {"mtp": False}], ids=["corrupted", "nonsense"])
def test_wrong_drafts_never_change_a_greedy_text(loop: dict[str, bool]) -> None:
    want = oracle("qwen3_5_dense")
    got = GreedyRounds(SOURCES["qwen3_5_dense"], 5, **loop).generate(want["input_ids"].tolist(), 8)
    assert got == want["greedy_ids"].tolist()


def test_a_model_without_the_block_says_so() -> None:
    assert "fold" not in open_artifact(DATA / "llama").config
    with pytest.raises(UsageError, match=r"this llama model has no MTP block to draft with"):
        runner(DATA / "llama", "draft", rounds=ROUNDS)
    with pytest.raises(UsageError, match=r"no graph mode 'verify'; there are sample, score, logits$"):
        runner(SOURCES["qwen3_5_dense"], "verify")


def test_a_model_without_recurrence_verifies_as_it_samples() -> None:
    want = oracle("llama")
    ids = want["input_ids"].tolist()
    verify = runner(DATA / "llama", "verify", rounds=Rounds(hidden_rows=0, journal_rows=8))
    tokens = verify.outputs([part(ids)])["token"]
    assert tokens.tolist() == want["logits"].argmax(axis=1).tolist()
    fold = runner(DATA / "llama", "fold", rounds=Rounds(hidden_rows=0, journal_rows=8), share=verify)
    assert fold.outputs([part(ids[:2], 48)]) == {}
