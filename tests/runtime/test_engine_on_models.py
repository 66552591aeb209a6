"""The engine on real graphs: whatever shares its steps, a sequence says what it says alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.artifacts import open_artifact
from ninfer.formats.kv import by_name
from ninfer.models import identify
from ninfer.runtime.batch import Limits
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.reference import ReferenceRunner, reference_runner
from ninfer.runtime.request import FinishReason, GenerateRequest, Sampling
from ninfer.runtime.weights import bind_weights
from tests.runtime.fake_runner import config, tokens

MODEL = Path(__file__).resolve().parents[1] / "data" / "qwen3_5_dense"  # delta rule and attention
LIMITS = Limits(max_rows=128, max_seqs=4, slots=4, pages=12, max_pages=4, context_len=256, domain=500)


def runner() -> ReferenceRunner:
    artifact = open_artifact(MODEL)
    family, spec = identify(artifact.config)
    graph = family.build(spec, artifact.info, kv=by_name("f32"), mode="sample")
    return reference_runner(graph, bind_weights(graph, artifact), LIMITS, decode_weights=True)


SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=6, presence_penalty=1.0, frequency_penalty=0.5),
    Sampling(temperature=0, repetition_penalty=1.3),
    Sampling(temperature=0, logit_bias={7: 50.0}),
    Sampling(temperature=1.0, seed=9),
    Sampling(temperature=0.5, seed=10, min_p=0.05),
)
REQUESTS = tuple(
    GenerateRequest(
        id=str(i),
        prompt_ids=tuple((7 * i + 13 * k) % 500 for k in range(1 + 29 * i)),
        sampling=sampling,
        max_tokens=10,
    )
    for i, sampling in enumerate(SAMPLINGS)
)


@pytest.mark.parametrize("changes", [{"deterministic": True}, {"prefill_chunk": 128}, {"prefill_chunk": 48}])
def test_company_changes_nothing(changes: dict[str, object]) -> None:
    together = drive(Engine(runner(), config(max_concurrency=4, **changes)), REQUESTS)
    alone = Engine(runner(), config(max_concurrency=1, prefill_chunk=128))
    for request in REQUESTS:
        said = drive(alone, [request])[request.id]
        assert said[-1].finish is FinishReason.LENGTH
        assert tokens(together[request.id]) == tokens(said), request
    assert set(tokens(together["4"])) == {7}
    assert len({tuple(tokens(d)) for d in together.values()}) == len(REQUESTS)
