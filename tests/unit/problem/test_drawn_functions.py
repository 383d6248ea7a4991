"""Tests of the drawn mask functions: each against the function itself in NumPy, and what they have among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.problem import drawn_functions
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import MaskFunction, mask_of
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.spec import parse

SIZES = 2, 3, 150, 170
NAMES = ("stripes", "documents", "marked", "weights", "tree", "dilated", "images", "prefix")


def seen(name: str, sizes: tuple[int, int, int, int] = SIZES, seed: int = 3) -> npt.NDArray[Any]:
    """Which keys each query sees, (batch, heads, queries, keys)."""
    return drawn_functions.mask(name, sizes, seed).materialise(*sizes)


def test_all_are_tested() -> None:
    assert (*drawn_functions.FUNCTIONS,) == NAMES
    programs = {str(drawn_functions.mask(name, SIZES, 0).program) for name in NAMES}
    assert len(programs) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_the_program_does_what_the_function_does(name: str, seed: int) -> None:
    """Of arrays of NumPy in place of symbols; each sees some pairs, and not all."""
    mask = drawn_functions.mask(name, SIZES, seed)
    function, _ = drawn_functions.FUNCTIONS[name]
    coordinates = [*np.ogrid[tuple(slice(size) for size in SIZES)]]
    with np.errstate(divide="ignore"):
        expected = function(*coordinates, **mask.arguments)
    np.testing.assert_array_equal(mask.materialise(*SIZES), np.broadcast_to(expected, SIZES))
    assert 0.005 < expected.mean() < 0.995


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (1, 2, 1, 90), (2, 1, 90, 1), (1, 1, 33, 0), (0, 1, 0, 40), (0, 0, 0, 0)]
)
def test_any_sizes(name: str, sizes: tuple[int, int, int, int]) -> None:
    """Every size has the same program, and arrays of the ranks that it reads."""
    for seed in range(3):
        mask = drawn_functions.mask(name, sizes, seed)
        assert mask.program == drawn_functions.mask(name, SIZES, 9).program
        assert mask.materialise(*sizes).shape == sizes
        assert all(array.size for array in mask.arrays().values())


@pytest.mark.parametrize("name", NAMES)
def test_the_same_arguments_give_the_same_bits(name: str) -> None:
    first, again, other = (seen(name, seed=seed) for seed in (3, 3, 4))
    assert (first == again).all()
    assert (first == other).all() == (name == "stripes"), "its integers follow from the sizes"


def test_what_differs_by_sequence_and_head() -> None:
    for name in NAMES:
        found = seen(name)
        assert (found == found[:1]).all() == (name in ("stripes", "marked", "weights", "dilated")), name
        assert (found == found[:, :1]).all() == (name in ("documents", "marked", "tree", "images")), name


def test_queries_and_keys_without_pairs() -> None:
    """Among a few seeds some queries see nothing, whole tiles among them, and some keys are not seen."""
    masks = {name: [seen(name, (2, 2, 500, 500), seed) for seed in range(8)] for name in NAMES}
    empty = {name: [~found.any(axis=3) for found in some] for name, some in masks.items()}
    for name in ("documents", "tree", "dilated"):
        assert any((rows[..., 128:256].all(axis=-1)).any() for rows in empty[name]), name
    assert any(not found.any(axis=2).all() for some in masks.values() for found in some)
    assert any(found[..., :128, 128:256].any() for found in masks["images"])


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", NAMES)
def test_the_problem_of_a_spec(name: str, direction: str) -> None:
    """Has the program and the integers of the mask of every seed, and arrays of its shapes."""
    spec = parse(f"bf16_d64_q150_s170_b2_h4k2_causal_ranges1hruns_blocks50bhx64_function{name}")
    assert (spec.mask_function, spec.block_share, spec.block_axes, spec.block_size) == (name, 50, "bh", 64)
    problem = spec.problem(direction)
    assert problem.refusals() == []
    for seed in (0, 5):
        mask = spec.drawn_mask(seed)
        assert isinstance(mask, MaskFunction)
        numbers = mask.numbers()
        assert {field: getattr(problem, field) for field in numbers} == numbers
        layouts = {array: getattr(problem, array) for array in mask.arrays()}
        assert {array: (tensor.shape, tensor.dtype) for array, tensor in layouts.items()} == {
            array: (values.shape, str(values.dtype)) for array, values in mask.arrays().items()
        }
        again = mask_of(problem, mask.arrays())
        assert isinstance(again, MaskFunction)
        np.testing.assert_array_equal(again.materialise(*spec.shape.bias), mask.materialise(*spec.shape.bias))
        within = BlockSparse(mask.arrays()["visible_blocks"], (64, 64), spec.key_ranges(seed))
        own = drawn_functions.mask(name, spec.shape.bias, seed).materialise(*spec.shape.bias)
        expected = own & within.materialise(*spec.shape.bias)
        np.testing.assert_array_equal(mask.materialise(*spec.shape.bias), expected)


def test_masks_of_specs() -> None:
    assert parse("bf16_d64_s70_b2_h4_causal").drawn_mask() == Causal()
    assert isinstance(parse("bf16_d64_s70_b2_h4_causal_ranges11").drawn_mask(), KeyRanges)
    blocks = parse("bf16_d64_s700_b2_h4k2_causal_blocks25b")
    mask = blocks.drawn_mask(7)
    assert isinstance(mask, BlockSparse)
    assert (mask.visible_blocks.shape, mask.block_size, mask.within) == ((2, 1, 6, 6), (128, 128), Causal())
    assert (mask.visible_blocks != blocks.replace(block_axes="").drawn_mask(7).visible_blocks).any()  # type: ignore[union-attr]
    shares = [parse(f"bf16_d64_s9000_b1_h1_full_blocks{share}").drawn_mask() for share in (0, 25, 100)]
    means = [each.visible_blocks.mean() for each in shares if isinstance(each, BlockSparse)]
    assert (means[0], means[2]) == (0, 1)
    assert 0.2 < means[1] < 0.3


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("words", ["functionweights", "blocks40bh", "blocks40_functionprefix", "ranges11_functiontree"])
def test_visible_pairs_are_work(words: str, direction: str) -> None:
    spec = parse(f"bf16_d64v32_q150_s170_b2_h4k2_causal_{words}")
    mask = spec.drawn_mask()
    assert isinstance(mask, (MaskFunction, BlockSparse))
    pairs = int(mask.materialise(*spec.shape.bias).sum())
    assert spec.flops(direction) == 2 * pairs * (64 + 32) * {"forward": 2, "backward": 5}[direction] // 2
