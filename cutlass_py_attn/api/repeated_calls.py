"""Repeated calls of append_to_cache and merge_states: calls of known layouts are launched without a validation.

A call is repeatable if its arrays are aligned torch or CuPy arrays and its stream is the current stream of their
library. Arrays that are written must not overlap others, which their addresses decide: extents are compared in every
call. Extents that do overlap, as those of two parts of one pool, are sound at the distances that were validated.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

from cutlass_py_attn.api.call_cache import CachedCall, are_cacheable, layouts_of
from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import fill
from cutlass_py_attn.runtime.arrays import Array
from cutlass_py_attn.runtime.binding import Bound
from cutlass_py_attn.runtime.frameworks import numpy_dtype

MAX_CALLS: Final = 64
MAX_DISTANCES: Final = 256  # of two arrays of one call

_calls: LruCache[RepeatedCall] = LruCache(MAX_CALLS)


def look_up(
    options: tuple[Any, ...], operands: Mapping[str, Any], stream: object
) -> tuple[Hashable | None, list[Any] | None]:
    """Looks a call up and launches it on a hit.

    options: everything hashable beside the arrays and the stream that decides the call.

    Returns (key, new results): key is None if the call is not repeatable, the results are None on a miss.
    """
    arrays = tuple(operands.values())
    try:
        layouts = layouts_of(arrays)
        key = options, layouts
        call = None if layouts is None else _calls.get(key)
    except (RuntimeError, TypeError):  # an array without strides, or an unhashable option
        return None, None
    if layouts is None:
        return None, None
    return key, None if call is None else call(arrays, stream)


def store(
    key: Hashable,
    bound: Bound,
    found: Mapping[str, Array],
    written: Sequence[str],
    new_outputs: Mapping[str, Tensor],
    cleared: Tensor | None,
) -> None:
    """Stores a call that was validated and launched, or the distances of its arrays if the call is stored already.

    found: the caller's arrays in the order of the call. written: names of those that the kernel writes.
    new_outputs: results that the call allocates. cleared: layout of the result "output" that is cleared before the
    launch; None for no clearing.
    """
    if not are_cacheable(found):
        return
    call = _calls.get(key)
    if call is None:
        call = RepeatedCall(bound, found, written, new_outputs, cleared)
        _calls.put(key, call)
    call.add_distances([each.pointer for each in found.values()])


class RepeatedCall:
    """A validated call with its bound kernel; the arguments are those of `store`."""

    def __init__(
        self,
        bound: Bound,
        found: Mapping[str, Array],
        written: Sequence[str],
        new_outputs: Mapping[str, Tensor],
        cleared: Tensor | None,
    ) -> None:
        clear = None
        if cleared is not None:
            clear = functools.partial(_clear, bound, cleared, [*found, *new_outputs].index("output"))
        self._call = CachedCall(bound, found, new_outputs, self._may_overlap, clear)
        extents = [_extent(array) for array in found.values()]
        names = list(found)
        pairs = {
            (min(first, second), max(first, second))
            for first in (names.index(name) for name in written)
            for second in range(len(names))
            if first != second
        }
        # Arrays overlap only if distance = address of second - address of first is between least and most.
        self._pairs = [
            (first, second, extents[first][0] - extents[second][1], extents[first][1] - extents[second][0])
            for first, second in sorted(pairs)
        ]
        self._sound: set[tuple[int, int, int]] = set()

    def add_distances(self, addresses: Sequence[int]) -> None:
        """Records that arrays at these addresses do not overlap."""
        for first, second, least, most in self._pairs:
            distance = addresses[second] - addresses[first]
            if least < distance < most and len(self._sound) < MAX_DISTANCES:
                self._sound.add((first, second, distance))

    def _may_overlap(self, addresses: Sequence[int]) -> bool:
        for first, second, least, most in self._pairs:
            distance = addresses[second] - addresses[first]
            if least < distance < most and (first, second, distance) not in self._sound:
                return True
        return False

    def __call__(self, arrays: Sequence[Any], stream: object) -> list[Any] | None:
        """Launches and returns the new results; returns None, without a launch, if the call must be validated."""
        return self._call(arrays, stream)


def _clear(bound: Bound, cleared: Tensor, index: int, addresses: Sequence[int], stream: int) -> None:
    """Clears the result whose address is number `index`."""
    with bound.device.current():
        fill.clear(cleared, addresses[index], stream)


def _extent(array: Array) -> tuple[int, int]:
    """Returns the first byte of an array and the byte behind its last, counted from its address."""
    item = numpy_dtype(array.dtype).itemsize
    steps = [(size - 1) * stride * item for size, stride in zip(array.shape, array.strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + item
