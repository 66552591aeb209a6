"""Ranking of documents by the served model, asked of each whether it answers the query. Embeddings are refused."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from attrs import frozen
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler

from ninfer.api.ask import Ask, Chat
from ninfer.api.errors import request_id
from ninfer.api.fields import Value, boolean, decode, integer, text
from ninfer.api.prepare import encode_prompts
from ninfer.api.serving import Serving
from ninfer.api.sse import body_of, unless_gone
from ninfer.errors import BadRequest, NinferError
from ninfer.runtime.request import Delta, GenerateRequest, Sampling
from ninfer.runtime.sequence import Failed

MAX_DOCUMENTS = 1000
NUM_BEST = 20  # log-probabilities that the engine tells of a token
# The words that Qwen3-Reranker was trained with.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
YES, NO = ("yes", "Yes"), ("no", "No")


@frozen(kw_only=True)
class Asked:
    """plain: documents came as `texts`, and the answer is a bare array."""

    query: str
    documents: tuple[str, ...]
    instruction: str
    model: str | None
    top_n: int
    shown: bool
    plain: bool


def parse(body: Value) -> Asked:
    plain = body["texts"].given and not body["documents"].given
    field = body["texts"] if plain else body["documents"]
    documents = tuple(_document(value) for value in field.items())
    if not documents or len(documents) > MAX_DOCUMENTS:
        raise field.refused(f"from 1 to {MAX_DOCUMENTS} documents are ranked, not {len(documents)}")
    query = text(body["query"])
    if not query:
        raise body["query"].wrong("a string of at least one character")
    shown = body["return_text" if plain else "return_documents"].maybe(boolean)
    return Asked(
        query=query,
        documents=documents,
        instruction=body["instruction"].maybe(text) or INSTRUCTION,
        model=body["model"].maybe(text),
        top_n=body["top_n"].maybe(integer(1)) or len(documents),
        shown=not plain if shown is None else shown,
        plain=plain,
    )


def _document(value: Value) -> str:
    return value.raw if isinstance(value.raw, str) else text(value["text"])


def prompts(serving: Serving, asked: Asked) -> list[tuple[int, ...]]:
    """One for each document. Raises BadRequest."""
    found = []
    for i, document in enumerate(asked.documents):
        told = f"<Instruct>: {asked.instruction}\n<Query>: {asked.query}\n<Document>: {document}"
        turns = ({"role": "system", "content": JUDGE}, {"role": "user", "content": told})
        chat = Chat(messages=turns, options={"enable_thinking": False})
        ask = Ask(
            prompts=(chat,), prompt_path=f"{'texts' if asked.plain else 'documents'}[{i}]", model=asked.model, graft=""
        )
        found.append(encode_prompts(serving, ask)[0].ids)
    return found


def answers(serving: Serving) -> tuple[frozenset[int], frozenset[int]]:
    """The tokens of yes and of no. Raises BadRequest where the model would spell them in pieces."""

    def single(words: Sequence[str]) -> frozenset[int]:
        spelled = [serving.tokenizer.encode(word) for word in words]
        return frozenset(ids[0] for ids in spelled if len(ids) == 1)

    yes, no = single(YES), single(NO)
    if not yes or not no:
        raise BadRequest(
            f"{serving.model_id} cannot rank: yes and no are not single tokens of it", code="rerank_not_supported"
        )
    return yes, no


async def scores(serving: Serving, asked: Asked, id: str) -> tuple[list[float], int]:
    """P(yes) / (P(yes) + P(no)) of each document, and how many tokens were read."""
    yes, no = answers(serving)
    ids = await asyncio.to_thread(prompts, serving, asked)
    gate = asyncio.Semaphore(serving.client.stats().max_concurrency)

    async def judged(i: int) -> float:
        request = GenerateRequest(
            id=f"{id}-{i}", prompt_ids=ids[i], sampling=Sampling(temperature=0), max_tokens=1, logprobs=NUM_BEST
        )
        async with gate:
            return score(await _first(serving, request), yes, no)

    tasks = [asyncio.ensure_future(judged(i)) for i in range(len(ids))]
    try:
        return list(await asyncio.gather(*tasks)), sum(map(len, ids))
    finally:
        for task in tasks:
            task.cancel()


async def _first(serving: Serving, request: GenerateRequest) -> Mapping[int, float]:
    """Log-probabilities of the first token's best candidates, the best first."""
    stream = cast("AsyncGenerator[Delta, None]", serving.client.stream(request))
    async with aclosing(stream):
        async for delta in stream:
            if isinstance(delta, Failed):
                raise delta.exception
            for token in delta.tokens:
                return dict(token.top)
    raise NinferError("the engine gave no log-probabilities")


def score(best: Mapping[int, float], yes: frozenset[int], no: frozenset[int]) -> float:
    """What is not among the best counts as the last of them, its upper bound."""
    last = math.exp(min(best.values()))

    def mass(ids: frozenset[int]) -> float:
        return sum(math.exp(best[i]) for i in ids if i in best) or last

    return mass(yes) / (mass(yes) + mass(no))


def shaped(serving: Serving, asked: Asked, found: Sequence[float], num_tokens: int) -> Any:
    order = sorted(range(len(found)), key=lambda i: (-found[i], i))[: asked.top_n]
    if asked.plain:
        return [{"index": i, "score": found[i]} | ({"text": asked.documents[i]} if asked.shown else {}) for i in order]
    results = [
        {"index": i, "relevance_score": found[i]} | ({"document": {"text": asked.documents[i]}} if asked.shown else {})
        for i in order
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"model": serving.model_id, "object": "list", "results": results, "usage": usage}


def routes(serving: Serving) -> tuple[HTTPRouteHandler, ...]:
    @post(["/v1/rerank", "/v1/v1/rerank", "/rerank", "/v1/reranking", "/reranking"], status_code=200)
    async def rerank(request: Request[Any, Any, Any]) -> Any:
        entry = serving.journal.begin("rerank", request_id(request.scope))
        try:
            asked = parse(decode(await body_of(request)))
            found, count = await unless_gone(request, scores(serving, asked, secrets.token_hex(8)))
        except BaseException as error:
            entry.end(error)
            raise
        entry.end()
        return shaped(serving, asked, found, count)

    @post(["/v1/embeddings", "/v1/v1/embeddings", "/embeddings", "/embedding"], status_code=200, sync_to_thread=False)
    def embeddings() -> None:
        raise BadRequest(
            f"{serving.model_id} generates text and makes no embeddings; serve an embedding model elsewhere",
            code="embeddings_not_supported",
        )

    return rerank, embeddings
