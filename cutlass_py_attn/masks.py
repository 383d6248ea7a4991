"""Masks: which key each query may see, as one frozen object per mask.

A mask is described by one number, the *diagonal*: query i sees key j when j <= i + diagonal.
`Full` has none. All indices are zero-based inside the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.parts.integers import larger, smaller


@dataclass(frozen=True, slots=True)
class Mask:
    """What all masks share; use one of the classes below."""

    name: ClassVar[str] = ""
    bounded: ClassVar[bool] = True

    def diagonal(self, num_queries: Any, num_keys: Any) -> Any:
        """Offset of the last visible key from the query index."""
        raise TypeError(f"{type(self).__name__} has no diagonal")

    def sees(self, query: Any, key: Any, num_queries: Any, num_keys: Any) -> Any:
        """Whether `query` sees `key`: ints, NumPy arrays or traced values."""
        if not self.bounded:
            return (key < num_keys) & (query < num_queries)
        inside = key <= query + self.diagonal(num_queries, num_keys)
        return inside & (key < num_keys) & (query < num_queries)

    def key_end(self, last_query: Any, num_queries: Any, num_keys: Any) -> Any:
        """One past the last key that any query <= last_query sees, in [0, num_keys]."""
        if not self.bounded:
            return num_keys
        return larger(smaller(num_keys, last_query + self.diagonal(num_queries, num_keys) + 1), 0)

    def query_start(self, first_key: Any, num_queries: Any, num_keys: Any) -> Any:
        """The first query that sees any key >= first_key; may be >= num_queries (none does)."""
        if not self.bounded:
            return first_key * 0
        return larger(first_key - self.diagonal(num_queries, num_keys), 0)

    def materialise(self, num_queries: int, num_keys: int) -> npt.NDArray[np.bool_]:
        """The mask as a boolean array [num_queries, num_keys]; slow, for tests and the reference."""
        query = np.arange(num_queries)[:, None]
        key = np.arange(num_keys)[None, :]
        visible = self.sees(query, key, num_queries, num_keys)
        return np.broadcast_to(visible, (num_queries, num_keys)).copy()


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key."""

    name: ClassVar[str] = "full"
    bounded: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """Query i sees keys j <= i: the diagonal starts in the top-left corner (PyTorch's is_causal)."""

    name: ClassVar[str] = "causal"

    def diagonal(self, num_queries: Any, num_keys: Any) -> Any:
        """Zero: query and key count from the same start."""
        return 0


@dataclass(frozen=True, slots=True)
class CausalBottomRight(Mask):
    """Query i sees keys j <= i + num_keys - num_queries: the diagonal ends in the bottom-right corner.

    With more queries than keys the first num_queries - num_keys rows see nothing.
    """

    name: ClassVar[str] = "causal_br"

    def diagonal(self, num_queries: Any, num_keys: Any) -> Any:
        """num_keys - num_queries, negative when there are more queries than keys."""
        return num_keys - num_queries


ALL: dict[str, type[Mask]] = {cls.name: cls for cls in (Full, Causal, CausalBottomRight)}


def from_name(name: str) -> Mask:
    """The mask object of a plan's mask name; ValueError names the known ones."""
    if name not in ALL:
        raise ValueError(f"mask {name!r}: must be one of {', '.join(ALL)}")
    return ALL[name]()
