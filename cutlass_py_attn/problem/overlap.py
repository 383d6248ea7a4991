"""Overlap: whether two strided tensors share memory, and whether one tensor stores two elements in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

MAX_WORK: Final = 100_000  # steps of NumPy's exact search, some milliseconds; ordinary layouts take less than ten


@dataclass(frozen=True, slots=True)
class Region:
    """Strided memory. address, strides and item_bytes: in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """Returns an array of these bytes, which may be device memory: only its layout may be used."""
        return np.asarray(_Described(self))


class _Described:
    """An object that NumPy reads a Region from."""

    def __init__(self, region: Region) -> None:
        self.__array_interface__ = {
            "data": (region.address, False),
            "shape": region.shape,
            "strides": region.strides,
            "typestr": f"|V{region.item_bytes}",
            "version": 3,
        }


def overlap(first: Region, second: Region) -> bool:
    """Returns whether a byte belongs to both; also True if that takes too long to find out."""
    if 0 in first.shape or 0 in second.shape:
        return False
    return _share_memory(first.as_numpy(), second.as_numpy())


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], item: int = 1) -> bool:
    """Returns whether two elements share memory; also True if that takes too long to find out.

    strides, item: distances and size of the elements in one unit.
    """
    axes = sorted((abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    if 0 in shape or _are_nested(axes, item):
        return False
    sizes, steps = [size for _, size in axes], [stride for stride, _ in axes]
    whole = np.lib.stride_tricks.as_strided(np.empty(1, f"V{item}"), sizes, steps)
    # Two elements differ first along some axis; by symmetry the one has index 0 there, and both before it.
    for _ in axes:
        if _share_memory(whole[:1], whole[1:]):
            return True
        whole = whole[0]
    return False


def _are_nested(axes: Sequence[tuple[int, int]], item: int) -> bool:
    """Returns whether each axis steps over all elements of the axes before it, as in every ordinary layout.

    axes: (stride, size) by ascending stride.
    """
    extent = item
    for stride, size in axes:
        if stride < extent:
            return False
        extent += (size - 1) * stride
    return True


def _share_memory(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    try:
        # NumPy documents any number; its type names only the two that have a name.
        return bool(np.shares_memory(first, second, max_work=MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
