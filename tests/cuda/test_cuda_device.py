"""devices/cuda.py over a pretended GPU: placement, record, capture, results, refusals."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ninfer.devices.cuda import CudaBench, CudaDevice, check_driver, cuda_info
from ninfer.devices.cuda_sim import SimDevice, SimPrograms, sim_info
from ninfer.devices.synthetic import Synthetic
from ninfer.errors import DeviceError
from ninfer.formats.quant import Packed, by_name
from ninfer.ir.graph import Graph
from ninfer.ir.ops.embed import embed, take_rows
from ninfer.ir.ops.norm import rms_norm
from ninfer.ir.ops.sample import sample
from ninfer.ir.types import Env, TensorType
from ninfer.routes.cuda_layout import device_layout
from ninfer.routes.measure import calibrate
from tests.cuda.fake_gpu import CUDARuntimeError, FakeGpu, FakePrograms
from tests.cuda.parity import lowering_for

V, H = 256, 256
ENV = Env(rows=4, logit_rows=2, seqs=2, slots=2, pages=3, max_pages=2)


def graph() -> Graph:
    """Tokens to embedding to norm to draw, the hidden values being the logits."""
    g = Graph()
    x = embed(g, g.step["tokens"], g.matrix("table", (V, H), by_name("q8_0")))
    x = rms_norm(g, x, g.weight("norm", TensorType((H,))), eps=1e-6)
    sample(g, take_rows(g, x, g.step["logit_rows"]), domain=V)
    return g


def weights() -> dict[str, Any]:
    rng, fmt = np.random.default_rng(1), by_name("q8_0")
    table = Packed(fmt, fmt.pack(rng.standard_normal((V, H)).astype(np.float32)), (V, H))
    return {"table": table, "norm": rng.standard_normal(H).astype(np.float32)}


def device(gpu: FakeGpu, sim: SimPrograms) -> CudaDevice:
    return CudaDevice(gpu.libs, cuda_info(gpu.libs), FakePrograms(gpu, sim), device_layout)  # type: ignore[arg-type]


def executable(device: Any, weights: dict[str, Any]) -> Any:
    g = graph()
    plan = lowering_for(sim_info()).lower(g, ENV)
    states = {name: value.type for name, value in g.states.items()}
    memory = device.memory(weights, states, ENV, plan.arena_bytes)
    return device.bind(plan, memory, {}, device.compile([plan]))


def fill(executable: Any, tokens: list[int]) -> None:
    step, header = executable.step, executable.header
    step["tokens"][: len(tokens)] = tokens
    step["logit_rows"][:2] = [0, len(tokens) - 1]
    header["rows"], header["seqs"], header["logit_rows"] = len(tokens), 1, 2


def test_a_captured_plan_gives_what_the_simulation_gives_step_after_step(sim_programs: SimPrograms) -> None:
    gpu, w = FakeGpu(), weights()
    ours, theirs = executable(device(gpu, sim_programs), w), executable(SimDevice(sim_programs, device_layout), w)
    for tokens in ([3, 7], [200, 1, 255], [9]):
        results = []
        for e in (ours, theirs):
            fill(e, tokens)
            results.append({k: v.copy() for k, v in e.launch().items()})
        assert results[0].keys() == {"token", "logprob", "top"}
        assert (results[0]["token"] == results[1]["token"]).all() and len(results[0]["token"]) == 2


def test_only_the_first_kernel_waits_for_the_copy_of_the_record(sim_programs: SimPrograms) -> None:
    gpu = FakeGpu()
    executable(device(gpu, sim_programs), weights())
    assert gpu.dependent[0] is False and all(gpu.dependent[1:]) and len(gpu.dependent) > 4


def test_states_are_zero_and_can_be_written_and_read(sim_programs: SimPrograms) -> None:
    e = executable(device(FakeGpu(), sim_programs), weights())
    assert not e.memory.read_state("counts", slice(None)).any()
    e.memory.write_state("page_table", (1, slice(0, 2)), np.array([5, 6], np.int32))
    assert e.memory.read_state("page_table", 1).tolist() == [5, 6]
    e.memory.write_state("bias", 1, np.arange(V, dtype=np.float32))
    assert e.memory.read_state("bias", 1)[7] == 7 and e.memory.read_state("bias", 0)[7] == 0


def test_rows_of_states_go_to_host_memory_and_back(sim_programs: SimPrograms, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = executable(device(FakeGpu(), sim_programs), weights()).memory
    names, dice = ("counts", "bias"), np.random.default_rng(3)
    for staged in (True, False):
        if not staged:
            monkeypatch.setattr("ninfer.devices.cuda.STAGED_BYTES", 0)
        counts, bias = dice.integers(0, 9, V).astype(np.int32), dice.standard_normal(V).astype(np.float32)
        memory.write_state("counts", 1, counts)
        memory.write_state("bias", 1, bias)
        reads = [memory.read_rows(names, 1) for _ in range(3)]
        memory.settle()
        for raw in reads:
            assert raw.tobytes() == counts.tobytes() + bias.tobytes()
        memory.write_rows(names, 0, reads[0])
        memory.settle()
        assert (memory.read_state("counts", 0) == counts).all() and (memory.read_state("bias", 0) == bias).all()
    memory.free()


@pytest.mark.parametrize("most", [9, 2])
def test_host_memory_is_pinned_ahead_as_far_as_it_can_be(
    sim_programs: SimPrograms, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    gpu, asked, done = FakeGpu(), list[int](), threading.Event()
    d = device(gpu, sim_programs)
    memory = executable(d, weights()).memory

    def alloc(nbytes: int) -> bytearray:
        asked.append(nbytes)
        if len(asked) == min(most + 1, 5):
            done.set()
        if len(asked) > most:
            raise CUDARuntimeError("out of memory")
        return bytearray(nbytes)

    monkeypatch.setattr(d.cupy.cuda, "alloc_pinned_memory", alloc)
    memory.reserve_rows({4096: 2, 512: 3})
    assert done.wait(10)
    memory.free()  # waits for the thread
    assert asked == [4096, 4096, 512, 512, 512][: most + 1]


def test_synthetic_weights_are_the_tile_over_and_over(sim_programs: SimPrograms) -> None:
    fmt = by_name("q4_g64")
    w = {n: Synthetic(fmt, (600, 128), seed) for n, seed in (("a", 0), ("b", 3))}
    d = device(FakeGpu(), sim_programs)
    memory = d.memory(w, {}, ENV, 256)
    raw = device_layout(fmt)(w["a"].tile().raw, (256, 128))
    run = raw.nbytes // 16
    for name, turn in (("a", 0), ("b", 3)):
        at = memory.weight_at[name]
        got = np.ctypeslib.as_array((ctypes.c_uint8 * (38 * run)).from_address(at)).reshape(38, run)
        want = raw.reshape(16, run)[(np.arange(38) + turn) % 16]
        assert (got == want).all()
        whole = device_layout(fmt)(w[name].whole().raw, (600, 128))
        assert (whole.reshape(38, run)[:37] == got[:37]).all()  # the last run ends within the matrix


def test_a_thread_with_the_number_of_an_earlier_one_enters_too(
    sim_programs: SimPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, entered = device(FakeGpu(), sim_programs), list[int]()
    monkeypatch.setattr(type(d.stream), "use", lambda stream: entered.append(threading.get_ident()))

    def enter_twice() -> None:
        d.enter()
        d.enter()

    for _ in range(8):
        thread = threading.Thread(target=enter_twice)
        thread.start()
        thread.join()
    assert len(entered) == 8


def test_too_little_memory_says_what_would_fit(sim_programs: SimPrograms) -> None:
    d = device(FakeGpu(free_bytes=1 << 28), sim_programs)
    with pytest.raises(DeviceError, match=r"0\.2 GiB free, but .* needed .*--quantize"):
        d.memory(weights(), {}, ENV, 4 << 20)
    kv = {"kv.0": TensorType((1 << 20, 1024))}
    with pytest.raises(DeviceError, match=r"lower --kv-capacity .* to \d+%"):
        device(FakeGpu(free_bytes=3 << 30), sim_programs).memory({}, kv, ENV, 256)


def test_calibration_checks_and_times_every_route(sim_programs: SimPrograms) -> None:
    d, g, lowering = device(FakeGpu(), sim_programs), graph(), lowering_for(sim_info())
    bench = CudaBench(d, weights(), {name: value.type for name, value in g.states.items()}, ENV, {})

    def write(width: int, step: Any, header: Any) -> None:
        step["tokens"][:width] = 5
        step["row_seq"][:width], step["row_count"][:1], header["seqs"] = 0, width, 1
        header["rows"], header["logit_rows"] = width, min(width, 2)

    result = calibrate(lambda env: g, lowering, bench, [evolve(ENV, rows=1, logit_rows=1), ENV], write, repeat=3)
    assert {t.candidate for t in result.timings} >= {"embed.cuda", "norm.rms.cuda", "take_rows.cuda", "sample.cuda"}
    assert all(t.seconds == 1e-3 and t.error < 1e-5 for t in result.timings if t.key.split("/")[0] != "sample")


def test_an_old_driver_is_named() -> None:
    with pytest.raises(DeviceError, match=r"supports CUDA 12\.4.*NVRTC 13\.5.*cuda12"):
        check_driver(12040, "13.5")
    check_driver(13000, "13.5")


def test_an_old_card_is_refused() -> None:
    with pytest.raises(DeviceError, match="sm_70"):
        cuda_info(FakeGpu(major=7).libs)
