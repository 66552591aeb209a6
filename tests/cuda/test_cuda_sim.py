"""The simulation's own instructions against numpy, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.devices.base import Source
from ninfer.devices.cuda_sim import SimPrograms, run_kernel, sim_info, sim_source
from ninfer.errors import DeviceError
from ninfer.formats.dtypes import bf16_to_f32, f32_to_bf16
from ninfer.routes.render import Renderer

RUN = Callable[..., None]


@pytest.fixture(scope="module")
def run(sim_programs: SimPrograms) -> RUN:
    """Compile `body` as a kernel of the given parameters and run one block of it over the arrays."""
    renderer = Renderer(sim_info())
    prelude = renderer.render_template("cuda/prelude.h.j2", {}).text
    mma = renderer.render_template("cuda/mma.h.j2", {}).text

    def call(parameters: str, body: str, *arrays: NDArray, threads: int = 32, order: int = 0, shared: int = 0) -> None:  # type: ignore[type-arg]
        entry = f"k{abs(hash((parameters, body)))}"
        source = Source(entry, f'extern "C" __global__ void {entry}({parameters}) {{ {body} }}', (prelude, mma))
        (address,) = sim_programs.addresses([sim_source(source)]).values()
        run_kernel(entry, address, [a.ctypes.data for a in arrays], (1, 1, 1), threads, shared, order=order)

    return call


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("order", [0, 1])
def test_shuffles_and_votes(run: RUN, order: int) -> None:
    x, out, votes = np.arange(32, dtype=np.float32) ** 2, np.zeros((4, 32), np.float32), np.zeros(2, np.uint32)
    run(
        "const f32* x, f32* out, u32* votes",
        """out[LANE] = warp_sum(x[LANE]); out[32 + LANE] = __shfl_down_sync(FULL, x[LANE], 3);
        out[64 + LANE] = __shfl_up_sync(FULL, x[LANE], 1, 8); out[96 + LANE] = __shfl_sync(FULL, x[LANE], 5, 8);
        u32 b = __ballot_sync(FULL, LANE % 3 == 0); if (LANE == 0) votes[0] = b;
        if (LANE < 4) { u32 c = __ballot_sync(15u, 1); if (LANE == 0) votes[1] = c; }""",
        x, out, votes, order=order,
    )  # fmt: skip
    lane = np.arange(32)
    assert (out[0] == x.sum()).all()
    assert (out[1] == x[np.where(lane + 3 < 32, lane + 3, lane)]).all()
    assert (out[2] == x[np.where(lane % 8 > 0, lane - 1, lane)]).all()
    assert (out[3] == x[lane // 8 * 8 + 5]).all()
    assert votes[0] == sum(1 << i for i in range(0, 32, 3)) and votes[1] == 15


@pytest.mark.parametrize("order", [0, 1])
def test_tensor_core_products(run: RUN, order: int) -> None:
    a, b = rng().standard_normal((16, 16)), rng().standard_normal((8, 16))  # b as [n, k]
    fragments = """
        const int g = LANE / 4, q = LANE % 4;
        const u32* A = (const u32*)a; const u32* B = (const u32*)b;
        u32 x[4] = {A[g * 8 + q], A[(g + 8) * 8 + q], A[g * 8 + q + 4], A[(g + 8) * 8 + q + 4]};
        u32 y[2] = {B[g * 8 + q], B[g * 8 + q + 4]};"""
    store = """c[g * 8 + 2 * q] = z[0]; c[g * 8 + 2 * q + 1] = z[1];
        c[(g + 8) * 8 + 2 * q] = z[2]; c[(g + 8) * 8 + 2 * q + 1] = z[3];"""
    c = np.zeros((16, 8), np.float32)
    for name in ("bf16", "f16"):
        if name == "bf16":
            ha, hb = f32_to_bf16(a.astype(np.float32)), f32_to_bf16(b.astype(np.float32))
            want = bf16_to_f32(ha) @ bf16_to_f32(hb).T
        else:
            ha, hb = a.astype(np.float16).view(np.uint16), b.astype(np.float16).view(np.uint16)
            want = ha.view(np.float16).astype(np.float32) @ hb.view(np.float16).astype(np.float32).T
        run(
            "const u16* a, const u16* b, f32* c",
            f"{fragments} f32 z[4] = {{0, 0, 0, 0}}; mma_{name}(z, x, y); {store}",
            ha,
            hb,
            c,
            order=order,
        )
        np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-5)
    ia, ib = rng().integers(-128, 128, (16, 32)).astype(np.int8), rng().integers(-128, 128, (8, 32)).astype(np.int8)
    ic = np.zeros((16, 8), np.int32)
    run(
        "const i8* a, const i8* b, i32* c",
        f"{fragments} i32 z[4] = {{0, 0, 0, 0}}; mma_s8(z, x, y); {store}",
        ia,
        ib,
        ic,
        order=order,
    )
    assert (ic == ia.astype(np.int32) @ ib.astype(np.int32).T).all()
    fa, fb = (rng().integers(-9, 9, shape).astype(np.float32) for shape in ((16, 8), (8, 8)))
    run(
        "const f32* a, const f32* b, f32* c",
        f"{fragments} f32 z[4] = {{0, 0, 0, 0}}; mma_tf32(z, x, y); {store}",
        fa,
        fb,
        c,
        order=order,
    )
    assert (c == fa @ fb.T).all()


@pytest.mark.parametrize("order", [0, 1])
def test_matrix_loads_and_asynchronous_copies(run: RUN, order: int) -> None:
    x, plain, turned = (
        np.arange(256, dtype=np.uint16).reshape(32, 8),
        np.zeros((4, 32, 2), np.uint16),
        np.zeros((4, 32, 2), np.uint16),
    )
    run(
        "const u16* x, u32* plain, u32* turned",
        """__shared__ __align__(16) u16 s[256];
        cp_async16(s + 8 * LANE, x + 8 * LANE); cp_commit(); cp_wait<0>(); __syncwarp();
        u32 r[4]; ldmatrix4(r, s + 8 * LANE); for (int i = 0; i < 4; i++) plain[32 * i + LANE] = r[i];
        ldmatrix4_t(r, s + 8 * LANE); for (int i = 0; i < 4; i++) turned[32 * i + LANE] = r[i];""",
        x, plain, turned, order=order,
    )  # fmt: skip
    matrices = x.reshape(4, 8, 8)
    assert (plain.reshape(4, 8, 8) == matrices).all()
    assert (turned.reshape(4, 8, 8) == matrices.swapaxes(1, 2)).all()


def test_an_asynchronous_copy_lands_only_when_waited_for(run: RUN) -> None:
    x, out = np.ones(4, np.uint32), np.zeros(2, np.uint32)
    run(
        "const u32* x, u32* out",
        """__shared__ __align__(16) u32 s[4];
        if (LANE == 0) { cp_async16(s, x); cp_commit(); out[0] = s[0]; cp_wait<0>(); out[1] = s[0]; }""",
        x, out,
    )  # fmt: skip
    assert out.tolist() == [0xFFFFFFFF, 1]


def test_a_missing_barrier_shows_in_one_of_the_two_orders(run: RUN) -> None:
    body = "__shared__ u32 s[64]; s[threadIdx.x] = threadIdx.x; out[threadIdx.x] = s[63 - threadIdx.x];"
    good, bad = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    run("u32* out", body.replace(" out", " __syncthreads(); out"), good, threads=64)
    assert (good == np.arange(64)[::-1]).all()
    for order in (0, 1):
        run("u32* out", body, bad, threads=64, order=order)
        assert (bad != good).any()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x < 32) bar_sync(1, 64);", "no thread of the block can go on"),
        ("if (LANE == 0) __syncwarp(); else warp_sum(1.0f);", "different collectives"),
        ("cp_async16(out, out + 8); cp_commit();", "nobody waited for"),
        ("load16((u8*)out + 4);", "not aligned"),
        ("if (LANE != 3) __syncwarp();", "left before a collective"),
    ],
)
def test_what_would_hang_or_fault_is_an_error(run: RUN, body: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        run("u32* out", body, np.zeros(64, np.uint32), threads=64)


def test_atomics_and_named_barriers(run: RUN) -> None:
    out = np.zeros(4, np.uint32)
    run(
        "u32* out",
        """atomicAdd(out, 1u); atomicMax(out + 1, threadIdx.x);
        if (threadIdx.x < 64) bar_sync(2, 64); if (threadIdx.x == 0) out[2] = out[0];
        if (__syncthreads_count(threadIdx.x & 1) == 48) out[3] = 1;""",
        out, threads=96,
    )  # fmt: skip
    assert out[0] == 96 and out[1] == 95 and out[2] >= 64 and out[3] == 1
