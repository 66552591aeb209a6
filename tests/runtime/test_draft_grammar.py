"""The real grammars in rounds of drafts: what a reply says, and that it fits, does not depend on the drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from ninfer.runtime.engine import drive
from ninfer.runtime.request import FinishReason, GenerateRequest
from ninfer.text.grammar import AfterReasoning, Grammars, JsonSchema, Matcher, available
from ninfer.text.tokenizer import Tokenizer
from tests.runtime.fake_runner import FakeRunner, engine, limits, next_token, request, speculative, tokens
from tests.text.test_grammar import CLOSE, END, TOKENS

pytestmark = pytest.mark.skipif(not available(), reason="needs xgrammar")

PROMPT, THOUGHTS = 5, 4
BIT = {"type": "boolean"}
SCHEMA = {
    "type": "object",
    "properties": {"bits": {"type": "array", "items": BIT, "minItems": 3, "maxItems": 6}, "last": {"enum": ["x", "y"]}},
    "required": ["bits", "last"],
}
SIZES = limits(domain=len(TOKENS))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "token_type": [1] * 256 + [3, 3, 4, 4, 4, 4]}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in {**keys, "merges": []}.items()}, "test")
    return Grammars(tokenizer, {END})


def says(history: Sequence[int], seed: int) -> int:
    """Thoughts of some tokens, their end, and then anything."""
    at = len(history) - PROMPT
    return 97 + at if at < THOUGHTS else CLOSE if at == THOUGHTS else next_token(history, seed) % len(TOKENS)


def asked(mask: Matcher | AfterReasoning) -> GenerateRequest:
    return request("a", PROMPT, 200, mask=mask, stop_ids=frozenset({END}))


@pytest.mark.parametrize("every", [1, 2, 3, 1000])
@pytest.mark.parametrize("num_drafts", [1, 5])
def test_a_reply_is_the_same_with_drafts_across_the_end_of_reasoning(
    grammars: Grammars, num_drafts: int, every: int
) -> None:
    format = JsonSchema(schema=SCHEMA)
    alone = drive(engine(FakeRunner(SIZES, says)), [asked(grammars.matcher(format, after=CLOSE))])["a"]
    reply = tokens(alone)
    assert alone[-1].finish is FinishReason.STOP and reply[THOUGHTS] == CLOSE
    found = json.loads(bytes(reply[THOUGHTS + 1 :]).decode())
    assert 3 <= len(found["bits"]) <= 6 and found["last"] in ("x", "y")

    drafted, drafter = speculative(FakeRunner(SIZES, says), num_drafts, wrong=lambda position: position % every == 0)
    drafter.runner = FakeRunner(SIZES, lambda history, seed: [*reply, END, 0, 0, 0, 0, 0, 0][len(history) - PROMPT])
    got = drive(drafted, [asked(grammars.matcher(format, after=CLOSE))])["a"]
    assert tokens(got) == reply and got[-1].finish is FinishReason.STOP
    assert every == 1 or len(got) < len(alone), "some drafts were kept"
