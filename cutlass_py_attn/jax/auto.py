"""Split of one call on an Auto mesh: a Shardy rule that names the axes, and each device's part when XLA compiles."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, NamedSharding

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax.partition import BATCH, HEADS, HEADS_KEY, Arrays, Axes, Split, axes_of
from cutlass_py_attn.problem import serialize
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.score_terms import registry

METADATA: Final = "cutlass_py_attn"

_BATCH_AXIS, _HEADS_AXIS = 0, 2  # of query


def run(
    problem: Problem,
    one_device: Callable[[str | None, Arrays], Arrays],
    operands: Arrays,
    results: Mapping[str, Any],
    digest: str,
) -> Arrays:
    """Returns the results of a call that XLA may split.

    one_device: computes a call of one device, whatever its part, with the program of its mask function
    results: their shapes by name
    digest: identifies the call. JAX's compilation cache sees the arrays and the Shardy rule of a partitioned call, but
        not what it computes; this string makes two calls two programs.
    """
    names, shapes = tuple(operands), {name: array.shape for name, array in operands.items()}

    def unsplit(*arrays: Any) -> tuple[Any, ...]:
        found = one_device(problem.mask_program, dict(zip(names, arrays, strict=True)))
        return tuple(found[name] for name in results)

    def partition(mesh: Mesh, described: Any, _: Any) -> tuple[Any, ...]:
        candidates = (split_of(problem, mesh, described[names.index(name)]) for name in ("query", "key", "value"))
        split, refined = max(candidates, key=lambda found: found[0].count((*found[0].batch, *found[0].heads)))
        if reasons := split.reasons():
            raise NotSupported(reasons)
        of_device = functools.partial(one_device, split.mask_program)

        def on_device(*arrays: Any) -> tuple[Any, ...]:
            found = split.on_device(of_device, dict(zip(names, arrays, strict=True)), shapes)
            return tuple(found[name] for name in results)

        given = tuple(NamedSharding(refined, split.spec(name, shape)) for name, shape in shapes.items())
        returned = tuple(NamedSharding(refined, split.spec(name, shape)) for name, shape in results.items())
        return refined, on_device, returned, given

    whole = custom_partitioning(unsplit)
    text, factors = rule(problem, shapes, results)
    whole.def_partition(partition, sharding_rule=text, decode_shardings=False, **factors)
    with set_xla_metadata(**{METADATA: digest}):
        return dict(zip(results, whole(*operands.values()), strict=True))


def rule(problem: Problem, shapes: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the Shardy rule and its keyword arguments.

    The axis of the query heads is (key head, query head of its group). Every factor but these and the batch must be
    whole.
    """
    group = problem.shape.group
    letters: dict[str, Axes] = {HEADS: ("k",), HEADS_KEY: ("k",)}
    if problem.shape.num_heads_key == 1:
        letters = {HEADS: ("g",)}
    elif group > 1:
        letters = {HEADS: ("k", "g"), HEADS_KEY: ("k",)}
    given: list[list[Axes]] = [[letters.get(a, (a,)) for a in axes_of(n, s, problem)] for n, s in shapes.items()]
    returned: list[list[Axes]] = [[letters.get(a, (a,)) for a in axes_of(n, s, problem)] for n, s in results.items()]
    found = dict.fromkeys(factor for array in given + returned for axis in array for factor in axis)
    short = {factor: f"f{number}" for number, factor in enumerate(found)}  # Shardy's names are a letter and digits

    def text(arrays: list[list[Axes]]) -> str:
        axes = ([" ".join(short[factor] for factor in axis) for axis in array] for array in arrays)
        return ", ".join(" ".join(f"({axis})" if " " in axis else axis for axis in array) for array in axes)

    splits_heads = not (problem.dropout_p and problem.sequences is not None and problem.shape.batch > 1)
    split = {BATCH, "k", "g"} if splits_heads else {BATCH}
    extra: dict[str, Any] = {"need_replication_factors": tuple(short[name] for name in found if name not in split)}
    if len(letters[HEADS]) > 1:
        extra[short["g"]] = group
    return f"{text(given)} -> {text(returned)}", extra


