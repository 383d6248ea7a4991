"""Split of one call over devices by batch and heads: the axes of every array, and what each device computes.

Two ways lead here. An Explicit mesh has the shardings in the types of the operands: `explicit` reads them when the call
is traced. An Auto mesh has them only when XLA compiles: `auto.py` reads them then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax.handler import PHILOX
from cutlass_py_attn.problem import operands
from cutlass_py_attn.problem.mask_program import MaskProgram
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.tensors import CACHED, MASK_ARRAYS

Arrays = dict[str, Any]
Axes = tuple[str, ...]

BATCH: Final = "batch"
HEAD: Final = "head"
HEADS: Final = "num_heads"
HEADS_KEY: Final = "num_heads_key"


def axes_of(name: str, shape: tuple[int, ...], problem: Problem) -> Axes:
    """Returns a name for each axis of an operand or result; only axes called BATCH, HEADS or HEADS_KEY can be split.

    An axis of size 1 over which a bias broadcasts is not split. With variable lengths no axis is called BATCH: the
    sequences follow each other in one axis. With pages neither, because every sequence may use any page of a pool.
    """
    found = operands.axes_of(problem, name, shape)
    if problem.sequences is not None or problem.pages is not None:
        found = tuple("sequences" if axis == BATCH else axis for axis in found)
    return found


@dataclass(frozen=True, slots=True)
class Split:
    """One call over the axes of a mesh.

    problem: the whole call
    batch, heads: mesh axes that split the batch, and the heads, the slowest first
    sizes: (name, size) of these mesh axes
    """

    problem: Problem
    batch: Axes
    heads: Axes
    sizes: tuple[tuple[str, int], ...]

    def count(self, axes: Axes) -> int:
        """Returns the number of parts that these mesh axes split an axis into."""
        sizes = dict(self.sizes)
        return math.prod(sizes[name] for name in axes)

    @property
    def heads_key(self) -> Axes:
        """Mesh axes that split the key heads: those of the query heads, the slowest first, as far as there are heads.

        With more parts than key heads, several parts read one key head.
        """
        number = self.problem.shape.num_heads_key
        lengths = range(len(self.heads), -1, -1)
        return next(self.heads[:length] for length in lengths if number % self.count(self.heads[:length]) == 0)

    def reasons(self) -> list[str]:
        """Returns why the kernels cannot compute the parts."""
        sizes, parts, axes = self.problem.shape, self.count(self.heads), _shown(self.heads)
        reasons = []
        if sizes.num_heads % parts or (sizes.num_heads_key % parts and parts % sizes.num_heads_key):
            repeated = math.lcm(sizes.num_heads_key, parts)
            remedy = (
                f"repeat key and value to {repeated} heads with jax.numpy.repeat(key, {repeated // sizes.num_heads_key}"
                ", axis=2), or split the heads over fewer devices"
                if sizes.num_heads % repeated == 0
                else "split the heads over a number of devices that divides both"
            )
            reasons.append(
                f"heads are split over {axes} ({parts} devices), key has {sizes.num_heads_key} heads and query "
                f"{sizes.num_heads}: each device must have whole groups of query heads; {remedy}"
            )
        if parts > 1 and self.problem.dropout_p and self.problem.sequences is not None and sizes.batch > 1:
            reasons.append(
                f"heads are split over {axes} with dropout and {sizes.batch} sequences of variable length: must be one "
                "sequence, for the kernels count the random numbers of a device's own heads; split the batch over "
                "devices inside jax.shard_map, or pass dropout_p=0"
            )
        return reasons + self._reasons_of_function()

    def _reasons_of_function(self) -> list[str]:
        """Returns why the kernels cannot compute the mask function of the parts."""
        function, reasons = self._function, []
        if function is None:
            return []
        if (names := self._moved_positions) and len(function.arrays) == len(MASK_ARRAYS):
            reasons.append(
                f"the mask function reads {len(MASK_ARRAYS)} arrays and the position of {', '.join(names)}, split over "
                f"{_shown((*self.batch, *self.heads))}: must read fewer arrays, for one says where the part of a "
                "device begins; join two of them"
            )
        if self.problem.dropout_p and self.count(self.heads) > 1 and BATCH in function.coordinates:
            reasons.append(
                f"heads are split over {_shown(self.heads)} with dropout, and the mask function reads batch: must not, "
                "for a device computes one batch after another; pass dropout_p=0"
            )
        return reasons

    @property
    def _function(self) -> MaskProgram | None:
        text = self.problem.mask_program
        return None if text is None else MaskProgram.parse(text)

    @property
    def _moved_positions(self) -> tuple[str, ...]:
        """Coordinates of the mask function that a device does not count from 0."""
        read = frozenset() if self._function is None else self._function.coordinates
        axes = {BATCH: self.batch, HEAD: self.heads}
        return tuple(name for name in axes if name in read and self.count(axes[name]) > 1)

    @property
    def mask_program(self) -> str | None:
        """The mask function of a device's part, as in its Problem."""
        names, function = self._moved_positions, self._function
        return str(function.placed(names)) if names and function is not None else self.problem.mask_program

    def _with_positions(self, operands: Arrays) -> Arrays:
        """Returns a device's operands with the array that its mask function has beside that of the whole call."""
        if not self._moved_positions:
            return operands
        of_axes = (self.batch, operands["query"].shape[0]), (self.heads, operands["query"].shape[2])
        first = [jax.lax.axis_index(axes) * size if axes else 0 for axes, size in of_axes]
        name = next(name for name in MASK_ARRAYS if name not in operands)
        return {**operands, name: jnp.stack([jnp.asarray(number, jnp.int32) for number in first])}

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the PartitionSpec of an operand or result."""
        split = {BATCH: self.batch or None, HEADS: self.heads or None, HEADS_KEY: self.heads_key or None}
        return PartitionSpec(*(split.get(axis) for axis in axes_of(name, shape, self.problem)))

    def on_device(self, run: Callable[[Arrays], Arrays], operands: Arrays, shapes: Mapping[str, Any]) -> Arrays:
        """Returns a device's part of every result, inside of shard_map or alike.

        run: computes the call of one device, whose mask function is `mask_program`
        operands: the device's part of every operand
        shapes: of all operands, whole
        """
        operands = self._with_positions(self._with_own_key_head(operands))
        results = self.with_dropout(run, operands) if PHILOX in operands else run(operands)
        return {name: self._summed(name, part, shapes) for name, part in results.items()}

    def _with_own_key_head(self, operands: Arrays) -> Arrays:
        first = self._first_key_head(operands["key"].shape[2])
        if first is None:
            return operands
        own = dict(operands)
        for name, array in operands.items():
            axes = axes_of(name, array.shape, self.problem)
            if HEADS_KEY in axes:
                own[name] = jax.lax.dynamic_slice_in_dim(array, first, 1, axis=axes.index(HEADS_KEY))
        return own

    def _first_key_head(self, number: int) -> Any:
        """Returns which of a device's `number` key heads its query heads read; None if they read all."""
        parts_of_one = self.count(self.heads) // self.problem.shape.num_heads_key
        if number == 1 or parts_of_one < 2:
            return None
        return jax.lax.axis_index(self.heads) // parts_of_one % number

    def with_dropout(self, run: Callable[[Arrays], Arrays], operands: Arrays) -> Arrays:
        """Runs the call with the random numbers that one device draws for these batches and heads.

        Element (b, h, i, j) takes word offset + ((b H + h) Mq + i) Mk + j. A part of the batch only moves the offset. A
        part of the heads has another H too, so that every batch is a call with an offset of its own.
        """
        items = operands["query"].shape[0]
        heads_part = jax.lax.axis_index(self.heads) if self.heads else 0
        first = jax.lax.axis_index(self.batch) * items if self.batch else 0
        starts = jnp.asarray(self._first_words())

        def at(item: Any) -> Any:
            return _plus(operands[PHILOX], starts[first + item, heads_part])

        if items == 1 or self.count(self.heads) == 1:
            return run({**operands, PHILOX: at(0)})
        of_batch = {name: BATCH in axes_of(name, array.shape, self.problem) for name, array in operands.items()}

        def one(item: Any) -> Arrays:
            own = {
                name: jax.lax.dynamic_slice_in_dim(array, item, 1) if of_batch[name] else array
                for name, array in operands.items()
            }
            return run({**own, PHILOX: at(item)})

        stacked = jax.lax.map(one, jnp.arange(items))
        return {
            name: found.reshape(items, *found.shape[2:])
            if BATCH in axes_of(name, found.shape[1:], self.problem) or (name == "grad_bias" and _has_batch(operands))
            else found.sum(0, dtype=jnp.float32).astype(found.dtype)
            for name, found in stacked.items()
        }

    def _first_words(self) -> Any:
        """Returns the index of the first random word of (batch, part of the heads): uint32 pairs, low word first."""
        sizes, parts = self.problem.shape, self.count(self.heads)
        item, part = np.arange(sizes.batch, dtype=np.uint64)[:, None], np.arange(parts, dtype=np.uint64)
        head = item * np.uint64(sizes.num_heads) + part * np.uint64(sizes.num_heads // parts)
        words = head * np.uint64(sizes.num_queries) * np.uint64(sizes.num_keys)
        return np.stack([words & np.uint64(2**32 - 1), words >> np.uint64(32)], -1).astype(np.uint32)

    def _summed(self, name: str, part: Any, shapes: Mapping[str, Any]) -> Any:
        """Returns a gradient with the sum of the parts that the other devices have of the same elements."""
        operand = name.removeprefix("grad_")
        if operand == name:  # output and logsumexp
            return part
        shape = shapes[operand]
        if operand in CACHED:
            number = shape[2] // self.count(self.heads_key)
            first = self._first_key_head(number)
            if first is not None:
                whole = jnp.zeros((*part.shape[:2], number, part.shape[3]), part.dtype)
                part = jax.lax.dynamic_update_slice_in_dim(whole, part, first, axis=2)
        own = {axis for entry in self.spec(name, shape) for axis in _names(entry)}
        others = tuple(axis for axis in (*self.batch, *self.heads) if axis not in own)
        return jax.lax.psum(part.astype(jnp.float32), others).astype(part.dtype) if others else part


def _has_batch(operands: Arrays) -> bool:
    return operands["bias"].shape[0] > 1


def _plus(philox: Any, words: Any) -> Any:
    """Returns seed and offset, four uint32 words, with a 64-bit number added to the offset."""
    low = philox[2] + words[0]
    carry = (low < words[0]).astype(jnp.uint32)
    return jnp.stack([philox[0], philox[1], low, philox[3] + words[1] + carry])


def _shown(axes: Axes) -> str:
    """Returns the names of mesh axes for a message; parts of an axis, as "x[0]", under the name of the axis."""
    return ", ".join(dict.fromkeys(name.partition("[")[0] for name in axes))


def _names(entry: Any) -> Axes:
    """Returns the mesh axes of an entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


# Explicit meshes


def explicit_mesh(operands: Arrays) -> Any:
    """Returns the mesh of the operands' types if it has Explicit axes, else None."""
    mesh = jax.typeof(operands["query"]).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def explicit(problem: Problem, operands: Arrays) -> Split:
    """Returns the split that the operands' types say; NotSupported if they disagree or split another axis."""
    mesh = explicit_mesh(operands)
    found: dict[str, dict[Axes, str]] = {BATCH: {}, HEADS: {}, HEADS_KEY: {}}  # mesh axes, and who says so
    reasons = []
    for name, array in operands.items():
        spec = jax.typeof(array).sharding.spec
        for number, (axis, entry) in enumerate(zip(axes_of(name, array.shape, problem), spec, strict=False)):
            if not (axes := _names(entry)):
                continue
            if axis in found:
                found[axis].setdefault(axes, name)
            else:
                reasons.append(_must_be_whole(name, axis, number, spec))
    batch, heads = next(iter(found[BATCH]), ()), next(iter(found[HEADS] or found[HEADS_KEY]), ())
    reasons += [
        _must_agree(BATCH, axes, name, batch, found[BATCH]) for axes, name in found[BATCH].items() if axes != batch
    ]
    of_heads = found[HEADS_KEY] | found[HEADS]
    for axes, name in of_heads.items():
        if axes != heads and (name not in (*CACHED, *SCALES) or axes != heads[: len(axes)]):
            reasons.append(_must_agree("heads", axes, name, heads, of_heads))
    if shared := sorted(set(batch) & set(heads)):
        reasons.append(
            f"mesh axis {', '.join(shared)} splits the batch of {found[BATCH][batch]} and the heads of "
            f"{of_heads[heads]}: must split one of the two; call jax.sharding.reshard on one of them"
        )
    autos = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]
    if (batch or heads) and (autos := [name for name in autos if mesh.shape[name] > 1]):
        reasons.append(
            f"the mesh has the Auto axis {', '.join(autos)}, and its Explicit axis {', '.join((*batch, *heads))} "
            "splits the call: both must be of one type, for a call is split by one of them; pass axis_types to "
            "jax.make_mesh"
        )
    split = Split(problem, batch, heads, tuple(mesh.shape.items()))
    reasons += [] if reasons else split.reasons()
    if reasons:
        raise NotSupported(reasons)
    return split


