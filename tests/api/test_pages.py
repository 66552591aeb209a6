"""The dashboard and the chat page, in a real browser where there is one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from ninfer.runtime.request import DraftStats, GenerateRequest
from tests.api.conftest import FakeClient, Server, Start, until
from tests.browser import Browser, find

TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n</function>\n</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
MARKDOWN = """# Title

Some **bold**, *slanted* and `code <b>`, a [link](https://example.org/a_b).

```python
def f(x):  # a comment
    return "<script>alert(1)</script>"
```

1. one
   - inner
2. two

| a | b |
|---|---|
| 1 | 2 |

<img src=x onerror="document.title='owned'"> ![picture](https://example.org/p.png)
"""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"


# Without a browser


def test_pages_are_there_only_when_they_are_wanted(start: Start) -> None:
    plain, chat = start(), start(webui=True)
    assert plain.http.get("/").status_code == plain.http.get("/web/chat.js").status_code == 404
    assert plain.http.get("/dashboard").headers["content-type"] == "text/html; charset=utf-8"
    assert chat.http.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert chat.http.get("/web/chat.js").headers["content-type"] == "text/javascript; charset=utf-8"
    for path in ("/web/../config.py", "/web/%2e%2e%2fconfig.py", "/web/none.js", "/web/"):
        assert chat.http.get(path).status_code == 404


def test_pages_name_nothing_outside_and_are_not_sent_twice(start: Start) -> None:
    server = start(webui=True, api_keys=("k",))
    for path in ("/", "/dashboard", "/web/chat.js", "/web/style.css"):
        response = server.http.get(path)
        assert response.status_code == 200, "pages need no key"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        again = server.http.get(path, headers={"if-none-match": response.headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert server.http.get("/stats").status_code == 401


# With one


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find() is None:
        pytest.skip("no Chromium is installed")
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture
def page(browser: Browser) -> Browser:
    browser.errors.clear()
    return browser


def visit(page: Browser, url: str) -> None:
    """As somebody who was never there."""
    page.open(url)
    page.run("localStorage.clear()")
    page.open(url)


def ask(page: Browser, text: str) -> None:
    page.type("#input", text)
    page.press("Enter")


def done(page: Browser, count: int) -> None:
    """Wait until that many replies are whole."""
    page.until(f"document.querySelectorAll('.message.assistant > .actions').length === {count}")


def test_a_chat_streams_markdown_and_nothing_in_it_is_html(start: Start, page: Browser) -> None:
    server = start(FakeClient(context_len=4096), webui=True)
    server.says(*(MARKDOWN[i : i + 7] for i in range(0, len(MARKDOWN), 7)))
    visit(page, server.url + "/")
    page.until("document.getElementById('model').textContent === 'toy/model-1'")
    ask(page, "show me")
    done(page, 1)
    assert page.text(".message.user .bubble") == ["show me"]
    assert page.text(".text h2") == ["Title"] and page.text(".text strong") == ["bold"]
    assert page.text(".text p code") == ["code <b>"]
    assert page.run("document.querySelector('.text a').href") == "https://example.org/a_b"
    assert page.text(".code pre") == ['def f(x):  # a comment\n    return "<script>alert(1)</script>"']
    assert page.text(".code-k") == ["def", "return"] and page.text(".code-c") == ["# a comment"]
    assert page.text(".text ol > li > ul > li") == ["inner"] and page.text(".text td") == ["1", "2"]
    assert page.run("document.querySelectorAll('.text img, .text script').length") == 0
    assert page.run("document.title") == "ninfer"
    assert page.errors == []


def test_text_shows_while_it_comes_and_stop_stops(start: Start, page: Browser) -> None:
    client = FakeClient(hold=True)
    server = start(client, webui=True)
    client.script = lambda request: [server.ids("H"), server.ids("i")]
    visit(page, server.url + "/")
    ask(page, "go on for ever")
    page.until("document.querySelector('.message.assistant .text')?.innerText === 'Hi'")
    assert page.run("document.getElementById('send').hidden") and client.cancelled == []
    page.click("#stop")
    until(lambda: len(client.cancelled) == 1)
    done(page, 1)
    assert page.text(".message.assistant .text") == ["Hi"] and "stopped" in page.text(".figures")[0]
    assert page.run("document.getElementById('stop').hidden")
    assert page.errors == []


def test_reasoning_is_folded_once_the_answer_begins(start: Start, page: Browser) -> None:
    server = start(FakeClient(step_s=0.05), webui=True)
    server.says("<think>", "let me ", "see", "</think>", "It is ", "so.")
    visit(page, server.url + "/")
    ask(page, "why?")
    page.until("document.querySelector('.reasoning')?.open === true")
    done(page, 1)
    assert page.run("document.querySelector('.reasoning').open") is False
    assert page.text(".message.assistant > .text") == ["It is so."]
    assert page.text(".reasoning summary")[0].startswith("Thought for")
    page.click(".reasoning summary")
    assert page.text(".reasoning .text") == ["let me see"]


def test_a_tool_call_is_shown_and_its_result_sent_back(start: Start, page: Browser) -> None:
    client = FakeClient(context_len=4096)
    server = start(client, template=TOOLS_TEMPLATE, webui=True)
    answers = iter([CALL, "Rain in Oslo."])
    client.script = lambda request: [server.ids(next(answers)), server.ids("<|end|>")]
    visit(page, server.url + "/")
    page.click("#open-settings")
    page.type("textarea[name=tools]", "[{")
    page.click("#save")
    assert "the tools are not JSON" in page.text("#settings-error")[0]
    page.run("document.querySelector('textarea[name=tools]').value = ''")
    page.type("textarea[name=tools]", json.dumps([TOOL]))
    page.type("textarea[name=system]", "Be brief.")
    page.click("#save")
    page.until("!document.getElementById('settings').open")
    ask(page, "weather?")
    done(page, 1)
    assert page.text(".call-name b") == ["weather"] and json.loads(page.text(".call pre")[0]) == {"city": "Oslo"}
    page.type(".call .result", "rain")
    page.click(".call .row button")
    done(page, 2)
    assert page.text(".message.assistant > .text") == ["Rain in Oslo."]
    last = prompt_of(server, client.requests[-1])
    assert "Be brief." in last and "tool\nrain" in last and "<function=weather>" in last
    page.open(server.url + "/")  # chats are kept
    assert page.text(".chat-link") == ["weather?"]
    page.click(".chat-link")
    assert page.text(".message.assistant > .text") == ["Rain in Oslo."]
    assert page.errors == []


def prompt_of(server: Server, request: GenerateRequest) -> str:
    return server.tokenizer.decode(list(request.prompt_ids))


def test_settings_reach_the_request(start: Start, page: Browser) -> None:
    client = FakeClient()
    server = start(client, webui=True)
    visit(page, server.url + "/")
    page.click("#open-settings")
    page.type("input[name=temperature]", "0.5")
    page.type("input[name=max_tokens]", "1")
    page.click("#save")
    ask(page, "hi")
    done(page, 1)
    (request,) = client.requests
    assert request.sampling.temperature == 0.5 and request.max_tokens == 1
    assert "cut at the limit" in page.text(".figures")[0]


def test_an_error_is_told_in_its_place_and_a_key_is_asked_for(start: Start, page: Browser) -> None:
    server = start(webui=True, api_keys=("sesame",))
    visit(page, server.url + "/")
    page.until("document.getElementById('settings').open")
    page.type("input[name=key]", "sesame")
    page.click("#save")
    page.until("document.getElementById('model').textContent === 'toy/model-1'")
    ask(page, "x" * 2000)
    done(page, 1)
    assert "context window" in page.text(".message .error")[0]


def test_the_dashboard_shows_what_stats_tell(start: Start, page: Browser) -> None:
    server = start()
    server.chat()
    slot: dict[str, Any] = {"id": 0, "is_processing": True, "phase": "decode", "n_prompt_tokens": 12, "n_decoded": 34}
    server.client.stats_now = attrs.evolve(
        server.client.stats_now,
        num_running=1,
        num_waiting=1,
        max_concurrency=2,
        num_pages=10,
        num_free_pages=4,
        slots=(slot, {"id": 1, "is_processing": False}),
        queue=(("abc-0", 1.25),),
        drafts=DraftStats(num_drafted=10, num_accepted=7),
        tiers=({"name": "disk", "used_bytes": 1 << 20, "capacity_bytes": 4 << 20},),
    )
    page.open(server.url + "/dashboard")
    page.until("document.querySelector('#state').innerText === 'busy'")
    tiles = "\n".join(page.text(".tile"))
    assert "1 / 2" in tiles and "6 / 10" in tiles and "longest 1.25 s" in tiles
    assert "34 written" in page.text("#slots")[0] and "abc-0" in page.text("#queue")[0]
    assert "openai chat completions\t1" in page.text("#endpoints")[0]
    assert "7 of 10, 70 %" in page.text("#cache")[0] and "1.0 MiB of 4.0 MiB" in page.text("#cache")[0]
    server.client.stats_now = attrs.evolve(server.client.stats_now, num_running=0, num_waiting=0, queue=())
    page.until("document.querySelector('#state').innerText === 'idle'")  # it is live
    assert "Nobody waits." in page.text("#queue")[0]
    assert page.errors == []
