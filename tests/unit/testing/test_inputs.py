"""Tests of the inputs of GPU cases: grouped heads, variable lengths, and biases with rows that see nothing."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import ArrayMask, MaskFunction
from cutlass_py_attn.reference.score_mod import SeqlenInfo
from cutlass_py_attn.testing import inputs, layouts
from cutlass_py_attn.testing.cases import SM90_ARCH, Case
from cutlass_py_attn.testing.check import Array

LINES = (
    "f16_d64_q40_s50_b2_h4k2_causal_br",
    "bf16_d64_n40x50u30,7x3u3,0x20u5,9x0u0_h4k2_causal",
    "f32_d96_n33,5x60_h2_window_left9_right2",
    "bf16_d64_q40_s50_b2_h4k2_causal_br_rangesbh",
    "f16_d64_q40_s50_b2_h4_full_ranges1hdocuments",
    "f16_d64_q300_s50_b2_h2_causal_rangesb1runs",
    "bf16_d64_q300_s200_b2_h4k2_full_blocks40bhx64",
    "f16_d64_q60_s50_b2_h4k2_causal_functiondilated",
    "bf16_d64_q40_s50_b2_h4_full_rangesbh_blocks60_functionweights",
)


def visible(case: Case, sequence: SeqlenInfo) -> Array:
    """Which keys each query of a sequence sees, (heads, queries, keys)."""
    drawn = case.mask_of(case.arrays())
    if isinstance(drawn, ArrayMask):
        return case.visible(drawn)[sequence.index]
    mask = case.spec.mask.materialise(sequence.num_queries, sequence.num_keys)
    return np.broadcast_to(mask, (case.spec.num_heads, *mask.shape))


@pytest.mark.parametrize("line", LINES)
def test_one_key_gets_the_weight_of_its_row(line: str) -> None:
    case = Case.parse(f"forward {line} inputs=one_key")
    spec, arrays = case.spec, case.arrays()
    group = spec.num_heads // spec.num_heads_key
    for each in case.sequences:
        seen = visible(case, each)
        for head in range(spec.num_heads):
            query = arrays["query"][each.batch, each.queries, head].astype(np.float64)
            key = arrays["key"][each.batch, each.keys, head // group].astype(np.float64)
            scores = np.where(seen[head], query @ key.T / np.sqrt(spec.head_dim), -np.inf)[seen[head].any(axis=1)]
            weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
            weights /= weights.sum(axis=1, keepdims=True)
            assert (weights.max(axis=1, initial=0) > 0.99).all(), (each, head)


def test_a_needle_row_of_a_group_has_its_two_keys_in_its_sequence() -> None:
    case = Case.parse("forward f32_d64_n40x50u30,25_h4k2_causal inputs=needle")
    arrays = case.arrays()
    for each in case.sequences:
        query = arrays["query"][0, each.queries]
        for head in range(4):
            products = query[:, head] @ arrays["key"][0, each.keys, head // 2].T
            seen = case.spec.mask.materialise(each.num_queries, each.num_keys)
            best = np.where(seen, products, -np.inf).max(axis=1)
            assert (best >= 2.0 * 64 * 0.5).all(), "a visible key of its own sequence has the score of a needle"


def test_rising_scores_exceed_those_of_the_next_keys_by_more_than_weights_may_exceed_1() -> None:
    """In about half of the rows, at every border of blocks but where the levels start again."""
    arrays = Case.parse("forward bf16_d96_n300x2300,200_h4k2_causal inputs=rising").arrays()
    query, key = (arrays[name][0].astype(np.float64) for name in ("query", "key"))
    borders = np.arange(128, 2300, 128)
    scores = np.einsum("qhd,khd->hqk", query[:300], np.repeat(key[:2300], 2, axis=1)) / np.sqrt(96)
    steps = scores[:, :, borders - 1] - scores[:, :, borders]
    rises = (np.delete(steps, np.arange(7, len(borders), 8), axis=2) > 24 * np.log(2)).all(axis=2)
    assert 0.4 < rises.mean() < 0.6
    assert np.abs(scores).max() < 300


@pytest.mark.parametrize("axes", ["bhqk", "1hqk", "bh1k", "bhq1", "1111"])
@pytest.mark.parametrize("line", LINES)
def test_every_row_with_the_most_negative_bias_has_an_ordinary_key(line: str, axes: str) -> None:
    case = Case.parse(f"forward {line}_bias{axes} bias_inputs=lowest seed=1")
    spec = case.spec
    sizes = spec.batch, spec.num_heads, spec.num_queries, spec.num_keys
    bias = np.broadcast_to(case.arrays()["bias"].astype(np.float64), sizes)
    lowest = inputs.MOST_NEGATIVE[case.spec.dtype]
    if axes == "bhqk":
        assert (bias == lowest).mean() > 0.1
    for each in case.sequences:
        seen = visible(case, each)
        part = bias[each.index, :, : each.num_queries, : each.num_keys]
        ordinary = (part > lowest / 2) & seen
        assert ordinary.any(axis=2)[seen.any(axis=2)].all()


def test_hidden_rows_hide_every_third_row() -> None:
    bias = Case.parse("forward f16_d64_s50_b2_h2_full_biasbhqk bias_inputs=hidden_rows").arrays()["bias"]
    hidden = np.isneginf(bias.astype(np.float64)).all(axis=3)
    assert (hidden == (np.arange(50) % 3 == 2)).all()


def test_the_line_of_a_case_holds_its_inputs() -> None:
    case = Case.parse("backward f16_d64_s50_b1_h2_full_biasbhqk inputs=one_key bias_inputs=lowest seed=3")
    assert Case.parse(case.line) == case
    assert "inputs=one_key bias_inputs=lowest" in case.line


@pytest.mark.parametrize("layout", layouts.RANGE_LAYOUTS)
@pytest.mark.parametrize("axes", ["11", "b1", "1h", "bh"])
def test_ranges_of_every_layout_are_those_of_the_seed(axes: str, layout: str) -> None:
    case = Case.parse(f"backward f16_d64_q40_s50_b2_h4_causal_ranges{axes}runs range_layout={layout} seed=7")
    assert Case.parse(case.line) == case
    problem, arrays = case.problem(), case.arrays()
    assert problem.reasons() == []
    assert planner.plan(problem, SM90_ARCH).build.mask == "ranges"
    truth = case.spec.key_ranges(7)
    for name, edge in truth.arrays().items():
        tensor = getattr(problem, name)
        assert arrays[name].shape == tensor.shape
        assert (arrays[name] == edge).all()
        memory = np.full(max(np.dot(np.subtract(tensor.shape, 1), tensor.strides) + 1, 1), -1, np.int32)
        view = np.lib.stride_tricks.as_strided(memory, tensor.shape, [4 * step for step in tensor.strides])
        view[...] = arrays[name]
        assert (view == edge).all(), "no element of the layout is another's"
    assert (truth.key_start != case.replace(seed=8).arrays()["key_start"]).any()
    found = case.mask_of(arrays)
    assert isinstance(found, KeyRanges)
    assert found.band == case.spec.mask


def test_an_unknown_family_of_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="bias family 'low': must be one of gaussian, lowest, hidden_rows"):
        Case.parse("forward f16_d64_s8_b1_h1_full_bias bias_inputs=low").arrays()


@pytest.mark.parametrize("layout", layouts.RANGE_LAYOUTS)
@pytest.mark.parametrize(
    "words", ["functiontree", "functionimages", "blocks40bhx64", "rangesbh_blocks40_functionweights"]
)
def test_arrays_of_masks_of_every_layout_are_those_of_the_seed(words: str, layout: str) -> None:
    case = Case.parse(f"backward f16_d64_q140_s250_b2_h4k2_causal_{words} range_layout={layout} seed=7")
    assert Case.parse(case.line) == case
    problem, arrays = case.problem(), case.arrays()
    assert problem.reasons() == []
    assert planner.plan(problem, SM90_ARCH).build.form.name == "ranges"
    drawn = case.drawn_mask
    assert isinstance(drawn, ArrayMask)
    for name, truth in drawn.arrays().items():
        tensor = getattr(problem, name)
        assert (tensor.dtype, arrays[name].dtype) == (str(truth.dtype), truth.dtype)
        memory = np.zeros(np.dot(np.subtract(tensor.shape, 1), tensor.strides) + 1, truth.dtype)
        steps = [truth.dtype.itemsize * step for step in tensor.strides]
        np.lib.stride_tricks.as_strided(memory, tensor.shape, steps)[...] = arrays[name]
        view = np.lib.stride_tricks.as_strided(memory, tensor.shape, steps)
        assert (view == np.broadcast_to(truth, tensor.shape)).all(), "no element of the layout is another's"
    found = case.mask_of(arrays)
    assert isinstance(found, ArrayMask)
    assert isinstance(found, MaskFunction) == ("function" in words)
    np.testing.assert_array_equal(case.visible(found), case.visible(drawn))
