"""Attention of global arrays whose rows are split over a mesh axis: the jax.shard_map around a call of each device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import sizes
from cutlass_py_attn.problem.split_rows import ZIGZAG
from cutlass_py_attn.refusals import Refusal, refuse

Axis = str | tuple[str, ...] | None

_SPLIT_ARRAYS: Final = ("bias", "alibi_slopes", "sinks")


@dataclass(frozen=True)
class Layout:
    """Mesh axes of batch, rows and heads; several split an axis together."""

    mesh: Any
    batch: Axis
    rows: str
    heads: Axis

    def size(self, axis: Axis) -> int:
        """Returns the number of parts."""
        return math.prod(self.mesh.shape[name] for name in _names(axis))

    def spec(self, name: str, array: Any) -> PartitionSpec:
        """Returns how an operand or a result is split; an axis of size 1 over which a bias broadcasts is not."""
        if name == "bias":
            axes = (self.batch, self.heads, self.rows, None)
            return PartitionSpec(*(axis if size > 1 else None for axis, size in zip(axes, array.shape, strict=True)))
        if name == "alibi_slopes":
            return PartitionSpec(*(self.batch, self.heads)[-jnp.ndim(array) :])
        if name == "sinks":
            return PartitionSpec(self.heads)
        if name == "logsumexp":
            return PartitionSpec(self.batch, self.heads, self.rows)
        return PartitionSpec(self.batch, self.rows, self.heads)


def attend(
    attention: Callable[..., Any],
    operands: Mapping[str, Any],
    mesh: Any,
    batch_axis: Axis,
    heads_axis: Axis,
    options: Mapping[str, Any],
) -> Any:
    """Returns `attention` of global arrays; NotSupported lists every wrong argument.

    attention: the function of a device's operands
    options: of `attention`, among them context_axis
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    rows = options.get("context_axis")
    if refusals := [*_axis_refusals(mesh, {"context_axis": rows, "batch_axis": batch_axis, "heads_axis": heads_axis})]:
        raise NotSupported(refusals)
    assert isinstance(rows, str)
    layout = Layout(mesh, batch_axis, rows, heads_axis)
    arrays = {name: jnp.asarray(array) for name, array in operands.items()}
    arrays |= {name: jnp.asarray(options[name]) for name in _SPLIT_ARRAYS if options.get(name) is not None}
    if refusals := [*sizes.refusals(arrays)] or [*_refusals(layout, arrays, options)]:
        raise NotSupported(refusals)
    fixed = {name: value for name, value in options.items() if name not in arrays}
    specs = {name: layout.spec(name, array) for name, array in arrays.items()}
    if AxisType.Explicit in mesh.axis_types:
        arrays = {name: jax.sharding.reshard(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
    of_output = layout.spec("output", None)
    results = (of_output, layout.spec("logsumexp", None)) if options.get("return_logsumexp") else of_output

    def of_device(own: dict[str, Any]) -> Any:
        terms = {name: array for name, array in own.items() if name not in operands}
        return attention(*(own[name] for name in operands), **terms, **fixed)

    sharded = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=results,
    )
    return sharded(arrays)


def _names(axis: Axis) -> tuple[str, ...]:
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _axis_refusals(mesh: Any, axes: Mapping[str, Any]) -> Iterator[Refusal]:
    known = getattr(mesh, "axis_names", ())
    if not known:
        yield refuse("mesh", mesh, "must be a jax.sharding.Mesh, or None inside jax.set_mesh(mesh)", "pass one")
        return
    used: dict[str, str] = {}
    for option, given in axes.items():
        is_several = isinstance(given, tuple) and option != "context_axis"
        names = given if is_several else () if given is None and option != "context_axis" else (given,)
        for name in names:
            if name not in known:
                yield refuse(option, given, f"must be of the mesh's axes, {', '.join(known)}", "choose one")
            elif name in used:
                yield refuse(option, given, f"must be another axis than {used[name]}", "choose one")
            else:
                used[name] = option


def _refusals(layout: Layout, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Refusal]:
    ranks = [name for name in ("query", "key", "value") if arrays[name].ndim != 4]
    if ranks:
        for name in ranks:
            yield refuse(f"{name}.shape", arrays[name].shape, "must be (batch, rows, heads, head_dim)", "reshape it")
        return
    chunks = 2 if options.get("load_balance") == ZIGZAG else 1
    for name in ("query", "key", "value"):
        batch, rows, heads, _ = arrays[name].shape
        parts = chunks * layout.size(layout.rows)
        if rows % parts:
            each = ", two chunks each" if chunks > 1 else ""
            rule = f"must be a multiple of {parts}, split over {layout.rows} ({layout.size(layout.rows)} devices{each})"
            yield refuse(f"rows of {name}", rows, rule, "pad the rows")
        for what, count, axis in (("batch", batch, layout.batch), ("heads", heads, layout.heads)):
            if count % (number := layout.size(axis)):
                rule = f"must be a multiple of {number}, split over {', '.join(_names(axis))} ({number} devices)"
                yield refuse(f"{what} of {name}", count, rule, "use fewer devices for it")
    yield from _term_refusals(arrays)
    if layout.size(layout.batch) * layout.size(layout.heads) == 1:
        return
    for name, default in (("dropout_p", 0.0), ("score_terms", {}), ("sequences", None)):
        if (given := options.get(name, default)) != default:
            rule = "must be absent with batch_axis or heads_axis, for a device counts its own batches and heads"
            yield refuse(name, given, rule, "split the rows alone")


def _term_refusals(arrays: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yields why a bias, slopes or sinks do not fit; jax.shard_map would name neither the array nor the axis."""
    (batch, rows, heads, _), keys = arrays["query"].shape, arrays["key"].shape[1]
    allowed: dict[str, list[tuple[int, ...]]] = {
        "bias": [(batch, heads, rows, keys)],
        "alibi_slopes": [(heads,), (batch, heads)],
        "sinks": [(heads,)],
    }
    for name, shapes in allowed.items():
        if name not in arrays:
            continue
        found, must = arrays[name].shape, " or ".join(map(str, shapes))
        if name == "bias":
            fits = len(found) == 4 and all(size in (1, whole) for size, whole in zip(found, shapes[0], strict=True))
            must = f"{must}, (batch, heads, rows, keys) of all devices, or 1 for an axis to broadcast over"
        else:
            fits = found in shapes
        if not fits:
            yield refuse(f"{name}.shape", found, f"must be {must}", "reshape it")
