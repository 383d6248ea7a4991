"""Tests of problem specs: names and specs convert into each other, and a wrong name is refused with a remedy."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cutlass_py_attn.bench.cases import default_cases
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import spec as specs
from cutlass_py_attn.problem.drawn_functions import FUNCTIONS
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.spec import ProblemSpec, SequenceLengths, parse, parse_mask
from cutlass_py_attn.problem.tensors import DIRECTIONS, Shape, Tensor

RESULTS = Path(__file__).resolve().parents[3] / "tools" / "bench" / "results"

lengths = st.integers(0, 300)
windows = st.none() | st.integers(1, 300)
edges = st.none() | st.integers(0, 300)
masks: st.SearchStrategy[Mask] = (
    st.just(Full())
    | st.builds(Causal, windows)
    | st.builds(CausalBottomRight, windows)
    | st.builds(Window, edges, edges)
)
RANGE_FAMILIES = ("", "runs", "all", "documents", "documents4096", "prefix7", "window10")
positive = st.floats(1e-6, 100, allow_nan=False)


@st.composite
def any_spec(draw: st.DrawFn) -> ProblemSpec:
    """A spec with any mixture of features."""
    axes = [draw(st.sampled_from((letter, "1"))) for letter in specs.BIAS_AXES]
    bias = "".join(axes) if draw(st.booleans()) else ""
    gradient = draw(st.sampled_from(("", "grad", "sum"))) if bias else ""
    sinks = draw(st.booleans())
    ranges = draw(st.sampled_from(("", "", "11", "b1", "1h", "bh")))
    share = draw(st.none() | st.integers(0, 100))
    letters = "".join(letter for letter in "qkv" if draw(st.booleans())) + ("b" if gradient else "")
    letters += "s" if sinks and draw(st.booleans()) else ""
    used = draw(st.booleans())
    sequence = st.builds(SequenceLengths, lengths, lengths, lengths if used else st.none())
    sequences = draw(st.lists(sequence, min_size=1, max_size=5)) if draw(st.booleans()) else []
    heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return ProblemSpec(
        draw(st.sampled_from(("float16", "bfloat16", "float32"))),
        draw(st.integers(1, 600)),
        num_queries=draw(lengths),
        num_keys=draw(lengths),
        batch=draw(st.integers(0, 5)),
        num_heads=heads * group,
        head_dim_value=draw(st.integers(0, 600)),
        num_heads_key=heads,
        mask=draw(masks),
        sequences=tuple(sequences),
        ranges=ranges,
        range_family=draw(st.sampled_from(RANGE_FAMILIES)) if ranges else "",
        block_share=share,
        block_axes=draw(st.sampled_from(("", "b", "h", "bh"))) if share is not None else "",
        block_size=draw(st.sampled_from((128, 64, 3))) if share is not None else 128,
        mask_function=draw(st.sampled_from(("", "", *FUNCTIONS))),
        bias=bias,
        bias_gradient=gradient,
        gradients=letters,
        dropout_p=draw(st.just(0.0) | st.floats(1e-9, 1)),
        philox_on_device=draw(st.booleans()),
        softcap=draw(st.just(0.0) | positive),
        scale=draw(st.none() | st.floats(-10, 10)),
        alibi=draw(st.sampled_from(("", "h", "bh"))),
        sinks=sinks,
        deterministic=draw(st.booleans()),
        num_splits_key=draw(st.none() | st.integers(1, 8)),
    )


@settings(deadline=None)
@given(any_spec())
def test_a_name_gives_its_spec(spec: ProblemSpec) -> None:
    assert parse(spec.name) == spec
    assert parse(spec.name).name == spec.name


@settings(deadline=None)
@given(any_spec(), st.randoms())
def test_words_may_come_in_any_order(spec: ProblemSpec, random: object) -> None:
    words = spec.name.split("_")
    random.shuffle(words)  # type: ignore[attr-defined]
    assert parse("_".join(words)) == spec


@settings(deadline=None)
@given(any_spec(), st.sampled_from(DIRECTIONS))
def test_the_problem_of_a_spec_is_serialized(spec: ProblemSpec, direction: str) -> None:
    problem = spec.problem(direction)
    assert from_json(json.loads(json.dumps(to_json(problem)))) == problem


@settings(deadline=None)
@given(any_spec(), st.sampled_from(DIRECTIONS))
def test_a_spec_has_the_features_of_its_problem(spec: ProblemSpec, direction: str) -> None:
    problem = spec.problem(direction)
    assert problem.shape == spec.shape
    assert (problem.mask, problem.scale, problem.dropout_p) == (spec.mask, spec.scale, spec.dropout_p)
    assert problem.form.has_ranges == spec.has_array_mask
    if direction == "backward":
        assert problem.gradients == tuple(specs.GRADIENTS[letter] for letter in spec.gradients)
        assert (problem.deterministic, problem.num_splits_key) == (spec.deterministic, spec.num_splits_key)
    else:
        assert (problem.gradients, problem.deterministic, problem.num_splits_key) == ((), False, None)


@settings(deadline=None)
@given(masks)
def test_a_mask_has_words(mask: Mask) -> None:
    assume(mask != Full())
    assert parse_mask(ProblemSpec("float16", 8, mask=mask).name.partition("_h1_")[2]) == mask


def test_recorded_names_are_the_names_of_their_specs() -> None:
    """The records of tools/bench/results stay valid."""
    recorded = {
        row["case"] for file in ("h200", "sustained") for row in json.loads((RESULTS / f"{file}.json").read_text())
    }
    assert len(recorded) > 50
    for name in recorded | set(default_cases()):
        assert parse(name).name == name


def test_every_word_of_the_grammar_is_parsed() -> None:
    spec = parse(
        "f16_d64v32_n70x200u30,130_h8k2_causal_br_window64_bias11qksum_dropout1e-06_softcap30_alibib_sinks"
        "_deterministic_scale-0.05_deviceseed_gradsqbs_splits2"
    )
    assert spec.shape == Shape(2, 130, 200, 8, 64, 32, 2, (200, 330))
    assert spec.sequences == (SequenceLengths(70, 200, 30), SequenceLengths(130, 130, 130))
    assert spec.mask == CausalBottomRight(64)
    assert (spec.bias, spec.bias_gradient, spec.gradients, spec.alibi) == ("11qk", "sum", "qbs", "bh")
    assert (spec.dropout_p, spec.softcap, spec.scale, spec.num_splits_key) == (1e-6, 30.0, -0.05, 2)
    assert spec.sinks
    assert spec.deterministic
    assert spec.philox_on_device
    ranges = parse("bf16_d64_q3_s70_b2_h4_causal_window8_rangesb1documents4096")
    assert (ranges.mask, ranges.ranges, ranges.range_family) == (Causal(8), "b1", "documents4096")
    assert ranges.problem("forward").key_start == Tensor.contiguous((2, 1, 3), "int32")
    assert parse("bf16_d64_q3_s70_b2_h4_window_left7").mask == Window(7, None)
    assert parse("bf16_d64_s64_t100_h4_full").num_tokens == (100, 100)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "write it like"),
        ("bf16_d128_b1_h1_full", "the lengths are b1: must be s with b"),
        ("bf16_d64_s64_h1_full", "the lengths are s64: must be s with b, q with s and b, s with t, or n alone"),
        ("bf16_d64_h1_full", "the lengths are missing"),
        ("bf16_d64_s64_b2_full", r"num_heads is missing; add h\{num_heads\}"),
        ("b16_d64_s64_b2_h2_full", "'b2' gives batch a second time; leave one out"),
        ("bf16_d64_s64_b2_h2_casual", "'casual' is no word of the grammar; did you mean causal"),
        ("bf16_d64_s64_b2_h2_full_determinstic", "did you mean deterministic"),
        ("bf16_d64_s64_b2_h2_full_dropout", r"has another form; write \[dropout\{dropout_p\}\]: probability"),
        ("bf16_d64_s64_b2_h2_full_paged0", "the value of 'paged0' has another form"),
        ("bf16_d64_s64_b2_h2_full_ranges", "the value of 'ranges' has another form; write"),
        ("bf16_d64_s64_b2_h2_full_ranges1hprefix0", "the value of 'ranges1hprefix0' has another form; write"),
        ("bf16_d64_s64_b2_h2_full_range11", "did you mean ranges"),
        ("bf16_d64_s64_b2_h2_full_window8", "'window8' belongs to causal; write causal or leave it out"),
        ("bf16_d64_s64_b2_h2_causal_left8", "'left8' belongs to window; write window or leave it out"),
        ("bf16_d64_q3_s64_t200_h2_full", "the lengths are q3, s64, t200: must be"),
        ("bf16_d64_s64_n5,6_h2_full", "the lengths are s64, n5,6: must be"),
        ("bf16_d64_s64_b2_h2_full_gradsqb", "must have b if the bias has grad or sum, and only then"),
        ("bf16_d64_s64_b2_h2_full_biasgrad_gradsq", "must have b if the bias has grad or sum, and only then"),
        ("bf16_d64_s64_b2_h2_full_gradskq", "must be in the order qkvbs, each once"),
    ],
)
def test_a_wrong_name_is_refused_with_a_remedy(name: str, message: str) -> None:
    with pytest.raises(NotSupported, match=message):
        parse(name)


def test_every_objection_is_listed() -> None:
    with pytest.raises(NotSupported) as raised:
        parse("bf16_d64_s64_b2_h2_ful_dropot0.1")
    assert len(raised.value.reasons) == 2


def test_tokens_without_keys_have_one_objection() -> None:
    with pytest.raises(NotSupported) as caught:
        parse("f16_d64_t100_h2_full")
    assert str(caught.value) == (
        "problem 'f16_d64_t100_h2_full': the lengths are t100: must be s with b, q with s and b, s with t, or n alone; "
        "add or leave out a word, as in bf16_d128_s8192_b4_h16_causal"
    )
    with pytest.raises(NotSupported, match=r"t\.\.\. needs s\.\.\. of at least one"):
        parse("f16_d64_t100_s0_h2_full")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("functionstripe", "'functionstripe' is no word of the grammar; did you mean function?"),
        ("function", "the value of 'function' has another form"),
        ("blocks", "the value of 'blocks' has another form"),
        ("blocks25hb", "the value of 'blocks25hb' has another form"),
        ("blocks25x0", "the value of 'blocks25x0' has another form"),
        ("blocks101", "blocks101: must be from 0 to 100 in a hundred; reduce it"),
        ("block25", "'block25' is no word of the grammar; did you mean blocks?"),
    ],
)
def test_words_of_arrays_that_are_wrong(word: str, words: str) -> None:
    with pytest.raises(NotSupported) as caught:
        parse(f"bf16_d64_s64_b2_h2_full_{word}")
    (reason,) = caught.value.reasons
    assert words in reason


def test_ranges_beside_lengths_are_refused_with_their_problem() -> None:
    for name in (
        "n64x70,3_h2_full_ranges11",
        "n64x70,3_h2_full_functiontree",
        "n64x70,3_h2_full_blocks25",
        "q3_s70_b2_h2_full_paged16_ranges11",
    ):
        assert any("a mask in memory" in reason for reason in parse(f"bf16_d64_{name}").problem("forward").reasons())


def test_a_number_out_of_range_is_refused_with_its_problem() -> None:
    with pytest.raises(NotSupported, match="must be a probability from 0 to 1"):
        parse("bf16_d64_s64_b2_h2_full_dropout1.5").problem("forward").check()


def test_every_field_has_a_word() -> None:
    fields = {field for word in specs.WORDS for field in word.fields}
    assert {item.name for item in dataclasses.fields(ProblemSpec)} <= fields
    assert len(specs.WORDS) == len(re.findall(r"^\S", specs.GRAMMAR, re.MULTILINE))


def test_a_mask_of_other_words_is_refused() -> None:
    with pytest.raises(NotSupported, match="is no word of a mask"):
        parse_mask("causal_dropout0.1")


@pytest.mark.parametrize(("keys", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_pages_hold_the_keys(keys: int, pages: int) -> None:
    spec = parse(f"bf16_d64_q1_s{keys}_b3_h2_full_paged16")
    assert (spec.max_pages, spec.problem("forward").key.shape[0]) == (pages, 3 * pages + 1)
