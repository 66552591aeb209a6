"""From an ask to what the engine takes: prompts as token ids, and masks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ninfer.api.ask import Ask, Chat, Plain, Prompt
from ninfer.api.serving import Serving
from ninfer.errors import BadRequest, ContextTooLong
from ninfer.runtime.request import TokenMask
from ninfer.text.budget import ThinkingBudget
from ninfer.text.grammar import Calls, Format, JsonSchema
from ninfer.text.prompt import encode, encode_chat
from ninfer.text.tokenizer import Tokenizer


def prepare(serving: Serving, ask: Ask) -> tuple[tuple[Prompt, ...], list[TokenMask | None]]:
    """The prompts, and a mask for each reply. Slow for long prompts and new grammars.

    Raises BadRequest, ContextTooLong or UnknownModel.
    """
    prompts = encode_prompts(serving, ask)
    masks = _formats(serving, ask, prompts)
    limits = [_budget(serving, ask, prompt) for prompt in prompts for _ in range(ask.n)]
    return prompts, [mask if limit is None else limit(mask) for mask, limit in zip(masks, limits, strict=True)]


def _formats(serving: Serving, ask: Ask, prompts: Sequence[Prompt]) -> list[TokenMask | None]:
    format = whole_format(serving, ask)
    if format is None:
        return [None] * (len(prompts) * ask.n)
    tags = prompts[0].tags
    open_id, close_id = serving.tokenizer.token_to_id(tags.open), serving.tokenizer.token_to_id(tags.close)
    if close_id is None and any(prompt.thinking for prompt in prompts):
        raise BadRequest("the end of the model's thinking is no single token, so nothing can be enforced after it")
    grammars, masks = serving.grammars, list[TokenMask | None]()
    for prompt in (prompt for prompt in prompts for _ in range(ask.n)):
        opens = prompt.may_think and open_id is not None
        after = close_id if prompt.thinking or opens else None
        masks.append(grammars.matcher(format, after=after, opened_by=open_id if opens else None))
    return masks


def _budget(serving: Serving, ask: Ask, prompt: Prompt) -> Callable[[TokenMask | None], TokenMask] | None:
    """What puts the bound on thinking around a mask, if there is one."""
    budget = ask.thinking_budget or serving.defaults.default_thinking_budget
    if budget is None or prompt.thinking is None:
        return None
    tokenizer = serving.tokenizer
    close_id = tokenizer.token_to_id(prompt.tags.close)
    if close_id is None:
        if ask.thinking_budget is None:
            return None
        raise BadRequest(
            "the end of the model's thinking is no single token, so it cannot be ended",
            path="thinking_budget",
            code="thinking_budget_not_supported",
        )
    message = encode(tokenizer, serving.defaults.thinking_budget_message, parse_special=False)
    return lambda mask: ThinkingBudget(
        budget,
        (*message, close_id),
        open=prompt.thinking is True,
        open_id=tokenizer.token_to_id(prompt.tags.open),
        inner=mask,
    )


def encode_prompts(serving: Serving, ask: Ask) -> tuple[Prompt, ...]:
    """Template and tokenizer applied. Raises as prepare does."""
    serving.check_model(ask.model)
    if ask.n * len(ask.prompts) > serving.max_replies:
        raise BadRequest(
            f"{ask.n * len(ask.prompts)} replies are asked for, and the server runs and queues {serving.max_replies}",
            path="n",
        )
    prompts = tuple(
        _chat(serving, p, ask) if isinstance(p, Chat) else _plain(serving.tokenizer, p, ask.prompt_path)
        for p in ask.prompts
    )
    for prompt in prompts:
        if len(prompt.ids) > serving.client.context_len:
            error = ContextTooLong(len(prompt.ids), serving.client.context_len)
            error.path = ask.prompt_path
            raise error
        if not prompt.ids:
            raise BadRequest(f"{ask.prompt_path}: the prompt is empty", path=ask.prompt_path, code="invalid_prompt")
    return prompts


def whole_format(serving: Serving, ask: Ask) -> Format | None:
    """The request's format and what it says about tools, as one."""
    tools = ask.tools
    if not tools.schemas or not (tools.must or ask.format):
        return ask.format
    style = serving.template().call_style
    if style is None:
        raise BadRequest("the model's chat template shows no spelling of tool calls to keep to", path="tool_choice")
    or_json = None if tools.must else ask.format
    if or_json is not None and not isinstance(or_json, JsonSchema):
        raise BadRequest("with tools, only a JSON format can be kept to", path="tools")
    return Calls(tools=tools.schemas, style=style, parallel=tools.parallel, or_json=or_json)


