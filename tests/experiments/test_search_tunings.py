"""Proposals of the search over tunings, for a GPU that is described and not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ninfer.devices.base import DeviceInfo
from ninfer.devices.cuda import features_of

INFO = DeviceInfo("cuda", "sm_90a", "sm_90a", features_of("sm_90a"), "sm_90a", 132, 1 << 37)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent.parent / "experiments"))
    import search_tunings  # type: ignore[import-not-found, unused-ignore]

    yield search_tunings
    for name in ("search_tunings", "tuning_space", "bench_decode", "ceilings"):
        sys.modules.pop(name, None)


def test_trials_change_the_ops_that_they_name(script: Any) -> None:
    args = script.arguments().parse_args(["synthetic:bonsai-tiny", "--ops", "linear", "--seed", "3"])
    search, _ = script.search_of(args, INFO)
    assert search.kinds and all("linear" in key for key in search.kinds)
    plain = search.plan(search.best)
    trials = script.batch(search, None, 40)
    assert len(trials) == 40 and any(len(t.table) > 1 for t in trials)
    for trial in trials[::8]:
        plan = search.plan({**search.best, **trial.table})
        changed = {a.types for a, b in zip(plain.launches, plan.launches, strict=True) if a.source != b.source}
        assert len(changed) <= len(trial.table)
        assert {s.entry for s in trial.sources} <= {s.entry for s in plan.sources}


def test_a_seed_gives_the_same_trials(script: Any) -> None:
    args = script.arguments().parse_args(["synthetic:llama-tiny", "--rows", "4", "--seed", "5"])
    first, again = (script.batch(script.search_of(args, INFO)[0], None, 20) for _ in range(2))
    names = [[{key: c.id for key, c in t.table.items()} for t in trials] for trials in (first, again)]
    assert names[0] == names[1]
