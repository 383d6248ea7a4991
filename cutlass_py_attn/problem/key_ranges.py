"""Key ranges: a mask in memory, the keys that each query sees as a range.

Documents, prefixes, chunks, windows that differ by head, and every band are ranges. A `Mask` has numbers alone and is
part of a Problem; ranges are arrays, as query and key are. The constructors compute them where their arguments are, in
NumPy, CuPy or JAX, by operations that JAX can trace.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import UNLIMITED, Full, Mask
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.tensors import RANGE_EDGES
from cutlass_py_attn.refusals import Refusal, refuse

Array = npt.NDArray[Any]
FULL: Final = Full()
MAX_PLACES: Final = 2**31 - 1  # places of all sequences together that 32-bit integers number
_WITHOUT_NAMESPACE: Final = ("cupy",)  # libraries with the functions of NumPy whose arrays may not name them


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
            if not is_array(array):
                rule = "must be an int32 array (batch, num_heads, num_queries)"
                yield refuse(name, array, rule, "pass one; the first two sizes may be 1")
        yield from _band_refusals(self.band)

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays by their names in a Problem, those of NumPy as int32."""
        return dict(zip(RANGE_EDGES, map(_as_int32, (self.key_start, self.key_end)), strict=True))

    def numbers(self) -> dict[str, Any]:
        """Returns the other fields of a Problem that the mask decides."""
        return {}

    @staticmethod
    def of(mask: Mask, num_queries: int, num_keys: int) -> KeyRanges:
        """Returns the ranges of a mask, for every sequence and head."""
        start, end = mask.ranges(num_queries, num_keys)
        return KeyRanges(start[None, None], end[None, None])

    @staticmethod
    def documents(cu_seqlens: Any, num_tokens: int, band: Mask = FULL) -> KeyRanges:
        """Returns the ranges of documents that are packed in one sequence: a token sees those of its document.

        cu_seqlens: (documents + 1,) or (batch, documents + 1) ascending integers: document d has the tokens from
            cu_seqlens[d] to cu_seqlens[d + 1] - 1. A token before the first document or behind the last sees nothing
        num_tokens: length of query and of key, with the tokens of no document
        band: a Mask that hides keys as well, such as Causal()

        `KeyRanges.documents([0, 3, 5], 6)` has key_start (1, 1, 6) 0 0 0 3 3 0 and key_end 3 3 3 5 5 0.
        """
        expect(_bounds(cu_seqlens), length_refusals("num_tokens", num_tokens), _band_refusals(band))
        xp, bounds = _read(cu_seqlens)
        bounds = bounds.reshape(-1, bounds.shape[-1])
        batch, entries = bounds.shape
        expect(length_refusals("num_tokens", num_tokens, batch))
        places = int(num_tokens) + 1  # of a bound
        bounds = xp.clip(bounds, 0, places - 1)
        row = xp.arange(batch, dtype=xp.int32)[:, None]
        tokens = row * places + xp.arange(places - 1, dtype=xp.int32)
        every = (bounds + row * places).reshape(-1)  # ascending over all sequences
        begun = xp.searchsorted(every, tokens.reshape(-1), side="right").reshape(tokens.shape) - row * entries
        is_inside = (begun > 0) & (begun < entries)
        ends = (row * entries + xp.clip(begun - 1 + end, 0, entries - 1) for end in (0, 1))
        start, end = (xp.where(is_inside, bounds.reshape(-1)[place], 0)[:, None] for place in ends)
        return _ranges(xp, start, end, band)

    @staticmethod
    def segments(segment_ids: Any, band: Mask = FULL) -> KeyRanges:
        """Returns the ranges of segments: a token sees the run of tokens with its number around it.

        segment_ids: (batch, num_tokens) integers of any values. A number that comes back later is another segment
        band: a Mask that hides keys as well, such as Causal()

        `KeyRanges.segments([[7, 7, 2, 7]])` has key_start (1, 1, 4) 0 0 2 3 and key_end 2 2 3 4.
        """
        expect(integer_refusals("segment_ids", segment_ids, "(batch, num_tokens)"), _band_refusals(band))
        xp = library_of(segment_ids)
        numbers = xp.asarray(segment_ids)
        batch, count = numbers.shape
        expect(length_refusals("num_tokens", count, batch))
        begins = xp.concatenate([xp.ones((batch, 1), dtype=bool), numbers[:, 1:] != numbers[:, :-1]], axis=1)
        run = xp.cumsum(begins[:, :count].reshape(-1).astype(xp.int32))
        row = xp.arange(batch, dtype=xp.int32)[:, None, None]
        places = (xp.searchsorted(run, run, side=side).reshape(batch, 1, count) for side in ("left", "right"))
        start, end = (place - row * count for place in places)
        return _ranges(xp, start, end, band)

    @staticmethod
    def prefix_lm(lengths: Any, num_queries: int) -> KeyRanges:
        """Returns the ranges of a prefix language model: a causal mask with which every query sees the prefix too.

        lengths: (batch,) integers; of the prefix of each sequence
        num_queries: length of query

        `KeyRanges.prefix_lm([2], 4)` has key_start (1, 1, 4) 0 0 0 0 and key_end 2 2 3 4.
        """
        expect(integer_refusals("lengths", lengths, "(batch,)"), length_refusals("num_queries", num_queries))
        xp, prefix = _read(lengths)
        end = xp.maximum(prefix[:, None, None], xp.arange(1, int(num_queries) + 1, dtype=xp.int32))
        return _ranges(xp, xp.zeros_like(end), end)

    @staticmethod
    def chunks(size: Any, num_tokens: int) -> KeyRanges:
        """Returns the ranges of chunks: a token sees itself and those before it in its chunk, as in layers of Llama 4.

        size: tokens of a chunk, at least 1; an int or an array () of one
        num_tokens: length of query and of key

        `KeyRanges.chunks(2, 5)` has key_start (1, 1, 5) 0 0 2 2 4 and key_end 1 2 3 4 5.
        """
        expect(integer_refusals("size", size, "()"), length_refusals("num_tokens", num_tokens))
        if isinstance(size, (int, np.integer, np.ndarray)) and size < 1:
            raise NotSupported(refuse("size", size, "must be at least 1", "correct it"))
        xp, of_chunk = _read(size)
        token = xp.arange(int(num_tokens), dtype=xp.int32)[None, None]
        return _ranges(xp, token // of_chunk * of_chunk, token + 1)

    @staticmethod
    def windows(left: Any, right: Any, num_queries: int) -> KeyRanges:
        """Returns the ranges of windows that differ by head: query i sees the keys from i - left to i + right.

        left, right: (num_heads,) integers, or an int for all heads: the keys before and behind that of the query. As
            many as there are keys are no limit
        num_queries: length of query

        `KeyRanges.windows([1, 2], 0, 3)` has key_start (1, 2, 3) -1 0 1, -2 -1 0 and key_end 1 2 3, 1 2 3.
        """
        shapes = "()", "(num_heads,)"
        expect(
            integer_refusals("left", left, *shapes),
            integer_refusals("right", right, *shapes),
            length_refusals("num_queries", num_queries),
        )
        xp, before, behind = _read(left, right)
        if len({int(array.size) for array in (before, behind)} | {1}) > 2:
            rule = f"must be that of left, {tuple(before.shape)}"
            raise NotSupported(refuse("right.shape", tuple(behind.shape), rule, "pass a number for each head"))
        before, behind = xp.broadcast_arrays(before.reshape(1, -1, 1), behind.reshape(1, -1, 1))
        query = xp.arange(int(num_queries), dtype=xp.int32)
        return _ranges(xp, query - before, query + behind + 1)

    def resolved(self, num_heads: int, num_queries: int, num_keys: int) -> KeyRanges:
        """Returns NumPy ranges without a band."""
        return self.within(num_keys)

    def within(self, num_keys: int) -> KeyRanges:
        """Returns NumPy ranges without a band, cut to it and to the keys; an empty one is (0, 0)."""
        start, end = np.asarray(self.key_start), np.asarray(self.key_end)
        first, last = self.band.ranges(start.shape[2], num_keys)
        start, end = np.maximum(np.maximum(start, first), 0), np.minimum(np.minimum(end, last), num_keys)
        sees = start < end
        return KeyRanges(np.where(sees, start, 0), np.where(sees, end, 0))

    def sees(self, batch: Any, head: Any, query: Any, key: Any, num_keys: int) -> Array:
        """Returns whether a query of a head of a sequence sees a key, of index arrays that broadcast."""
        return self.within(num_keys).reach(batch, head, query, key)

    def reach(self, batch: Any, head: Any, query: Any, key: Any) -> Array:
        """Returns `sees` of ranges that `within` has cut."""
        at = batch % self.key_start.shape[0], head % self.key_start.shape[1], query
        visible: Array = (self.key_start[at] <= key) & (key < self.key_end[at])
        return visible

    def materialise(self, num_keys: int) -> Array:
        """Returns the mask as a (batch, num_heads, num_queries, num_keys) bool array; slow, for tests."""
        shape = *np.shape(self.key_start), num_keys
        batch, head, query, key = np.ogrid[tuple(slice(size) for size in shape)]
        return self.sees(batch, head, query, key, num_keys)


def is_array(value: object) -> bool:
    """Returns whether this is an array of any library."""
    return any(hasattr(value, name) for name in ("dtype", "__dlpack__", "__cuda_array_interface__"))


def _ranges(xp: Any, start: Any, end: Any, band: Mask = FULL) -> KeyRanges:
    return KeyRanges(start.astype(xp.int32), end.astype(xp.int32), band)


def _read(*arrays: Any) -> tuple[Any, ...]:
    """Returns the functions of the arrays' library, NumPy for Python numbers, and each as int32 within UNLIMITED."""
    libraries = [library for array in arrays if (library := library_of(array)) is not np]
    xp: Any = libraries[0] if libraries else np
    found = [xp.asarray(array) for array in arrays]
    limits = [xp.iinfo(array.dtype) for array in found]
    bounds = [(max(int(of.min), -UNLIMITED), min(int(of.max), UNLIMITED)) for of in limits]
    return xp, *(xp.clip(array, *ends).astype(xp.int32) for array, ends in zip(found, bounds, strict=True))


def library_of(array: Any) -> Any:
    """Returns the module with the functions of an array's library; None for an array without one."""
    if isinstance(array, (int, list, tuple)):
        return np
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    name = type(array).__module__.partition(".")[0]
    return sys.modules[name] if name in _WITHOUT_NAMESPACE else None


def expect(*refusals: Iterable[Refusal]) -> None:
    """Raises NotSupported with every refusal, if there is one."""
    if every := [*itertools.chain(*refusals)]:
        raise NotSupported(every)


def integer_refusals(name: str, given: Any, *shapes: str) -> Iterator[Refusal]:
    """Yields why this is no array of integers with as many axes as one of the shapes, such as "(batch, heads)"."""
    rule = f"must be {' or '.join(shapes)} integers of NumPy, CuPy, JAX or Python"
    array = _on_host(given)
    if library_of(array) is None:
        yield refuse(name, given, rule, "convert it")
        return
    if getattr(array.dtype, "kind", "") not in "iu":
        yield refuse(f"{name}.dtype", str(array.dtype), rule, "convert it")
    if len(array.shape) not in [len([*filter(None, shape.strip("()").split(","))]) for shape in shapes]:
        yield refuse(f"{name}.shape", tuple(array.shape), rule, "reshape it")


def _on_host(given: Any) -> Any:
    """Returns Python numbers as an array of NumPy, None for rows of several lengths; other arrays as they are."""
    with contextlib.suppress(ValueError):
        return np.asarray(given) if isinstance(given, (int, list, tuple)) else given
    return None


def _bounds(cu_seqlens: Any) -> Iterator[Refusal]:
    """Yields why these are no bounds of documents; whether bounds on a device ascend is not read."""
    wrong = [*integer_refusals("cu_seqlens", cu_seqlens, "(documents + 1,)", "(batch, documents + 1)")]
    yield from wrong
    bounds = _on_host(cu_seqlens)
    if wrong:
        return
    if bounds.shape[-1] == 0:
        yield refuse("cu_seqlens.shape", tuple(bounds.shape), "must have an entry at least", "pass [0] for no document")
    elif isinstance(bounds, np.ndarray) and (bounds[..., 1:] < bounds[..., :-1]).any():
        yield refuse("cu_seqlens", cu_seqlens, "must be ascending", "sum the lengths of the documents")


def length_refusals(name: str, given: Any, rows: int = 1) -> Iterator[Refusal]:
    """Yields why this is no length of `rows` sequences whose places 32-bit integers number."""
    length = integer_of(given)
    if length is None or length < 0:
        yield refuse(name, given, "must be an int of at least 0", "correct it")
    elif rows * (length + 1) > MAX_PLACES:
        yield refuse(name, given, f"must be at most {MAX_PLACES // rows - 1} here", "call once for each slice")


def _band_refusals(band: object) -> Iterator[Refusal]:
    if not isinstance(band, Mask):
        yield refuse("band", band, "must be a Mask", "create one, such as Causal()")


def _as_int32(array: Any) -> Any:
    """Returns a NumPy array of integers as int32, with numbers beyond these at their ends; others as they are."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        return array
    limits = np.iinfo(np.int32)
    return np.clip(array, limits.min, limits.max).astype(np.int32)
