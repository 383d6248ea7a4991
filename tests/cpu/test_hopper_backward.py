"""The Hopper backward: which problems it takes, its plans and tensor maps, and its machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fakes import expect_taken

from cutlass_py_attn import hopper, kernels, planner
from cutlass_py_attn.compiler import compile as compile_now
from cutlass_py_attn.device import architecture
from cutlass_py_attn.masks import Causal, Full, Mask
from cutlass_py_attn.plan import Plan, TensorMap
from cutlass_py_attn.problem import Problem, Shape, Tensor
from cutlass_py_attn.shared_memory import shared_columns


def backward(dim: int = 128, dim_value: int = 128, mask: Mask | None = None, heads_key: int = 4) -> Problem:
    """A dense problem that the family takes: 200 queries, 300 keys, 4 heads, 2 batches."""
    return Problem.dense("backward", Shape(2, 200, 300, 4, dim, dim_value, heads_key), "bfloat16", mask or Full())


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({}, ()),
        ({"mask": Causal(17)}, ()),
        ({"deterministic": True}, ("deterministic gradients",)),
        ({"num_splits_key": 2}, ("num_splits_key",)),
        ({"grad_key": None}, ("choice of gradients",)),
        ({"softcap": 2.0}, ("softcap",)),
        ({"grad_output": Tensor((2, 200, 4, 128), (0, 512, 128, 1), "bfloat16")}, ("strides of 0 or less",)),
        ({"grad_value": Tensor((2, 300, 4, 128), (300 * 512, 512, 128, 1), "bfloat16", 8)},
         ("rows aligned to less than 16 bytes",)),
    ],
)  # fmt: skip
def test_what_the_family_takes(changes: dict[str, Any], lacking: tuple[str, ...]) -> None:
    expect_taken(backward().replace(**changes), lacking)


@pytest.mark.parametrize(
    ("dims", "changes", "lacking"),
    [
        ((192, 128), {}, ()),
        ((256, 256), {"mask": Causal()}, ()),
        ((136, 64), {}, ("head dims beyond 128 other than 192/128, 192/192, 256/256",)),
        ((64, 136), {}, ("head dims beyond 128 other than 192/128, 192/192, 256/256",)),
        ((264, 264),
         {},
         ("head dims beyond 256", "head dims beyond 128 other than 192/128, 192/192, 256/256")),
        ((256, 256), {"mask": Causal(50)}, ("windows with head dims beyond 128",)),
        ((192, 192), {"softcap": 2.0}, ("softcap",)),
    ],
)  # fmt: skip
def test_which_wide_heads_the_family_takes(
    dims: tuple[int, int], changes: dict[str, Any], lacking: tuple[str, ...]
) -> None:
    assert hopper.lacking(backward(*dims).replace(**changes)) == lacking


def test_wide_heads_in_other_forms_are_generic() -> None:
    grouped = backward(256, 256, heads_key=2)
    half = Problem.dense("backward", Shape(1, 64, 64, 1, 256, 256), "float16", Full())
    assert hopper.lacking(grouped) == ("grouped",)
    assert hopper.lacking(half) == ("float16 with head dims beyond 128",)
    for problem in (grouped, half):
        assert planner.plan(problem, "sm_90a").build.family == "generic"


@pytest.mark.parametrize("dims", [(8, 8), (32, 64), (64, 64), (80, 80), (96, 96), (128, 64), (64, 128), (128, 128)])
def test_plans_fit_and_come_back_from_json(dims: tuple[int, int]) -> None:
    plan = planner.plan(backward(*dims), "sm_90a")
    build = plan.build
    assert build.family == "hopper"
    assert build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block
    assert Plan.from_json(plan.to_json()) == plan
    assert f"bwd_hopper_bf16_d{dims[0]}" in plan.explain()
    assert build.buffer("barriers").bytes == 16 * (build.query_stages + 2 * build.grad_output_stages + 2)


def test_launches() -> None:
    """300 keys of 4 key heads in 2 batches are 24 tiles of 128; only the main kernel reads through tensor maps."""
    plan = planner.plans(backward(), "sm_90a", 132)[0]
    main, delta, finish = (kernels.entries(plan.build)[role] for role in ("main", "delta", "finish"))
    launches = {launch.symbol: launch for launch in plan.launches}
    assert list(launches) == [delta, main, finish]
    assert (launches[main].grid, launches[main].block) == ((24, 1, 1), (512, 1, 1))
    assert launches[finish].block == (128, 1, 1)
    assert [len(launches[symbol].tensor_maps) for symbol in (delta, main, finish)] == [0, 4, 0]
    assert planner.plans(backward(heads_key=2), "sm_90a", 132)[0].launches[1].grid == (12, 1, 1)
    assert planner.plans(backward(), "sm_90a", 10)[0].launches[1].grid == (10, 1, 1)
    assert [len(kernels.parameters(plan.build, role)) for role in ("delta", "main", "finish")] == [1, 5, 1]


def test_tensor_maps_of_every_operand() -> None:
    (_, launch, _) = planner.plan(backward(96, 64), "sm_90a").launches
    assert launch.tensor_maps == (
        TensorMap("query", (96, 200, 4, 2), (384, 96, 200 * 384), (32, 64, 1, 1), 64),
        TensorMap("grad_output", (64, 200, 4, 2), (256, 64, 200 * 256), (64, 64, 1, 1), 128),
        TensorMap("key", (96, 300, 4, 2), (384, 96, 300 * 384), (32, 128, 1, 1), 64),
        TensorMap("value", (64, 300, 4, 2), (256, 64, 300 * 256), (64, 128, 1, 1), 128),
    )


@pytest.mark.parametrize(("dims", "scores"), [((192, 128), 2), ((192, 192), 2), ((256, 256), 1)])
def test_wide_plans_fit_and_come_back_from_json(dims: tuple[int, int], scores: int) -> None:
    """Where shared memory has room for them, P and dS have two slots."""
    plan = planner.plan(backward(*dims), "sm_90a")
    build = plan.build
    assert (build.family, build.tile_n, build.scores, build.grad_q) == ("hopper", 64, (4, 1), (4, 1))
    assert build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block
    assert build.buffer("p_ds").bytes == build.buffer("other_ds").bytes == scores * 64 * 64 * 2
    assert build.buffer("barriers").bytes == 16 * (build.query_stages + build.grad_output_stages + scores + 2)
    assert Plan.from_json(plan.to_json()) == plan
    assert "one dQ of both blocks of a cluster" in plan.explain()


def test_wide_launches() -> None:
    """300 keys of 4 key heads in 2 batches are 24 pairs of tiles of 64, one for each cluster of two blocks."""
    plan = planner.plans(backward(256, 256), "sm_90a", 132)[0]
    main = kernels.entries(plan.build)["main"]
    launches = {launch.symbol: launch for launch in plan.launches}
    assert (launches[main].grid, launches[main].cluster) == ((48, 1, 1), 2)
    assert [launch.cluster for symbol, launch in launches.items() if symbol != main] == [1, 1]
    assert f"{main}: grid 48 x 1 x 1, block 512 x 1 x 1, cluster 2 x 1 x 1" in plan.explain()
    assert planner.plans(backward(256, 256), "sm_90a", 11)[0].launches[1].grid == (10, 1, 1)
    assert [tensor_map.box for tensor_map in launches[main].tensor_maps] == [(64, 64, 1, 1)] * 4


@pytest.mark.parametrize(("columns", "shared"), [(192, 128), (256, 128)])
def test_columns_of_dq_are_shared_in_whole_pieces(columns: int, shared: int) -> None:
    build = planner.plan(backward(columns, columns), "sm_90a").build
    assert shared_columns(build) == shared
    assert build.buffer("other_key").bytes == 64 * shared * 2


@pytest.mark.parametrize(("dims", "mask"), [((192, 128), Causal()), ((256, 256), Full())])
def test_wide_machine_code(dims: tuple[int, int], mask: Mask) -> None:
    """compile() itself refuses spills and ptxas remarks, which say that products wait for each other."""
    plan = planner.plan(backward(*dims, mask), "sm_90a")
    build, made = plan.build, compile_now(plan)
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", made.ptx)
    # S^T and dP^T stand before their loops and in them; dQ is added to in a loop over pieces, of both blocks' keys.
    scores = 2 * (build.columns + build.columns_value) // 16
    pieces = 2 * build.tile_n // 16
    gradients = [width for columns in dims for width in ([columns] if columns <= 192 else [128, columns - 128])]
    expected = ["64"] * (scores + pieces) + [str(width) for width in gradients for _ in range(build.tile_m // 16)]
    assert sorted(products) == sorted(expected)
    assert len(re.findall(r"setmaxnreg\.(?:inc|dec)", made.ptx)) == 3
    strips = sum(-(-columns // 128) for columns in dims)  # 64 columns each, every second one
    assert len(re.findall(r"multicast::cluster", made.ptx)) == strips
    assert len(re.findall(r"cp\.async\.bulk\.shared::cluster\.shared::cta", made.ptx)) == 1
    assert len(re.findall(r"red\.relaxed\.gpu\.global\.add\.v4\.f32", made.ptx)) == 64 * 64 // 128 // 4


@pytest.mark.parametrize(("dim", "mask"), [(64, Full()), (96, Causal()), (128, Causal(50))])
def test_machine_code(dim: int, mask: Mask) -> None:
    """compile() itself refuses spills and ptxas remarks, which say that products wait for each other."""
    plan = planner.plan(backward(dim, dim, mask), "sm_90a")
    build, made = plan.build, compile_now(plan)
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", made.ptx)
    columns = 64 if dim % 64 == 0 else 32
    # S^T stands before the loop and in it, dP^T in it; dV and dK; dQ in pieces of 64 rows.
    scores, gradients = 3 * build.columns // 16, 2 * build.tile_m // 16
    pieces = build.tile_m // 64 * build.columns // columns * build.tile_n // 16
    expected = [str(build.tile_m)] * scores + [str(build.columns)] * gradients + [str(columns)] * pieces
    assert sorted(products) == sorted(expected)
    assert len(re.findall(r"setmaxnreg\.(?:inc|dec)", made.ptx)) == 3
    assert len(re.findall(r"cp\.reduce\.async\.bulk", made.ptx)) == pieces // (build.tile_n // 16)
