"""Tests of overlap: compared with every byte that the elements of a layout cover."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.problem.overlap import Region, overlap, overlaps_itself

BASE = 0x7F0000000000  # never read
SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


def covered(region: Region) -> list[int]:
    """Returns the address of every byte of every element."""
    starts = (
        region.address + sum(i * stride for i, stride in zip(index, region.strides, strict=True))
        for index in itertools.product(*map(range, region.shape))
    )
    return [start + byte for start in starts for byte in range(region.item_bytes)]


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """Draws a small layout with strides of either sign, around BASE."""
    shape = draw(SHAPES)
    strides = tuple(draw(st.integers(-9, 9)) for _ in shape)
    return Region(BASE + draw(st.integers(-12, 12)), shape, strides, draw(st.sampled_from([1, 2, 4])))


@settings(deadline=None, max_examples=100)
@given(regions(), regions())
def test_overlap_is_exact(first: Region, second: Region) -> None:
    assert overlap(first, second) == bool(set(covered(first)) & set(covered(second)))


@settings(deadline=None, max_examples=100)
@given(regions())
def test_overlap_with_itself_is_exact(region: Region) -> None:
    found = covered(region)
    assert overlaps_itself(region.shape, region.strides, region.item_bytes) == (len(set(found)) < len(found))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((4, 4096, 16, 128), (4096 * 6144, 6144, 128, 1), False),  # a slice of packed projections
        ((4, 4096, 16, 128), (4096 * 2048, 128, 4096 * 128, 1), False),  # heads before rows
        ((2, 3), (3, 2), False),  # axes that interleave, and every element has its own place
        ((3, 4), (2, 3), False),
        ((3, 3), (4, 2), True),
        ((4, 4096, 16, 128), (4096 * 2048, 2048, 127, 1), True),
        ((2**20, 2**20), (0, 1), True),
    ],
)
def test_layouts(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert overlaps_itself(shape, strides) is expected


def test_what_takes_too_long_counts_as_overlap() -> None:
    shape = (211, 197, 223, 181)
    first = Region(BASE, shape, (913_178, 871_414, 900_382, 888_886), 2)
    second = Region(BASE + 10**7, shape, (-913_182, 871_418, -900_386, 888_890), 2)
    assert overlap(first, second)
