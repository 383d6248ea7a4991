"""Masks: which key each query may see, as one frozen object per mask.

Every mask is a band: query i sees key j when low <= j - i <= high, and both lie inside the sequence. A mask
says how low and high follow from the lengths; `Band` answers every question about a band, for Python ints, NumPy
arrays and traced values alike. All indices are zero-based inside the sequence.

Kernels know three forms: "full" (no edge), "causal" (a right edge) and "local" (both edges). Where the edges lie
is a number that they read when they run, so that all windows of one form share their kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.parts.integers import larger, smaller

FORMS = ("full", "causal", "local")
UNLIMITED = 2**30 - 2**17  # stands for no edge; with lengths up to 2^29 no sum of both leaves 32 bits


@dataclass(frozen=True, slots=True)
class Band:
    """The visible pairs of one sequence: low <= key - query <= high. `form` says which edges exist."""

    form: str
    low: Any
    high: Any
    num_queries: Any
    num_keys: Any

    def sees(self, query: Any, key: Any) -> Any:
        """Whether `query` sees `key`."""
        inside = (key < self.num_keys) & (query < self.num_queries)
        if self.form != "full":
            inside = inside & (key - query <= self.high)
        if self.form == "local":
            inside = inside & (key - query >= self.low)
        return inside

    def key_start(self, first_query: Any) -> Any:
        """The first key that any query >= first_query sees, not below 0; may be >= num_keys (none does)."""
        return larger(first_query + self.low, 0) if self.form == "local" else first_query * 0

    def key_end(self, last_query: Any) -> Any:
        """One past the last key that any query <= last_query sees, in [0, num_keys]."""
        if self.form == "full":
            return self.num_keys
        return larger(smaller(self.num_keys, last_query + self.high + 1), 0)

    def query_start(self, first_key: Any) -> Any:
        """The first query that sees any key >= first_key; may be >= num_queries (none does)."""
        return first_key * 0 if self.form == "full" else larger(first_key - self.high, 0)

    def query_end(self, last_key: Any) -> Any:
        """One past the last query that sees any key <= last_key, in [0, num_queries]."""
        if self.form != "local":
            return self.num_queries
        return larger(smaller(self.num_queries, last_key - self.low + 1), 0)


@dataclass(frozen=True, slots=True)
class Mask:
    """What all masks share; use one of the classes below."""

    name: ClassVar[str] = ""
    bottom_right: ClassVar[bool] = False  # the diagonal ends in the last query and key, not starts in the first

    @property
    def left(self) -> int | None:
        """Keys seen before the diagonal; None: all."""
        return None

    @property
    def right(self) -> int | None:
        """Keys seen behind the diagonal; None: all."""
        return None

    @property
    def form(self) -> str:
        """Which kernel serves it: full, causal or local."""
        if self.left is not None:
            return "local"
        return "full" if self.right is None else "causal"

    @property
    def edges(self) -> tuple[int, int]:
        """(left, right) with UNLIMITED for an edge that does not exist."""
        limits = (UNLIMITED if edge is None else min(edge, UNLIMITED) for edge in (self.left, self.right))
        left, right = limits
        return left, right

    def band(self, num_queries: int, num_keys: int) -> Band:
        """The band of a sequence with these lengths."""
        left, right = self.edges
        diagonal = num_keys - num_queries if self.bottom_right else 0
        return Band(self.form, diagonal - left, diagonal + right, num_queries, num_keys)

    def sees(self, query: Any, key: Any, num_queries: int, num_keys: int) -> Any:
        """Whether `query` sees `key`: ints or NumPy arrays."""
        return self.band(num_queries, num_keys).sees(query, key)

    def pairs(self, num_queries: int, num_keys: int) -> int:
        """How many (query, key) pairs are visible."""
        query = np.arange(num_queries, dtype=np.int64)
        band = self.band(num_queries, num_keys)
        first = np.maximum(query + band.low, 0) if self.form == "local" else 0 * query
        last = np.minimum(query + band.high, num_keys - 1) if self.form != "full" else 0 * query + num_keys - 1
        return int(np.maximum(last - first + 1, 0).sum())

    def materialise(self, num_queries: int, num_keys: int) -> npt.NDArray[np.bool_]:
        """The mask as a boolean array [num_queries, num_keys]; slow, for tests and the reference."""
        query = np.arange(num_queries)[:, None]
        key = np.arange(num_keys)[None, :]
        visible = self.sees(query, key, num_queries, num_keys)
        return np.broadcast_to(visible, (num_queries, num_keys)).copy()

    def objections(self) -> list[str]:
        """What is wrong with the mask's numbers."""
        return [
            f"mask {side} = {edge!r}: must be an int of at least 0, or None for no limit; correct it"
            for side, edge in (("left", self.left), ("right", self.right))
            if edge is not None and (not isinstance(edge, int) or isinstance(edge, bool) or edge < 0)
        ]


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key."""

    name: ClassVar[str] = "full"


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """Query i sees keys j <= i: the diagonal starts in the top-left corner (PyTorch's is_causal).

    window_size W: of those only the last W, j > i - W; None sees them all.
    """

    window_size: int | None = None
    name: ClassVar[str] = "causal"

    @property
    def left(self) -> int | None:
        """W - 1 keys before the diagonal's own."""
        return None if self.window_size is None else self.window_size - 1

    @property
    def right(self) -> int | None:
        """The diagonal is the last key."""
        return 0

    def objections(self) -> list[str]:
        """What is wrong with the window."""
        size = self.window_size
        if size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 1):
            return []
        return [f"window_size = {size!r}: must be an int of at least 1, or None for no window; correct it"]


@dataclass(frozen=True, slots=True)
class CausalBottomRight(Causal):
    """Query i sees keys j <= i + num_keys - num_queries: the diagonal ends in the bottom-right corner.

    With more queries than keys the first num_queries - num_keys rows see nothing. window_size as in `Causal`.
    """

    name: ClassVar[str] = "causal_br"
    bottom_right: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Window(Mask):
    """FlashAttention's window: query i sees keys from d - window_left to d + window_right, d = i + num_keys -
    num_queries; None is no limit on that side."""

    window_left: int | None = None
    window_right: int | None = None
    name: ClassVar[str] = "window"
    bottom_right: ClassVar[bool] = True

    @property
    def left(self) -> int | None:
        """window_left."""
        return self.window_left

    @property
    def right(self) -> int | None:
        """window_right."""
        return self.window_right


def objections(mask: object) -> list[str]:
    """What is wrong with what was given as a mask."""
    if isinstance(mask, Mask):
        return mask.objections()
    return [f"mask = {mask!r}: must be a mask object such as Full() or Causal(); make one"]


ALL: dict[str, type[Mask]] = {cls.name: cls for cls in (Full, Causal, CausalBottomRight, Window)}
PLAIN = ("full", "causal", "causal_br")  # those that need no numbers


def from_name(name: str) -> Mask:
    """The mask without numbers of that name; ValueError names the known ones."""
    if name not in PLAIN:
        raise ValueError(f"mask {name!r}: must be one of {', '.join(PLAIN)}")
    return ALL[name]()
