"""Drawn ranges: seeded families of ranges of keys, which problem specs, test cases and the benchmark share.

A family says which keys query i of a head of a sequence sees:

    random             any range of its own; none in a tenth of the queries, and in a run of neighbours now and then
    runs               that of its run of neighbours: a range as often as none
    all                every key
    lengths            the first ones, as many for all queries: padding
    causal             those up to the diagonal from the top-left corner
    documents[SIZE]    those of its document, which has SIZE tokens, or a number that is drawn
    prefix[SIZE]       those up to the diagonal, and the first SIZE, or a number that is drawn
    window[SIZE]       the last SIZE up to the diagonal; without SIZE those between two distances from it that are drawn

What is drawn is drawn for each list: one for each sequence and head, unless these share one. A range may reach past the
keys on both sides, as far as int32 goes, and an empty one may start behind its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Edges = tuple[Array, Array]  # the first key that each query sees, and one past its last

EMPTY_SHARE: Final = 0.1  # queries of `random` without a key
EMPTY_RUN_SHARE: Final = 0.4  # lists of `random` in which neighbouring queries have no key
LONGEST_EMPTY_RUN: Final = 400  # enough for whole query tiles
BEYOND: Final = 20  # keys by which a range of `random` may miss the keys
FAR_SHARE: Final = 0.02  # ranges of `random` that begin or end as far as int32 goes
LONGEST_RUN: Final = 300  # queries of a run of `runs`
LIMITS: Final = np.iinfo(np.int32)
PATTERN: Final = "runs|all|lengths|causal|(?:documents|prefix|window)(?:0*[1-9][0-9]*)?"  # of names beside random


def draw(family: str, lists: tuple[int, int], num_queries: int, num_keys: int, seed: int) -> Edges:
    """Returns int32 (*lists, num_queries) starts and ends of a family; the same arguments always give the same bits.

    family: a name that PATTERN matches; "" for random. lists: (batch, heads), or 1 for either
    ValueError for another family.
    """
    match = re.fullmatch(PATTERN, family)
    if family and not match:
        raise ValueError(f"ranges {family!r}: must be '' or match {PATTERN}")
    name = family.rstrip("0123456789")
    size = int(family[len(name) :] or 0)
    rng = np.random.default_rng((seed, 1))
    start, end = np.zeros((2, *lists, num_queries), np.int64)
    for at in np.ndindex(*lists):
        start[at], end[at] = _FAMILIES[name](rng, num_queries, num_keys, size)
    return start.astype(np.int32), end.astype(np.int32)


def _random(rng: np.random.Generator, num_queries: int, num_keys: int, size: int) -> Edges:
    start, end = np.sort(rng.integers(-BEYOND, num_keys + BEYOND + 1, (2, num_queries)), axis=0)
    start = np.where(rng.random(num_queries) < FAR_SHARE, LIMITS.min, start)
    end = np.where(rng.random(num_queries) < FAR_SHARE, LIMITS.max, end)
    empty = rng.random(num_queries) < EMPTY_SHARE
    if rng.random() < EMPTY_RUN_SHARE:
        first = int(rng.integers(0, num_queries + 1))
        empty[first : first + int(rng.integers(1, LONGEST_EMPTY_RUN))] = True
    return np.where(empty, end, start), np.where(empty, start, end)


def _runs(rng: np.random.Generator, num_queries: int, num_keys: int, size: int) -> Edges:
    cuts = np.cumsum(rng.integers(1, LONGEST_RUN + 1, num_queries))
    run = np.searchsorted(cuts, np.arange(num_queries), side="right")
    edges = np.sort(rng.integers(0, num_keys + 1, (2, num_queries)), axis=0)
    edges[:, rng.random(num_queries) < 0.5] = 0
    return edges[0, run], edges[1, run]


def _all(rng: np.random.Generator, num_queries: int, num_keys: int, size: int) -> Edges:
    return np.zeros(num_queries, np.int64), np.full(num_queries, num_keys)


def _lengths(rng: np.random.Generator, num_queries: int, num_keys: int, size: int) -> Edges:
    return np.zeros(num_queries, np.int64), np.full(num_queries, rng.integers(0, num_keys + 1))


def _causal(rng: np.random.Generator, num_queries: int, num_keys: int, size: int) -> Edges:
    return np.zeros(num_queries, np.int64), np.arange(num_queries) + 1


def _documents(rng: np.random.Generator, num_queries: int, num_keys: int, size: int) -> Edges:
    longest = max(num_queries, num_keys)
    lengths = np.full(longest // size + 1, size) if size else rng.integers(1, max(longest // 2, 1) + 1, longest)
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, np.arange(num_queries), side="right")
    return ends[document] - lengths[document], ends[document]


def _prefix(rng: np.random.Generator, num_queries: int, num_keys: int, size: int) -> Edges:
    prefix = size or int(rng.integers(0, num_keys + 1))
    return np.zeros(num_queries, np.int64), np.maximum(np.arange(num_queries) + 1, prefix)


def _window(rng: np.random.Generator, num_queries: int, num_keys: int, size: int) -> Edges:
    left, right = (size - 1, 0) if size else rng.integers(0, max(num_keys // 2, 1), 2)
    rows = np.arange(num_queries)
    return rows - left, rows + right + 1


_FAMILIES: Final[dict[str, Callable[[np.random.Generator, int, int, int], Edges]]] = {
    "": _random,
    "runs": _runs,
    "all": _all,
    "lengths": _lengths,
    "causal": _causal,
    "documents": _documents,
    "prefix": _prefix,
    "window": _window,
}
