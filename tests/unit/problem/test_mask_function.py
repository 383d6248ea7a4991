"""Tests of problem/mask_function.py: arguments, what a mask is within, and its pairs against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn import MaskFunction
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from tests.support.fakes import InterfaceArray
from tests.support.refusals import expect, expect_raised

BATCH, HEADS, QUERIES, KEYS = 2, 4, 70, 100
SIZES = BATCH, HEADS, QUERIES, KEYS
RANDOM = np.random.default_rng(5)
IDS = np.sort(RANDOM.integers(0, 5, (BATCH, KEYS)))
BLOCKS = RANDOM.random((BATCH, 2, 2, 4)) < 0.5


def same_document(batch: Any, head: Any, query: Any, key: Any, ids: Any) -> Any:
    return ids[batch, query] == ids[batch, key]


def sees(batch: Any, head: Any, query: Any, key: Any, ids: Any = None, width: Any = 0, weight: Any = None) -> Any:
    """Takes any of the arguments of these tests."""
    return query >= key


def pairs() -> list[npt.NDArray[Any]]:
    """Returns batch, head, query and key of every pair, which broadcast."""
    return [*np.ogrid[tuple(slice(size) for size in SIZES)]]


def random_ranges(axes: tuple[int, int]) -> KeyRanges:
    return KeyRanges(*np.sort(RANDOM.integers(0, KEYS, (2, *axes, QUERIES)), axis=0), Causal())


BANDS = Full(), Causal(9), CausalBottomRight(), Window(30, 4)
WITHIN: dict[str, tuple[Any, npt.NDArray[Any]]] = {
    **{band.name: (band, band.materialise(QUERIES, KEYS)) for band in BANDS},
    **{f"ranges {axes}": (mask := random_ranges(axes), mask.materialise(KEYS)) for axes in ((1, 1), (2, 4), (1, 4))},
    "blocks": (
        BlockSparse(BLOCKS, (64, 32)),
        BLOCKS.repeat(2, 1).repeat(64, 2)[:, :, :QUERIES].repeat(32, 3)[..., :KEYS],
    ),
    "blocks of ranges": (
        BlockSparse(BLOCKS, (64, 32), KeyRanges.documents([0, 20, QUERIES], QUERIES, Causal())),
        BLOCKS.repeat(2, 1).repeat(64, 2)[:, :, :QUERIES].repeat(32, 3)[..., :KEYS]
        & KeyRanges.documents([0, 20, QUERIES], QUERIES, Causal()).materialise(KEYS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHIN)
def test_pairs(name: str) -> None:
    """A pair is seen if the function says so, and what the function is within."""
    within, seen = WITHIN[name]
    of_batch, head, query, key = pairs()
    mask = MaskFunction(
        lambda batch, head, query, key, ids, step: (
            (ids[batch, query] == ids[batch, key]) | ((query - key) % step == head)
        ),
        {"ids": IDS, "step": 5},
        within,
    )
    own = (IDS[of_batch, query] == IDS[of_batch, key]) | ((query - key) % 5 == head)
    np.testing.assert_array_equal(mask.materialise(*SIZES), own & seen)
    assert 0 < (own & seen).mean() < seen.mean()
    resolved = mask.resolved(HEADS, QUERIES, KEYS)
    np.testing.assert_array_equal(resolved.reach(of_batch, head, query, key), own & seen)
    assert mask.band == (within if isinstance(within, Mask) else within.band)
    assert [*mask.refusals()] == []


def test_arrays_and_numbers_of_a_problem() -> None:
    """Arrays and integers are numbered in the order of the arguments."""
    arguments = {"width": 3, "ids": IDS, "step": np.int64(-7), "weight": RANDOM.standard_normal(KEYS)}
    mask = MaskFunction(
        lambda batch, head, query, key, width, ids, step, weight: (ids[0, key] + step < width) & (weight[key] > 0),
        arguments,
        BlockSparse(BLOCKS, (64, 32), random_ranges((1, 1))),
    )
    assert [*mask.arrays()] == ["visible_blocks", "key_start", "key_end", "mask_array_0", "mask_array_1"]
    assert mask.scalars == (3, -7)
    assert mask.numbers() == {"block_size": (64, 32), "mask_program": str(mask.program), "mask_scalars": (3, -7)}
    assert mask.program.arrays == (("int32", 2), ("float32", 1))
    assert MaskFunction(sees).arrays() == {}
    assert MaskFunction(sees).numbers() == {"mask_program": "arrays; scalars 0; le 3 2", "mask_scalars": ()}
    assert [*MaskFunction(sees, within=random_ranges((1, 1))).arrays()] == ["key_start", "key_end"]


@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        (np.array([1, 2**40, -(2**40)]), np.int32, [1, 2**31 - 1, -(2**31)]),
        (np.array([1, 2**64 - 1], np.uint64), np.int32, [1, 2**31 - 1]),
        (np.array([1, -3], np.int8), np.int32, [1, -3]),
        (np.array([0, 1, 200], np.uint8), np.uint8, [0, 1, 200]),
        (np.array([True, False]), np.bool_, [True, False]),
        (np.array([0.1, np.inf]), np.float32, [np.float32(0.1), np.inf]),
        (np.array([0.1], np.float16), np.float32, [np.float16(0.1)]),
        (np.array(3), np.int32, 3),
    ],
)
def test_arrays_of_numpy_are_converted(given: Any, dtype: Any, expected: Any) -> None:
    """Numbers beyond int32 are those at its ends, as in ranges of keys."""
    (converted,) = MaskFunction(sees, {"ids": given}).arrays().values()
    assert isinstance(converted, np.ndarray)
    assert converted.dtype == dtype
    assert converted.tolist() == np.array(expected, dtype).tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_, np.uint8])
def test_other_arrays_are_taken_as_they_are(dtype: Any) -> None:
    host = np.ones((2, 6), dtype)[:, ::2]
    on_device = InterfaceArray(host)
    assert MaskFunction(sees, {"ids": host}).arguments["ids"] is host
    mask = MaskFunction(sees, {"ids": on_device})
    assert mask.arguments["ids"] is on_device
    assert mask.program.arrays == ((np.dtype(dtype).name if dtype != np.uint8 else "bool", 2),)


@pytest.mark.parametrize("number", [3, -(2**31), 2**31 - 1, np.int64(3), np.uint8(3), np.int32(-3)])
def test_integers(number: Any) -> None:
    mask = MaskFunction(lambda batch, head, query, key, width: query - key < width, {"width": number})
    assert [(type(value), value) for value in mask.scalars] == [(int, int(number))]
    assert mask.arrays() == {}


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no dict": ({"arguments": [IDS]}, ["arguments: a dict of arrays and integers by name"]),
    "no names": ({"arguments": {3: IDS}}, ["arguments: names of parameters"]),
    "a float": ({"arguments": {"width": 3.0}}, ["arguments['width']: an array, or an int32"]),
    "a float of NumPy": ({"arguments": {"width": np.float32(3)}}, ["arguments['width']: an array, or an int32"]),
    "a bool": ({"arguments": {"width": True}}, ["arguments['width']: an array, or an int32"]),
    "a long integer": ({"arguments": {"width": 2**31}}, ["arguments['width']: an array, or an int32"]),
    "a list": ({"arguments": {"ids": [1, 2]}}, ["arguments['ids']: an array, or an int32"]),
    "None": ({"arguments": {"ids": None}}, ["arguments['ids']: an array, or an int32"]),
    "complex numbers": ({"arguments": {"ids": np.zeros(3, complex)}}, ["arguments['ids'].dtype: bool, uint8, int32"]),
    "texts": ({"arguments": {"ids": np.array(["a"])}}, ["arguments['ids'].dtype: bool, uint8, int32 or float32"]),
    "dtypes on a device": (
        {"arguments": {"ids": InterfaceArray(np.zeros(3)), "weight": InterfaceArray(np.zeros(3, np.int64))}},
        ["arguments['ids'].dtype: bool, uint8, int32", "arguments['weight'].dtype: bool, uint8, int32"],
    ),
    "five axes": ({"arguments": {"ids": np.zeros((1,) * 5, int)}}, ["arguments['ids'].shape: at most 4 axes"]),
    "no element": ({"arguments": {"ids": np.zeros((3, 0), int)}}, ["arguments['ids'].shape: an element"]),
    "five arrays": ({"arguments": {str(n): IDS for n in range(5)}}, ["arguments: at most 4 arrays"]),
    "five integers": ({"arguments": {str(n): n for n in range(5)}}, ["arguments: at most 4 integers"]),
    "no function": ({"function": 3}, ["function: a function"]),
    "text": ({"function": "le 2 3"}, ["function: a function"]),
    "a class of mask": ({"within": Causal}, ["within: a Mask, KeyRanges or BlockSparse"]),
    "a function in a function": ({"within": MaskFunction(sees)}, ["within: a Mask, KeyRanges or BlockSparse"]),
    "all at once": (
        {"function": None, "arguments": {"width": 0.5}, "within": None},
        ["arguments['width']: an array, or an int32", "function: a function", "within: a Mask"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_mask_function(name: str) -> None:
    given, expected = WRONG[name]
    expect_raised(lambda: MaskFunction(**{"function": sees, **given}), expected)


def test_what_it_is_within_is_checked_with_it() -> None:
    mask = MaskFunction(sees, within=KeyRanges([1], 3, Causal()))  # type: ignore[arg-type]
    words = "must be an int32 array (batch, num_heads, num_queries)"
    expect(mask.refusals(), [f"key_start: {words}", f"key_end: {words}"])


def test_other_arguments() -> None:
    """Of the same dtypes and ranks, which need no other program."""
    mask = MaskFunction(
        lambda batch, head, query, key, ids, width: (ids[batch, query] == ids[batch, key]) & (query - key < width),
        {"ids": IDS, "width": 9},
        Causal(),
    )
    other = mask.with_arguments(width=2, ids=IDS[:, :50])
    assert other.program == mask.program
    assert (other.scalars, other.within, other.arguments["ids"].shape) == ((2,), Causal(), (2, 50))
    assert mask.scalars == (9,)
    assert mask.with_arguments(width=3).arguments["ids"] is mask.arguments["ids"]
    for changes in ({"ids": IDS[0]}, {"ids": IDS.astype(float)}, {"width": IDS}, {"ids": 3}, {"more": IDS}):
        expect_raised(
            lambda changes=changes: mask.with_arguments(**changes), ["arguments: the names, dtypes and ranks"]
        )  # type: ignore[misc]
    expect_raised(lambda: mask.with_arguments(width=0.5), ["arguments['width']: an array, or an int32"])
    expect_raised(lambda: mask.with_arguments(steps=3), ["arguments: the names, dtypes and ranks"])


def test_masks_have_no_hash_and_no_equality() -> None:
    mask = MaskFunction(same_document, {"ids": IDS})
    with pytest.raises(TypeError, match="unhashable"):
        hash(mask)
    assert mask != MaskFunction(same_document, {"ids": IDS})
