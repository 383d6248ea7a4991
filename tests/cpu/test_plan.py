"""plan.py, planner.py, shared_memory.py, explain.py: laws that hold for every problem without reasons."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn import budget, masks
from cutlass_py_attn.device import ARCHITECTURES, architecture
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan import Buffer, Build, Plan
from cutlass_py_attn.planner import plan_backward, plan_forward
from cutlass_py_attn.problem import ITEM_BYTES, Problem, Shape, Tensor

LENGTHS = st.integers(0, 5000)
HEAD_DIMS = st.integers(1, 16).map(lambda eighths: 8 * eighths)
SHAPES = st.builds(Shape, st.integers(0, 9), LENGTHS, LENGTHS, st.integers(0, 40), HEAD_DIMS, HEAD_DIMS)
ARCHS = st.sampled_from(sorted(ARCHITECTURES))
LAW = settings(max_examples=150, deadline=None)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any supported problem with dense tensors."""
    direction = draw(st.sampled_from(["forward", "backward"]))
    mask = draw(st.sampled_from(sorted(masks.ALL)))
    dense = Problem.dense(direction, draw(SHAPES), draw(st.sampled_from(sorted(ITEM_BYTES))), masks.from_name(mask))
    deterministic = draw(st.booleans())
    # A deterministic backward may have to refuse a number in between: see the test of its own.
    splits = st.none() | (st.just(1) if deterministic else st.integers(1, 300))
    return dense.replace(deterministic=deterministic, num_splits_key=draw(splits) if direction == "backward" else None)


def plan_of(problem: Problem, arch: str) -> Plan:
    return (plan_forward if problem.direction == "forward" else plan_backward)(problem, arch)


BACKWARD = Problem.dense("backward", Shape(2, 300, 500, 3, 72, 64), "bfloat16", masks.Causal())
PLAN = plan_of(BACKWARD.replace(deterministic=True), "sm_80")


@LAW
@given(problems(), ARCHS)
def test_a_problem_without_reasons_has_a_plan_that_fits(problem: Problem, arch: str) -> None:
    assert problem.reasons() == []
    plan = plan_of(problem, arch)
    budget.check(plan.build, architecture(arch))
    assert plan.launches == () or not problem.is_empty
    for launch in plan.launches:
        assert launch.shared_memory_bytes <= architecture(arch).shared_memory_per_block
        assert min(launch.grid) >= 1
        assert max(launch.grid[1:]) <= 65535


@LAW
@given(problems(), ARCHS)
def test_a_plan_is_a_value(problem: Problem, arch: str) -> None:
    plan = plan_of(problem, arch)
    assert Plan.from_json(plan.to_json()) == plan
    assert hash(Plan.from_json(plan.to_json())) == hash(plan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.why = "because"  # type: ignore[misc]


def test_json_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown fields"):
        Plan.from_json(PLAN.to_json().replace('"why"', '"why_not"'))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Build)])
def test_every_field_of_a_build_changes_its_digest(name: str) -> None:
    value = getattr(PLAN.build, name)
    changes = {str: f"{value}x", int: 77, bool: False, tuple: ()}
    assert dataclasses.replace(PLAN.build, **{name: changes[type(value)]}).digest != PLAN.build.digest


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Buffer)])
def test_every_field_of_a_buffer_changes_the_digest(name: str) -> None:
    first, *others = PLAN.build.shared_memory
    changed = dataclasses.replace(first, **{name: "x" if name == "name" else 7})
    assert dataclasses.replace(PLAN.build, shared_memory=(changed, *others)).digest != PLAN.build.digest


@LAW
@given(problems(), ARCHS, st.integers(1, 9), LENGTHS, LENGTHS, st.integers(1, 40))
def test_batch_lengths_strides_and_scale_share_the_build(
    problem: Problem, arch: str, batch: int, num_queries: int, num_keys: int, num_heads: int
) -> None:
    shape = dataclasses.replace(
        problem.shape, batch=batch, num_queries=num_queries, num_keys=num_keys, num_heads=num_heads
    )
    other = Problem.dense(problem.direction, shape, problem.dtype, problem.mask)
    other = other.replace(scale=0.25, deterministic=problem.deterministic, query=_spread(other.query))
    assert plan_of(other, arch).build == plan_of(problem, arch).build


def _spread(tensor: Tensor) -> Tensor:
    """The same tensor as a slice of one with twice the heads."""
    batch, row, head, column = tensor.strides
    return dataclasses.replace(tensor, strides=(2 * batch, 2 * row, head, column))


