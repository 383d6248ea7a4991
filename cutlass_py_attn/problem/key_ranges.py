"""Key ranges: a mask in memory, the keys that each query sees as one or two ranges.

Documents, prefixes, chunks, windows that differ by head, and every band are ranges. A `Mask` has numbers alone and is
part of a Problem; ranges are arrays, as query and key are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.refusals import Refusal, refuse

Array = npt.NDArray[Any]
_NAMES = ("start", "end", "start2", "end2")


@dataclass(frozen=True, slots=True, eq=False)
class KeyRanges:
    """Query i sees key j if start[i] <= j < end[i] or start2[i] <= j < end2[i].

    Each array is (batch, num_heads, num_queries), of integers; an axis of size 1 before the last is that of every
    sequence or query head. Ranges may overlap, reach past the keys, and be empty: those whose start is at or behind
    their end.

    start2, end2: a second range of each query, or None
    """

    start: Array
    end: Array
    start2: Array | None = None
    end2: Array | None = None

    def __post_init__(self) -> None:
        for name in _NAMES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, np.asarray(getattr(self, name)))
        if wrong := [*self._refusals()]:
            raise NotSupported(wrong)

    def _refusals(self) -> Iterator[Refusal]:
        if (self.start2 is None) != (self.end2 is None):
            yield refuse("end2", self.end2, "must come with start2", "pass both, or none")
        for name in _NAMES:
            array = getattr(self, name)
            if array is None:
                continue
            if array.ndim != 3:
                rule = "must be (batch, num_heads, num_queries)"
                yield refuse(f"{name}.shape", array.shape, rule, "add the missing axes with size 1")
            elif array.shape != self.start.shape:
                yield refuse(f"{name}.shape", array.shape, f"must be that of start, {self.start.shape}", "broadcast it")
            if array.dtype.kind not in "iu":
                yield refuse(f"{name}.dtype", str(array.dtype), "must be of integers", "cast it")

    @staticmethod
    def of(mask: Mask, num_queries: int, num_keys: int) -> KeyRanges:
        """Returns the ranges of a mask, for every sequence and head."""
        start, end = mask.ranges(num_queries, num_keys)
        return KeyRanges(start[None, None], end[None, None])

    @property
    def num_queries(self) -> int:
        """Queries of each sequence."""
        return int(self.start.shape[2])

    def within(self, mask: Mask, num_keys: int) -> KeyRanges:
        """Returns ranges of the keys that both these and a mask let each query see."""
        start, end = mask.ranges(self.num_queries, num_keys)
        cut = replace(self, start=np.maximum(self.start, start), end=np.minimum(self.end, end))
        if self.start2 is None or self.end2 is None:
            return cut
        return replace(cut, start2=np.maximum(self.start2, start), end2=np.minimum(self.end2, end))

    def sees(self, batch: Any, head: Any, query: Any, key: Any, num_keys: int) -> Array:
        """Returns whether a query of a head of a sequence sees a key, of index arrays that broadcast."""
        at = batch % self.start.shape[0], head % self.start.shape[1], query
        inside = (self.start[at] <= key) & (key < self.end[at])
        if self.start2 is not None and self.end2 is not None:
            inside = inside | ((self.start2[at] <= key) & (key < self.end2[at]))
        found: Array = inside & (key < num_keys)
        return found

    def materialise(self, num_keys: int) -> Array:
        """Returns the mask as a (batch, num_heads, num_queries, num_keys) bool array; slow, for tests."""
        batch, head, query, key = np.ogrid[tuple(slice(size) for size in (*self.start.shape, num_keys))]
        return self.sees(batch, head, query, key, num_keys)

    def disjoint(self, num_keys: int) -> tuple[Array, Array]:
        """Returns (start, end), each (batch, num_heads, num_queries, ranges), of ranges with keys between them.

        All are inside the keys, and an empty one is (0, 0). There are as many ranges as a query has at most: 1 or 2.
        """
        start, end = _inside(self.start, self.end, num_keys)
        if self.start2 is None or self.end2 is None:
            return start[..., None], end[..., None]
        start2, end2 = _inside(self.start2, self.end2, num_keys)
        # An empty range joins the other one; ranges that touch or overlap become one.
        is_empty, is_empty2 = end == 0, end2 == 0
        joins = is_empty | is_empty2 | ((start <= end2) & (start2 <= end))
        both_start = np.where(is_empty, start2, np.where(is_empty2, start, np.minimum(start, start2)))
        both_end = np.maximum(end, end2)
        starts = np.stack([np.where(joins, both_start, start), np.where(joins, 0, start2)], axis=-1)
        ends = np.stack([np.where(joins, both_end, end), np.where(joins, 0, end2)], axis=-1)
        return (starts, ends) if ends[..., 1].any() else (starts[..., :1], ends[..., :1])


def _inside(start: Array, end: Array, num_keys: int) -> tuple[Array, Array]:
    """Returns int32 ranges cut to the keys, (0, 0) for those without a key."""
    first, last = (np.clip(array, 0, num_keys).astype(np.int32) for array in (start, end))
    return np.where(first < last, first, 0), np.where(first < last, last, 0)
