"""Call cache: repeated calls of attention_forward and attention_backward skip validation.

A call is cacheable if its arrays are aligned torch or CuPy arrays, its stream is the current stream of their library,
and its options are plain values. Every other call is validated and launched by `attention`, which stores new calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.options import PLAIN_OPTIONS, exact_key
from cutlass_py_attn.problem.tensors import ROW_ALIGNMENT_BYTES, Tensor
from cutlass_py_attn.runtime import driver, lifetimes
from cutlass_py_attn.runtime.arrays import Array
from cutlass_py_attn.runtime.binding import Bound
from cutlass_py_attn.runtime.frameworks import FRAMEWORKS, Framework, framework_of

_ALIGNMENT_MASK: Final = ROW_ALIGNMENT_BYTES - 1

MAX_CALLS: Final = 64

_calls: LruCache[CachedCall] = LruCache(MAX_CALLS)


def lookup(
    direction: str, operands: Sequence[Any], options: Mapping[str, Any], stream: object
) -> tuple[Hashable | None, list[Any] | None]:
    """Looks a call up and launches it on a hit.

    Returns (key, results): key is None if the call is not cacheable, results is None on a miss.
    """
    try:
        key = _key(direction, operands, options)
        call = None if key is None else _calls.get(key)
    except (RuntimeError, TypeError):  # an array without strides, or an unhashable option such as a list
        return None, None
    return key, None if call is None else call(operands, stream)


def store(key: Hashable, bound: Bound, operands: Mapping[str, Array], outputs: Mapping[str, Tensor]) -> None:
    """Stores a call that was launched, if its arrays are cacheable.

    operands: in the order of the call. outputs: the results, all of them allocated by the call.
    """
    if are_cacheable(operands):
        _calls.put(key, CachedCall(bound, operands, outputs))


def are_cacheable(operands: Mapping[str, Array]) -> bool:
    """Returns whether all arrays are aligned ones of one library."""
    library = next(iter(operands.values())).library
    return all(
        array.library == library and not isinstance(array.owner, tuple) and not array.pointer & _ALIGNMENT_MASK
        for array in operands.values()
    )


def layouts_of(operands: Sequence[Any]) -> tuple[Any, ...] | None:
    """Returns what decides a call of each array except its address; None if not all are of one type of torch or CuPy.

    RuntimeError or TypeError: an array has no strides.
    """
    kind = type(operands[0])
    framework = framework_of(operands[0])
    if framework is None:
        return None
    layout_key = framework.layout_key
    layouts = tuple([layout_key(array) for array in operands if type(array) is kind])
    return layouts if len(layouts) == len(operands) else None


def _key(direction: str, operands: Sequence[Any], options: Mapping[str, Any]) -> Hashable | None:
    """Returns everything that decides a call except addresses and stream; None if the call is not cacheable."""
    if not options.keys() <= PLAIN_OPTIONS:
        return None
    layouts = layouts_of(operands)
    return None if layouts is None else (direction, layouts, exact_key(options))


class CachedCall:
    """A validated call with bound kernels.

    operands: arrays of one library by name, in the order of the call. outputs: the results.
    must_validate: says of the operands' addresses whether the call must be validated; None if they do not matter.
    prepare: called with all addresses and the stream before the launch; None for nothing.
    """

    __slots__ = ("_bound", "_framework", "_must_validate", "_names", "_ordinal", "_outputs", "_prepare")

    def __init__(
        self,
        bound: Bound,
        operands: Mapping[str, Array],
        outputs: Mapping[str, Tensor],
        must_validate: Callable[[Sequence[int]], bool] | None = None,
        prepare: Callable[[Sequence[int], int], None] | None = None,
    ) -> None:
        self._bound = bound
        self._framework: Framework = FRAMEWORKS[next(iter(operands.values())).library]
        self._must_validate, self._prepare = must_validate, prepare
        self._outputs = [(tensor.shape, tensor.dtype) for tensor in outputs.values()]
        self._names = (*operands, *outputs)
        self._ordinal = bound.device.ordinal

    def __call__(self, operands: Sequence[Any], stream: object) -> list[Any] | None:
        """Launches and returns the results; returns None, without a launch, if the call must be validated."""
        if lifetimes.kept:
            lifetimes.release()
        framework = self._framework
        current = framework.current_stream(self._ordinal)
        addresses = framework.addresses(operands)
        bits = 0
        for address in addresses:
            bits |= address
        if (
            bits & _ALIGNMENT_MASK
            or (stream is not None and driver.stream_handle(stream) != current)
            or not framework.allocates_on(self._ordinal)
            or (self._must_validate is not None and self._must_validate(addresses))
        ):
            return None
        results = []
        for shape, dtype in self._outputs:
            array, address = framework.empty(shape, dtype, self._ordinal)
            results.append(array)
            addresses.append(address)
        if self._prepare is not None:
            self._prepare(addresses, current)
        self._bound(dict(zip(self._names, addresses, strict=True)), current)
        return results
