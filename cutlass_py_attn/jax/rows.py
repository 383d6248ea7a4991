"""Rows of one call over the devices of a mesh axis, and the zigzag order of JAX arrays (problem/split_rows.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import split_rows
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.split_rows import Chunk
from cutlass_py_attn.refusals import refuse


@dataclass(frozen=True, slots=True)
class Context:
    """How the rows of a call are split.

    axis, size: name and size of the mesh axis
    strategy: one of STRATEGIES
    zigzag: whether the rows are in the zigzag order
    """

    axis: str
    size: int
    strategy: str
    zigzag: bool

    def rank(self) -> Any:
        """Returns the index of this device on the axis, traced."""
        return jax.lax.axis_index(self.axis)

    def chunks(self, rows: int, device: Any) -> list[Chunk]:
        """Returns the runs of consecutive rows among a device's `rows` rows. device: its index, traced or not."""
        return split_rows.chunks(self.size, self.zigzag, rows, device)

    def to_natural(self, array: Any, axis: int) -> Any:
        """Returns rows of all devices in natural order."""
        return restore(array, self.size, axis) if self.zigzag else array

    def from_natural(self, array: Any, axis: int) -> Any:
        """Returns rows in natural order in that of the devices."""
        return reorder(array, self.size, axis) if self.zigzag else array


def reorder(array: Any, num_devices: int, axis: int = 1) -> Any:
    """Returns rows in zigzag order, for `load_balance="zigzag"`; `restore` undoes it.

    array: of JAX or NumPy; axis: its axis of rows, whose size is a multiple of 2 num_devices, else NotSupported.
    Reorder everything that has a row for each token: tokens, positions, targets; of a bias the rows, not the columns.
    """
    chunks = _chunks(array, num_devices, axis)
    last = 2 * num_devices - 1
    order = [chunk for first in range(int(num_devices)) for chunk in (first, last - first)]
    return jnp.concatenate([chunks[number] for number in order], axis)


def restore(array: Any, num_devices: int, axis: int = 1) -> Any:
    """Returns rows in natural order from those that `reorder` returned, with the same arguments."""
    chunks = _chunks(array, num_devices, axis)
    return jnp.concatenate([*chunks[::2], *chunks[::-2]], axis)


def _chunks(array: Any, num_devices: Any, axis: Any) -> list[Any]:
    count, place = integer_of(num_devices), integer_of(axis)
    reasons = []
    if count is None or count < 1:
        reasons.append(refuse("num_devices", num_devices, "must be an int of at least 1", "correct it"))
    if place is None:
        reasons.append(refuse("axis", axis, "must be an int, the axis of the rows", "correct it"))
    if reasons:
        raise NotSupported(reasons)
    assert count is not None
    assert place is not None
    array = jnp.asarray(array)
    if not -array.ndim <= place < array.ndim or array.shape[place] % (2 * count):
        raise NotSupported(
            f"an array of shape {array.shape} in zigzag order along axis {place}: must have a multiple of "
            f"{2 * count} rows there, two chunks for each of {count} devices; pad the rows"
        )
    return jnp.split(array, 2 * count, place)
