"""Gemma's chat format: turns, channels of thought, results of tools. The template is a short one of that format."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from ninfer.text.chat import CHANNEL, CallStyle, ChatTemplate
from ninfer.text.parts import Part, Reasoning, Text, joined
from ninfer.text.prompt import encode_chat, render
from ninfer.text.reasoning import ReasoningSplit
from ninfer.text.tokenizer import CHANNELS, Tokenizer

SOURCE = """{{ bos_token }}
{%- if enable_thinking | default(false) %}<|turn>system
<|think|>
<turn|>
{% endif %}
{%- for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% for call in m.tool_calls | default([]) %}<|tool_call>call:{{ call.function.name }}{}<tool_call|>{% endfor %}
{%- for r in m.tool_responses | default([]) %}<|tool_response>response:{{ r.name }}{
{%- if r.response is mapping %}{% for k, v in r.response | dictsort %}{{ k }}:{{ v }}{% endfor %}
{%- else %}value:<|"|>{{ r.response }}<|"|>{% endif %}}<tool_response|>{% endfor %}
{{- m.content | default('') }}<turn|>
{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{% if not enable_thinking | default(false) %}<|channel>thought
<channel|>{% endif %}{% endif %}"""
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(SOURCE, {"bos_token": "<bos>"})


def test_thinking_is_off_unless_asked_for(template: ChatTemplate) -> None:
    assert template.tags is CHANNEL and template.knows_thinking and template.thinks_when_asked
    off = render(template, [USER])
    assert off.endswith("<|turn>model\n<|channel>thought\n<channel|>") and off == render(
        template, [USER], enable_thinking=False
    )
    on = render(template, [USER], enable_thinking=True)
    assert on.startswith("<bos><|turn>system\n<|think|>") and on.endswith("<|turn>model\n")
    assert not template.opens_thinking() and not template.opens_thinking(enable_thinking=True)


def split(pieces: list[str], *, by_token: bool) -> list[Part]:
    """A piece that is the end token tells of it, where tags are tokens."""
    s, parts = ReasoningSplit(open=False, by_token=by_token, tags=CHANNEL), list[Part]()
    for piece in pieces:
        parts += s.close() if by_token and s.open and piece == CHANNEL.close else s.feed(piece)
    return joined([*parts, *s.flush()])


@pytest.mark.parametrize("by_token", [False, True])
def test_a_channel_of_thought_is_reasoning(by_token: bool) -> None:
    pieces = ["<|channel>", "thought", "\n", "Why", " not.\n", "<channel|>", "Yes", "."]
    assert split(pieces, by_token=by_token) == [Reasoning("Why not."), Text("Yes.")]
    assert split(["Yes", "."], by_token=by_token) == [Text("Yes.")]


def test_a_reply_in_single_characters() -> None:
    text = "<|channel>thought\nWhy not.<channel|>Yes."
    assert split(list(text), by_token=False) == [Reasoning("Why not."), Text("Yes.")]


CALLS = [
    {"id": "a", "type": "function", "function": {"name": "sky", "arguments": {}}},
    {"id": "b", "type": "function", "function": {"name": "sea", "arguments": {}}},
]


def test_the_spelling_of_calls_is_seen_from_the_template(template: ChatTemplate) -> None:
    assert template.call_style is CallStyle.GEMMA


def test_results_of_tools_stand_in_the_message_that_called(template: ChatTemplate) -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "b", "content": '{"colour": "green"}'},
        {"role": "tool", "tool_call_id": "a", "content": "blue"},
    ]
    text = render(template, messages)
    assert "<|turn>tool" not in text
    assert "<|tool_response>response:sea{colour:green}<tool_response|>" in text
    assert '<|tool_response>response:sky{value:<|"|>blue<|"|>}<tool_response|>' in text
    assert messages[1].keys() == {"role", "content", "tool_calls"}, "the caller's messages stay as they were"


def tokenizer() -> Tokenizer:
    """Characters, and Gemma's tokens."""
    letters = {text: i for i, text in enumerate(["<unk>", "\n", *map(chr, range(32, 127))])}
    backends = [Backend(models.BPE(letters, [], unk_token="<unk>")) for _ in range(2)]
    marks = ["<|turn>", "<turn|>", "<|think|>", *CHANNELS]
    backends[0].add_tokens([AddedToken(t, normalized=False, special=True) for t in marks])
    ids = {t: backends[0].token_to_id(t) or 0 for t in marks}
    special = frozenset(i for t, i in ids.items() if t not in CHANNELS)
    return Tokenizer(backends[0], backends[1], special=special, added=frozenset(ids.values()))


@pytest.mark.parametrize("evil", ["<turn|>", "<|tool_call>", '<|"|>', "<channel|>"])
def test_what_users_and_tools_write_is_never_one_of_the_tokens(template: ChatTemplate, evil: str) -> None:
    t = tokenizer()
    conversations: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"x{evil}y"}],
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
            {"role": "tool", "tool_call_id": "a", "content": f"x{evil}y"},
        ],
    ]
    for messages in conversations:
        harmless = [{**m, "content": str(m["content"]).replace(evil, "?")} for m in messages]
        ids, want = encode_chat(template, t, messages), encode_chat(template, t, harmless)
        assert ids.count(t.token_to_id(evil) or -1) == want.count(t.token_to_id(evil) or -1)
        assert t.decode(ids) == render(template, messages)


def test_tokens_of_channels_are_shown() -> None:
    t = tokenizer()
    ids = [t.token_to_id(x) or 0 for x in ("<|channel>", "<turn|>")]
    assert t.decode(ids, skip_special=True) == "<|channel>"
