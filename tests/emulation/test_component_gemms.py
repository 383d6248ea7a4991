"""Tests of the component GEMMs: their numbers, plans and machine code, and that machine code executed on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.kernels.component_gemms import COMPONENT_GEMMS
from cutlass_py_attn.kernels.component_gemms.kernel import spec_of
from cutlass_py_attn.kernels.component_gemms.products import BY_NAME, doivj, grad_k, grad_q, grad_v, matmul_qk
from cutlass_py_attn.launch.build import F32_ROW_PADDING
from cutlass_py_attn.launch.smem import swizzle_bytes
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan.component_gemms import all_component_gemms, plan_component_gemm
from cutlass_py_attn.plan.plan import Plan
from tests.support import gemm_emulator
from tests.support.gemm_emulator import TILES, Array, emulate
from tests.support.machine_code import MachineCode

SAMPLES = [
    *((component_gemm, family, "bfloat16", 128) for family in ("sm80", "sm90") for component_gemm in COMPONENT_GEMMS),
    *((component_gemm, "sm90", "float16", 64) for component_gemm in COMPONENT_GEMMS),
    *((component_gemm, "sm80", "float32", 64) for component_gemm in COMPONENT_GEMMS),
    ("matmul_qk", "sm80", "float16", 96),
    ("grad_v", "sm80", "bfloat16", 96),
    ("grad_q", "sm80", "float32", 96),
    ("doivj", "sm90", "bfloat16", 96),
    ("grad_k", "sm90", "bfloat16", 192),
    ("grad_q", "sm90", "float16", 256),
    ("grad_v", "sm80", "float16", 256),
]


def arch_of(family: str) -> str:
    """The oldest target of a family."""
    return "sm_90a" if family == "sm90" else "sm_80"


@pytest.mark.parametrize(
    ("component_gemm", "shape", "majors", "accumulates"),
    [
        ("matmul_qk", (128, 128, 96), (False, False), False),
        ("doivj", (128, 128, 96), (False, False), False),
        ("grad_v", (128, 96, 128), (True, True), True),
        ("grad_k", (128, 96, 128), (True, True), True),
        ("grad_q", (128, 96, 128), (False, True), False),
    ],
)
def test_spec(component_gemm: str, shape: tuple[int, int, int], majors: tuple[bool, bool], accumulates: bool) -> None:
    spec = spec_of(plan_component_gemm(component_gemm, "sm90", "bfloat16", 96, "sm_90a").build)
    assert (spec.m, spec.n, spec.k) == shape
    assert (spec.a_transposed, spec.b_transposed) == majors
    assert spec.accumulate == accumulates
    assert spec.name == BY_NAME[component_gemm].name == component_gemm
    assert spec.equation == BY_NAME[component_gemm].equation
    assert spec.instruction == (64, spec.n, 16)
    assert spec.instructions == spec.k // 16
    assert spec.accumulator_registers == spec.m * spec.n // 256


def test_float32_takes_three_times_the_instructions() -> None:
    tile = TileConfig(64, 64, 4)
    half, full = (
        spec_of(plan_component_gemm("grad_q", "sm80", dtype, 64, "sm_80", tile=tile).build)
        for dtype in ("float16", "float32")
    )
    assert full.instruction == (16, 8, 8)
    assert full.instructions == 3 * 2 * half.instructions  # three products, and half the depth in each


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("softmax", "sm80", "float16", 64, "sm_80"), "component_gemm = 'softmax'"),
        (("grad_q", "volta", "float16", 64, "sm_80"), "family = 'volta'"),
        (("grad_q", "sm90", "float32", 64, "sm_90a"), "dtype = 'float32'"),
        (("grad_q", "sm90", "float16", 64, "sm_80"), "has no wgmma"),
        (("grad_q", "sm80", "float16", 72, "sm_80"), "head_dim = 72"),
        (("grad_q", "sm80", "float16", 288, "sm_80"), "head_dim = 288"),
        (("grad_q", "sm80", "float16", 64, "sm_80", -1), "tiles = -1"),
        (("grad_v", "sm80", "float16", 256, "sm_80", 1, TileConfig(128, 256, 8)), "registers a thread"),
        (("grad_v", "sm90", "float16", 256, "sm_90a", 1, TileConfig(96, 96, 4)), "multiple of 64 rows"),
        (("grad_v", "sm90", "float16", 64, "sm_90a", 1, TileConfig(64, 128, 4)), "64 rows a warpgroup"),
        (("matmul_qk", "sm80", "float32", 256, "sm_86", 1, TileConfig(128, 128, 8)), "shared memory"),
        (("grad_v", "sm80", "float16", 64, "sm_80", 1, TileConfig(16, 16, 8)), "do not divide among 8 warps"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(NotSupported, match=reason):
        plan_component_gemm(*arguments)


@pytest.mark.parametrize(("arch", "count"), [("sm_80", 75), ("sm_86", 75), ("sm_90a", 125), ("sm_120", 75)])
def test_all_component_gemms(arch: str, count: int) -> None:
    plans = all_component_gemms(arch)
    assert len({plan.symbol for plan in plans}) == len(plans) == count
    for plan in plans:
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.build.shared_memory_bytes <= plan.architecture.shared_memory_per_block
        for item in plan.launches[0].tensor_maps:
            assert item.box[1] <= 256
            assert item.box[0] * 2 == item.swizzle_bytes
            assert item.sizes[0] % item.box[0] == 0


def test_no_tiles_launch_nothing() -> None:
    assert plan_component_gemm("grad_q", "sm90", "float16", 64, "sm_90a", 0).launches == ()


@pytest.mark.parametrize(("component_gemm", "family", "dtype", "head_dim"), SAMPLES)
def test_machine_code(component_gemm: str, family: str, dtype: str, head_dim: int, machine_code: MachineCode) -> None:
    """compile() itself refuses spills, stack, ptxas remarks and parameters that differ from the ABI."""
    plan = plan_component_gemm(component_gemm, family, dtype, head_dim, arch_of(family), TILES)
    spec, made = spec_of(plan.build), machine_code(plan)
    found = re.findall(r"\b(wgmma\.mma_async|mma\.sync)\S*\.m(\d+)n(\d+)k(\d+)", made.ptx)
    name = "wgmma.mma_async" if family == "sm90" else "mma.sync"
    assert found == [(name, *(str(x) for x in spec.instruction))] * spec.instructions
    assert made.registers <= spec.accumulator_registers + (40 if family == "sm90" else 120)
    if family == "sm90":
        boxes = re.findall(r"cp\.async\.bulk\.tensor\.2d", made.ptx)
        assert len(boxes) == sum(item.sizes[0] // item.box[0] for item in plan.launches[0].tensor_maps)


@pytest.mark.parametrize(("component_gemm", "family", "dtype", "head_dim"), SAMPLES)
def test_emulated_result(
    component_gemm: str, family: str, dtype: str, head_dim: int, machine_code: MachineCode
) -> None:
    """The PTX, executed: 16-bit products of small integers exactly, float32 to three TF32 products' error."""
    plan = plan_component_gemm(component_gemm, family, dtype, head_dim, arch_of(family), TILES)
    machine_code(plan)
    a, b, c = emulate(plan)
    expected = BY_NAME[component_gemm].reference(a, b)
    if dtype == "float32":
        assert np.linalg.norm(c - expected) <= 1e-6 * np.linalg.norm(expected)
    else:
        assert (c == expected).all()