def template_options(
    serving: Serving, chat: Chat, *, structured: bool = False, budgeted: bool = False
) -> dict[str, Any]:
    """structured, or the server's --no-thinking: thinking is off unless an effort or a budget asks for it."""
    options = dict(chat.options)
    effort = options.get("reasoning_effort")
    if effort == "none":
        del options["reasoning_effort"]
        options.setdefault("enable_thinking", False)
    elif isinstance(effort, str):
        options["reasoning_effort"] = serving.template().nearest_effort(effort)
    quiet = serving.defaults.no_thinking or structured
    if "reasoning_effort" in options or budgeted:
        if quiet or serving.template().thinks_when_asked:
            options.setdefault("enable_thinking", True)
    elif quiet:
        options.setdefault("enable_thinking", False)
    return options


def _chat(serving: Serving, chat: Chat, ask: Ask) -> Prompt:
    template = serving.template()
    budgeted = ask.thinking_budget is not None
    options = template_options(serving, chat, structured=ask.format is not None, budgeted=budgeted)
    if chat.tools and not template.takes_tools:
        raise BadRequest("the model's chat template has no place for tools", path="tools", code="tools_not_supported")
    messages = in_call_order(chat.messages)
    if isinstance(ask.format, JsonSchema):
        messages = instructed(messages, ask.format)
    ids = encode_chat(template, serving.tokenizer, messages, tools=chat.tools or None, **options)
    thinking = template.opens_thinking(**options) if template.knows_thinking else None
    if chat.prefill:
        if thinking:
            raise BadRequest("a reply that thinks first cannot be begun for it; turn thinking off", path="messages")
        ids += encode(serving.tokenizer, chat.prefill, parse_special=False)
    graft = serving.graft(ask.graft)
    before = () if graft is None else graft.ids
    may = thinking is False and options.get("enable_thinking") is True and not chat.prefill
    style = template.call_style if chat.tools else None
    return Prompt(ids=(*before, *ids), graft=graft, thinking=thinking, tags=template.tags, style=style, may_think=may)


def in_call_order(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Tool results in the order of the calls they answer, since templates show no ids."""
    found: list[Mapping[str, Any]] = []
    order: dict[str, int] = {}
    run = 0  # how many results the list ends with
    for message in messages:
        found.append(message)
        if message["role"] != "tool":
            order = {str(call["id"]): i for i, call in enumerate(message.get("tool_calls", ()))}
            run = 0
            continue
        run += 1
        if order:
            found[-run:] = sorted(found[-run:], key=lambda m: order.get(str(m.get("tool_call_id")), len(order)))
    return found


def instructed(messages: Sequence[Mapping[str, Any]], format: JsonSchema) -> Sequence[Mapping[str, Any]]:
    """The messages with the format told at their head: masks make a reply valid, knowing of them makes it good."""
    schema = json.dumps(format.schema, ensure_ascii=False)
    text = f"Answer with JSON alone, without any text around it. It must follow this JSON schema:\n{schema}"
    first = messages[0]
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]


def _plain(tokenizer: Tokenizer, plain: Plain, path: str) -> Prompt:
    ids: list[int] = []
    for i, piece in enumerate(plain.pieces):
        if isinstance(piece, str):
            ids += encode(tokenizer, piece, add_special=i == 0)
        elif 0 <= piece < tokenizer.vocab_size:
            ids.append(piece)
        else:
            raise BadRequest(f"{path}: token {piece} is not one of the model's {tokenizer.vocab_size}", path=path)
    whole = plain.pieces[0] if len(plain.pieces) == 1 else None
    return Prompt(text=whole if isinstance(whole, str) else tokenizer.decode(ids), ids=tuple(ids))
