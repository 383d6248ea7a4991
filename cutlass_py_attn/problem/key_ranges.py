"""Key ranges: a mask in memory, the keys that each query sees as a range.

Documents, prefixes, chunks, windows that differ by head, and every band are ranges. A `Mask` has numbers alone and is
part of a Problem; ranges are arrays, as query and key are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.masks import Full, Mask
from cutlass_py_attn.problem.tensors import RANGE_EDGES
from cutlass_py_attn.refusals import Refusal, refuse

Array = npt.NDArray[Any]
FULL: Final = Full()


@dataclass(frozen=True, slots=True, eq=False)
class KeyRanges:
    """The mask with which query i sees key j if key_start[i] <= j < key_end[i], and `band` lets it see the key too.

    key_start, key_end: (batch, num_heads, num_queries) int32 arrays; an axis of size 1 before the last is that of every
        sequence or query head. CUDA arrays are read in place when kernels run, so that other values need no other
        kernel; NumPy arrays may be of any integers. A range may reach past the keys, which cuts it. One whose start is
        at or behind its end is empty: its query sees no key, and has output 0 and logsumexp -inf.
    band: a Mask that hides keys as well, such as Causal()
    """

    key_start: Any
    key_end: Any
    band: Mask = FULL

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # calls with other values are other calls

    def refusals(self) -> Iterator[Refusal]:
        """Yields what is no array, and a band that is no mask."""
        for name in RANGE_EDGES:
            array = getattr(self, name)
            if not any(hasattr(array, word) for word in ("dtype", "__dlpack__", "__cuda_array_interface__")):
                rule = "must be an int32 array (batch, num_heads, num_queries)"
                yield refuse(name, array, rule, "pass one; the first two sizes may be 1")
        if not isinstance(self.band, Mask):
            yield refuse("band", self.band, "must be a Mask", "create one, such as Causal()")

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays by their names in a Problem, those of NumPy as int32."""
        return dict(zip(RANGE_EDGES, map(_as_int32, (self.key_start, self.key_end)), strict=True))

    @staticmethod
    def of(mask: Mask, num_queries: int, num_keys: int) -> KeyRanges:
        """Returns the ranges of a mask, for every sequence and head."""
        start, end = mask.ranges(num_queries, num_keys)
        return KeyRanges(start[None, None], end[None, None])

    def within(self, num_keys: int) -> KeyRanges:
        """Returns NumPy ranges without a band, cut to it and to the keys; an empty one is (0, 0)."""
        start, end = np.asarray(self.key_start), np.asarray(self.key_end)
        first, last = self.band.ranges(start.shape[2], num_keys)
        start, end = np.maximum(np.maximum(start, first), 0), np.minimum(np.minimum(end, last), num_keys)
        sees = start < end
        return KeyRanges(np.where(sees, start, 0), np.where(sees, end, 0))

    def sees(self, batch: Any, head: Any, query: Any, key: Any, num_keys: int) -> Array:
        """Returns whether a query of a head of a sequence sees a key, of index arrays that broadcast."""
        ranges = self.within(num_keys)
        at = batch % ranges.key_start.shape[0], head % ranges.key_start.shape[1], query
        visible: Array = (ranges.key_start[at] <= key) & (key < ranges.key_end[at])
        return visible

    def materialise(self, num_keys: int) -> Array:
        """Returns the mask as a (batch, num_heads, num_queries, num_keys) bool array; slow, for tests."""
        shape = *np.shape(self.key_start), num_keys
        batch, head, query, key = np.ogrid[tuple(slice(size) for size in shape)]
        return self.sees(batch, head, query, key, num_keys)


def _as_int32(array: Any) -> Any:
    """Returns a NumPy array of integers as int32, with numbers beyond these at their ends; others as they are."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        return array
    limits = np.iinfo(np.int32)
    return np.clip(array, limits.min, limits.max).astype(np.int32)
