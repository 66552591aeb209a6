"""Synthetic models have the published sizes, and every tensor that their graphs read."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from attrs import evolve

from ninfer.artifacts.synthetic import CONFIGS, SyntheticArtifact
from ninfer.formats.kv import by_name as kv_by_name
from ninfer.models import identify
from ninfer.models.family import Rounds
from ninfer.models.proposal import parse_proposal
from tests.checkpoints import part, runner

PUBLISHED = {"qwen3.5-27b": 26_895_998_464, "qwen3.5-35b-a3b": 34_660_610_688, "gemma4-26b-a4b": 25_233_141_790}


@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_read_every_tensor(name: str) -> None:
    artifact = SyntheticArtifact(name)
    family, spec = identify(artifact.config)
    if artifact.has_proposal:
        spec = evolve(spec, proposal=parse_proposal(artifact.proposal_ids(), spec.vocab_size))
    graphs = [family.build(spec, artifact.info, kv=kv_by_name("bf16"), mode="sample")]
    if spec.num_mtp_layers:
        rounds = Rounds(hidden_rows=4, journal_rows=4)
        graphs.append(family.build(spec, artifact.info, kv=kv_by_name("bf16"), mode="draft", rounds=rounds))
    read = {piece.param for graph in graphs for weight in graph.weights.values() for piece in weight.pieces}
    assert read == set(artifact.names())


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    artifact = SyntheticArtifact(name)
    target = [n for n in artifact.names() if not n.startswith(("mtp.", "proposal."))]  # not in published sizes
    assert sum(prod(artifact.info(n).shape) for n in target) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["qwen3.5-moe-tiny", "gemma4-tiny", "bonsai-tiny"])
def test_values_stay_in_range(name: str) -> None:
    logits = runner(SyntheticArtifact(name)).outputs([part(range(20))])["logits"]
    assert np.isfinite(logits).all() and 0.5 < logits.std() < 2
