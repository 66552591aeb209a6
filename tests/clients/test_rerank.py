"""Ranking by a real model, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ninfer.api.rerank import JUDGE, score
from tests.clients.conftest import Process

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "Cats sleep a lot.", "The Loire is a river."]


def test_scores_are_the_models_own_probabilities(demo: Process) -> None:
    body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS, "instruction": "Find it"}
    response = demo.http.post("/v1/rerank", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    assert [r["relevance_score"] for r in found["results"]] == sorted(
        (r["relevance_score"] for r in found["results"]), reverse=True
    )
    assert all(r["document"]["text"] == DOCUMENTS[r["index"]] for r in found["results"])
    for result in found["results"]:  # the same by way of the chat
        told = f"<Instruct>: Find it\n<Query>: {QUERY}\n<Document>: {DOCUMENTS[result['index']]}"
        turns = [{"role": "system", "content": JUDGE}, {"role": "user", "content": told}]
        chat = {"messages": turns, "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}
        [record] = demo.http.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
        best = {t["token"]: math.exp(t["logprob"]) for t in record["top_logprobs"]}
        yes, no = (
            sum(best.get(w, 0.0) for w in words) or min(best.values()) for words in (("yes", "Yes"), ("no", "No"))
        )
        assert result["relevance_score"] == pytest.approx(yes / (yes + no), rel=0.05)  # batches round otherwise


def test_the_other_spelling_is_a_bare_array(demo: Process) -> None:
    found = demo.http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "top_n": 2, "return_text": True}).json()
    assert len(found) == 2 and set(found[0]) == {"index", "score", "text"}


@pytest.mark.parametrize(
    "body",
    [
        {"documents": ["a"]},
        {"query": "", "documents": ["a"]},
        {"query": "q"},
        {"query": "q", "documents": []},
        {"query": "q", "documents": [{"txt": "a"}]},
        {"query": "q", "documents": ["a"], "top_n": 0},
        {"query": "q", "documents": ["a"] * 1001},
    ],
)
def test_what_cannot_be_ranked_is_refused(demo: Process, body: dict[str, Any]) -> None:
    response = demo.http.post("/v1/rerank", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"]


def test_embeddings_are_refused_in_words(demo: Process) -> None:
    response = demo.http.post("/v1/embeddings", json={"input": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "embeddings_not_supported")


def test_a_word_that_is_not_among_the_best_counts_as_the_last() -> None:
    best = {1: math.log(0.6), 2: math.log(0.2), 3: math.log(0.05)}
    assert score(best, frozenset({1}), frozenset({2})) == pytest.approx(0.75)
    assert score(best, frozenset({9}), frozenset({2})) == pytest.approx(0.2)
    assert score(best, frozenset({1, 2}), frozenset({9})) == pytest.approx(0.8 / 0.85)
