"""Masks: which keys each query sees, as one frozen object per mask.

Every mask is a band: query i sees key j if low <= j - i <= high, and both indices are inside the sequence. A mask
computes low and high from the lengths. `Band` computes ranges of a band for Python ints, NumPy arrays and traced values
alike. All indices are zero-based inside the sequence.

Kernels are compiled for one form of band. The positions of its edges are run-time parameters, so that all windows of
one form share their kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.integers import larger, smaller
from cutlass_py_attn.problem.scalars import python_value
from cutlass_py_attn.refusals import Refusal, refuse

_PLAIN = frozenset((int, bool, str, type(None)))
UNLIMITED = 2**30 - 2**17  # means no edge; its sum with lengths up to 2^29 stays in 32 bits


class Form(str):
    """Which edges a band has: "full" none, "causal" a right one, "local" both. Code asks for edges, not for names.

    Form "ranges" has no band: each query has a range of keys of its own, in memory (problem/key_ranges.py). Behind its
    name may stand the program of a mask function (problem/mask_program.py).
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The form without a program."""
        return self.partition(" ")[0]

    @property
    def program(self) -> str:
        """The text of the program of a mask function; "" for none."""
        return self.partition(" ")[2]

    @property
    def has_left(self) -> bool:
        """Whether a query does not see keys far before its diagonal."""
        return self == "local"

    @property
    def has_right(self) -> bool:
        """Whether a query does not see keys behind its diagonal."""
        return self != "full" and not self.has_ranges

    @property
    def has_ranges(self) -> bool:
        """Whether arrays say which keys each query sees."""
        return self.name == "ranges"

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key."""
        return not (self.has_left or self.has_right or self.has_ranges)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the run-time parameters that say where its edges are."""
        edges = (("window_left", self.has_left), ("window_right", self.has_right))
        return tuple(name for name, is_limited in edges if is_limited)

    @property
    def grows(self) -> bool:
        """Whether a query sees all keys that the queries before it see, and later ones behind these."""
        return self.has_right and not self.has_left


FORMS = (Form("full"), Form("causal"), Form("local"))  # of bands
RANGES = Form("ranges")


@dataclass(frozen=True, slots=True)
class Band:
    """The visible (query, key) pairs of one sequence: low <= key - query <= high.

    form: which edges exist, one of FORMS
    low, high: smallest and largest visible key - query
    num_queries, num_keys: lengths of the sequence
    """

    form: Form
    low: Any
    high: Any
    num_queries: Any
    num_keys: Any

    def sees(self, query: Any, key: Any) -> Any:
        """Returns whether `query` sees `key`."""
        inside = (key < self.num_keys) & (query < self.num_queries)
        if self.form.has_right:
            inside = inside & (key - query <= self.high)
        if self.form.has_left:
            inside = inside & (key - query >= self.low)
        return inside

    def key_start(self, first_query: Any) -> Any:
        """Returns the first key that any query >= first_query sees, at least 0; num_keys or more if none sees one."""
        return larger(first_query + self.low, 0) if self.form.has_left else first_query * 0

    def key_end(self, last_query: Any) -> Any:
        """Returns one past the last key that any query <= last_query sees, in [0, num_keys]."""
        if not self.form.has_right:
            return self.num_keys
        return larger(smaller(self.num_keys, last_query + self.high + 1), 0)

    def query_start(self, first_key: Any) -> Any:
        """Returns the first query that sees any key >= first_key; num_queries or more if none does."""
        return larger(first_key - self.high, 0) if self.form.has_right else first_key * 0

    def query_end(self, last_key: Any) -> Any:
        """Returns one past the last query that sees any key <= last_key, in [0, num_queries]."""
        if not self.form.has_left:
            return self.num_queries
        return larger(smaller(self.num_queries, last_key - self.low + 1), 0)


@dataclass(frozen=True, slots=True)
class Mask:
    """Base class of all masks; use one of the classes below.

    Integers of other libraries and 0-d arrays become Python ints when a mask is made, so that masks are equal and
    hashable by their numbers, also as static arguments of jax.jit.
    """

    name: ClassVar[str] = ""
    bottom_right: ClassVar[bool] = False  # whether the diagonal ends in the last query and key, not starts in the first

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if type(value) not in _PLAIN:
                object.__setattr__(self, name, python_value(value))

    @property
    def left(self) -> int | None:
        """Number of visible keys before the diagonal; None for all."""
        return None

    @property
    def right(self) -> int | None:
        """Number of visible keys behind the diagonal; None for all."""
        return None

    @property
    def form(self) -> Form:
        """Form of the mask in kernels: full, causal or local."""
        if self.left is not None:
            return Form("local")
        return Form("full" if self.right is None else "causal")

    @property
    def edges(self) -> tuple[int, int]:
        """(left, right), with UNLIMITED for an edge that does not exist."""
        limits = (UNLIMITED if edge is None else min(edge, UNLIMITED) for edge in (self.left, self.right))
        left, right = limits
        return left, right

    def band(self, num_queries: int, num_keys: int) -> Band:
        """Returns the band of a sequence with these lengths."""
        left, right = self.edges
        diagonal = num_keys - num_queries if self.bottom_right else 0
        return Band(self.form, diagonal - left, diagonal + right, num_queries, num_keys)

    def sees(self, query: Any, key: Any, num_queries: int, num_keys: int) -> Any:
        """Returns whether `query` sees `key`, for ints and NumPy arrays."""
        return self.band(num_queries, num_keys).sees(query, key)

    def ranges(self, num_queries: int, num_keys: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the first key that each query sees, and one past its last; a query without keys has start >= end."""
        query = np.arange(num_queries, dtype=np.int64)
        band = self.band(num_queries, num_keys)
        start = np.maximum(query + band.low, 0) if self.form.has_left else 0 * query
        end = np.minimum(query + band.high + 1, num_keys) if self.form.has_right else 0 * query + num_keys
        return start, end

    def pairs(self, num_queries: int, num_keys: int) -> int:
        """Returns the number of visible (query, key) pairs."""
        start, end = self.ranges(num_queries, num_keys)
        return int(np.maximum(end - start, 0).sum())

    def materialise(self, num_queries: int, num_keys: int) -> npt.NDArray[np.bool_]:
        """Returns the mask as a (num_queries, num_keys) bool array; slow, for tests and the reference."""
        query = np.arange(num_queries)[:, None]
        key = np.arange(num_keys)[None, :]
        visible = self.sees(query, key, num_queries, num_keys)
        return np.broadcast_to(visible, (num_queries, num_keys)).copy()


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key."""

    name: ClassVar[str] = "full"


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """Query i sees keys j <= i: the diagonal starts in the top-left corner (PyTorch's is_causal).

    window_size: number of keys that a query sees, j > i - window_size; None for all
    """

    window_size: int | None = None
    name: ClassVar[str] = "causal"

    @property
    def left(self) -> int | None:
        """window_size - 1: the key on the diagonal is one of the window."""
        return None if self.window_size is None else self.window_size - 1

    @property
    def right(self) -> int | None:
        """0: the key on the diagonal is the last visible key."""
        return 0


@dataclass(frozen=True, slots=True)
class CausalBottomRight(Causal):
    """Query i sees keys j <= i + num_keys - num_queries: the diagonal ends in the bottom-right corner.

    With more queries than keys the first num_queries - num_keys rows see nothing. window_size as in `Causal`.
    """

    name: ClassVar[str] = "causal_br"
    bottom_right: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Window(Mask):
    """FlashAttention's window: query i sees keys d - window_left to d + window_right, d = i + num_keys - num_queries.

    window_left, window_right: number of visible keys before and behind the diagonal; None for no limit
    """

    window_left: int | None = None
    window_right: int | None = None
    name: ClassVar[str] = "window"
    bottom_right: ClassVar[bool] = True

    @property
    def left(self) -> int | None:
        """Number of visible keys before the diagonal: window_left."""
        return self.window_left

    @property
    def right(self) -> int | None:
        """Number of visible keys behind the diagonal: window_right."""
        return self.window_right


ALL: dict[str, type[Mask]] = {cls.name: cls for cls in (Full, Causal, CausalBottomRight, Window)}
PLAIN = ("full", "causal", "causal_br")  # masks without numbers


def refusals(mask: object) -> list[Refusal]:
    """Returns why this is no mask, or which of its numbers are none."""
    if type(mask) not in ALL.values():
        return [refuse("mask", mask, "must be a mask object such as Full() or Causal()", "make one")]
    least, none = (1, "no window") if isinstance(mask, Causal) else (0, "no limit")
    numbers = {item.name: getattr(mask, item.name) for item in fields(mask)}  # type: ignore[arg-type]
    return [
        refuse(name, number, f"must be an int of at least {least}, or None for {none}", "correct it")
        for name, number in numbers.items()
        if number is not None and (type(number) is not int or number < least)
    ]


def from_name(name: str) -> Mask:
    """Returns the mask without numbers of that name; ValueError for another name."""
    if name not in PLAIN:
        raise ValueError(f"mask {name!r}: must be one of {', '.join(PLAIN)}")
    return ALL[name]()
