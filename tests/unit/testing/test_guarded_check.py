"""Tests of the check of the random cases: it passes the reference, and sees faults that ordinary inputs hide."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.reference.numpy_reference import ReferenceScoreMod
from cutlass_py_attn.testing import accuracy, check, guarded_check
from cutlass_py_attn.testing.cases import ARCH, Case
from cutlass_py_attn.testing.check import unseen_rows
from tests.support.fake_launch import FakeLaunch, stored

Array = npt.NDArray[Any]

DROPPED_FACTOR = {"dropout_p": 0.0}  # the mask of dropout without the factor 1 / (1 - p)
RARE_DROPOUT = tuple(
    f"{direction} f32_d64_{sizes}_b1_h2_{mask}_dropout1e-06"
    for direction, single in (("forward", "q40_s1"), ("backward", "s1"))
    for sizes, mask in ((single, "full"), ("s40", "causal_window1"), ("q30_s40", "window_left0_right0"))
)
SOFTCAP = tuple(f"{direction} bf16_d64_q30_s50_b1_h2_causal" for direction in ("forward", "backward"))


def worst_ratio(case: Case, monkeypatch: pytest.MonkeyPatch, **fault: float) -> float:
    """The worst error / allowed of the reference's results, with fields of its score modification changed."""
    expected = guarded_check.expect(case)
    create = Case.score_mod

    def faulty(self: Case, arrays: dict[str, Array]) -> ReferenceScoreMod:
        return dataclasses.replace(create(self, arrays), **fault)

    with monkeypatch.context() as patch:
        patch.setattr(Case, "score_mod", faulty)
        found = guarded_check.by_reference(case, expected.arrays, "float64")
    results = dataclasses.replace(expected, truth={name: found[name] for name in expected.truth})
    return max(guarded_check.ratios(case, expected, stored(case, results)).values())


