"""Tests of the drawn ranges: every family against its definition, and what random ranges have among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.problem import drawn_ranges
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, Full, Mask
from cutlass_py_attn.problem.spec import parse

FAMILIES = (
    "",
    "runs",
    "all",
    "lengths",
    "causal",
    "documents",
    "documents16",
    "prefix",
    "prefix9",
    "window",
    "window7",
)
LISTS, QUERIES, KEYS = (2, 3), 600, 90


def seen(family: str, queries: int = QUERIES, keys: int = KEYS, seed: int = 3) -> npt.NDArray[Any]:
    """Which keys each query sees, (2, 3, queries, keys)."""
    return KeyRanges(*drawn_ranges.draw(family, LISTS, queries, keys, seed)).materialise(keys)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 90), (600, 1), (33, 0), (0, 40), (0, 0)])
def test_any_sizes(family: str, sizes: tuple[int, int]) -> None:
    for seed in range(5):
        start, end = drawn_ranges.draw(family, LISTS, *sizes, seed)
        assert start.dtype == end.dtype == np.int32
        assert start.shape == end.shape == (*LISTS, sizes[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_arguments_give_the_same_ranges(family: str) -> None:
    first, again, other = (seen(family, seed=seed) for seed in (3, 3, 4))
    assert (first == again).all()
    is_drawn = family in ("", "runs", "lengths", "documents", "prefix", "window")
    assert (first == other).all() != is_drawn
    assert (first == first[:1, :1]).all() != is_drawn, "drawn for each list"


def test_random_ranges_have_empty_tiles_and_leave_the_keys() -> None:
    start, end = drawn_ranges.draw("", (4, 4), QUERIES, KEYS, 1)
    empty = (start >= end).reshape(16, QUERIES)
    tiles = np.array([[head[row : row + 128].all() for row in range(0, QUERIES - 127)] for head in empty])
    assert tiles.any(axis=1).any()
    assert not tiles.any(axis=1).all()
    assert (start < 0).any()
    assert (end > KEYS).any()
    assert (start.min(), end.max()) == (np.iinfo(np.int32).min, np.iinfo(np.int32).max)
    assert (start > end).any()


def test_runs_share_a_range() -> None:
    found = seen("runs")
    changes = (found[:, :, 1:] != found[:, :, :-1]).any(axis=3).sum(axis=2)
    assert (changes < 30).all()
    assert found.any()
    assert not found.any(axis=3).all()


@pytest.mark.parametrize(
    ("family", "mask"), [("all", Full()), ("causal", Causal()), ("window7", Causal(7)), ("prefix1", Causal())]
)
def test_ranges_of_masks(family: str, mask: Mask) -> None:
    assert (seen(family) == mask.materialise(QUERIES, KEYS)).all()


@pytest.mark.parametrize("family", ["documents", "documents16"])
def test_documents_are_blocks_on_the_diagonal(family: str) -> None:
    found = seen(family, 90, 90)
    assert found.diagonal(axis1=2, axis2=3).all()
    assert (found == found.swapaxes(2, 3)).all()
    assert (np.einsum("bhij,bhjk->bhik", found.astype(int), found.astype(int)) > 0).tolist() == found.tolist()
    if family == "documents16":
        blocks = np.arange(90) // 16
        assert (found == (blocks[:, None] == blocks)).all()
    else:
        assert not found.all()


def test_a_prefix_is_seen_by_all() -> None:
    found = seen("prefix9")
    assert (found == (np.arange(KEYS) < np.maximum(np.arange(QUERIES)[:, None] + 1, 9))).all()


def test_lengths_are_those_of_all_queries() -> None:
    found = seen("lengths")
    assert (found == found[:, :, :1]).all()
    assert (found[..., :-1] >= found[..., 1:]).all()


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="ranges 'document': must be '' or match runs"):
        drawn_ranges.draw("document", LISTS, 3, 3, 0)


@pytest.mark.parametrize("axes", ["11", "b1", "1h", "bh"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_visible_pairs_are_work(axes: str, direction: str) -> None:
    spec = parse(f"bf16_d64v32_q70_s90_b2_h4k2_causal_ranges{axes}runs")
    pairs = int(np.broadcast_to(spec.key_ranges().materialise(90), (2, 4, 70, 90)).sum())
    assert spec.flops(direction) == 2 * pairs * (64 + 32) * {"forward": 2, "backward": 5}[direction] // 2
    assert parse("bf16_d64_s64_b2_h2_full_rangesbhall").flops(direction) == parse("bf16_d64_s64_b2_h2_full").flops(
        direction
    )
