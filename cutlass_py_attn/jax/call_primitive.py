"""Primitive: one forward or backward, with its rule for vmap.

`bind` applies it. `derivatives` adds its derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from cutlass_py_attn.jax import calls
from cutlass_py_attn.jax.batching import MappedCall
from cutlass_py_attn.jax.calls import Call

Arrays = dict[str, Any]
Run = Callable[[Call, tuple[str, ...], Arrays], Arrays]


@dataclass(frozen=True, slots=True, weakref_slot=True)  # JAX keeps weak references to the parameters of a primitive
class Params:
    """The static parameters.

    call: static arguments of the call
    gradients: operands whose gradients are the results; () for output and logsumexp
    operands: names, in order
    run: adds the call to a traced program, as `calls.run` does
    """

    call: Call
    gradients: tuple[str, ...]
    operands: tuple[str, ...]
    run: Run

    def program(self, *arrays: Any) -> list[Any]:
        """Adds the call to the traced program."""
        operands = dict(zip(self.operands, arrays, strict=True))
        results = calls.as_varying(self.run(self.call, self.gradients, operands), operands)
        return [results[name] for name in calls.result_names(self.gradients)]


def bind(call: Call, gradients: tuple[str, ...], operands: Arrays, run: Run = calls.run) -> Arrays:
    """Returns the results by name: output and logsumexp, or gradients."""
    params = Params(call, gradients, tuple(operands), run)
    program = jax.make_jaxpr(params.program)(*operands.values())  # its types have shardings and axes of shard_map
    results = attention.bind(*operands.values(), params=params, program=program)
    return dict(zip(calls.result_names(gradients), results, strict=True))


def batch(
    axis: Any,
    arrays: Any,
    axes: Any,
    call: Call,
    names: tuple[str, ...],
    gradients: tuple[str, ...],
    results: tuple[str, ...],
    apply: Callable[[Call, Arrays], Arrays],
) -> tuple[list[Any], list[int | None]]:
    """Returns the results of a primitive under vmap, and their mapped axes.

    axis: name, size and mesh axes of the mapped axis
    arrays, axes: operands and their mapped axes, None for those without
    names, results: of the operands and of the results, in order
    gradients: operands whose gradients, or whose tangents, are mapped
    apply: applies the primitive of a call to operands by name, and returns results by name
    """
    operands = {
        name: array if number is None else jnp.moveaxis(array, number, 0)
        for name, array, number in zip(names, arrays, axes, strict=True)
    }
    is_mapped = {name: number is not None for name, number in zip(names, axes, strict=True)}
    if any(is_mapped.values()):
        mapped = MappedCall(call, gradients, axis.size, axis.explicit_mesh_axis, is_mapped).results(apply, operands)
        return [mapped[name] for name in results], [0 for _ in results]
    same = apply(call, operands)
    return [same[name] for name in results], [None for _ in results]


def is_of_devices(call: Call, axis: Any) -> bool:
    """Returns whether the mapped axis takes the place of the devices over which the rows of a call are split."""
    return call.context is not None and call.context.axis == axis.name


def _batch(axis: Any, arrays: Any, axes: Any, *, params: Params, program: Any) -> tuple[list[Any], list[int | None]]:
    call, gradients = params.call, params.gradients
    names = calls.result_names(gradients)
    if is_of_devices(call, axis):
        operands = dict(zip(params.operands, arrays, strict=True))
        mapped = (dict(zip(params.operands, axes, strict=True)),)
        run = functools.partial(params.run, call, gradients)
        results = jax.vmap(run, mapped, axis_name=axis.name, axis_size=axis.size)(operands)
        return [results[name] for name in names], [0 for _ in names]

    def apply(call: Call, operands: Arrays) -> Arrays:
        return bind(call, gradients, operands, params.run)

    return batch(axis, arrays, axes, call, params.operands, gradients, names, apply)


def _implement(*arrays: Any, program: Any, **_: Any) -> list[Any]:
    results: list[Any] = jaxpr_as_fun(program)(*arrays)
    return results


attention: Final = Primitive("cutlass_py_attn_attention")
attention.multiple_results = True
attention.def_abstract_eval(lambda *_, params, program: program.out_avals)
attention.def_impl(_implement)
mlir.register_lowering(attention, mlir.lower_fun(_implement, multiple_results=True))
batching.fancy_primitive_batchers[attention] = _batch