@pytest.mark.parametrize("line", RARE_DROPOUT)
def test_zero_scores_show_a_dropped_factor_of_rare_dropout(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sharp = Case.parse(f"{line} inputs=zero_scores")
    assert worst_ratio(sharp, monkeypatch) < 0.5
    assert worst_ratio(sharp, monkeypatch, **DROPPED_FACTOR) > 1.5


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_gaussian_inputs_hide_a_dropped_factor_of_rare_dropout(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(f"{direction} f32_d64_s40_b1_h2_causal_dropout1e-06")
    assert worst_ratio(case, monkeypatch, **DROPPED_FACTOR) < 0.5


@pytest.mark.parametrize("line", SOFTCAP)
@pytest.mark.parametrize("softcap", [4.0, 30.0])
def test_scores_at_the_softcap_show_an_error_of_one_percent(
    line: str, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharp = Case.parse(f"{line}_softcap{softcap:g} inputs=saturated")
    assert worst_ratio(sharp, monkeypatch) < 0.5
    assert worst_ratio(sharp, monkeypatch, softcap=1.01 * softcap) > 2


@pytest.mark.parametrize("line", SOFTCAP)
def test_gaussian_scores_hide_an_error_of_a_large_softcap(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst_ratio(Case.parse(f"{line}_softcap30"), monkeypatch, softcap=30.3) < 0.5


@pytest.mark.parametrize("family", ["gaussian", "gaussian_x3", "needle", "one_key", "equal_keys", "integers"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_a_rounded_reference_passes_with_every_family(dtype: str, direction: str, family: str) -> None:
    """The reference in float32, rounded to the dtype, is about as accurate as a kernel."""
    case = Case.parse(f"{direction} {dtype}_d64_q40_s50_b1_h4k2_causal_br inputs={family} seed=1")
    expected = guarded_check.expect(case)
    found = guarded_check.by_reference(case, expected.arrays, "float32")
    rounded = dataclasses.replace(expected, truth={name: found[name] for name in expected.truth})
    ratios = guarded_check.ratios(case, expected, stored(case, rounded))
    assert max(ratios.values()) < 0.6, ratios


@pytest.mark.parametrize("name", ["output", "logsumexp"])
def test_one_wrong_row_fails(name: str) -> None:
    case = Case.parse("forward bf16_d64_q65_s90_b1_h2_causal_br inputs=one_key seed=1")
    expected = guarded_check.expect(case)
    found = {key: array.copy() for key, array in expected.truth.items()}
    if name == "output":
        found[name][:, 40] = found[name][:, 41]
    else:
        found[name][:, :, 40] += 0.1
    assert max(guarded_check.ratios(case, expected, found).values()) > 1


@pytest.mark.parametrize("family", ["", "runs", "lengths"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_that_see_no_key_and_keys_that_no_row_sees_are_exactly_zero(direction: str, family: str) -> None:
    case = Case.parse(f"{direction} bf16_d64_q150_s190_b2_h4k2_causal_br_window60_rangesbh{family}_gradlse seed=2")
    expected = guarded_check.expect(case)
    found = guarded_check.by_reference(case, expected.arrays, "float32")
    rounded = stored(case, dataclasses.replace(expected, truth={name: found[name] for name in expected.truth}))
    assert max(guarded_check.ratios(case, expected, rounded).values()) < 0.6
    unseen = unseen_rows(case, expected.arrays)
    for name in set(rounded) & set(unseen):
        truth = expected.truth[name]
        assert not truth[unseen[name]].any()
        if not unseen[name].any():
            assert name in ("grad_key", "grad_value"), "some rows see no key"
            continue
        spoilt = {other: array.copy() for other, array in rounded.items()}
        spoilt[name][tuple(index[0] for index in np.nonzero(unseen[name]))] = 1e-30
        assert guarded_check.ratios(case, expected, spoilt)[name] == np.inf
    if direction == "forward":
        lse = expected.truth["logsumexp"][:, :, :150]
        assert (np.isneginf(lse).swapaxes(1, 2) == unseen["output"]).all()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_dense_check_has_ranges(direction: str) -> None:
    case = Case.parse(f"{direction} bf16_d64_q150_s190_b2_h4k2_causal_br_rangesbhruns seed=2")
    arrays = case.arrays()
    found = check.by_reference(case, arrays, "float32")
    results = {name: array.astype(np.float32 if name == "logsumexp" else arrays["query"].dtype)
               for name, array in found.items()}  # fmt: skip
    assert accuracy.passed(check.results(case, arrays, results))
    name = "output" if direction == "forward" else "grad_key"
    row = tuple(index[0] for index in np.nonzero(check.unseen_rows(case, arrays)[name]))
    results[name][row] = 1e-30
    (zero,) = (each for each in check.results(case, arrays, results) if (each.tensor, each.rule) == (name, "zero"))
    assert zero.worst == np.inf


def test_a_launch_says_which_kernel_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("forward f16_d64_s8_b1_h1_full")
    expected = guarded_check.expect(case)
    build = plan(case.problem(), ARCH).build
    monkeypatch.setattr(guarded_check, "guarded_launch", lambda *given: FakeLaunch(build, expected.truth))
    launched = guarded_check.launch(case, expected, lambda build: pytest.fail("bound by the fake"))
    assert (launched.build, launched.outputs) == (build, expected.truth)


def test_products_of_one_sign_lose_the_bits_behind_their_sum() -> None:
    """256 products of 240 and 448 of which those behind a sum of 2^24 lose 1024 each, as on an H200: 0.36 %."""
    case = Case.parse(
        "forward e4m3_d256_q5_s32_b1_h1_causal_br_window1_descaletensor_f16out inputs=rising seed=1893817849"
    )
    expected = guarded_check.expect(case)
    truth = expected.truth

    def ratio(lost: float) -> float:
        found = {name: array.copy() for name, array in truth.items()}
        found["logsumexp"] = truth["logsumexp"] * (1 - lost)
        return guarded_check.ratios(case, expected, found)["logsumexp"]

    assert ratio(96 * 1024 / (256 * 240 * 448)) < 1
    assert ratio(0.05) > 1
