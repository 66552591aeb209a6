"""Chat completions through the official client and through raw HTTP."""

from __future__ import annotations

import openai

from .conftest import MODEL, Server


def test_a_whole_reply_has_text_usage_and_timings(server: Server) -> None:
    server.says("Hel", "lo")
    body = server.chat("hi").json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    num_prompt = len(server.client.requests[0].prompt_ids)
    assert body["usage"]["prompt_tokens"] == num_prompt
    assert body["usage"]["completion_tokens"] == 6  # with the end token
    assert body["usage"]["total_tokens"] == num_prompt + 6
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert body["timings"]["cache_n"] + body["timings"]["prompt_n"] == num_prompt
    assert body["timings"]["predicted_per_second"] == 5 / 0.25


def test_the_official_client_streams(server: Server) -> None:
    server.says("Hel", "lo")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, None, None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert all(c.usage is None for c in chunks[:-1])
