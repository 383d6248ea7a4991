"""Tests of kernels/sm90_wide/backward_layout.py: order of chunks, shared memory, grid, and the planner's choice."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from cutlass_py_attn.errors import DoesNotFit
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.kernels.sm90_wide import backward_layout as sm90_wide_backward
from cutlass_py_attn.kernels.sm90_wide.backward_layout import GRAD_KEY, GRAD_QUERY, GRAD_VALUE, Gradient
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner, resources
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Shape, Tensor
from tests.support.cluster_ring_model import Action, Chunk, ClusterModel

HEAD_DIMS = [(512, 512), (448, 448), (384, 384), (320, 320), (264, 264), (512, 64), (8, 264), (328, 456)]
GRADIENTS = (GRAD_QUERY, GRAD_KEY, GRAD_VALUE)


def problem_of(dims: tuple[int, int], dtype: str = "bfloat16", heads: int = 4, **changes: Any) -> Problem:
    return Problem.dense("backward", Shape(2, 200, 300, heads, *dims), dtype, Causal()).replace(**changes)


@functools.cache
def build_of(dims: tuple[int, int]) -> Build:
    return planner.plan(problem_of(dims), "sm_90a").build


@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda gradient: gradient.name)
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_chunks_cover_every_operand_and_both_warpgroups_have_columns(dims: tuple[int, int], gradient: Gradient) -> None:
    build = build_of(dims)
    columns = {
        **dict.fromkeys(("query", "key"), build.columns),
        **dict.fromkeys(("grad_output", "value"), build.columns_value),
    }
    assert build.columns >= max(dims[0], 128)
    assert build.columns_value >= max(dims[1], 128)
    first, second = sm90_wide_backward.result_columns(build, gradient)
    assert first + second == columns[gradient.streamed]
    assert 256 >= first >= second >= first - 64 >= 0
    assert second >= 64
    result = [chunk for chunks in sm90_wide_backward.result_chunks(build, gradient) for chunk in chunks]
    scores = sm90_wide_backward.score_chunks(build, gradient)
    covered = [(columns[operand], chunks) for (_, operand), chunks in zip(gradient.products, scores, strict=True)]
    for count, chunks in (*covered, (columns[gradient.streamed], result)):
        ends = [chunk.first + chunk.columns for chunk in chunks]
        assert [chunk.first for chunk in chunks] == [0, *ends[:-1]]
        assert ends[-1] == count


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_the_rings_fill_shared_memory(dims: tuple[int, int]) -> None:
    build, allowed = build_of(dims), architecture("sm_90a").shared_memory_per_block
    found = {buffer.name: buffer for buffer in build.shared_memory}
    stage_bytes = 64 * 128 * 2
    start, stages = sm90_wide_backward.ring_buffer(build, GRAD_KEY)
    assert sm90_wide_backward.ring_buffer(build, GRAD_QUERY) == (start, stages)
    assert (start, stages * stage_bytes) == (found["ring"].offset, found["ring"].bytes)
    assert found["resident"].bytes + found["resident_value"].bytes == 64 * 2 * (build.columns + build.columns_value)
    # dV has one resident tile, and its ring begins behind it and ends within the other's.
    start, most = sm90_wide_backward.ring_buffer(build, GRAD_VALUE)
    assert start == found["resident_value"].offset == found["resident"].bytes
    assert start + most * stage_bytes <= found["ring"].offset + found["ring"].bytes
    assert found["barriers"].bytes >= 8 * (3 * most + 1)
    assert stages <= most < 32, "a warpgroup has a bit for each stage"
    assert build.shared_memory_bytes <= allowed
    assert resources.refusals(build, architecture("sm_90a")) == []


def loads(build: Build, gradient: Gradient, tiles: int) -> list[tuple[int, Chunk]]:
    """Returns (warpgroup, chunk) of each chunk in the order in which the producer loads them."""

    def scores(tile: int) -> Iterator[tuple[int, Chunk]]:
        for (_, operand), chunks in zip(
            gradient.products, sm90_wide_backward.score_chunks(build, gradient), strict=True
        ):
            for chunk in chunks:
                yield tile % 2, (f"scores of {operand}", tile, chunk.first)

    found = [*scores(0)]
    for tile in range(tiles):
        found += scores(tile + 1) if tile + 1 < tiles else ()
        for warpgroup, chunks in enumerate(sm90_wide_backward.result_chunks(build, gradient)):
            found += [(warpgroup, ("result", tile, chunk.first)) for chunk in chunks]
    return found


def reads(build: Build, gradient: Gradient, tiles: int, warpgroup: int) -> Iterator[Action]:
    """Yields what a warpgroup does, as `WideGradient.mma` has it."""
    results = sm90_wide_backward.result_chunks(build, gradient)[warpgroup]

    def scores(tile: int) -> Iterator[Action]:
        first = sm90_wide_backward.first_score_chunk(build, gradient, tile) if tile else 0
        number = 0
        for (_, operand), chunks in zip(
            gradient.products, sm90_wide_backward.score_chunks(build, gradient), strict=True
        ):
            for chunk in chunks:
                yield "full", first + number, (f"scores of {operand}", tile, chunk.first)
                if number:
                    yield "release", first + number - 1
                number += 1

    def last_of_scores(tile: int) -> Action:
        first = sm90_wide_backward.first_score_chunk(build, gradient, tile) if tile else 0
        return "release", first + sm90_wide_backward.num_score_chunks(build, gradient) - 1

    def result(tile: int) -> tuple[list[Action], list[Action]]:
        is_last = tile == tiles - 1
        first = sm90_wide_backward.first_result_chunk(build, gradient, tile, warpgroup, is_last=is_last)
        waits: list[Action] = [
            ("full", first + index, ("result", tile, chunk.first)) for index, chunk in enumerate(results)
        ]
        return waits, [("release", first + index) for index in range(len(results))]

    if warpgroup == 0:
        yield from scores(0)
        yield last_of_scores(0)
        yield "arrive", "p_full", 0
    for tile in range(tiles):
        owner = tile % 2
        waits, releases = result(tile)
        computes = tile + 1 < tiles and owner != warpgroup
        if computes:
            yield from scores(tile + 1)
        if owner != warpgroup:
            yield "wait", "p_full", owner
        yield from waits
        if computes:
            yield last_of_scores(tile + 1)
            if tile:
                yield "wait", "p_empty", warpgroup
            yield "arrive", "p_full", warpgroup
        yield from releases
        if computes and tile + 2 < tiles:
            yield "arrive", "p_empty", owner


def model_of(build: Build, gradient: Gradient, tiles: int, seed: int, full_barriers: int = 2) -> ClusterModel:
    _, stages = sm90_wide_backward.ring_buffer(build, gradient)
    program = functools.partial(reads, build, gradient, tiles)
    return ClusterModel(stages, loads(build, gradient, tiles), program, seed, full_barriers)


@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda gradient: gradient.name)
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 11])
def test_warpgroups_read_their_chunks_whatever_is_late(dims: tuple[int, int], gradient: Gradient, tiles: int) -> None:
    build = build_of(dims)
    for seed in range(2):
        model_of(build, gradient, tiles, seed).run()


def test_one_full_barrier_for_both_warpgroups_would_let_them_read_other_chunks() -> None:
    """The parity of a phase that a warpgroup has not waited for may be that of the phase before."""
    failed = 0
    for seed in range(12):
        try:
            model_of(build_of((512, 512)), GRAD_VALUE, 12, seed, full_barriers=1).run()
        except AssertionError as error:
            failed += "another chunk" in str(error)
    assert failed > 4


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({}, ()),
        ({"mask": Full(), "softcap": 3.0}, ()),
        ({"alibi_slopes": Tensor.contiguous((4,), "float32")}, ()),
        ({"deterministic": True}, ()),
        ({"bias": Tensor.contiguous((2, 4, 200, 300), "bfloat16")}, ("bias",)),
        ({"dropout_p": 0.1}, ("dropout",)),
        ({"num_splits_key": 2}, ("num_splits_key",)),
        ({"grad_query": None}, ("choice of gradients",)),
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
    assert TileConfig.of(plan.build) == TileConfig(64, 64, 12, 2, 2, variant="wide")
    text = plan.explain()
    assert "blocks of dQ keep Q and dO" in text
    assert "cluster 2 x 1 x 1" in text
    assert "resident_value" in text


def test_the_workspace_has_the_row_statistics_alone_and_nothing_is_zeroed() -> None:
    plan = planner.plan(problem_of((512, 512)), "sm_90a")
    rows = 2 * 4 * 256 * 4  # batches, heads, queries in whole tiles, bytes
    assert [(part.name, part.bytes) for part in plan.workspace.buffers] == [("delta", rows), ("logsumexp_log2", rows)]
    assert plan.workspace.zero_bytes == 0
    assert [launch.symbol.rsplit("_", 2)[-2:] for launch in plan.launches] == [["delta", "1"], ["64x64", "0"]]


def test_the_grid_has_clusters_for_key_tiles_twice_and_for_query_tiles_of_every_head() -> None:
    """200 queries are 2 pairs of tiles, and 300 keys 3 pairs."""
    _, launch = planner.plan(problem_of((512, 512)), "sm_90a").launches
    assert (launch.grid, launch.cluster, launch.block) == ((2 * (3 + 3 + 2), 4, 2), 2, (384, 1, 1))
    assert [each.field for each in launch.tensor_maps] == ["query", "grad_output", "key", "value"]
    assert {(each.box, each.swizzle_bytes) for each in launch.tensor_maps} == {((64, 64, 1, 1), 128)}
    grouped = parse("bf16_d512_q200_s300_b2_h8k2_full").problem("backward")
    _, launch = planner.plan(grouped, "sm_90a").launches
    assert launch.grid == (2 * (3 + 3 + 4 * 2), 2, 2)


def test_narrow_heads_have_other_kernels() -> None:
    with pytest.raises(DoesNotFit, match="variant wide is for head dims beyond 256"):
        planner.plan_with_tile(problem_of((128, 128)), "sm_90a", TileConfig(64, 64, 12, 2, 2, variant="wide"))
    assert planner.plan(problem_of((256, 256)), "sm_90a").build.variant == "2cta"
    wider = planner.plan(problem_of((520, 512)), "sm_90a")
    assert wider.build.family == "sm80"
    assert "the sm90 family takes no head dims beyond 512" in wider.reason


def test_lengths_and_edges_do_not_decide_the_machine_code() -> None:
    first = planner.plan(parse("bf16_d512_q70_s90_b1_h2_causal").problem("backward"), "sm_90a").build
    other = planner.plan(parse("bf16_d512_q9000_s700_b3_h5_causal_br").problem("backward"), "sm_90a").build
    assert first == other
