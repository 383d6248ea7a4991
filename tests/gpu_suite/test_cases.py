"""Tests of the GPU suite without a GPU: its cases are consistent, and it is skipped in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import KEEPS_DS, STANDARD
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.planner import plan_backward
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.tensors import DIRECTIONS
from cutlass_py_attn.testing import component_gemms, layouts
from cutlass_py_attn.testing.cases import ARCH, SM90_ARCH, Case, builds_of
from tests.cases import covering_cases, suite
from tests.cases.grouped_cases import GROUPED
from tests.gpu import test_torch_ops
from tests.gpu.hosts import test_jax_context, test_jax_native
from tests.support import fakes

ROOT = Path(__file__).resolve().parents[2]
ALL = (*covering_cases.FORWARD, *covering_cases.BACKWARD)
LENGTHS = (*suite.VARIABLE_LENGTH, *suite.WRONG_LENGTHS, *suite.CHANGED_LENGTHS)
TILES = (
    *(*suite.MANY_TILES, *suite.DS_IN_REGISTERS, *suite.FEW_TILES),
    *(*suite.LAST_ROUNDS, *suite.SPECULATIVE, *suite.SHARED_END, *suite.SHARED_QUERIES),
)
SINGLE = (
    *(*suite.MANY_HEADS, *TILES, *GROUPED, *suite.WIDE_BACKWARD, *LENGTHS),
    *(*suite.LAUNCHERS.values(), *suite.LONG_DROPOUT, *suite.SPLIT_ROWS, *suite.JAX_HANDLERS),
)


def test_every_case_is_supported_and_named() -> None:
    for case in (*ALL, *SINGLE):
        assert case.problem().reasons() == [], case.line
        assert Case.parse(case.line) == case
    assert len({case.line for case in ALL}) == len(ALL)


def test_many_and_few_tiles_have_the_kernels_that_they_are_for() -> None:
    rows = {"forward": "tile_m", "backward": "tile_n"}
    for cases, allowed in ((suite.MANY_TILES, {128, 192}), (suite.FEW_TILES, {64})):
        builds = [planner.plans_on(case.problem(), (9, 0), 132)[0].build for case in cases]
        plain = [build for build in builds if build.variant in (STANDARD, *KEEPS_DS)]
        assert len(plain) >= len(cases) - 2, "with grouped heads and a mask, a backward adds by query heads"
        assert {getattr(build, rows[build.kind]) for build in plain} <= allowed


def test_cases_of_ds_in_registers_have_these_variants() -> None:
    builds = [planner.plans_on(case.problem(), (9, 0), 132)[0].build for case in suite.DS_IN_REGISTERS]
    assert [build.variant for build in builds] == ["ds_registers"] * 5 + ["key_registers"] * 5


def test_backwards_of_wide_heads_have_kernels_of_variant_wide() -> None:
    cases = (*covering_cases.WIDE_BACKWARD, *suite.WIDE_BACKWARD, suite.LAUNCHERS["wide backward"])
    assert {planner.plan(case.problem(), SM90_ARCH).build.variant for case in cases} == {"wide"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "must be like 'backward bf16_d128"),
        ("fwd bf16_d64_s1_b1_h1_full", "a direction of forward, backward"),
        ("forward", "the name of a problem"),
        ("forward bf16_d64_s1_b1_h1_ful seed=1", "did you mean full"),
        ("forward bf16_d64_s1_b1_h1_full sed=1", "'sed' is no field; write seed"),
    ],
)
def test_a_wrong_line_is_refused_with_the_form(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case.parse(line)


def parameters(case: Case) -> dict[str, Any]:
    """The parameters of a covering case, by the names of their values."""
    spec = case.spec
    unsized = spec.replace(batch=1, num_heads=1, num_queries=1, num_keys=1, scale=None, num_splits_key=None)
    return {
        "MAIN": unsized, "LENGTHS": spec.num_queries, "keys": spec.num_keys, "BATCHES": spec.batch,
        "HEADS": spec.num_heads, "FAMILIES": case.inputs, "SCALES": spec.scale, "SPLITS": spec.num_splits_key,
    }  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_two_values_of_two_parameters_meet(direction: str) -> None:
    cases = covering_cases.FORWARD if direction == "forward" else covering_cases.BACKWARD
    names = ["MAIN", "LENGTHS", "keys", "BATCHES", "HEADS", "FAMILIES", "SCALES"]
    names += ["SPLITS"] if direction == "backward" else []
    values = {name: getattr(covering_cases, "LENGTHS" if name == "keys" else name) for name in names}
    found = [parameters(case) for case in cases]
    for left, right in combinations(names, 2):
        met = {(each[left], each[right]) for each in found}
        missing = set(product(values[left], values[right])) - met
        assert not missing, (left, right, missing)


def test_every_kernel_is_built_once_and_no_case_needs_another() -> None:
    builds = covering_cases.builds()
    assert len(set(builds)) == len(builds) <= 204
    names = [(first.arch, first.symbol) for first, *_ in builds]
    assert len(set(names)) == len(names), "a folder holds one kernel of a name"
    assert {planner.builds(case.problem(), ARCH) for case in ALL} <= set(builds)
    whole = set(suite.builds())
    assert {*builds, *builds_of(SINGLE, ARCH)} <= whole


def test_the_suite_has_the_kernels_of_the_torch_operators() -> None:
    needed = {planner.builds(problem, ARCH) for problem in test_torch_ops.problems()}
    assert needed == set(suite.torch_ops_builds())


def test_the_suite_has_the_kernels_of_split_rows_on_one_gpu() -> None:
    """The first choice of every problem, not one that a missing kernel falls back to."""
    jax = pytest.importorskip("jax")
    needed = needed_by(partial(test_jax_context.lower_for_one_gpu, jax))
    assert len(needed) >= 10
    assert needed <= {first for arch in (ARCH, SM90_ARCH) for first, *_ in builds_of(suite.SPLIT_ROWS, arch)}


def test_the_suite_has_the_kernels_of_both_handlers_of_jax() -> None:
    jax = pytest.importorskip("jax")

    def lower(attend: Any) -> None:
        for program in test_jax_native.programs(jax, partial(attend, mask=Causal(), deterministic=True)):
            program.trace(*test_jax_native.operands(jax)).lower(lowering_platforms=("cuda",))

    needed = needed_by(lower)
    assert {(build.kind, build.has("varlen")) for build in needed} == set(product(DIRECTIONS, (False, True)))
    assert needed <= {first for arch in (ARCH, SM90_ARCH) for first, *_ in builds_of(suite.JAX_HANDLERS, arch)}


def needed_by(lower: Callable[[Any], None]) -> set[Build]:
    """Returns the kernels that JAX programs take for an H100 or H200; `lower` lowers them with the given attention."""
    from cutlass_py_attn.jax import attention

    needed = set()

    def kernels(build: Build) -> Artifact:
        needed.add(build)
        return fakes.artifact(build)

    lower(partial(attention, kernels=kernels, arch=SM90_ARCH))
    return needed


def test_splits_of_a_deterministic_case_are_allowed() -> None:
    chosen = [case for case in covering_cases.BACKWARD if case.spec.deterministic]
    assert {case.spec.num_splits_key for case in chosen} == {None, 1}
    for case in chosen:
        plan_backward(case.problem(), ARCH, 132)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_layouts_are_supported_and_do_not_overlap(layout: str) -> None:
    case = next(case for case in covering_cases.BACKWARD if case.spec.head_dim == 80 and case.spec.num_keys == 65)
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
    "component_gemm",
    component_gemms.SHOWN_COMPONENT_GEMMS,
    ids=str,
)
def test_component_gemms_agree_with_their_own_files(component_gemm: component_gemms.ComponentGemm) -> None:
    """The shapes and the product in testing/ agree with the component GEMM's own file."""
    pytest.importorskip("cutlass")
    from cutlass_py_attn.kernels.component_gemms.kernel import spec_of

    plan = component_gemm.plan(2)
    spec = spec_of(plan.build)
    assert component_gemms.shapes(plan) == ((2, *spec.a_shape), (2, *spec.b_shape))
    assert component_gemms.product_shape(plan) == (spec.m, spec.n)
    given = component_gemms.operands(plan, "integers", 1)
    a, b = (given[name].astype("f8")[1] for name in ("a", "b"))
    expected = (a.T if spec.a_transposed else a) @ (b if spec.b_transposed else b.T)
    assert (component_gemms.product(plan, given)[1] == expected).all()


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


def test_the_gpu_machine_needs_no_compiler() -> None:
    """verify_gpu, fuzz, sanitize, stress and the tests on a GPU do not import the DSL."""
    modules = (
        *("tools.release.verify_gpu", "tools.release.fuzz", "tools.lab.race.sanitize", "tools.lab.race.stress"),
        *("tests.cases.suite", "tests.gpu.test_matrix_xformers", "tests.gpu.test_torch_ops"),
    )
    code = f"import sys, {', '.join(modules)}; assert 'cutlass' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
