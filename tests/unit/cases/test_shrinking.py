"""Tests of the shrinker with faults that are conditions of the case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.testing.cases import Case
from tests.cases.shrinking import shrink, smaller

LARGE = (
    "backward bf16_d96v72_q190_s257_b3_h8k2_causal_window64_biasbhqksum_dropout0.3_softcap4_alibi_sinks"
    "_scale0.1_splits3 inputs=needle bias_inputs=lowest layout=padded bias_layout=transposed philox_seed=7"
    " philox_offset=5 seed=11"
)
VARIABLE = "forward f16_d128_n100x190u90,0x20u3,64x129u129,31x65u0_h4k2_causal_br_alibib inputs=one_key seed=3"

RANGES = (
    "backward f16_d128_q190_s257_b3_h8k2_causal_window64_rangesbhdocuments_sinks_scale0.1 inputs=needle layout=padded"
    " range_layout=mixed seed=11"
)

FAULTS: list[tuple[str, Callable[[Case], bool], str]] = [
    (LARGE, lambda c: True, "backward bf16_d64_s1_b1_h1_full"),
    (LARGE, lambda c: c.spec.num_keys > 128, "backward bf16_d64_q1_s129_b1_h1_full"),
    (LARGE, lambda c: c.spec.softcap > 0 and c.spec.sinks, "backward bf16_d64_s1_b1_h1_full_softcap4_sinks"),
    (LARGE, lambda c: "b" in c.spec.gradients, "backward bf16_d64_s1_b1_h1_full_biasbhqkgrad"),
    (LARGE, lambda c: c.spec.num_heads != c.spec.num_heads_key, "backward bf16_d64_s1_b1_h2k1_full"),
    (LARGE, lambda c: c.inputs == "needle", "backward bf16_d64_s1_b1_h1_full inputs=needle"),
    (LARGE, lambda c: c.layout == "padded" and c.seed == 11, "backward bf16_d64_s1_b1_h1_full layout=padded seed=11"),
    (RANGES, lambda c: True, "backward f16_d64_s1_b1_h1_full"),
    (RANGES, lambda c: bool(c.spec.ranges), "backward f16_d64_s1_b1_h1_full_ranges11all"),
    (
        RANGES,
        lambda c: bool(c.spec.ranges) and not c.spec.key_ranges(c.seed).materialise(c.spec.num_keys).all(),
        "backward f16_d64_q1_s2_b1_h1_causal_window1_ranges11all",
    ),
    (
        RANGES,
        lambda c: c.spec.ranges == "bh" and c.range_layout == "mixed",
        "backward f16_d64_s1_b1_h1_full_rangesbhall range_layout=mixed",
    ),
    (VARIABLE, lambda c: True, "forward f16_d64_s1_b1_h1_full"),
    (VARIABLE, lambda c: bool(c.spec.sequences), "forward f16_d64_s1_t1_h1_full"),
    (VARIABLE, lambda c: c.spec.has_used_keys and c.spec.mask.name != "full", "forward f16_d64_n1x1u0_h1_causal_br"),
    (
        VARIABLE,
        lambda c: any(each.num_queries > 60 and each.num_keys > 100 for each in c.spec.sequences),
        "forward f16_d64_n61x101_h1_full",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "fault", "expected"), FAULTS, ids=[each[2] for each in FAULTS])
def test_a_fault_is_reduced_to_what_it_needs(line: str, fault: Callable[[Case], bool], expected: str) -> None:
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case)
        assert case.needs_kernels
        return fault(case)

    found = shrink(Case.parse(line), fails)
    assert fault(found)
    assert found.line == Case.parse(expected).line
    assert len(asked) == len(set(asked)), "no case runs twice"


def test_no_smaller_case_fails() -> None:
    case = Case.parse(LARGE)
    assert shrink(case, lambda other: False) == case


def test_no_more_cases_run_than_allowed() -> None:
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case)
        return False

    shrink(Case.parse(LARGE), fails, tries=5)
    assert len(asked) == 5


def test_only_cases_whose_kernel_is_at_hand_remain() -> None:
    """Where only the kernel of the case is at hand, no other kernel fails, and sizes and numbers alone become less."""
    case = Case.parse("backward f16_d80_q70_s90_b2_h4_causal_softcap2 inputs=needle layout=packed seed=9")
    found = shrink(
        case, lambda c: (c.spec.softcap, c.spec.head_dim, c.spec.mask, c.layout) == (2, 80, Causal(), "packed")
    )
    assert found.line == "backward f16_d80_s1_b1_h1_causal_softcap2 layout=packed"


@pytest.mark.parametrize("line", [LARGE, VARIABLE])
def test_steps_make_other_cases_that_have_a_line(line: str) -> None:
    case = Case.parse(line)
    found = list(smaller(case))
    assert case not in found
    for each in found:
        assert Case.parse(each.line) == each
