"""Recall: calls of attention_forward and attention_backward like one before, without judging them again.

Only what most programs do comes this way: arrays of torch or CuPy, aligned, on the stream on which their library
computes, with options that are plain values. For everything else there is the long way, which also remembers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

from cutlass_py_attn import driver
from cutlass_py_attn.arrays import Array
from cutlass_py_attn.guests import BY_LIBRARY, Guest, guest_of
from cutlass_py_attn.launch import Bound
from cutlass_py_attn.options import PLAIN
from cutlass_py_attn.problem import ROW_ALIGNMENT_BYTES, Tensor

_LOW_BITS: Final = ROW_ALIGNMENT_BYTES - 1

KEPT: Final = 64  # calls

_kept: dict[Hashable, Recalled] = {}


def again(
    direction: str, operands: Sequence[Any], options: Mapping[str, Any], stream: object
) -> tuple[Hashable | None, list[Any] | None]:
    """What this call is known by, None where calls like it are not remembered, and its results where it is known."""
    try:
        call = _call(direction, operands, options)
        known = _kept.get(call)
    except (RuntimeError, TypeError):  # an array without strides, or a list among the options
        return None, None
    return call, None if known is None else known(operands, stream)


def remember(call: Hashable, bound: Bound, taken: Mapping[str, Array], made: Mapping[str, Tensor]) -> None:
    """Keep a call that was launched, unless something about its arrays was not plain.

    taken: its operands in their order. made: its results.
    """
    library = next(iter(taken.values())).library
    is_plain = all(
        array.library == library and not isinstance(array.owner, tuple) and not array.pointer & _LOW_BITS
        for array in taken.values()
    )
    if is_plain:
        while len(_kept) >= KEPT:
            _kept.pop(next(iter(_kept)), None)
        _kept[call] = Recalled(bound, library, taken, made)


def _call(direction: str, operands: Sequence[Any], options: Mapping[str, Any]) -> Hashable | None:
    """All that decides a call but addresses and stream."""
    kind = type(operands[0])
    guest = guest_of(operands[0])
    if guest is None or not options.keys() <= PLAIN:
        return None
    lie = guest.lie
    lies = tuple([lie(array) for array in operands if type(array) is kind])
    return (direction, lies, tuple(options.items())) if len(lies) == len(operands) else None


class Recalled:
    """A call that was judged and bound.

    names: of the operands, in the order in which they come. made: the results. library: whose arrays they are.
    """

    __slots__ = ("_bound", "_guest", "_made", "_names", "_ordinal")

    def __init__(self, bound: Bound, library: str, names: Iterable[str], made: Mapping[str, Tensor]) -> None:
        self._bound = bound
        self._guest: Guest = BY_LIBRARY[library]
        self._made = [(tensor.shape, tensor.dtype) for tensor in made.values()]
        self._names = (*names, *made)
        self._ordinal = bound.device.ordinal

    def __call__(self, operands: Sequence[Any], stream: object) -> list[Any] | None:
        """Launch; the results, or None where it has to go the long way."""
        guest = self._guest
        handle = driver.stream_handle(stream)
        addresses = guest.addresses(operands)
        bits = 0
        for address in addresses:
            bits |= address
        if bits & _LOW_BITS or guest.current_stream(self._ordinal) != handle or not guest.is_on(self._ordinal):
            return None
        results = []
        for shape, dtype in self._made:
            made, address = guest.empty(shape, dtype, self._ordinal)
            results.append(made)
            addresses.append(address)
        self._bound(dict(zip(self._names, addresses, strict=True)), handle)
        return results
