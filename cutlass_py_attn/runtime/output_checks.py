"""Checks of the caller's arrays for results: they must be writable, and share no memory with each other or an operand.

No kernel family may write over an operand. The thread blocks of split-D kernels each write some columns of rows that
other blocks still read, and with variable lengths the results are cleared before the kernels start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from cutlass_py_attn.problem.overlap import Region, overlap, overlaps_itself
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime import cuda_interface
from cutlass_py_attn.runtime.arrays import Array
from cutlass_py_attn.runtime.frameworks import FRAMEWORKS, numpy_dtype


def refusals(arrays: Mapping[str, Array], outputs: Collection[str], remedy: str = "") -> list[Refusal]:
    """Returns why arrays cannot take the results.

    arrays: every array of the call by name. outputs: names of those that take results. remedy: what to do about an
    array that is unfit; "" for a result that the caller may leave out.
    """
    if not outputs:
        return []
    read_only = [
        refuse(name, arrays[name], "must be writable, and is read-only", remedy or "leave it out")
        for name in outputs
        if _is_read_only(arrays[name])
    ]
    return [*read_only, *_overlaps(arrays, outputs, remedy)]


def _is_read_only(array: Array) -> bool:
    if array.device is None:
        return not array.source.flags.writeable
    return array.library == "jax" or (array.library not in FRAMEWORKS and cuda_interface.is_read_only(array.source))


def _overlaps(arrays: Mapping[str, Array], outputs: Collection[str], remedy: str) -> Iterator[Refusal]:
    """Yields results that overlap themselves, an operand or one another."""
    regions = {name: region for name, array in arrays.items() if (region := _region(array)) is not None}
    written = [name for name in outputs if name in regions]
    for number, name in enumerate(written):
        region = regions[name]
        # Problem.refusals knows the strides of device arrays only.
        if arrays[name].device is None and overlaps_itself(region.shape, region.strides, region.item_bytes):
            rule = f"an output must not overlap itself, and has strides {region.strides} in bytes"
            yield refuse(name, arrays[name], rule, "allocate it in full")
        for operand in (each for each in regions if each not in outputs):
            if overlap(region, regions[operand]):
                rule = (
                    f"must have memory of its own, and shares it with {operand}: some thread blocks read {operand} "
                    f"after others have written {name}"
                )
                yield refuse(name, arrays[name], rule, remedy or "pass another array or leave it out")
        for other in written[number + 1 :]:
            if overlap(region, regions[other]):
                rule = f"each result must have memory of its own, and this shares it with {other}"
                yield refuse(name, arrays[name], rule, "pass separate arrays")


def _region(array: Array) -> Region | None:
    """Returns the memory of an array; None if its dtype has no known size, which validation refuses."""
    try:
        item_bytes = numpy_dtype(array.dtype).itemsize
    except TypeError:
        return None
    if array.device is None:  # `strides` describes the dense device copy
        return Region(array.pointer, array.shape, array.owner.strides, item_bytes)
    return Region(array.pointer, array.shape, tuple(stride * item_bytes for stride in array.strides), item_bytes)
