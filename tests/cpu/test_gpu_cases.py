"""Tests of the GPU suite where there is no GPU: its cases hold together, and it is skipped in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from cutlass_py_attn import planner
from cutlass_py_attn.planner import plan_backward

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu import cases, layouts, memory, rooms  # noqa: E402

ALL = (*cases.FORWARD, *cases.BACKWARD)


def test_every_case_is_supported_and_named() -> None:
    for case in ALL:
        assert case.problem().reasons() == [], case.line
        assert cases.parse(case.line) == case
    assert len({case.line for case in ALL}) == len(ALL)


@pytest.mark.parametrize(
    "line", ["", "fwd bf16 d64 full 1x1x1 gaussian seed 1", "fwd b16 d64 full 1x1x1x1 gaussian seed 1"]
)
def test_a_wrong_line_is_refused_with_the_form(line: str) -> None:
    with pytest.raises(ValueError, match="must be like 'bwd bf16 d80v40"):
        cases.parse(line)


@pytest.mark.parametrize("suite", [cases.FORWARD, cases.BACKWARD], ids=["forward", "backward"])
def test_every_two_values_of_two_parameters_meet(suite: tuple[cases.Case, ...]) -> None:
    values = {
        "variant": cases.MAIN, "num_queries": cases.LENGTHS, "num_keys": cases.LENGTHS, "batch": cases.BATCHES,
        "num_heads": cases.HEADS, "family": cases.FAMILIES, "scale": cases.SCALES,
    }  # fmt: skip
    if suite is cases.BACKWARD:
        values["num_splits_key"] = cases.SPLITS
    for left, right in combinations(values, 2):
        met = {(getattr(case, left), getattr(case, right)) for case in suite}
        missing = set(product(values[left], values[right])) - met
        assert not missing, (left, right, missing)


def test_every_kernel_is_built_once_and_no_case_needs_another() -> None:
    builds = cases.builds()
    assert len(set(builds)) == len(builds) <= 183
    names = [(first.arch, first.symbol) for first, *_ in builds]
    assert len(set(names)) == len(names), "a folder holds one kernel of a name"
    assert {planner.builds(case.problem(), cases.ARCH) for case in ALL} <= set(builds)


def test_splits_of_a_deterministic_case_are_allowed() -> None:
    chosen = [case for case in cases.BACKWARD if case.variant.deterministic]
    assert {case.num_splits_key for case in chosen} == {None, 1}
    for case in chosen:
        plan_backward(case.problem(), cases.ARCH, 132)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_layouts_are_supported_and_do_not_overlap(layout: str) -> None:
    case = next(case for case in cases.BACKWARD if case.variant.head_dim == 80 and case.num_keys == 65)
    problem = layouts.of_problem(case.problem(), layout)
    assert problem.reasons() == []
    for tensor in problem.tensors().values():
        places = {
            sum(i * step for i, step in zip(index, tensor.strides, strict=True))
            for index in product(*map(range, tensor.shape))
        }
        size = tensor.shape[0] * tensor.shape[1] * tensor.shape[2] * tensor.shape[3]
        assert len(places) == size


@pytest.mark.parametrize(
    "room", cases.SHOWN_ROOMS, ids=lambda room: f"{room.name}_{room.family}_{room.dtype}_{room.head_dim}"
)
def test_rooms_as_the_suite_sees_them(room: cases.Room) -> None:
    """Shapes and product that the suite writes out are those of the room's own file."""
    pytest.importorskip("cutlass")
    from cutlass_py_attn.gemm.plans import spec_of

    plan = room.plan(2)
    spec = spec_of(plan.build)
    assert rooms.shapes(plan) == ((2, *spec.a_shape), (2, *spec.b_shape))
    assert memory.product_shape(plan) == (spec.m, spec.n)
    given = rooms.operands(plan, "integers", 1)
    a, b = (given[name].astype("f8")[1] for name in ("a", "b"))
    expected = (a.T if spec.a_transposed else a) @ (b if spec.b_transposed else b.T)
    assert (rooms.product(plan, given)[1] == expected).all()


def test_without_a_gpu_one_skip_stands_for_all() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(lines) == 1
    assert "no usable GPU" in lines[0]
    assert " 1 skipped" in done.stdout.splitlines()[-1]
    assert " passed" not in done.stdout.splitlines()[-1]