@pytest.mark.parametrize("tile", [TileConfig(64, 64, 4), TileConfig(256, 64, 8), TileConfig(128, 128, 4)])
def test_emulated_warpgroups(tile: TileConfig) -> None:
    """One warpgroup, and rows beyond 64 in each."""
    a, b, c = emulate(plan_component_gemm("matmul_qk", "sm90", "bfloat16", 64, "sm_90a", TILES, tile))
    assert (c == matmul_qk.reference(a, b)).all()


@pytest.mark.parametrize("head_dim", [96, 128, 160])
def test_emulated_wide_warps(head_dim: int) -> None:
    """Warps that share no columns: each computes all of head_dim, as the forward's O += P V does."""
    plan = plan_component_gemm("grad_q", "sm80", "bfloat16", head_dim, "sm_80", TILES, TileConfig(64, 64, 4))
    plan = replace(plan, build=replace(plan.build, warps_grad_q=(4, 1)))
    a, b, c = emulate(plan)
    assert (c == grad_q.reference(a, b)).all()


def test_references_make_the_backward() -> None:
    """One tile, dense: the five products around dS = P (dP - delta) are the gradients of softmax(Q K^T) V."""
    random = np.random.default_rng(3)
    q, k, v, do = (random.standard_normal((8, 4)) for _ in range(4))

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        p = np.exp(matmul_qk.reference(q, k))
        p /= p.sum(axis=1, keepdims=True)
        return p, grad_q.reference(p, v)

    p, o = forward(q, k, v)
    ds = p * (doivj.reference(do, v) - (do * o).sum(axis=1, keepdims=True))
    gradients = (grad_q.reference(ds, k), grad_k.reference(ds, q), grad_v.reference(p, do))
    for which, gradient in enumerate(gradients):
        step = 1e-6 * random.standard_normal((8, 4))
        sides = []
        for sign in (1, -1):
            moved = [x + sign * step * (i == which) for i, x in enumerate((q, k, v))]
            sides.append((forward(*moved)[1] * do).sum())
        assert np.isclose((sides[0] - sides[1]) / 2, (gradient * step).sum(), rtol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (32, 96), (16, 32), (128, 64)])