@LAW
@given(problems(), ARCHS)
def test_num_splits_key_is_within_the_key_tiles(problem: Problem, arch: str) -> None:
    plan = plan_of(problem, arch)
    key_tiles = max(-(-problem.shape.num_keys // plan.build.tile_n), 1)
    assert 1 <= plan.num_splits_key <= key_tiles
    if problem.direction == "forward":
        assert plan.num_splits_key == 1
    elif problem.num_splits_key is not None:
        assert plan.num_splits_key == min(problem.num_splits_key, key_tiles)


@LAW
@given(problems(), ARCHS)
def test_the_workspace_is_no_larger_than_gradient_turns_and_row_statistics(problem: Problem, arch: str) -> None:
    plan = plan_of(problem, arch)
    space, shape = plan.workspace, problem.shape
    if problem.direction == "forward" or problem.is_empty:
        assert (space.bytes, space.zero_bytes, space.parts) == (0, 0, ())
        return
    groups = shape.batch * shape.num_heads
    tiles = groups * -(-shape.num_queries // plan.build.tile_m)
    needed = 4 * (tiles * (plan.build.tile_m * plan.build.columns + 1 + 2 * plan.build.tile_m) + groups)
    assert space.bytes <= needed + 256 * len(space.parts)
    _disjoint([(part.offset, part.bytes) for part in space.parts], space.bytes)
    zeroed = [part.name for part in space.parts if part.offset < space.zero_bytes]
    assert zeroed == ["grad_query_accum", "turn"][: 1 + plan.build.deterministic]


@LAW
@given(problems(), ARCHS)
def test_shared_memory_buffers_are_disjoint_or_alive_at_other_steps(problem: Problem, arch: str) -> None:
    build = plan_of(problem, arch).build
    _disjoint([(buffer.offset, buffer.bytes) for buffer in build.shared_memory], build.shared_memory_bytes)
    assert all(buffer.offset % 128 == 0 and buffer.first <= buffer.last for buffer in build.shared_memory)


def _disjoint(pieces: list[tuple[int, int]], total: int) -> None:
    for (first, first_bytes), (second, second_bytes) in combinations(pieces, 2):
        assert first + first_bytes <= second or second + second_bytes <= first
    assert max(offset + size for offset, size in pieces) <= total


def test_a_deterministic_backward_refuses_blocks_that_would_wait() -> None:
    turns = BACKWARD.replace(deterministic=True)
    key_tiles = PLAN.num_splits_key
    assert key_tiles == -(-500 // PLAN.build.tile_n)
    for asked, blocks in ((None, key_tiles), (1, 1)):
        assert plan_backward(turns.replace(num_splits_key=asked), "sm_80").num_splits_key == blocks
    with pytest.raises(NotSupported, match="num_splits_key = 2 with deterministic"):
        plan_backward(turns.replace(num_splits_key=2), "sm_80")


def test_the_rings_of_the_backward_must_be_equal() -> None:
    limits = architecture("sm_80")
    assert budget.objections(PLAN.build, limits) == []
    (found,) = budget.objections(dataclasses.replace(PLAN.build, grad_output_stages=1), limits)
    assert found.startswith("grad_output_stages = 1: must be query_stages = 2")


def test_the_direction_must_match() -> None:
    with pytest.raises(NotSupported, match="plan_forward plans the forward"):
        plan_forward(BACKWARD, "sm_80")
    with pytest.raises(NotSupported, match="not a known target"):
        plan_backward(BACKWARD, "sm_70")


def test_explain_says_what_decides() -> None:
    text = PLAN.explain()
    build = PLAN.build
    said = [
        "sm_80",
        f"{build.tile_m} queries x {build.tile_n} keys",
        f"{build.warps} ({build.threads} threads)",
        f"warps of scores  {build.scores[0]} x {build.scores[1]}",
        f"query {build.query_stages}, grad_output {build.grad_output_stages}",
        f"{budget.accumulator_registers(build)} of them float32 accumulators",
        "block 128 x 1 x 1, cluster 1 x 1 x 1",
        f"num_splits_key: {PLAN.num_splits_key}",
        f"shared memory: {build.shared_memory_bytes} of 166912 bytes",
        f"why: {PLAN.why}",
        *(f"{launch.symbol}: grid" for launch in PLAN.launches),
        *(part.name for part in PLAN.workspace.parts),
    ]
    for words in said:
        assert words in text
    assert all(f"{buffer.name} " in text and f" {buffer.bytes} " in text for buffer in PLAN.build.shared_memory)


def test_explain_of_a_forward_and_of_an_empty_problem() -> None:
    empty = Problem.dense("forward", Shape(0, 300, 500, 3, 64, 64), "float16")
    text = plan_of(empty, "sm_90").explain()
    assert "none, the problem is empty" in text
    assert "grad_" not in text
