"""Prompt grafts: what is refused at start, and that a given state is gone on from as if it had been computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifacts import open_artifact
from ninfer.devices.cpu import CpuMemory
from ninfer.errors import ArtifactError, UsageError
from ninfer.formats.dtypes import bf16_to_f32, f32_to_bf16
from ninfer.formats.kv import by_name
from ninfer.ir.ops.attention import page_views
from ninfer.models import identify
from ninfer.models.qwen3_5 import FULL, LINEAR, Qwen35Spec
from ninfer.runtime.batch import Limits
from ninfer.runtime.engine import Engine, drive
from ninfer.runtime.grafts import Graft, load_grafts
from ninfer.runtime.kv.given import check_grafts, given_tier
from ninfer.runtime.kv.store import StateStore
from ninfer.runtime.reference import ReferenceRunner
from ninfer.runtime.request import FinishReason, GenerateRequest, Sampling
from tests.checkpoints import DATA, GREEDY, part
from tests.checkpoints import runner as runner_of
from tests.graft_writer import random_state, write_graft
from tests.runtime.fake_runner import config, tokens

MODEL = DATA / "qwen3_5_dense"  # delta, delta, delta, attention
SIZES: dict[str, Any] = {"rows": 256, "seqs": 4, "pages_each": 6}
REST = tuple(range(5, 40))


def spec() -> Qwen35Spec:
    found = identify(open_artifact(MODEL).config)[1]
    assert isinstance(found, Qwen35Spec)
    return found


SPEC = spec()
IDS = tuple((7 * i + 3) % SPEC.domain for i in range(100))


@pytest.mark.parametrize(
    ("kind", "meta", "told"),
    [
        ("prefill_kv", {"format_version": 0}, "its format_version is 0, and 1 is read"),
        ("prefill_kv", {"kind": "other"}, "its kind is 'other'; there are prefill_kv, softprompt_kv, direct_kv"),
        ("prefill_kv", {"replay": None}, "it carries no ids to compute it from"),
        ("prefill_kv", {"layer_types": [FULL] * 4}, "its layer_types are not those of this model"),
        ("prefill_kv", {"n_kv_heads": 4}, "its n_kv_heads is 4, this model's is 2"),
        ("direct_kv", {"conv_dim": 64}, "its conv_dim is 64, this model's is 128"),
        ("direct_kv", {"rec_shape": [4, 16, 8]}, "its rec_shape is [4, 16, 8], this model's is [4, 16, 16]"),
        ("direct_kv", {"sha256": "0" * 64}, "do not have the sha256 of the description"),
        ("direct_kv", {"n_slots": 0}, "its n_slots is 0, not a number of positions"),
        ("direct_kv", {"n_slots": 99}, "k is BF16 [1, 100, 2, 32], and this model needs BF16 [1, 99, 2, 32]"),
    ],
)
def test_a_description_of_another_model_is_refused(tmp_path: Path, kind: str, meta: Any, told: str) -> None:
    path = write_graft(tmp_path / "g.bin", SPEC, kind, ids=IDS, meta=meta)
    with pytest.raises(ArtifactError) as error:
        load_grafts([f"g={path}"], SPEC)
    assert str(error.value).startswith("--graft g: ") and told in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"replay_ids": np.array([*IDS[:-1], SPEC.domain], "<i8")}, f"its id {SPEC.domain} is none of the model's"),
        ({"replay_ids": np.array([*IDS[:-1], -1], "<i8")}, "its id -1 is none of the model's"),
        ({"replay_ids": np.array(IDS[:-1], "<i8")}, "replay_ids is I64 [99], and this model needs I64 [100]"),
        ({"rec": random_state(SPEC, 1)["rec"][:, :, :8]}, "rec is F32 [3, 4, 8, 16], and this model needs F32"),
        ({"more": np.zeros(2, "<f4")}, "has a tensor 'more' that a prefill_kv graft does not have"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, arrays: Any, told: str) -> None:
    path = write_graft(tmp_path / "g.bin", SPEC, ids=IDS, arrays=arrays)
    with pytest.raises(ArtifactError) as error:
        load_grafts([f"g={path}"], SPEC)
    assert told in str(error.value)


def test_files_that_are_damaged_or_missing_are_refused(tmp_path: Path) -> None:
    path = write_graft(tmp_path / "g.bin", SPEC, ids=IDS)
    whole = path.read_bytes()
    for raw in (whole[:-1], whole[:5], bytes(8) + whole[8:], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(raw)
        with pytest.raises(ArtifactError, match="--graft g: "):
            load_grafts([f"g={path}"], SPEC)
    path.write_bytes(whole)
    with pytest.raises(ArtifactError, match="--graft g: two grafts have this name"):
        load_grafts([f"g={path}", f"g={path}"], SPEC)
    path.with_suffix(".json").unlink()
    with pytest.raises(ArtifactError, match=r"--graft g: .*g\.json: cannot be read: No such file"):
        load_grafts([f"g={path}"], SPEC)


def test_a_model_without_delta_layers_takes_no_graft(tmp_path: Path) -> None:
    path = write_graft(tmp_path / "g.bin", SPEC, ids=IDS)
    _, llama = identify(json.loads((DATA / "llama" / "config.json").read_text()))
    with pytest.raises(ArtifactError, match="--graft g: grafts are for models of attention and gated delta layers"):
        load_grafts([f"g={path}"], llama)


def test_a_graft_that_is_computed_is_its_ids(tmp_path: Path) -> None:
    path = write_graft(tmp_path / "g.bin", SPEC, ids=IDS)
    assert load_grafts([f"g={path}"], SPEC) == {"g": Graft(name="g", ids=IDS)}


def test_stand_ins_follow_from_the_contents(tmp_path: Path) -> None:
    ids = []
    for i, name in enumerate("abc"):
        state = random_state(SPEC, 70, seed=i // 2)
        path = write_graft(tmp_path / f"{name}.bin", SPEC, "direct_kv", n=70, arrays=state)
        [graft] = load_grafts([f"{name}={path}"], SPEC).values()
        assert len(graft.ids) == 70 and all(0 <= i < SPEC.domain for i in graft.ids)
        ids.append(graft.ids)
    assert ids[0] == ids[1] != ids[2]


def captured(model: ReferenceRunner, kv: str, n: int) -> dict[str, Any]:
    """The state of slot 0 after n positions, as a container holds it. What bf16 cannot hold is rounded in the model."""
    fmt, found = by_name(kv), random_state(SPEC, n)
    table = model.states["page_table"][0]
    places = np.arange(n)
    for at, layer in enumerate(i for i, kind in enumerate(SPEC.layer_types) if kind == FULL):
        sides = page_views(model.states[f"kv.{layer}"], fmt, SPEC.num_kv_heads, SPEC.head_dim)
        for name, side in zip("kv", sides, strict=True):
            found[name][at] = f32_to_bf16(side.load((table[places // 64], slice(None), places % 64)))
    for at, layer in enumerate(i for i, kind in enumerate(SPEC.layer_types) if kind == LINEAR):
        rounded = f32_to_bf16(model.states[f"conv.{layer}"][0])
        found["conv"][at, :, 1:] = rounded
        model.states[f"conv.{layer}"][0] = bf16_to_f32(rounded)
        found["rec"][at] = model.states[f"delta.{layer}"][0].swapaxes(1, 2)
    return found


class WithCache:
    """A reference runner, and its states as the memory of a device."""

    def __init__(self, model: ReferenceRunner, graft: Graft) -> None:
        self.limits = model.limits
        self.states = model.states
        self.set_pages, self.set_bias, self.set_mask = model.set_pages, model.set_bias, model.set_mask
        self.step, self.close = model.step, model.close
        types = {name: value.type for name, value in model.graph.states.items()}
        self.cache_store = StateStore(CpuMemory({}, model.states, np.zeros(0, np.uint8)), types)
        self.given = given_tier([graft], SPEC, by_name("bf16"), self.cache_store, model.limits)


def grafted(graft: Graft, **changes: Any) -> Engine:
    settings = config(max_concurrency=4, **changes)
    check_grafts([graft], settings)
    return Engine(WithCache(runner_of(MODEL, "sample", kv="bf16", **SIZES), graft), settings)


@pytest.mark.parametrize("n", [30, 100, 128])
@pytest.mark.parametrize("kind", ["direct_kv", "softprompt_kv"])
def test_a_given_state_is_gone_on_from_as_if_it_had_been_computed(tmp_path: Path, kind: str, n: int) -> None:
    ids = (IDS * 2)[:n]
    cold = runner_of(MODEL, "sample", kv="bf16", **SIZES)
    cold.step([part(ids)])
    state = captured(cold, "bf16", n)
    wanted = [cold.step([part(REST, n, draw=GREEDY)])[0]]
    for i in range(4):
        drawn = wanted[-1]
        assert drawn is not None
        wanted.append(cold.step([part([drawn.token], n + len(REST) + i, draw=GREEDY)])[0])

    path = write_graft(tmp_path / "g.bin", SPEC, kind, n=n, arrays=state)
    [graft] = load_grafts([f"g={path}"], SPEC).values()
    with grafted(graft, deterministic=n == 128) as engine:
        for id in "ab":  # the second time over
            request = GenerateRequest(
                id=id,
                prompt_ids=(*graft.ids, *REST),
                sampling=Sampling(temperature=0),
                max_tokens=5,
                logprobs=5,
                prefix_len=n,
                prefix_given=True,
            )
            told = [t for delta in drive(engine, [request])[id] for t in delta.tokens]
            assert [t.id for t in told] == [d.token for d in wanted if d is not None]
            for t, d in zip(told, wanted, strict=True):  # numpy sums the rows of other steps in another order
                assert d is not None
                np.testing.assert_allclose(
                    [logprob for _, logprob in t.top], [logprob for _, logprob in d.top], atol=2e-5
                )
            engine.check()
        tier = next(t for t in engine.stats().tiers if t["name"] == "grafts")
        assert (tier["pages"], tier["images"]) == (n // 64, 1)


def test_positions_that_cannot_be_computed_never_are() -> None:
    model = runner_of(MODEL, "sample", kv="bf16", **SIZES)
    engine = Engine(model, config())  # no cache store: nothing is reused
    request = GenerateRequest(id="a", prompt_ids=IDS, prefix_len=64, prefix_given=True)
    [delta] = drive(engine, [request])["a"]
    assert delta.finish is FinishReason.ERROR and "state that stands before the prompt is not there" in str(delta.error)
    assert tokens([delta]) == []


def test_a_given_state_is_refused_where_it_cannot_be_used(tmp_path: Path) -> None:
    path = write_graft(tmp_path / "g.bin", SPEC, "direct_kv", n=100)
    [graft] = load_grafts([f"g={path}"], SPEC).values()
    with pytest.raises(UsageError, match=r"--graft g: .*leave out --no-prefix-reuse"):
        check_grafts([graft], config(no_prefix_reuse=True))
    with pytest.raises(UsageError, match=r"--graft g: a state of 100 positions .*--deterministic"):
        check_grafts([graft], config(deterministic=True))
    sizes = Limits(max_rows=64, max_seqs=1, slots=1, pages=9, max_pages=9, context_len=100, domain=SPEC.domain)
    with pytest.raises(UsageError, match="--graft g: it has 100 positions, and the context window is 100"):
        given_tier([graft], SPEC, by_name("bf16"), None, sizes)  # type: ignore[arg-type]