def test_tiles_lie_as_the_hardware_swizzles(rows: int, columns: int) -> None:
    """shared_tile and smem_tile_at name the same bytes, and the swizzle between them is the hardware's."""
    layouts = pytest.importorskip("tests.support.gemm_layouts")
    shape, width = (rows, columns, 2), swizzle_bytes(columns)
    tile = layouts.run(layouts.tile_offsets, shape, False, rows, columns)
    plain = layouts.run(layouts.wgmma_offsets, shape, rows, columns)
    assert (np.sort(tile.ravel()) == np.arange(tile.size)).all()
    assert (gemm_emulator.swizzle(plain * 2, width) == tile * 2).all()
    row, column, stage = np.indices(shape)
    strip = width // 2
    expected = stage * rows * columns + column // strip * rows * strip + row * strip + column % strip
    assert (plain == expected).all()


def test_float32_tiles_are_padded() -> None:
    layouts = pytest.importorskip("tests.support.gemm_layouts")
    tile = layouts.run(layouts.tile_offsets, (32, 64, 2), True, 32, 64)
    row, column, stage = np.indices(tile.shape)
    assert (tile == (stage * 32 + row) * (64 + F32_ROW_PADDING) + column).all()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("width", [64, 128])
def test_wgmma_accumulator_is_the_next_operand(groups: int, width: int) -> None:
    layouts = pytest.importorskip("tests.support.gemm_layouts")
    tile = TileConfig(128, width, 4 * groups)
    first = spec_of(plan_component_gemm("matmul_qk", "sm90", "bfloat16", 64, "sm_90a", tile=tile).build)
    second = spec_of(plan_component_gemm("grad_q", "sm90", "bfloat16", 64, "sm_90a", tile=tile).build)
    shape = (first.threads, first.accumulator_registers, 2, 2)
    pairs = layouts.run(layouts.wgmma_relayout, shape, first, second)
    assert (pairs[:, :, 0] == pairs[:, :, 1]).all()
    assert len(np.unique(pairs[:, :, 0].reshape(-1, 2), axis=0)) == first.m * first.n
    held = first.m // (32 * groups)
    rows = layouts.run(layouts.wgmma_rows, (first.threads, held, first.n // 4, 2), first, held)
    assert (rows[..., 0] == rows[:, :, :1, 0]).all()
    assert (rows[..., 1] == rows[:, :1, :, 1]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mma_sync_accumulator_is_the_next_operand(dtype: str) -> None:
    layouts = pytest.importorskip("tests.support.gemm_layouts")
    tile = TileConfig(64, 32, 4)
    first, second = (
        replace(spec_of(plan_component_gemm(component_gemm, "sm80", dtype, 64, "sm_80", tile=tile).build), warps=(4, 1))
        for component_gemm in ("matmul_qk", "grad_q")
    )
    shape = (first.threads, first.accumulator_registers, 2, 2)
    pairs = layouts.run(layouts.mma_relayout, shape, first, second, dtype, arch="sm_80")
    assert (pairs[:, :, 0] == pairs[:, :, 1]).all()
    assert len(np.unique(pairs[:, :, 0].reshape(-1, 2), axis=0)) == first.m * first.n
