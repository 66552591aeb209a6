"""Rotary frequencies against the published formulas, written out plainly."""

from __future__ import annotations

from math import ceil, cos, floor, log, pi, sin
from typing import Any

import numpy as np
import pytest

from ninfer.errors import ArtifactError, UsageError
from ninfer.models.fields import Fields
from ninfer.models.rope import parse_rope

D, THETA = 64, 10000.0
PLAIN = [THETA ** (-2 * i / D) for i in range(D // 2)]


def rope(scaling: dict[str, Any] | None = None, **config: Any) -> Any:
    parameters = {"rope_type": "default", "rope_theta": THETA} | (scaling or {})
    return parse_rope(Fields({"rope_parameters": parameters} | config), D, 8192)


def test_default() -> None:
    np.testing.assert_allclose(rope().frequencies(), PLAIN, rtol=1e-7)
    assert rope().frequencies().dtype == np.float32 and rope().attention_factor == 1


def test_older_files_have_theta_and_scaling_apart() -> None:
    old = Fields({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}})
    np.testing.assert_allclose(
        parse_rope(old, D, 8192).frequencies(), [500000.0 ** (-2 * i / D) / 4 for i in range(32)]
    )
    absent = Fields({"rope_theta": 500000.0, "rope_scaling": None})
    assert parse_rope(absent, D, 8192).kind == "default"


def test_partial_rotation() -> None:
    spec = rope({"partial_rotary_factor": 0.25})
    np.testing.assert_allclose(spec.frequencies(), [THETA ** (-2 * i / 16) for i in range(8)], rtol=1e-7)


def test_llama3() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    want = []
    for f in PLAIN:
        length = 2 * pi / f
        if length < 2048 / 4:
            want.append(f)
        elif length > 2048 / 1:
            want.append(f / 8)
        else:
            smooth = (2048 / length - 1) / (4 - 1)
            want.append((1 - smooth) * f / 8 + smooth * f)
    got = rope(scaling).frequencies()
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert got[0] == np.float32(PLAIN[0]) and len({round(a / b, 3) for a, b in zip(PLAIN, got, strict=True)}) > 3


def yarn_by_hand(factor: float, original: int) -> list[float]:
    def pair(turns: float) -> float:
        return D * log(original / (turns * 2 * pi)) / (2 * log(THETA))

    low, high = max(floor(pair(32)), 0), min(ceil(pair(1)), D - 1)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(D // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(PLAIN, ramp, strict=True)]


def test_yarn() -> None:
    spec = rope({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048})
    np.testing.assert_allclose(spec.frequencies(), yarn_by_hand(4, 2048), rtol=1e-6)
    assert spec.attention_factor == pytest.approx(0.1 * log(4) + 1)
    given = rope({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25})
    assert given.attention_factor == 1.25 and given.original_len == 8192
    ratio = rope({"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5}).attention_factor
    assert ratio == pytest.approx((0.2 * log(4) + 1) / (0.05 * log(4) + 1))


def test_a_window_can_be_stretched() -> None:
    spec = rope().stretched(4, 2048)
    np.testing.assert_allclose(spec.frequencies(), yarn_by_hand(4, 2048), rtol=1e-6)
    with pytest.raises(UsageError, match=r"--rope-yarn 2: the model's rope has a scaling already, yarn"):
        spec.stretched(2, 8192)
    with pytest.raises(UsageError, match=r"--rope-yarn 0\.5: the factor"):
        rope().stretched(0.5, 2048)


def test_stored_divisors() -> None:
    divisors = [1.0] * 16 + [8.0] * 16
    got = rope(rope_freq_factors=divisors).frequencies()
    np.testing.assert_allclose(got, np.array(PLAIN) / divisors, rtol=1e-7)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            r"rope_parameters: rope_type is 'longrope', but supported are default",
        ),
        ({"rope_type": "linear"}, r"rope_parameters: factor is missing"),
        ({"rope_type": "linear", "factor": -2}, r"factor is -2, but must be a number above 0"),
        ({"partial_rotary_factor": 0.05}, r"partial_rotary_factor is 0\.05, but 0\.05 of 64"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}, r"high_freq_factor is 4"),
    ],
)
def test_what_is_not_understood_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        rope(scaling)


def test_the_rotation_keeps_relative_positions() -> None:
    f = float(rope().frequencies()[3])
    a, b = (cos(7 * f), sin(7 * f)), (cos(4 * f), sin(4 * f))
    assert a[0] * b[0] + a[1] * b[1] == pytest.approx(cos(3 * f))
