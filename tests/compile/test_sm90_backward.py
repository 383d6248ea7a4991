"""The sm90 backward: which problems it supports, its plans and tensor maps, and its machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cutlass_py_attn.kernels.backward_parts import grad_bias_layout as grad_bias_smem
from cutlass_py_attn.kernels.sm90_backward import layout as sm90_smem
from cutlass_py_attn.kernels.sm90_backward.layout import grad_query_piece
from cutlass_py_attn.kernels.sm90_backward_2cta.layout import first_cta_columns
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.grad_bias import uses_wgmma
from cutlass_py_attn.launch.smem import swizzle_bytes
from cutlass_py_attn.plan import entry_parameters, planner
from cutlass_py_attn.plan.plan import Plan, TensorMap
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Sequences, Shape, Tensor
from tests.support.fakes import expect_taken
from tests.support.machine_code import MachineCode
from tools.release import feature_ptx

WGMMA = r"wgmma\.mma_async\S*\.m64n(\d+)k16"  # the columns of a product
BY_HEAD = Tensor.contiguous((4,), "float32")
BIAS = Tensor.contiguous((2, 4, 200, 300), "bfloat16")


def backward(dim: int = 128, dim_value: int = 128, mask: Mask | None = None, heads_key: int = 4) -> Problem:
    """A dense problem that the family supports: 200 queries, 300 keys, 4 heads, 2 batches."""
    return Problem.dense("backward", Shape(2, 200, 300, 4, dim, dim_value, heads_key), "bfloat16", mask or Full())


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({}, ()),
        ({"mask": Causal(17)}, ()),
        ({"deterministic": True}, ()),
        ({"dropout_p": 0.1}, ()),
        ({"dropout_p": 0.1, "mask": Causal(17)}, ()),
        ({"num_splits_key": 2}, ("num_splits_key",)),
        ({"grad_key": None}, ("choice of gradients",)),
        ({"softcap": 2.0, "alibi_slopes": BY_HEAD}, ()),
        ({"sinks": BY_HEAD, "grad_sinks": BY_HEAD, "dropout_p": 0.1}, ()),
        ({"bias": BIAS}, ()),
        ({"bias": BIAS, "grad_bias": BIAS}, ("full gradient of the bias with rows aligned to less than 16 bytes",)),
        ({"grad_output": Tensor((2, 200, 4, 128), (0, 512, 128, 1), "bfloat16")}, ("strides of 0 or less",)),
        ({"grad_value": Tensor((2, 300, 4, 128), (300 * 512, 512, 128, 1), "bfloat16", 8)},
         ("rows aligned to less than 16 bytes",)),
    ],
)  # fmt: skip
def test_supported_features(changes: dict[str, Any], lacking: tuple[str, ...]) -> None:
    expect_taken(backward().replace(**changes), lacking)


def of_lengths(heads_key: int = 4, **changes: Any) -> Problem:
    """Three sequences of up to 400 queries and 300 keys, packed."""
    shape = Shape(3, 400, 300, 4, 128, 128, heads_key, tokens=(1000, 900))
    return Problem.dense("backward", shape, "bfloat16", Causal()).replace(**changes)


@pytest.mark.parametrize("seqused", [False, True])
def test_variable_lengths_are_supported(seqused: bool) -> None:
    expect_taken(of_lengths(sequences=Sequences(3, 400, 300, seqused)), ())


def test_workspace() -> None:
    """200 queries of 4 heads in 2 batches are 32 tiles of 64, each with a semaphore; one counter assigns key tiles.

    The delta kernel zeroes these; by query heads a memset does, with the sums of dK and dV.
    """
    for deterministic in (False, True):
        space = planner.plan(backward().replace(deterministic=deterministic), "sm_90a").workspace
        bytes_of = {part.name: part.bytes for part in space.buffers}
        semaphore = {"dq_semaphore": 32 * 4} if deterministic else {}
        expected = {"grad_query_accum": 32 * 64 * 128 * 4, **semaphore, "tile_count_semaphore": 4}
        assert bytes_of == {**expected, "delta": 32 * 64 * 4, "logsumexp_log2": 32 * 64 * 4}
        assert space.zero_bytes == 0
    space = planner.plan(backward(mask=Causal(), heads_key=2), "sm_90a").workspace
    zeroed = [part.name for part in space.buffers if part.offset < space.zero_bytes]
    assert zeroed == ["grad_query_accum", "grad_key_accum", "grad_value_accum", "tile_count_semaphore"]


@pytest.mark.parametrize(
    ("dims", "changes", "lacking"),
    [
        ((192, 128), {}, ()),
        ((136, 64), {"mask": Causal(50), "deterministic": True, "softcap": 2.0}, ()),
        ((192, 128), {"dropout_p": 0.1}, ("dropout",)),
        ((256, 256), {"mask": Causal()}, ()),
        ((200, 64), {}, ()),
        ((64, 136), {"mask": Causal(50)}, ()),
        ((520, 520), {}, ("head dims beyond 512",)),
        ((192, 128), {"bias": BIAS}, ()),
        ((192, 192), {"softcap": 2.0}, ("softcap",)),
        ((256, 256), {"bias": BIAS}, ("bias",)),
        ((192, 192), {"deterministic": True}, ("deterministic gradients with these head dims",)),
    ],
)  # fmt: skip
def test_supported_wide_head_dims(dims: tuple[int, int], changes: dict[str, Any], lacking: tuple[str, ...]) -> None:
    assert sm90_choice.unsupported_features(backward(*dims).replace(**changes)) == lacking


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wide_head_dims_with_gqa_are_supported(dtype: str) -> None:
    problem = Problem.dense("backward", Shape(2, 200, 300, 4, 256, 256, 2), dtype, Causal(50))
    expect_taken(problem, ())
    build = planner.plan(problem, "sm_90a").build
    assert (build.tile_n, build.features) == (64, ("grouped",))


@pytest.mark.parametrize("dims", [(8, 8), (32, 64), (64, 64), (80, 80), (96, 96), (128, 64), (64, 128), (128, 128)])
def test_plans_fit_and_round_trip_through_json(dims: tuple[int, int]) -> None:
    plan = planner.plan(backward(*dims), "sm_90a")
    build = plan.build
    assert build.family == "sm90"
    assert build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block
    assert Plan.from_json(plan.to_json()) == plan
    assert f"bwd_sm90_bf16_d{dims[0]}" in plan.explain()
    assert build.buffer("barriers").bytes == 16 * (
        build.query_stages + 2 * build.grad_output_stages + build.key_stages + 1
    )


@pytest.mark.parametrize(("dim", "tiles"), [(64, 8), (96, 32), (128, 32)])
def test_dropout_bits_of_several_query_tiles(dim: int, tiles: int) -> None:
    """As many as fit beside one key tile; they need no barriers."""
    build = planner.plan(backward(dim, dim).replace(dropout_p=0.1), "sm_90a").build
    assert build.buffer("dropout_bits").bytes == tiles * build.tile_m * build.tile_n // 8
    slots = build.query_stages + 2 * build.grad_output_stages + build.key_stages + 1
    assert (build.key_stages, build.buffer("barriers").bytes) == (1, 16 * slots)
    assert build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block


def test_sinks_have_a_kernel_of_their_own() -> None:
    """One block for each query head, launched after the three kernels of every backward."""
    problem = backward().replace(sinks=BY_HEAD, grad_sinks=BY_HEAD)
    plan = planner.plan(problem, "sm_90a")
    assert plan.build.family == "sm90"
    assert [(launch.symbol, launch.grid) for launch in plan.launches][3:] == [
        (entry_points.entries(plan.build)["sinks"], (4, 1, 1))
    ]


def test_launches() -> None:
    """300 keys of 4 key heads in 2 batches are 40 tiles of 64 or 24 of 128; only the main kernel has tensor maps."""
    plan = planner.plans(backward(), "sm_90a", 132)[0]
    main, delta, finish = (entry_points.entries(plan.build)[role] for role in ("main", "delta", "finish"))
    launches = {launch.symbol: launch for launch in plan.launches}
    assert list(launches) == [delta, main, finish]
    assert (launches[main].grid, launches[main].block) == ((40, 1, 1), (384, 1, 1))
    assert launches[finish].block == (128, 1, 1)
    assert [len(launches[symbol].tensor_maps) for symbol in (delta, main, finish)] == [0, 4, 0]
    grouped = backward(mask=Causal(), heads_key=2)
    assert planner.plans(grouped.replace(deterministic=True), "sm_90a", 132)[0].launches[1].grid == (20, 1, 1)
    assert planner.plans(grouped, "sm_90a", 132)[0].launches[1].grid == (24, 1, 1)
    for num_sms, grid, threads in ((39, 24, 512), (23, 23, 512)):
        launch = planner.plans(backward(), "sm_90a", num_sms)[0].launches[1]
        assert (launch.grid, launch.block) == ((grid, 1, 1), (threads, 1, 1))
    assert [len(entry_parameters.parameters(plan.build, role)) for role in ("delta", "main", "finish")] == [1, 5, 1]


def test_tensor_maps_of_every_operand() -> None:
    (_, launch, _) = planner.plan(backward(96, 64), "sm_90a", 23).launches
    assert launch.tensor_maps == (
        TensorMap("query", (96, 200, 4, 2), (384, 96, 200 * 384), (32, 64, 1, 1), 64),
        TensorMap("grad_output", (64, 200, 4, 2), (256, 64, 200 * 256), (64, 64, 1, 1), 128),
        TensorMap("key", (96, 300, 4, 2), (384, 96, 300 * 384), (32, 128, 1, 1), 64),
        TensorMap("value", (64, 300, 4, 2), (256, 64, 300 * 256), (64, 128, 1, 1), 128),
    )


def many(length: int, dim: int = 128, mask: Mask | None = None, **changes: Any) -> Problem:
    """A dense problem of 64 batches of 16 heads."""
    shape = Shape(64, length, length, 16, dim, dim)
    return Problem.dense("backward", shape, "bfloat16", mask or Causal()).replace(**changes)


@pytest.mark.parametrize(
    ("problem", "whole"),
    [
        (many(512), True),
        (many(512, deterministic=True), True),
        (many(512, dropout_p=0.1), True),
        (many(512, softcap=3.0), True),
        (many(256, mask=Full()), True),
        (many(512, mask=Full()), False),  # Q, dO and the sums of 132 heads are more than the L2 cache holds
        (many(512, 64, Full()), True),
        (many(1024, 64), True),
        (many(1024), False),
        (many(512, 192), False),
        (backward(mask=Causal()), False),  # eight heads keep eight multiprocessors busy
        (Problem.dense("backward", Shape(2, 200, 100, 66, 128, 128), "bfloat16", Full()), True),  # a key tile is a head
        (
            Problem.dense("backward", Shape(2, 200, 100, 16, 128, 128), "bfloat16", Full()),
            False,
        ),  # or two, where SMs idle
        (Problem.dense("backward", Shape(64, 512, 512, 16, 128, 128, 4), "bfloat16", Causal()), False),
        (Problem.dense("backward", Shape(64, 300, 200, 16, 128, 128), "bfloat16", CausalBottomRight()), False),
        (Problem.dense("backward", Shape(64, 200, 300, 16, 128, 128), "bfloat16", CausalBottomRight()), True),
        (of_lengths(sequences=Sequences(3, 400, 300)), False),
    ],
)
def test_which_problems_have_one_block_per_head(problem: Problem, whole: bool) -> None:
    builds = planner.builds(problem, "sm_90a")
    assert (builds[0].variant == "per_head") == whole
    assert not all(build.variant == "per_head" for build in builds)  # other kernels stand behind these


def test_one_block_per_head_needs_no_memset_and_no_postprocess() -> None:
    plan = planner.plans(many(512), "sm_90a", 100)[0]
    assert [launch.symbol.removeprefix(plan.symbol) for launch in plan.launches] == ["_delta_1", "_0"]
    assert plan.launches[1].grid == (100, 1, 1)
    assert [part.name for part in plan.workspace.buffers] == ["grad_query_accum", "delta", "logsumexp_log2"]
    assert (plan.workspace.zero_bytes, plan.workspace.buffers[0].bytes) == (0, 100 * 512 * 128 * 4)
    assert plan.build.buffer("barriers").bytes == 8 * (2 * (3 + 2 + 2 + 2 + 1) + 1)
    assert Plan.from_json(plan.to_json()) == plan
    assert "one block per head" in plan.explain()


@pytest.mark.parametrize(
    ("dim", "mask", "stages", "variant"),
    [
        (64, Full(), 2, "key_registers"),
        (64, Causal(), 2, "key_registers"),
        (64, Window(50, 0), 1, "key_registers"),
        (96, Full(), 1, "ds_registers"),
        (128, Causal(), 2, "ds_registers"),
    ],
)
def test_two_key_stages_where_they_are_faster(dim: int, mask: Mask, stages: int, variant: str) -> None:
    build = planner.plan(backward(dim, dim, mask), "sm_90a", 12).build
    assert (build.key_stages, build.variant) == (stages, variant)
    assert build.buffer("key").bytes == stages * 128 * dim * 2
    assert build.buffer("work_tiles").bytes == stages * 2 * 12 * 4


@pytest.mark.parametrize(
    ("dim", "changes", "variant"),
    [(128, {}, "ds_registers"), (96, {"dropout_p": 0.1}, ""), (64, {"softcap": 2.0, "dropout_p": 0.1}, "")],
)
def test_a_bias_tile_is_in_shared_memory(dim: int, changes: dict[str, Any], variant: str) -> None:
    problem = Problem.dense("backward", Shape(2, 200, 304, 4, dim, dim), "bfloat16", Full())
    bias = Tensor.contiguous((2, 4, 200, 304), "bfloat16")
    build = planner.plan(problem.replace(bias=bias, **changes), "sm_90a", 12).build
    assert (build.family, build.variant, build.bias_vector_bytes) == ("sm90", variant, 16)
    assert build.buffer("bias").bytes == 64 * 128 * 2


@pytest.mark.parametrize(
    ("changes", "family", "variant"),
    [
        ({}, "sm90", ""),
        ({"alibi_slopes": BY_HEAD}, "sm90", ""),
        ({"softcap": 2.0}, "sm80", ""),
        ({"dropout_p": 0.1}, "sm80", ""),
    ],
)
def test_a_bias_beside_terms_that_take_its_registers(changes: dict[str, Any], family: str, variant: str) -> None:
    build = planner.plan(backward().replace(bias=BIAS, **changes), "sm_90a", 12).build
    assert (build.family, build.variant) == (family, variant)


@pytest.mark.parametrize("dims", [(192, 128), (192, 64), (160, 128), (136, 8)])
def test_plans_in_query_blocks(dims: tuple[int, int]) -> None:
    """Query and grad_output are loaded in blocks of 32 rows; dS and the sum of dQ are tiles of 64 rows.

    The accumulators of dK, dV and scores of two warpgroups fit their registers, besides 24 registers for other values.
    """
    plan = planner.plan(backward(*dims), "sm_90a")
    build, main = plan.build, plan.launches[1]
    assert (build.family, build.tile_m, build.tile_n, build.block_queries) == ("sm90", 64, 128, 32)
    assert build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block
    slots = build.query_stages, build.grad_output_stages
    assert [build.buffer(name).bytes for name in ("query", "grad_output", "ds", "logsumexp", "delta", "barriers")] == [
        *(count * 32 * columns * 2 for count, columns in zip(slots, (build.columns, build.columns_value), strict=True)),
        slots[1] // 2 * 64 * 128 * 2,
        *(count * 32 * 4 for count in slots),
        16 * (slots[0] + slots[1] + slots[1] // 2 + 2),
    ]
    assert "staging" not in {buffer.name for buffer in build.shared_memory}  # what is added comes from registers
    assert build.buffer("value").bytes == 128 * build.columns_value * 2
    assert [tensor_map.box[1] for tensor_map in main.tensor_maps] == [32, 32, 128, 128]
    assert (main.grid, main.cluster) == ((24, 1, 1), 1)
    assert 24 + (build.columns + build.columns_value + 32 + 32 // 2) // 2 <= sm90_smem.registers(build)[-1]
    assert Plan.from_json(plan.to_json()) == plan
    assert "32 queries of a tile" in plan.explain()


@pytest.mark.parametrize("num_sms", [132, 12])  # one consumer warpgroup, and two
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 96), (128, 96), (128, 128), (192, 128), (256, 256)])
def test_registers(dims: tuple[int, int], num_sms: int) -> None:
    """The warpgroups have no more registers than an SM; the warpgroup of dQ has enough for its piece."""
    build = planner.plan(backward(*dims), "sm_90a", num_sms).build
    consumers = build.threads // 128 - 2
    assert consumers == (1 if num_sms == 132 and max(dims) <= 128 else 2)
    loading, multiplying, holding = sm90_smem.registers(build)
    assert 128 * (loading + multiplying + consumers * holding) <= architecture("sm_90a").registers_per_sm
    rows, columns = sm90_smem.grad_query_piece(build)
    assert rows * columns // 128 + 24 <= multiplying
    assert build.columns % columns == 0


@pytest.mark.parametrize(("dims", "scores"), [((192, 192), 2), ((256, 256), 1)])
def test_2cta_plans_fit_and_round_trip_through_json(dims: tuple[int, int], scores: int) -> None:
    """P and dS have two stages if shared memory has space for them."""
    plan = planner.plan(backward(*dims), "sm_90a")
    build = plan.build
    assert (build.family, build.tile_n, build.warps_scores, build.warps_grad_q) == ("sm90", 64, (4, 1), (4, 1))
    assert build.shared_memory_bytes <= architecture("sm_90a").shared_memory_per_block
    assert build.buffer("p_ds").bytes == build.buffer("other_ds").bytes == scores * 64 * 64 * 2
    assert build.buffer("barriers").bytes == 16 * (build.query_stages + build.grad_output_stages + scores + 2)
    assert Plan.from_json(plan.to_json()) == plan
    assert "one dQ of both blocks of a cluster" in plan.explain()


def test_2cta_launches() -> None:
    """300 keys of 4 key heads in 2 batches are 24 pairs of tiles of 64, one for each cluster of two blocks."""
    plan = planner.plans(backward(256, 256), "sm_90a", 132)[0]
    main = entry_points.entries(plan.build)["main"]
    launches = {launch.symbol: launch for launch in plan.launches}
    assert (launches[main].grid, launches[main].cluster) == ((48, 1, 1), 2)
    assert [launch.cluster for symbol, launch in launches.items() if symbol != main] == [1, 1]
    assert f"{main}: grid 48 x 1 x 1, block 512 x 1 x 1, cluster 2 x 1 x 1" in plan.explain()
    assert planner.plans(backward(256, 256), "sm_90a", 11)[0].launches[1].grid == (10, 1, 1)
    assert [tensor_map.box for tensor_map in launches[main].tensor_maps] == [(64, 64, 1, 1)] * 4


@pytest.mark.parametrize(("columns", "shared"), [(192, 128), (256, 128)])
def test_columns_of_dq_are_shared_in_whole_pieces(columns: int, shared: int) -> None:
    build = planner.plan(backward(columns, columns), "sm_90a").build
    assert first_cta_columns(build) == shared
    assert build.buffer("other_key").bytes == 64 * shared * 2


@pytest.mark.parametrize(("dims", "mask"), [((192, 192), Causal()), ((256, 256), Full())])
def test_2cta_machine_code(dims: tuple[int, int], mask: Mask, machine_code: MachineCode) -> None:
    """compile() itself refuses spills and ptxas remarks, which say that wgmma groups wait for each other."""
    plan = planner.plan(backward(*dims, mask, heads_key=2), "sm_90a")
    build, made = plan.build, machine_code(plan)
    products = re.findall(WGMMA, made.ptx)
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


CODE = [
    backward(64, 64),
    of_lengths(mask=Causal(50), sequences=Sequences(3, 400, 300, True), deterministic=True),
    backward(128, 128, Causal(50), heads_key=2).replace(dropout_p=0.1),
    backward(136, 64, Causal(50), heads_key=2).replace(deterministic=True),
    backward(192, 128, Causal(50)).replace(alibi_slopes=BY_HEAD, softcap=2.0),
]
OTHER_BODIES = ("2cta", "per_head", "wide")
PLANS = [
    *(planner.plan(problem, "sm_90a", 12) for problem in CODE),  # so few multiprocessors that all are busy
    planner.plan(backward(64, 64), "sm_90a"),
    *(
        plan
        for plan in feature_ptx.plans().values()
        if plan.build.kind == "backward" and plan.build.family == "sm90" and plan.build.variant not in OTHER_BODIES
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.symbol)
def test_machine_code(plan: Plan, machine_code: MachineCode) -> None:
    """compile() itself refuses spills and ptxas remarks, which say that wgmma groups wait for each other."""
    build, made = plan.build, machine_code(plan)
    bodies = {text.partition("(")[0]: text for text in made.ptx.split(".visible .entry ")[1:]}
    roles = entry_points.entries(build)
    main = bodies[roles["main"]]
    products = re.findall(WGMMA, main)
    rows, columns = grad_query_piece(build)
    # S^T stands before the loop and in it, dP^T in it; dV and dK; dQ in pieces of 64 rows.
    scores, gradients = (2 * build.columns + build.columns_value) // 16, build.block_queries // 16
    pieces = build.tile_m // rows * build.columns // columns * build.tile_n // 16
    # With K^T in registers, dQ^T has the rows of dQ as its columns.
    expected = [str(build.block_queries)] * scores + [
        str(rows if build.variant == "key_registers" else columns)
    ] * pieces
    expected += [str(width) for width in (build.columns, build.columns_value) for _ in range(gradients)]
    assert sorted(products) == sorted(expected)
    assert len(re.findall(r"setmaxnreg\.(?:inc|dec)", main)) == 3
    added = pieces // (build.tile_n // 16)
    bulk, vectors = (0, added * rows * columns // 128 // 4) if build.score_rows else (added, 0)
    if build.variant == "query_heads" or build.options:  # dK and dV of the 64 keys of a warpgroup
        vectors += (build.columns + build.columns_value) * 64 // 128 // 4
    assert len(re.findall(r"cp\.reduce\.async\.bulk", main)) == bulk
    assert len(re.findall(r"red\.relaxed\.gpu\.global\.add\.v4\.f32", main)) == vectors
    for launch in plan.launches:  # what is launched before the entry ahead has ended waits for it
        assert ("griddepcontrol.wait" in bodies[launch.symbol]) == launch.is_dependent, launch.symbol
    # With a semaphore, a block acquires once a query tile. It releases with the next tile or after the last, unless
    # warps of its own add dQ.
    assert len(re.findall(r"ld\.acquire\.gpu", main)) == (2 if build.deterministic else 0)
    releases = 1 if sm90_smem.adds_in_order(build) else 2
    assert len(re.findall(r"red\.release\.gpu", main)) == (releases if build.deterministic else 0)
    loaded, stored = (
        sum(columns * 2 // swizzle_bytes(columns) for _, columns in tiles.values())
        for tiles in (tma_tiles(build), sm90_smem.stored_tiles(build))
    )
    axes = 5 if build.has("varlen") else 4
    assert len(re.findall(rf"cp\.async\.bulk\.tensor\.{axes}d\.shared::cta", main)) == loaded
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.4d\.global\.shared::cta", main)) == stored
    if uses_wgmma(build):  # S and dP of a summed gradient of the bias
        found = re.findall(WGMMA, bodies[roles["bias"]])
        assert found == [str(grad_bias_smem.WGMMA_TILE)] * ((build.columns + build.columns_value) // 16)


def test_machine_code_of_one_block_per_head(machine_code: MachineCode) -> None:
    """A piece of dQ is stored, added, or added to the loaded sum and written from registers; no entry converts it."""
    plan = planner.plan(many(512), "sm_90a")
    build, made = plan.build, machine_code(plan)
    pieces = build.columns // grad_query_piece(build)[1]
    assert len(re.findall(r"\.visible \.entry", made.ptx)) == 2
    assert len(re.findall(r"cp\.reduce\.async\.bulk", made.ptx)) == pieces
    assert len(re.findall(r"cp\.async\.bulk\.global\.shared::cta", made.ptx)) == pieces
    loads = re.findall(r"cp\.async\.bulk\.shared::\w+\.global", made.ptx)
    assert len(loads) == pieces + 2, "and the row statistics"
    assert len(re.findall(r"st\.global\.v4", made.ptx)) == (build.columns + 2 * build.columns) * 64 // 128 // 8
