"""Tests of the verifier without a GPU: a result that is wrong, unwritten or not repeatable fails its kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.testing import accuracy, check, device_memory, guarded_check
from cutlass_py_attn.testing.cases import ARCH, Case
from tests.cases import decode_cases, serving_cases
from tests.support import fakes
from tests.support.fake_launch import FakeLaunch, stored
from tools.release import build_ptx, verify_gpu

FUSED = Case.parse("forward bf16_d64_s64_b1_h1_causal")
GEMM = next(plan.build for plan in build_ptx.committed_plans() if plan.build.kind == "component_gemm")
SMALL_DECODE = Case.parse("forward bf16_d64_q1_s256_b1_h2_full")


def artifact_of(build: Build) -> Artifact:
    return fakes.artifact(build)


def verify(build: Build) -> verify_gpu.Results:
    return verify_gpu.verify(artifact_of(build), artifact_of)


class Launches:
    """Stands in for every launch of a kernel: all results are `values` in turn."""

    bound = SimpleNamespace(plan=plan(FUSED.problem(), ARCH))

    def __init__(self, *values: float) -> None:
        self._values = values
        self._count = 0

    def __call__(self, *_: Any) -> Any:
        return self

    def __enter__(self) -> Launches:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self) -> dict[str, Any]:
        self._count += 1
        return {"output": np.full(4, self._values[min(self._count, len(self._values)) - 1], np.float32)}


def run_fused(monkeypatch: pytest.MonkeyPatch, worst: float, launches: Launches) -> verify_gpu.Results:
    monkeypatch.setattr(verify_gpu.covering_cases, "FORWARD", (FUSED,))
    result = accuracy.CheckResult("output", "tile", worst, "everywhere")
    monkeypatch.setattr(check, "run", lambda case, kernels: [result])
    monkeypatch.setattr(device_memory, "guarded_launch", launches)
    return verify(plan(FUSED.problem(), ARCH).build)


def test_a_fused_kernel_passes_and_fails_by_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_fused(monkeypatch, 0.5, Launches(1.0))
    assert (found["cases"], found["worst"], found["repeats"]) == (1, {"output": 0.5}, verify_gpu.REPEATS)
    for worst in (1.01, np.inf, np.nan):
        with pytest.raises(AssertionError, match=r"output +tile"):
            run_fused(monkeypatch, worst, Launches(1.0))


def test_a_launch_with_other_bits_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="launch 5 gave other bits"):
        run_fused(monkeypatch, 0.5, Launches(1.0, 1.0, 1.0, 1.0, 2.0))


def test_unwritten_elements_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="output has elements that no kernel wrote"):
        run_fused(monkeypatch, 0.5, Launches(np.nan))


def test_a_kernel_without_a_case_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_gpu.covering_cases, "FORWARD", ())
    with pytest.raises(AssertionError, match="the suite has no case for it"):
        verify(plan(FUSED.problem(), ARCH).build)


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A decode case, its kernel, and the results that its launches give."""
    expected = guarded_check.expect(SMALL_DECODE)
    given = SimpleNamespace(build=plan(SMALL_DECODE.problem(), ARCH).build, results=stored(SMALL_DECODE, expected))
    monkeypatch.setattr(decode_cases, "of_build", lambda build: [SMALL_DECODE])
    monkeypatch.setattr(guarded_check, "guarded_launch", lambda *_: FakeLaunch(given.build, given.results))
    monkeypatch.setattr(device_memory, "guarded_launch", Launches(1.0))
    return given


def test_a_decode_kernel_passes_and_fails_by_its_checks(decode: SimpleNamespace) -> None:
    assert verify(decode.build)["worst"]["output"] < 0.5
    decode.results["output"] = decode.results["output"] * 1.1
    with pytest.raises(AssertionError, match="bf16_d64_q1_s256"):
        verify(decode.build)


def test_a_decode_case_that_another_kernel_served_fails(decode: SimpleNamespace) -> None:
    tested, decode.build = decode.build, plan(FUSED.problem(), ARCH).build
    with pytest.raises(AssertionError, match="bf16_d64_q1_s256"):
        verify(tested)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.01, False)])
def test_a_component_gemm_passes_and_fails_by_its_error(
    factor: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemms = verify_gpu.component_gemms

    def launch(planned: Any, given: Any, kernels: Any) -> FakeLaunch:
        return FakeLaunch(GEMM, {"c": (gemms.product(planned, given) * factor).astype(np.float32)})

    monkeypatch.setattr(device_memory, "guarded_component_gemm", launch)
    if passes:
        assert verify(GEMM)["worst"]["c"] <= 1
    else:
        with pytest.raises(AssertionError, match="relative error"):
            verify(GEMM)


ROW = next(plan.build for plan in build_ptx.committed_plans() if plan.build.kind == "append")


class RowCase:
    """Stands in for a random append: its ratios, what is wrong, and the values of its launches."""

    def __init__(self, worst: float = 0.0, wrong: str = "", values: tuple[float, ...] = (1.0,)) -> None:
        self._worst, self._wrong = worst, [wrong] if wrong else []
        self.launches = Launches(*values)

    def check(self, kernels: Any, arch: str) -> tuple[dict[str, float], list[str]]:
        assert arch == ROW.arch
        return {"output": self._worst}, self._wrong

    def launch(self, kernels: Any, arch: str) -> Any:
        return self.launches


def test_an_append_is_verified_by_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [RowCase(0.25), RowCase(0.5), RowCase(0.125)]
    monkeypatch.setattr(verify_gpu.serving_cases, "of_build", lambda build: cases)
    found = verify(ROW)
    assert (found["cases"], found["worst"], found["repeats"]) == (3, {"output": 0.5}, verify_gpu.REPEATS)
    assert set(found["outputs_sha256"]) == {"seed1", "seed2"}


def test_wrong_rows_fail_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for cases, text in (
        ([RowCase(), RowCase(wrong="key_cache: 1 bytes differ")], "key_cache: 1 bytes differ"),
        ([RowCase(values=(1.0, 2.0))], "launch 2 gave other bits"),
        ([], "the suite has no case for it"),
    ):
        monkeypatch.setattr(verify_gpu.serving_cases, "of_build", lambda build, cases=cases: cases)
        with pytest.raises(AssertionError, match=text):
            verify(ROW)


def test_every_shown_row_kernel_has_cases() -> None:
    shown = [plan.build for plan in build_ptx.committed_plans() if plan.build.kind in ("append", "merge")]
    assert len(shown) == 6
    assert all(len(serving_cases.of_build(build)) >= 5 for build in shown)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16_d128_s8192_b4_h16_causal", {"grad_query"}),
        ("bf16_d128_s8192_b4_h16_causal_deterministic", set()),
        ("bf16_d128_s8192_b4_h16_full", {"grad_query", "grad_key", "grad_value"}),  # blocks share the last key tiles
        ("bf16_d128_s8192_b1_h1_full", {"grad_query", "grad_key", "grad_value"}),  # and few key tiles
        ("bf16_d128_s1024_b2_h8_full", {"grad_query"}),  # nearly as many key tiles as SMs, and none is shared
        ("bf16_d128_s512_b1_h16k4_causal", {"grad_query", "grad_key", "grad_value"}),  # query heads add
    ],
)
def test_gradients_to_which_several_blocks_add_may_differ_between_launches(name: str, expected: set[str]) -> None:
    assert verify_gpu.unordered(plan(Case.parse(f"backward {name}").problem(), "sm_90a")) == expected