def _must_agree(kind: str, axes: Axes, name: str, others: Axes, said: Mapping[Axes, str]) -> str:
    return (
        f"{kind} of {name} split over {', '.join(axes)}, of {said[others]} over {', '.join(others)}: must be split "
        f"alike; call jax.sharding.reshard on one of them"
    )


def _must_be_whole(name: str, axis: str, number: int, spec: Any) -> str:
    whole = ", ".join("None" if i == number else repr(entry) for i, entry in enumerate(spec))
    return (
        f"{name} is split over {', '.join(_names(spec[number]))} in axis {number} ({axis}): must be whole there, for "
        f"only batch and heads can be split; call jax.sharding.reshard({name}, jax.P({whole}))"
    )


def run_explicit(
    split: Split, run: Callable[[str | None, Arrays], Arrays], operands: Arrays, results: Mapping[str, Any]
) -> Arrays:
    """Returns the results of a split call, sharded as `Split.spec` says.

    run: computes a call with the program of its mask function
    results: their shapes by name
    """
    of_device = functools.partial(run, split.mask_program)
    mesh = explicit_mesh(operands)
    shapes = {name: array.shape for name, array in operands.items()}
    specs = {name: split.spec(name, shape) for name, shape in shapes.items()}
    placed = {name: jax.sharding.reshard(array, NamedSharding(mesh, specs[name])) for name, array in operands.items()}
    names = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    # Without names shard_map takes all axes but that of a surrounding vmap.
    names = set() if len(names) == len(mesh.axis_names) else names
    sharded = jax.shard_map(
        lambda own: split.on_device(of_device, own, shapes),
        mesh=mesh,
        in_specs=(specs,),
        out_specs={name: split.spec(name, shape) for name, shape in results.items()},
        axis_names=names,
        check_vma=False,
    )
    found: Arrays = sharded(placed)
    return found


def splits_axis(array: Any, axis: int) -> bool:
    """Returns whether an Explicit mesh splits an axis of the array."""
    spec = jax.typeof(array).sharding.spec
    return len(spec) > axis and bool(_names(spec[axis]))


def like(gradient: Any, primal: Any) -> Any:
    """Returns the gradient with its primal's sharding, which is part of its type on an Explicit mesh."""
    sharding = jax.typeof(primal).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or jax.typeof(gradient).sharding == sharding:
        return gradient
    return jax.sharding.reshard(gradient, sharding)


def whole(array: Any) -> Any:
    """Returns an array of which each device has all, though an Explicit mesh may split it."""
    sharding = jax.typeof(array).sharding
    if all(entry is None for entry in sharding.spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))
