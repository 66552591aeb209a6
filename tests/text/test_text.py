"""Tokenizer, chat template and text stream, against reference ids and by random splits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from ninfer.artifacts import open_artifact
from ninfer.artifacts.demo import demo_path
from ninfer.errors import ArtifactError, BadRequest
from ninfer.routes.profile import cache_dir
from ninfer.text.chat import CallStyle, ChatTemplate
from ninfer.text.stream import TextStream
from ninfer.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parent.parent / "data"


@pytest.fixture(scope="module")
def reference() -> Any:
    return json.loads((DATA / "smollm2" / "reference.json").read_text())


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_artifact(open_artifact(demo_path(cache_dir())))


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_hf(DATA / "tokenizer" / "tokenizer.json")


def test_gguf_tokenizer_equals_the_reference_with_and_without_specials(smollm2: Tokenizer, reference: Any) -> None:
    for case in reference["tokenise"]:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
        assert smollm2.encode(case["text"], parse_special=False) == case["plain_ids"], case["text"]
    text = (DATA / "smollm2" / "text.txt").read_text()
    assert smollm2.encode(text) == reference["text_ids"]
    assert smollm2.decode(reference["text_ids"]) == text


def test_chat_template_of_a_gguf_renders_the_reference_prompts(smollm2: Tokenizer, reference: Any) -> None:
    template = open_artifact(demo_path(cache_dir())).chat_template
    assert template is not None
    for run in reference["runs"]:
        prompt = ChatTemplate(template).render(run["messages"])
        assert prompt == run["prompt"]
        assert smollm2.encode(prompt) == run["prompt_ids"]


@pytest.mark.parametrize(
    "vocab, added, size",
    [
        ({"a": 0, "b": 1}, [], 2),
        ({"a": 0, "b": 1}, ["<|end|>"], 3),
        ({"a": 0, "b": 1}, ["b"], 2),  # added, but a word already
        ({"a": 0, "b": 7}, [], 8),  # a gap
        ({"a": 2, "b": 3, "": 0}, [], 4),
    ],
)
def test_the_size_of_a_vocabulary_is_its_highest_id(vocab: dict[str, int], added: list[str], size: int) -> None:
    backend = Backend(models.BPE(vocab, []))
    backend.add_tokens([AddedToken(text) for text in added])
    assert Tokenizer(backend, backend).vocab_size == size


def test_the_bytes_of_tokens_join_to_the_text(tiny: Tokenizer) -> None:
    text = "Grüße, 世界 🙂 and  two spaces\n\t<|im_end|>"
    ids = tiny.encode(text)
    assert b"".join(map(tiny.token_bytes, ids)).decode() == text
    assert tiny.decode(ids, skip_special=True) == text.removesuffix("<|im_end|>")
    assert tiny.is_special(ids[-1]) and not tiny.is_special(ids[0])
    assert "<|im_end|>" not in [tiny.token_text(i) for i in tiny.encode(text, parse_special=False)]


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_gives_the_same_text_however_it_is_cut(tiny: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "Das ist 世界🙂, naïve STOP and more ST" + "".join(rng.choice("aSTO界 🙂") for _ in range(30))
    stop = rng.choice([(), ("STOP",), ("TOP and", "STO"), ("nowhere",), ("世界🙂,",), ("e",)])
    expected, hit = text, False
    cuts = [text.find(s) for s in stop if s in text]
    if cuts:
        expected, hit = text[: min(cuts)], True
    ids = tiny.encode(text)
    stream, out, stopped, at = TextStream(tiny, stop), "", False, 0
    while at < len(ids) and not stopped:
        n = rng.randint(1, 4)
        piece, stopped = stream.feed(ids[at : at + n])
        assert "\ufffd" not in piece
        out, at = out + piece, at + n
        assert expected.startswith(out)
    out += stream.flush()
    assert (out, stopped) == (expected, hit)


def test_a_stream_holds_back_no_more_than_a_stop_string_could_need(tiny: Tokenizer) -> None:
    stream = TextStream(tiny, ("STOP",))
    assert stream.feed(tiny.encode("abc ST"))[0] == "abc "
    assert stream.feed(tiny.encode("x"))[0] == "STx"


def test_broken_bytes_become_replacement_characters(tiny: Tokenizer) -> None:
    whole = tiny.encode("🙂")
    assert len(whole) > 1, "this test needs a character of several tokens"
    stream = TextStream(tiny)
    assert stream.feed(whole[:-1])[0] == ""
    assert stream.flush() == "\ufffd"


def test_templates_know_thinking_and_report_errors() -> None:
    template = ChatTemplate((DATA / "tokenizer" / "chat_template.jinja").read_text())
    messages = [{"role": "user", "content": "hi"}]
    assert template.opens_thinking(enable_thinking=True)
    assert not template.opens_thinking()
    assert template.knows_thinking and template.call_style is CallStyle.XML
    assert ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").call_style is None
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert '"name": "f"' in template.render(messages, tools=tools)
    with pytest.raises(BadRequest, match="no such role"):
        ChatTemplate("{{ raise_exception('no such role') }}").render(messages)
    with pytest.raises(ArtifactError, match="line 1"):
        ChatTemplate("{% if %}")
    with pytest.raises(BadRequest):  # the sandbox
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(messages)


def test_unknown_tokenizers_are_refused_by_name() -> None:
    base = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.model": "gpt2"}
    with pytest.raises(ArtifactError, match=r"x\.gguf: pre-tokenizer 'mystery'.*smollm"):
        Tokenizer.from_gguf({**base, "tokenizer.ggml.pre": "mystery"}, "x.gguf")
    with pytest.raises(ArtifactError, match="tokenizer model 'bert'"):
        Tokenizer.from_gguf({**base, "tokenizer.ggml.model": "bert"}, "x.gguf")


def test_sentencepiece_from_scores_falls_back_to_bytes() -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab", "▁ab"]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0],
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = Tokenizer.from_gguf(meta, "x.gguf")
    ids = tokenizer.encode("ab é", add_special=True)
    assert ids[0] == 1 and tokenizer.token_text(ids[1]) == "▁ab"
    assert tokenizer.decode(ids[1:]) == " ab é"
