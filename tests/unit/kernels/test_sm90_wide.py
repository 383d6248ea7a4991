"""Tests of kernels/sm90_wide/layout.py: columns, chunks and their order, shared memory, and the planner's choice."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from cutlass_py_attn.kernels.catalogue import fused_kernel_of
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.kernels.sm90_wide import layout as sm90_wide
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner, resources
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Shape, Tensor
from tests.support.cluster_ring_model import ClusterModel

HEAD_DIMS = [(512, 512), (448, 448), (384, 384), (320, 320), (264, 264), (512, 64), (8, 264), (40, 512), (328, 456),
             (512, 384), (384, 8), (256, 320)]  # fmt: skip


def problem_of(dims: tuple[int, int], dtype: str = "bfloat16", queries: int = 200, heads: int = 4) -> Problem:
    return Problem.dense("forward", Shape(2, queries, 300, heads, *dims), dtype, Causal())


def build_of(dims: tuple[int, int]) -> Build:
    return planner.plan(problem_of(dims), "sm_90a").build


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_both_warpgroups_have_all_columns_between_them(dims: tuple[int, int]) -> None:
    build = build_of(dims)
    first, second = sm90_wide.value_columns(build)
    assert build.columns >= dims[0] > build.columns - 64
    assert first + second == build.columns_value >= max(dims[1], 128)
    assert 256 >= first >= second >= first - 64 >= 0
    assert second >= 64
    values = [chunk for chunks in sm90_wide.value_chunks(build) for chunk in chunks]
    for chunks, columns in ((sm90_wide.key_chunks(build), build.columns), (values, build.columns_value)):
        ends = [chunk.first + chunk.columns for chunk in chunks]
        assert [chunk.first for chunk in chunks] == [0, *ends[:-1]]
        assert ends[-1] == columns
        assert all(0 < chunk.columns <= sm90_wide.chunk_columns(build) for chunk in chunks)
        assert [chunk.strips * 64 for chunk in chunks] == [chunk.columns for chunk in chunks]


@pytest.mark.parametrize(
    ("dims", "width", "stages"),
    [((512, 512), 128, 9), ((448, 448), 128, 9), ((384, 384), 192, 6), ((320, 320), 192, 7)],
)
def test_the_ring_fills_shared_memory(dims: tuple[int, int], width: int, stages: int) -> None:
    build = build_of(dims)
    assert (sm90_wide.chunk_columns(build), sm90_wide.ring_stages(build)) == (width, stages)
    found = {buffer.name: buffer.bytes for buffer in build.shared_memory}
    assert found == {
        "query": 64 * dims[0] * 2,
        "ring": stages * 64 * width * 2,
        "p": 2 * 64 * 64 * 2,
        "row_statistics": 3 * 2 * 64 * 4,
        "barriers": 8 * (3 * stages + 1),
    }
    allowed = architecture("sm_90a").shared_memory_per_block
    assert allowed - 64 * width * 2 < build.shared_memory_bytes + 16 <= allowed


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_the_ring_has_chunks_of_at_most_two_tiles(dims: tuple[int, int]) -> None:
    build = build_of(dims)
    of_tile, allowed = sm90_wide.chunks_of_tile(build), architecture("sm_90a").shared_memory_per_block
    assert len(sm90_wide.key_chunks(build)) < sm90_wide.ring_stages(build) <= 2 * of_tile
    assert build.shared_memory_bytes <= allowed
    assert resources.refusals(build, architecture("sm_90a")) == []


def test_registers_are_those_of_the_warpgroup_with_more_columns() -> None:
    """S in float32, P in 16 bits, and O: 32, 16 and 64 * columns / 128 registers."""
    for dims, columns in (((512, 512), 256), ((448, 448), 256), ((320, 320), 192), ((512, 64), 64)):
        assert fused_kernel_of(build_of(dims)).accumulators(build_of(dims)) == 32 + 16 + columns // 2


def loads(build: Build, tiles: int) -> list[tuple[str, int, int]]:
    """Returns (operand, key tile, first column) of each chunk in the order in which the producer loads them."""
    found = [("key", 0, chunk.first) for chunk in sm90_wide.key_chunks(build)]
    values = [chunk for chunks in sm90_wide.value_chunks(build) for chunk in chunks]
    for tile in range(tiles):
        if tile + 1 < tiles:
            found += [("key", tile + 1, chunk.first) for chunk in sm90_wide.key_chunks(build)]
        found += [("value", tile, chunk.first) for chunk in values]
    return found


def reads(build: Build, tiles: int, warpgroup: int) -> Iterator[tuple[Any, ...]]:
    """Yields what a warpgroup waits for, ("full", chunk, what it is) or a barrier, and what it signals."""
    keys, values = sm90_wide.key_chunks(build), sm90_wide.value_chunks(build)[warpgroup]

    def scores(tile: int) -> Iterator[tuple[Any, ...]]:
        first = sm90_wide.first_key_chunk(build, tile) if tile else 0
        for index, chunk in enumerate(keys):
            yield "full", first + index, ("key", tile, chunk.first)
            if index:
                yield "release", first + index - 1
        yield "release", first + len(keys) - 1

    def output(tile: int) -> Iterator[tuple[Any, ...]]:
        first = sm90_wide.first_value_chunk(build, tile, warpgroup, is_last=tile == tiles - 1)
        for index, chunk in enumerate(values):
            yield "full", first + index, ("value", tile, chunk.first)
        for index in range(len(values)):
            yield "release", first + index

    if warpgroup == 0:
        yield from scores(0)
        yield "arrive", "p_full", 0
    for tile in range(tiles):
        is_owner = tile % 2 == warpgroup
        if tile + 1 < tiles and not is_owner:
            yield from scores(tile + 1)
        if not is_owner:
            yield "wait", "p_full", tile % 2
        yield from output(tile)
        if tile + 1 < tiles and not is_owner:
            if tile:
                yield "wait", "p_empty", warpgroup
            yield "arrive", "p_full", warpgroup
            if tile + 2 < tiles:
                yield "arrive", "p_empty", tile % 2


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5, 8])
def test_the_warpgroups_read_every_chunk_once_and_never_wait_for_each_other_forever(
    dims: tuple[int, int], tiles: int
) -> None:
    """The schedule of the kernel, step by step: chunks are loaded in their order as stages become free."""
    build = build_of(dims)
    stages, waiting = sm90_wide.ring_stages(build), deque(enumerate(loads(build, tiles)))
    total = len(waiting)
    ring: dict[int, tuple[int, tuple[str, int, int]]] = {}
    arrived: dict[tuple[str, int], int] = {}
    programs = [reads(build, tiles, warpgroup) for warpgroup in range(2)]
    pending: list[tuple[Any, ...] | None] = [next(program, None) for program in programs]
    released = 0
    while any(pending):
        moved = False
        while waiting and waiting[0][0] % stages not in ring:
            number, what = waiting.popleft()
            ring[number % stages] = number, what
            moved = True
        for index, action in enumerate(pending):
            if action is None:
                continue
            kind, *rest = action
            if kind == "full" and ring.get(rest[0] % stages, (None,))[0] != rest[0]:
                continue
            if kind == "wait" and not arrived.get(tuple(rest)):
                continue
            if kind == "full":
                assert ring[rest[0] % stages][1] == rest[1]
            elif kind == "release":
                assert ring.pop(rest[0] % stages)[0] == rest[0]
                released += 1
            else:
                arrived[tuple(rest)] = arrived.get(tuple(rest), 0) + (1 if kind == "arrive" else -1)
            pending[index] = next(programs[index], None)
            moved = True
        assert moved, f"nothing can go on: {pending}"
    assert released == total
    assert not any(arrived.values()), "every arrival has its wait"


def model_of(build: Build, tiles: int, seed: int, full_barriers: int = 2) -> ClusterModel:
    second = sm90_wide.value_columns(build)[0]  # first column of V that warpgroup 1 reads
    given = [(chunk[1] % 2 if chunk[0] == "key" else int(chunk[2] >= second), chunk) for chunk in loads(build, tiles)]
    stages = sm90_wide.ring_stages(build)
    return ClusterModel(stages, given, functools.partial(reads, build, tiles), seed, full_barriers)


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 7, 18])
def test_warpgroups_read_their_chunks_whatever_is_late(dims: tuple[int, int], tiles: int) -> None:
    build = build_of(dims)
    for seed in range(6):
        model_of(build, tiles, seed).run()


def test_one_full_barrier_for_both_warpgroups_would_let_them_read_other_chunks() -> None:
    """The parity of a phase that a warpgroup has not waited for may be that of the phase before."""
    build, failed = build_of((512, 512)), 0
    for seed in range(20):
        try:
            model_of(build, 18, seed, full_barriers=1).run()
        except AssertionError as error:
            failed += "another chunk" in str(error)
    assert failed > 10


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({}, ()),
        ({"mask": Full(), "softcap": 3.0, "sinks": Tensor.contiguous((4,), "float32")}, ()),
        ({"alibi_slopes": Tensor.contiguous((4,), "float32")}, ()),
        ({"bias": Tensor.contiguous((2, 4, 200, 300), "bfloat16")}, ()),
        ({"dropout_p": 0.1}, ("dropout",)),
        ({"scale": -0.1}, ("a scale below 0",)),
    ],
)
def test_supported_problems(changes: dict[str, Any], lacking: tuple[str, ...]) -> None:
    problem = problem_of((512, 512)).replace(**changes)
    assert sm90_choice.unsupported_features(problem) == lacking
    plan = planner.plan(problem, "sm_90a")
    assert (plan.build.variant, plan.build.family) == (("split_d", "sm80") if lacking else ("wide", "sm90"))
    assert all(name in plan.explain() for name in lacking)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_plans_come_back_from_json_and_explain_themselves(dims: tuple[int, int], dtype: str) -> None:
    plan = planner.plan(problem_of(dims, dtype), "sm_90a")
    assert Plan.from_json(plan.to_json()) == plan
    assert TileConfig.of(plan.build) == TileConfig(64, 64, 12, 2, variant="wide")
    text = plan.explain()
    assert "two warpgroups compute S of alternate key tiles" in text
    assert "cluster 2 x 1 x 1" in text
    assert "row_statistics" in text


def test_narrower_and_wider_heads_have_other_kernels() -> None:
    assert planner.plan(problem_of((256, 256)), "sm_90a").build.variant == ""
    assert planner.plan(problem_of((520, 512)), "sm_90a").build.family == "sm80"
    assert planner.plan(parse("f32_d512_s64_b1_h1_full").problem("forward"), "sm_90a").build.family == "sm80"


def test_the_grid_has_a_cluster_for_each_pair_of_query_tiles() -> None:
    (launch,) = planner.plan(problem_of((512, 512)), "sm_90a").launches
    assert (launch.grid, launch.cluster, launch.block) == ((4, 4, 2), 2, (384, 1, 1))
    assert [each.field for each in launch.tensor_maps] == ["query", "key", "value"]
    assert {(each.box, each.swizzle_bytes) for each in launch.tensor_maps} == {((64, 64, 1, 1), 128)}


def test_more_heads_than_a_grid_has_blocks_are_several_launches() -> None:
    launches = planner.plan(problem_of((40, 264), queries=17, heads=65600), "sm_90a").launches
    assert [(each.grid[1], dict(each.param_overrides)["first_head"]) for each in launches] == [(65535, 0), (65, 65535)]
