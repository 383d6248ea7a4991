"""Split-D: plans and machine code of the kernels for head dims too large for one block."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.kernels.backward_parts.layout import dq_piece_columns, dq_pieces
from cutlass_py_attn.kernels.sm80_split_d import layout as split_d
from cutlass_py_attn.kernels.sm80_split_d.layout import tile_and_column_block
from cutlass_py_attn.launch.arch import ARCHITECTURES, architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import even_chunk, tile_bytes
from cutlass_py_attn.launch.variants import SPLIT_D
from cutlass_py_attn.plan import resources
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan_backward, plan_forward, plans
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import ITEM_BYTES, Shape, Tensor
from tests.support.machine_code import MachineCode
from tools.release import feature_ptx

ANY = st.integers(1, 65536)
WIDE = st.integers(257, 65536)
HEAD_DIMS = st.one_of(st.tuples(WIDE, ANY), st.tuples(ANY, WIDE), st.tuples(WIDE, WIDE))
DTYPES = st.sampled_from(sorted(ITEM_BYTES))
ARCHS = st.sampled_from(sorted(ARCHITECTURES))
LAW = settings(max_examples=150, deadline=None)
NAMED = [(512, 512), (1024, 1024), (65536, 65536), (257, 257), (300, 40), (8, 1024)]


def problem(direction: str, dims: tuple[int, int], dtype: str, **changes: object) -> Problem:
    """Returns a problem of two sequences of 300 queries and 500 keys, six heads."""
    return Problem.dense(direction, Shape(2, 300, 500, 6, *dims), dtype, masks.Causal()).replace(**changes)


def planned(direction: str, dims: tuple[int, int], dtype: str, arch: str, **changes: object) -> Plan:
    """Returns the first plan of such a problem."""
    return plans(problem(direction, dims, dtype, **changes), arch)[0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("dims", NAMED)
def test_large_head_dims_have_plans_that_fit(dims: tuple[int, int], dtype: str, arch: str) -> None:
    for direction in ("forward", "backward"):
        plan = planned(direction, dims, dtype, arch)
        resources.check(plan.build, architecture(arch))
        assert plan.build.head_dim_split


def test_head_dims_that_fit_no_other_kernel_are_split() -> None:
    """A problem that exceeds float32 registers or 99 KiB of shared memory is not rejected."""
    assert not plan_forward(problem("forward", (256, 256), "float16"), "sm_90").build.head_dim_split
    for dims, dtype, arch in (((256, 256), "float32", "sm_90"), ((129, 129), "float32", "sm_86")):
        assert plan_forward(problem("forward", dims, dtype), arch).build.head_dim_split
        assert plan_backward(problem("backward", dims, dtype), arch).build.head_dim_split


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 300))
def test_grid_x_counts_tiles_and_column_blocks(tiles: int, column_blocks: int) -> None:
    first, last = tiles * column_blocks, (tiles + 1) * column_blocks
    found = [tile_and_column_block(block, column_blocks) for block in (first, last - 1, last)]
    assert found == [(tiles, 0), (tiles, column_blocks - 1), (tiles + 1, 0)]


@settings(deadline=None)
@given(st.integers(1, 2048).map(lambda thirty_twos: 32 * thirty_twos), st.sampled_from([32, 64, 128, 256]))
def test_even_chunks_cover_the_head_dim_with_the_fewest_steps(columns: int, widest: int) -> None:
    chunk = even_chunk(columns, widest)
    assert chunk <= widest
    assert chunk % 32 == 0
    assert -(-columns // chunk) == -(-columns // widest)


@LAW
@given(HEAD_DIMS, DTYPES, ARCHS)
def test_the_steps_of_a_forward_cover_its_tiles(dims: tuple[int, int], dtype: str, arch: str) -> None:
    build = planned("forward", dims, dtype, arch).build
    if not build.head_dim_split:
        return
    cut = split_d.forward_split(build)
    assert (cut.score_steps - 1) * cut.chunk < build.columns <= cut.score_steps * cut.chunk
    assert cut.value_steps * cut.value_rows == build.tile_n
    score_rows = build.tile_n if cut.keeps_query else build.tile_m + build.tile_n
    assert tile_bytes(dtype, score_rows, cut.chunk) <= cut.slot_bytes
    assert tile_bytes(dtype, cut.value_rows, build.block_columns_value) <= cut.slot_bytes
    assert build.query_stages * cut.slot_bytes <= build.buffer("ring").bytes
    assert tile_bytes(dtype, build.tile_m, build.block_columns_value) <= build.buffer("ring").bytes
    assert cut.keeps_query == any(buffer.name == "query" for buffer in build.shared_memory)


@LAW
@given(HEAD_DIMS, DTYPES, ARCHS)
def test_the_steps_of_a_backward_cover_its_tiles(dims: tuple[int, int], dtype: str, arch: str) -> None:
    build = planned("backward", dims, dtype, arch).build
    if not build.head_dim_split:
        return
    cut = split_d.backward_split(build)
    sides = (cut.key, build.columns, build.block_columns), (cut.value, build.columns_value, build.block_columns_value)
    for side, columns, width in sides:
        assert side.width == width
        assert (side.blocks - 1) * width < columns <= side.blocks * width
        assert (side.steps - 1) * side.chunk < columns <= side.steps * side.chunk
        assert side.columns % side.chunk == side.width % side.piece == 0
        assert side.parts * side.rows == build.tile_m
        chunk_rows = build.tile_m if side.keeps else build.tile_m + build.tile_n
        assert tile_bytes(dtype, chunk_rows, side.chunk) <= cut.slot_bytes
        assert tile_bytes(dtype, side.rows, side.width) <= cut.slot_bytes
        if build.item_bytes == 2:  # a chunk, a piece and a whole tile are swizzled alike
            assert (side.chunk % 64 == 0) == (side.piece % 64 == 0) == (side.width % 64 == 0)
    for name, side in (("key", cut.key), ("value", cut.value)):
        held = [buffer.bytes for buffer in build.shared_memory if buffer.name == name]
        whole = tile_bytes(dtype, build.tile_n, side.columns)
        assert held == ([whole] if side.keeps else [tile_bytes(dtype, build.tile_n, side.width)] * (name == "key"))
    store = max(tile_bytes(dtype, build.tile_n, side.width) for side in (cut.key, cut.value))
    assert store <= build.buffer("statistics").offset


@LAW
@given(HEAD_DIMS, DTYPES, ARCHS, st.booleans())
def test_workspace_has_a_sum_for_every_column(dims: tuple[int, int], dtype: str, arch: str, turns: bool) -> None:
    plan = planned("backward", dims, dtype, arch, deterministic=turns)
    if not plan.build.head_dim_split:
        return
    build, parts = plan.build, {part.name: part.bytes for part in plan.workspace.buffers}
    sums, columns = dq_pieces(build), dq_piece_columns(build)
    assert sums * columns >= build.columns
    assert build.block_columns % columns == 0
    tiles = 6 * dict(plan.params)["total_tiles"]
    assert parts["grad_query_accum"] == tiles * build.tile_m * sums * columns * 4
    grids = {launch.symbol: launch.grid for launch in plan.launches}
    finish = next(grid for symbol, grid in grids.items() if "_finish_" in symbol)
    assert finish[0] == -(-300 // build.tile_m) * sums
    if turns:
        assert parts["dq_semaphore"] == tiles * sums * 4
        assert parts["tile_count_semaphore"] == 6 * 2 * split_d.blocks_per_tile(build) * 4


GRADIENTS = [set(kept) for size in (1, 2, 3) for kept in itertools.combinations(("query", "key", "value"), size)]


def wanted(gradients: set[str], dims: tuple[int, int], dtype: str, with_bias: bool) -> Build:
    """A backward that computes these gradients."""
    dropped = {f"grad_{name}": None for name in ("query", "key", "value") if name not in gradients}
    bias = Tensor.contiguous(problem("backward", dims, dtype).shape.bias, dtype)
    biases = {"bias": bias, "grad_bias": bias} if with_bias else {}
    return planned("backward", dims, dtype, "sm_90", **dropped, **biases).build


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(512, 512), (1024, 1024), (8, 1024), (1024, 8), (300, 40)])
@pytest.mark.parametrize("gradients", GRADIENTS, ids=lambda kept: "_".join(sorted(kept)))
def test_blocks_share_every_gradient_once(
    gradients: set[str], dims: tuple[int, int], dtype: str, with_bias: bool
) -> None:
    """Every column block of dQ, dK and dV is one block's, grad_bias is the first block's, and none has nothing."""
    pytest.importorskip("cutlass.cute")
    from cutlass_py_attn.kernels.sm80_split_d.backward import BackwardSplitD

    build = wanted(gradients, dims, dtype, with_bias)
    kernel = BackwardSplitD(build)
    count, steps = {"query": 0, "key": 0, "value": 0, "bias": 0}, []
    for number in range(split_d.blocks_per_tile(build)):
        share = kernel.share(number)
        computed = zip(count, (share.has_dq, share.has_dk, share.has_dv, share.has_grad_bias), strict=True)
        flags = {name: bool(is_computed) for name, is_computed in computed}
        assert any(flags.values())
        assert bool(share.has_ds) == (flags["query"] or flags["key"] or flags["bias"])
        assert not (kernel.splits_dk_dv and flags["value"] and share.has_ds)
        count = {name: count[name] + flags[name] for name in count}
        steps.append((share.scores_end, share.dp_end, share.dv_end, share.dk_end))
    cut = split_d.backward_split(build)
    blocks = {"query": cut.key.blocks, "key": cut.key.blocks, "value": cut.value.blocks}
    assert count == {name: blocks[name] * (name in gradients) for name in blocks} | {"bias": int(with_bias)}
    assert all(list(ends) == sorted(ends) and ends[0] == cut.key.steps for ends in steps)


BUILDS = [
    planned("forward", (512, 512), "bfloat16", "sm_90").build,
    planned("forward", (8, 1024), "float32", "sm_80").build,
    planned("forward", (300, 40), "float16", "sm_86").build,
    planned("backward", (300, 40), "bfloat16", "sm_86").build,
    planned("backward", (256, 256), "float32", "sm_90").build,
    *(build for build in feature_ptx.builds().values() if build.variant == SPLIT_D),
]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.symbol)
def test_kernels_compile_within_their_registers(build: Build, machine_code: MachineCode) -> None:
    artifact = machine_code(build)
    assert artifact.build.head_dim_split
    assert all(kernel.registers <= 255 for kernel in artifact.kernels)