def split_of(problem: Problem, mesh: Mesh, operand: Any) -> tuple[Split, Mesh]:
    """Returns how XLA splits an operand's batch and heads, and a mesh whose axes do that.

    XLA may split an array over a part of a mesh axis. So the mesh has an axis for every prime factor of the given one's
    axes, in the same order of devices; the parts of axis "x" are called "x[0]", "x[1]".

    mesh: the mesh of the program; empty if XLA does not know one
    operand: shape and sharding of query, key or value
    """
    number = len(operand.sharding.device_set)
    regions = operand.sharding.devices_indices_map((number,) * len(operand.shape))  # sizes that any split divides
    devices = np.array(list(regions), dtype=object) if mesh.empty else mesh.devices.ravel()
    starts = np.array([[regions[device][axis].start or 0 for axis in (_BATCH_AXIS, _HEADS_AXIS)] for device in devices])
    for factors in _refinements((number,) if mesh.empty else mesh.devices.shape):
        whole = ("devices",) if mesh.empty else mesh.axis_names
        names = tuple(f"{axis}[{i}]" for axis, parts in zip(whole, factors, strict=True) for i in range(len(parts)))
        sizes = tuple(itertools.chain(*factors))
        grid = starts.reshape(*sizes, 2)
        batch, heads = (_axes_that_split(grid[..., i], names) for i in range(2))
        if batch is not None and heads is not None:
            split = Split(problem, batch, heads, tuple(zip(names, sizes, strict=True)))
            if operand.shape[_BATCH_AXIS] % split.count(batch):  # XLA pads such an axis, the kernels take no padding
                split = dataclasses.replace(split, batch=())
            return split, Mesh(devices.reshape(sizes), names)
    raise NotSupported(
        f"an operand has the sharding {operand.sharding}: must split batch and heads over axes of a mesh; "
        "pass arrays with a jax.NamedSharding"
    )


def _refinements(sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields the prime factors of each size, in every order."""
    yield from itertools.product(*([*_orders(tuple(_prime_factors(size)))] for size in sizes))


def _orders(numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the different orders of sorted numbers: one for 512 devices, of whose nine factors all are 2."""
    if not numbers:
        yield ()
    for number in dict.fromkeys(numbers):
        at = numbers.index(number)
        for rest in _orders(numbers[:at] + numbers[at + 1 :]):
            yield number, *rest


def _prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a positive number, the smallest first."""
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


def _axes_that_split(starts: Any, names: Axes) -> Axes | None:
    """Returns the axes of the grid of devices along which the first index grows, slowest first; None if none fit."""
    steps = {name: np.take(starts, 1, axis).flat[0] - starts.flat[0] for axis, name in enumerate(names)}
    axes = sorted((name for name, step in steps.items() if step), key=lambda name: -steps[name])
    number = np.zeros(starts.shape, int)  # of each device's part
    for name in axes:
        axis = names.index(name)
        along = np.arange(starts.shape[axis]).reshape([-1 if i == axis else 1 for i in range(starts.ndim)])
        number = number * starts.shape[axis] + along
    smallest = min((step for step in steps.values() if step), default=0)
    parts = math.prod(starts.shape[names.index(name)] for name in axes)
    fits = bool((starts == number * smallest).all()) and len(np.unique(starts)) == parts
    return tuple(axes) if fits else None


def is_possible(operands: Arrays) -> bool:
    """Returns whether XLA may split a call on these operands: by Shardy, if their mesh is unknown or has Auto axes.

    Inside shard_map over all axes of a mesh the operands are a device's own. NotSupported: inside shard_map over some
    axes, because XLA does not tell how it splits over the others.
    """
    mesh = jax.typeof(operands["query"]).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    autos = [name for name, kind in kinds.items() if kind == AxisType.Auto and mesh.shape[name] > 1]
    manual = [name for name, kind in kinds.items() if kind == AxisType.Manual]
    if autos and manual:
        raise NotSupported(
            f"attention is inside jax.shard_map over {', '.join(manual)}, and the mesh has the Auto axis "
            f"{', '.join(autos)}: must have no Auto axis left there, for XLA cannot split the call; name all axes in "
            "shard_map's axis_names"
        )
    by_shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)  # GSPMD does not read the rule
    return by_shardy and (bool(autos) or mesh.size == 1)


def digest(problem: Problem, gradients: tuple[str, ...], *others: Any) -> str:
    """Returns a digest of everything that decides what a call computes; the same in every process."""
    described = json.dumps([serialize.to_json(problem), gradients, *map(repr, others)], sort_keys=True)
    terms = registry.source_digest(problem.features)
    return hashlib.sha256(f"{described}\0{terms}\0{_sources()}".encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """Returns a digest of this package's files: kernels of another version take other parameters."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
