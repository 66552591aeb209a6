"""--device: the same model, the same text, on the processor and on the simulated GPU, through the product's loading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import evolve

from ninfer.config import EngineConfig
from ninfer.devices.cuda import cuda_missing
from ninfer.errors import DeviceError, UsageError
from ninfer.ir.types import Env
from ninfer.runtime.backend import open_backend
from ninfer.runtime.batch import Draw, Drawn, SeqRows
from ninfer.runtime.load import calibrate_model, load, open_model
from ninfer.runtime.request import Sampling


def config(
    device: str, model: str = "synthetic:llama-tiny", *, deterministic: bool = False, format: str | None = None
) -> EngineConfig:
    return EngineConfig(
        format=format, model=model, device=device, max_concurrency=2, prefill_chunk=16, max_context=128, threads=2,
        deterministic=deterministic,
    )  # fmt: skip


def run(
    device: str, *, deterministic: bool, forced: Sequence[int] = (), count: int = 8, format: str | None = None
) -> tuple[list[Drawn], str]:
    """A prompt in two chunks and greedy draws, each after the draw before or after a forced id; and the plans."""
    loaded = load(config(device, deterministic=deterministic, format=format))
    runner, draw = loaded.runner, Draw(sampling=Sampling(temperature=0.0), seed=1, logprobs=1)
    runner.set_pages(0, 0, [0, 1])
    prompt, found = tuple(range(65, 85)), list[Drawn]()
    runner.step([SeqRows(slot=0, kv_len=0, tokens=prompt[:16], generated=False, draw=None)])
    (drawn,) = runner.step([SeqRows(slot=0, kv_len=16, tokens=prompt[16:], generated=False, draw=draw)])
    for i in range(count):
        assert drawn is not None
        found.append(drawn)
        token = forced[i] if forced else drawn.token
        (drawn,) = runner.step([SeqRows(slot=0, kv_len=20 + i, tokens=(token,), generated=True, draw=draw)])
    text = loaded.explain()
    runner.close()
    return found, text


@pytest.mark.parametrize(
    "format",
    [
        None,
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("iq3_s/iq2_xs", "iq1_m/iq4_xs", "fp8_e4m3fn_row_bf16/mxfp8", "nvfp4/mxfp4", "q3_k/q2_0")
        ),
    ],
)
def test_the_simulated_gpu_gives_the_text_of_the_processor(format: str | None) -> None:
    exact, _ = run("cpu", deterministic=True, format=format)
    ids = [d.token for d in exact]
    on_gpu, plans = run("cuda-sim", deterministic=True, format=format)
    assert [d.token for d in on_gpu] == ids
    assert "fused" not in plans
    fused, plans = run(
        "cuda-sim", deterministic=False, forced=ids, format=format
    )  # 8-bit activations may turn a near tie
    assert "fused_attention" in plans and "fused_linear" in plans
    for mine, theirs in zip(fused, exact, strict=True):
        assert mine.logprob is not None and theirs.logprob is not None
        assert abs(mine.logprob - theirs.logprob) < 0.1


def test_auto_is_the_processor_where_there_is_no_gpu() -> None:
    if cuda_missing() is None:
        pytest.skip("there is a GPU")
    lines: list[str] = []
    backend = open_backend(config("auto"), lambda label, text: lines.append(f"{label} {text}"), lambda *_: None)
    assert backend.info.kind == "cpu" and not backend.is_gpu
    assert any(line.startswith("device ") for line in lines)
    with pytest.raises(DeviceError, match="--device cpu"):
        open_backend(config("cuda"), lambda *_: None, lambda *_: None)


def test_times_of_a_simulation_are_refused() -> None:
    with pytest.raises(UsageError, match="calibrate cpu or cuda"):
        calibrate_model(config("cuda-sim"))


def test_format_is_for_synthetic_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--quantize q4_g64"):
        load(EngineConfig(model=str(tmp_path), format="q4_g64"))


def test_a_graph_is_fused_once_for_all_widths_with_the_same_routes() -> None:
    model = open_model(config("cuda-sim"))
    backend = open_backend(config("cuda-sim"), lambda *_: None, lambda *_: None)
    graph = model.graph("sample")
    fused = {rows: backend.graph(graph, Env(rows=rows, logit_rows=1, seqs=1)) for rows in (1, 2, 64, 128)}
    assert fused[1] is fused[2] and fused[64] is fused[128]
    assert fused[1] is not fused[64]  # codes pass between kernels in narrow steps alone
    for rows, found in fused.items():
        env = Env(rows=rows, logit_rows=1, seqs=1)
        alone = evolve(backend).graph(graph, env)  # which has fused nothing yet
        assert [n.op for n in found.nodes] == [n.op for n in alone.nodes]
