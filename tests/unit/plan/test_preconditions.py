"""Tests of preconditions: each condition refuses an input that no other condition refuses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

import pytest

from cutlass_py_attn.bundle.numbers import inputs
from cutlass_py_attn.plan import launch_rules, planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.preconditions import MAX_MAP_STRIDE_BYTES, Condition, conditions, limits, mapped
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.masks import UNLIMITED
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import BMHK
from cutlass_py_attn.problem.validation import MAX_LENGTH

NUM_SMS: Final = 132
MAPPED: Final = "mapped grad_bias"
CASES: Final = {
    "grouped": ("forward", "bf16_d64_s1024_b2_h4k2_causal_br", "sm_80"),
    "plain": ("forward", "bf16_d64_s1024_b2_h4_full", "sm_80"),
    "sm90": ("forward", "bf16_d64_s1024_b2_h4_full", "sm_90a"),
    "varlen": ("backward", "bf16_d64_t2048_s1024_h4_window_left5_right6", "sm_90a"),
    "terms": ("backward", "f16_d64_s512_b2_h4_full_biassum_dropout0.1_softcap30_alibib_sinks", "sm_80"),
    "bias": ("backward", "f16_d64_s512_b2_h4_full_biasbhqkgrad", "sm_80"),
    "one head": ("backward", "f16_d64_s512_b1_h1_full_biasgrad", "sm_80"),
    "read bias": ("forward", "f16_d64_s512_b2_h4_full_bias", "sm_80"),
    "broadcast bias": ("backward", "f16_d64_s512_b2_h4_full_biasbh11grad", "sm_80"),
    MAPPED: ("backward", "bf16_d128_s512_b2_h4_full_biasgrad", "sm_90a"),
    "key": ("backward", "f16_d64_s512_b2_h4_full_gradskv", "sm_80"),
    "ds_registers": ("backward", "bf16_d128_s4096_b4_h16_full", "sm_90a"),
    "decode": ("forward", "bf16_d128_q4_s8192_b2_h8k2_full", "sm_90a"),
}
# Strides in elements, so large that other sizes fit between them.
MAPPED_STRIDES: Final = {"head": 1 << 10, "row": 1 << 18, "batch": 1 << 33}
STRIDES: Final = {"head": 1 << 10, "row": 1 << 28, "batch": 1 << 60}
BIAS_STRIDES: Final = {"column": 1, "row": 1 << 31, "head": 1 << 61, "batch": 1 << 79}
MAPPED_BIAS_STRIDES: Final = {"column": 1, "row": 1 << 12, "head": 1 << 24, "batch": 1 << 33}

Row = tuple[str, dict[str, float], str]  # case, changed inputs, the condition in words
SLICES: Final = "call once for each slice"
OF_ONE_AXIS: Final = "step(1, "  # the stride of an axis with one index, which no kernel reads
# Conditions that follow from others. They stay for the reader of a manifest, and if another condition changes.
IMPLIED: Final = {
    "softcap must be a number that float32 holds": "softcap has its own bounds",
    "the delta kernel would have": "num_queries is at most 2^29",
    "the main kernel would have": "num_queries is at most 2^29, and decode splits no further than the SMs",
    "the finish kernel would have": "num_queries is at most 2^29",
    "logsumexp_log2 would have": "delta is as large",
    "partial_output would have": "num_queries is at most 16, and there are fewer splits than SMs for each head",
    "partial_logsumexp would have": "partial_output is larger",
    "shared_sums would have": "there are fewer shared tiles than SMs",
}


@functools.cache
def planned(case: str) -> tuple[Problem, Plan]:
    direction, name, arch = CASES[case]
    problem = spec.parse(name).problem(direction)
    return problem, planner.plan(problem, arch, NUM_SMS)


def required(problem: Problem, plan: Plan) -> list[Condition]:
    return [*conditions(problem, plan.build), *limits(problem, plan.build)]


def with_large_strides(problem: Problem, plan: Plan) -> dict[str, float]:
    """Returns the inputs of the problem with strides between which other sizes fit."""
    names = {name: item.value for name, item in inputs(problem, plan.build).items()} | {"num_sms": NUM_SMS}
    for name in problem.tensors():
        of_bias = MAPPED_BIAS_STRIDES if name in mapped(plan.build) else BIAS_STRIDES
        strides = (MAPPED_STRIDES if mapped(plan.build) else STRIDES) if name in BMHK else of_bias
        names |= {f"{name}_{axis}": stride for axis, stride in strides.items()}
    return names


def refusals(case: str, changes: dict[str, float]) -> list[str]:
    """Returns every condition, in words, that refuses the problem of a case with changed inputs, but implied ones."""
    problem, plan = planned(case)
    names = with_large_strides(problem, plan) | changes
    with contextlib.suppress(ZeroDivisionError):  # of sizes that a condition refuses
        for name, rule in launch_rules.definitions(problem, plan.build).items():
            names[name] = rule.evaluate(names)
    found = []
    for rule, says in required(problem, plan):
        with contextlib.suppress(KeyError, ZeroDivisionError):
            if not says.startswith(tuple(IMPLIED)) and not rule.evaluate(names):
                found.append(says)
    return found


def both_heads(number: int) -> dict[str, float]:
    return {"num_heads": number, "num_heads_key": number}


SIZES: list[Row] = [
    *(
        ("grouped", {name: 0}, f"{name} must be at least 1; with none there is nothing to launch")
        for name in ("batch", "num_queries", "num_keys", "num_heads", "num_heads_key")
    ),
    ("plain", {"batch": 65536}, f"batch must be at most 65535; {SLICES}"),
    ("plain", both_heads(65536), f"num_heads must be at most 65535; {SLICES}"),
    ("plain", {"num_queries": MAX_LENGTH + 1}, f"num_queries must be at most {MAX_LENGTH}; {SLICES}"),
    ("plain", {"num_keys": MAX_LENGTH + 1}, f"num_keys must be at most {MAX_LENGTH}; {SLICES}"),
    ("plain", {"num_heads": 8}, "num_heads must be num_heads_key; export a problem with grouped heads"),
    ("grouped", {"num_heads": 5}, "num_heads must be a multiple of num_heads_key"),
    ("varlen", {"num_queries": 2049}, "num_queries, of the longest sequence, must be at most tokens_q"),
    ("varlen", {"num_keys": 2049}, "num_keys, of the longest sequence, must be at most tokens_k"),
    ("varlen", {"tokens_q": MAX_LENGTH + 1}, f"tokens_q must be at most {MAX_LENGTH}; cu_seqlens are 32-bit"),
    ("varlen", {"tokens_k": MAX_LENGTH + 1}, f"tokens_k must be at most {MAX_LENGTH}; cu_seqlens are 32-bit"),
    ("decode", {"num_queries": 17, "num_heads_key": 8}, "num_queries must be at most 16"),
    ("decode", {"num_queries": 17 - 1, "num_heads": 10}, "num_queries * group must be at most 64"),
    ("decode", {"num_keys": 255}, "num_keys must be at least 256"),
    ("one head", {"batch": 2}, "batch must be 1: grad_bias is not summed over it; export a problem with more"),
    ("one head", both_heads(2), "num_heads must be 1: grad_bias is not summed over it; export a problem with more"),
    ("read bias", {"num_keys": 508}, "num_keys must be a multiple of 8, for bias"),
    ("broadcast bias", {"num_keys": 508}, "num_keys must be a multiple of 8, for grad_bias"),
]
EDGES: list[Row] = [
    *(("varlen", {name: -1}, f"{name} must be at least 0") for name in ("window_left", "window_right")),
    *(
        ("varlen", {name: UNLIMITED + 1}, f"{name} must be at most {UNLIMITED}, which stands for no limit")
        for name in ("window_left", "window_right")
    ),
    *(("grouped", {"bottom_right": number}, "bottom_right must be 0 or 1") for number in (-1, 2)),
]
FACTORS: list[Row] = [
    ("plain", {"scale": 9e-31}, "scale must be 0 or have a magnitude of at least 1e-30"),
    ("plain", {"scale": -9e-31}, "scale must be 0 or have a magnitude of at least 1e-30"),
    ("plain", {"scale": 2.0**128}, "scale must have a magnitude of at most 2**127"),
    ("plain", {"scale": -(2.0**128)}, "scale must have a magnitude of at most 2**127"),
    ("sm90", {"scale": -0.1}, "scale must not be below 0; export a problem with such a scale"),
    ("ds_registers", {"scale": 0.0}, "scale must not be 0; export a problem with such a scale"),
    ("terms", {"softcap": 2.0**-127, "scale": 0.0}, "softcap must be above 0, and at least 2**-126"),
    ("terms", {"softcap": 2.0**101, "scale": 1.0}, "softcap must be at most 1.26765e+30 for float16"),
    *(
        ("terms", given, "scale / softcap must be 0 or have a magnitude from 2**-126 to 2**126")
        for given in ({"softcap": 2.0**-126, "scale": 2.0}, {"softcap": 2.0**-126, "scale": -2.0},
                      {"softcap": 2.0**30, "scale": 1e-30}, {"softcap": 2.0**30, "scale": -1e-30})
    ),
    *(("terms", {"keep_scale": number}, "keep_scale must be a number that float32 holds") for number in (-1e39, 1e39)),
    *(
        ("terms", {"dropout_threshold": number}, "dropout_threshold must be from -2147483648 to 2147483647")
        for number in (-(2**31) - 1, 2**31)
    ),
]  # fmt: skip
LIMITS: list[Row] = [
    (
        "key",
        {"batch": 65535, "num_queries": 128 * 32769, **both_heads(1)},
        f"total_tiles must be at most 2147483647; {SLICES}",
    ),
    (
        "terms",
        {"num_queries": 1 << 23, "num_keys": 1 << 23, **both_heads(1)},
        f"the bias kernel would have more than 2147483647 blocks; {SLICES}",
    ),
    (
        "bias",
        {"batch": 65535, "num_queries": 64 * 16, **both_heads(65535)},
        f"grad_query_accum would have more than 2^48 bytes of the workspace; {SLICES}",
    ),
    (
        "key",
        {"batch": 65535, "num_queries": 64 * 512, **both_heads(65535)},
        f"delta would have more than 2^48 bytes of the workspace; {SLICES}",
    ),
]


def stride_rows() -> Iterator[Row]:
    """Yields a row for each stride of each tensor, where the stride counts."""
    for case in CASES:
        problem, plan = planned(case)
        strides = MAPPED_STRIDES if mapped(plan.build) else STRIDES
        batch = 1 if problem.shape.tokens is not None else problem.shape.batch
        counts = {"batch": batch, "row": 2, "head": problem.shape.num_heads}
        most = MAX_MAP_STRIDE_BYTES // plan.build.item_bytes
        for name in (name for name in problem.tensors() if name in BMHK):
            for axis in (axis for axis, size in counts.items() if size > 1):
                stride = f"{name}_{axis}"
                yield case, {stride: strides[axis] + 4}, f"{stride} must be a multiple of 8 elements"
                if name in mapped(plan.build):
                    for wrong in (0, -8):
                        yield case, {stride: wrong}, f"{stride} must be above 0: a tensor map steps forward"
                    yield case, {stride: most + 8}, f"{stride} must be at most {most}, as in any tensor map"
        if problem.grad_output is not None:
            for wrong in (0, 2):
                says = "grad_output_column must be 1: rows are read several elements at a time"
                yield case, {"grad_output_column": wrong}, says


def bias_rows() -> Iterator[Row]:
    """Yields a row for each stride of a bias and of its gradient."""
    cases = ("terms", "bias"), ("bias", "bias"), ("bias", "grad_bias"), ("one head", "grad_bias"), (MAPPED, "grad_bias")
    for case, name in cases:
        for axis in ("batch", "head", "row"):
            stride = f"{name}_{axis}"
            strides = MAPPED_BIAS_STRIDES if case == MAPPED else BIAS_STRIDES
            yield case, {stride: strides[axis] + 4}, f"{stride} must be a multiple of 8 elements"
            if case == MAPPED:
                most = MAX_MAP_STRIDE_BYTES // 2
                yield case, {stride: -strides[axis]}, f"{stride} must be above 0: a tensor map steps forward"
                yield case, {stride: most + 8}, f"{stride} must be at most {most}, as in any tensor map"
        yield case, {f"{name}_column": 2}, f"{name}_column must be 1: rows are read 8 elements at a time"


def overlap_rows() -> Iterator[Row]:
    """Yields a row for each result, whose rows are as near as its heads."""
    for case in CASES:
        problem, _ = planned(case)
        written = [name for name in problem.tensors() if name.startswith("grad_") and name != "grad_output"]
        for name in written or ["output"]:
            says = (
                f"rows of {name} overlap: its strides must be those of an array of these sizes; set them with the sizes"
            )
            yield case, {f"{name}_row": 8}, says


ROWS: Final = [*SIZES, *EDGES, *FACTORS, *LIMITS, *stride_rows(), *bias_rows(), *overlap_rows()]


@pytest.mark.parametrize("case", CASES)
def test_the_problems_themselves_are_allowed(case: str) -> None:
    assert refusals(case, {}) == []


@pytest.mark.parametrize("case", CASES)
def test_a_condition_alone_refuses_an_input(case: str) -> None:
    wrong: dict[str, Any] = {
        f"{changes}": found
        for name, changes, says in ROWS
        if name == case and set(found := refusals(case, changes)) != {says}
    }
    assert wrong == {}


def test_every_condition_has_such_an_input() -> None:
    """A new condition needs a row, or follows from others and is named as such."""
    covered = {(case, says) for case, _, says in ROWS}
    said = {says for _, says in covered}
    missing = [
        says
        for case in CASES
        for rule, says in required(*planned(case))
        if says not in said and OF_ONE_AXIS not in str(rule) and not says.startswith(tuple(IMPLIED))
    ]
    assert missing == []
    assert not [says for says in said if says.startswith(tuple(IMPLIED))]
