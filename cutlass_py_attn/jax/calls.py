"""Forward or backward as one XLA custom call: checked when traced; vmap joins its axis to the batch if possible."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.api import cpu_backend, request
from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import auto, partition, primitive
from cutlass_py_attn.jax.handler import PHILOX
from cutlass_py_attn.jax.rows import Context
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.tensors import BMHK, KEY_ROPE, OPERANDS, Tensor
from cutlass_py_attn.runtime.arrays import Array
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.dropout import Dropout
from cutlass_py_attn.score_terms.term import ScoreTerm

Arrays = dict[str, Any]

_LENGTHS: Final = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


@dataclass(frozen=True, slots=True)
class Call:
    """The static arguments of a call.

    max_seqlens: max_seqlen_q and max_seqlen_k of the variable-length layout; None for other layouts.
    paged: max_seqlen_q, or None, and invariant of a cache in pages; None for other layouts.
    score_terms: the registered terms whose arrays are among the operands, each under its name.
    head_dim_value: first columns of key that are the value, in the same memory; None if value is an array of its own.
    context: how the rows are split over a mesh axis inside shard_map; None if all rows are on this device.
    """

    mask: Mask
    scale: float | None
    softcap: float
    dropout_p: float
    max_seqlens: tuple[int, int] | None
    score_terms: tuple[ScoreTerm, ...]
    deterministic: bool
    kernels: Callable[[Build], Artifact] | None
    arch: str | None
    backend: str
    context: Context | None = None
    paged: tuple[int | None, bool] | None = None
    head_dim_value: int | None = None

    def problem(self, operands: Mapping[str, Any], gradients: tuple[str, ...]) -> Problem:
        """Returns the validated problem of these operands, which XLA stores densely.

        gradients: names of the gradients that the backward computes; empty for the forward.
        """
        inputs = {name: _describe(array) for name, array in operands.items() if name != PHILOX}
        dropout = None
        if PHILOX in operands:
            scalar = Array(0, (), (), "int64", None, "jax", None)
            inputs |= {"philox_seed": scalar, "philox_offset": scalar}
            dropout = Dropout(self.dropout_p, scalar, scalar)
        options = self._options(dropout, self._sequences(inputs), gradients, inputs)
        return request.problem_of("backward" if gradients else "forward", inputs, options)[0]

    def options(self, operands: Mapping[str, Any], gradients: tuple[str, ...]) -> Options:
        """Returns the options of the CPU backend for these NumPy operands."""
        dropout = None
        if PHILOX in operands:
            seed, offset = (int(number) for number in np.asarray(operands[PHILOX]).view(np.uint64))
            dropout = Dropout(self.dropout_p, seed, offset)
        score_arrays = {name: operands.get(name) for name in registry.array_options()}
        return self._options(dropout, self._sequences(operands), gradients, operands, **score_arrays)

    def _sequences(self, operands: Mapping[str, Any]) -> VariableLength | Paged | None:
        """Returns the layout of the sequences, with the arrays among the operands."""
        if self.paged is not None:
            longest, invariant = self.paged
            names = ("page_table", "seqused_k", "cu_seqlens_q", "page_indptr")
            table, used, starts, indptr = (operands.get(name) for name in names)
            return Paged(table, used, starts, longest, indptr, invariant)
        if self.max_seqlens is None:
            return None
        lengths = [operands.get(name) for name in _LENGTHS]
        return VariableLength(lengths[0], lengths[1], *self.max_seqlens, lengths[2])

    def _options(
        self,
        dropout: Dropout | None,
        sequences: VariableLength | Paged | None,
        gradients: tuple[str, ...],
        operands: Mapping[str, Any],
        **score_arrays: Any,
    ) -> Options:
        return Options(
            mask=self.mask,
            scale=self.scale,
            softcap=self.softcap,
            dropout=dropout,
            sequences=sequences,
            grad_logsumexp=operands.get("grad_logsumexp"),
            query_scale=operands.get("query_scale"),
            key_scale=operands.get("key_scale"),
            value_scale=operands.get("value_scale"),
            gradients=gradients or OPERANDS,
            score_terms={term.name: operands[term.name] for term in self.score_terms},
            deterministic=self.deterministic and bool(gradients),
            head_dim_value=self.head_dim_value,
            **score_arrays,
        )


def _describe(array: Any) -> Array:
    """Describes a traced array as dense and aligned, which XLA guarantees; read as a host array is."""
    dense = Tensor.contiguous(tuple(array.shape), str(array.dtype))
    return Array(0, dense.shape, dense.strides, dense.dtype, None, "jax", None)


def forward(call: Call, operands: Arrays) -> tuple[Any, Any]:
    """Returns output (batch, num_queries, num_heads, head_dim_value) and logsumexp, as `attention_forward` does."""
    results = _batchable(call, (), operands)
    return results["output"], results["logsumexp"]


def backward(call: Call, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
    """Returns the gradients by name. operands: those of the forward, and grad_output, output and logsumexp.

    With grad_logsumexp among them, logsumexp has a gradient too.
    """
    results = _batchable(call, gradients, operands)
    return {name: results[f"grad_{name}"] for name in gradients}


def _batchable(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    """Returns the results. Under vmap, makes one call for all elements if the kernels can, else one per element."""

    def rule(size: int, batched: tuple[dict[str, bool]], operands: Arrays) -> tuple[Arrays, dict[str, bool]]:
        flags = batched[0]
        if _joins_batch(call, gradients, flags):
            joined, batch = _join_batch(call, size, flags, operands, gradients)
            results = _split_batch(size, batch, run(joined), operands, flags)
        else:
            shared = {name: array for name, array in operands.items() if not flags[name]}
            mapped = {name: array for name, array in operands.items() if flags[name]}
            results = jax.lax.map(lambda element: run({**shared, **element}), mapped)
        return results, dict.fromkeys(results, True)

    run = jax.custom_batching.custom_vmap(functools.partial(_run, call, gradients))
    run.def_vmap(rule)
    once = jax.custom_jvp(run)
    once.defjvp(_refuse_derivative)
    return as_varying(once(operands), operands)


def _refuse_derivative(*_: Any) -> NoReturn:
    raise NotSupported(
        "attention is differentiated twice: must be once, for its gradients have no derivatives; "
        "pass jax.lax.stop_gradient(...) of the first gradient, or differentiate attention in jax.numpy"
    )


def _joins_batch(call: Call, gradients: tuple[str, ...], batched: Mapping[str, bool]) -> bool:
    """Returns whether vmap's axis can join the batch axis.

    It cannot for variable lengths, which have no batch axis, for pages, whose pools have none, nor for sinks, seeds and
    terms without a batch axis, which all batches share, nor for scales of e4m3 codes that differ. A backward with
    dropout must draw the same numbers as its forward, whose axis was joined exactly if its output is batched.
    """
    if any(batched.get(term.name) and _term_rank(term) == 1 for term in call.score_terms):
        return False
    if (
        call.max_seqlens is not None
        or call.paged is not None
        or batched.get("sinks")
        or any(batched.get(name) for name in SCALES)
        or "sinks" in gradients
        or batched.get(PHILOX)
    ):
        return False
    return not (gradients and PHILOX in batched) or batched["output"]


def _term_rank(term: ScoreTerm) -> int:
    """Returns the rank of the term's array with a batch axis in front; 1 if no shape of the term has one there."""
    shapes = () if term.vector is None else term.vector.axes
    return max((len(axes) for axes in shapes if axes[0] == "batch"), default=1)


def _join_batch(
    call: Call, size: int, batched: Mapping[str, bool], operands: Arrays, gradients: tuple[str, ...]
) -> tuple[Arrays, int]:
    """Returns the operands with vmap's axis joined to the batch axis, and the batch size without it."""
    batch = operands["query"].shape[1 if batched["query"] else 0]
    ranks = {"alibi_slopes": 2, "sinks": 1, PHILOX: 1, "logsumexp": 3, "grad_logsumexp": 3, **dict.fromkeys(SCALES, 2)}
    ranks |= {term.name: _term_rank(term) for term in call.score_terms}

    def join(name: str, array: Any) -> Any:
        per_batch = name in (*BMHK, KEY_ROPE, "logsumexp", "grad_logsumexp")
        per_batch |= name == "bias" and "bias" in gradients
        if name in SCALES and array.ndim < 2:
            return array
        per_batch |= name in SCALES
        rank = ranks.get(name, 4)
        shape = array.shape[1:] if batched[name] else array.shape
        if not batched[name] and not per_batch and (len(shape) < rank or shape[0] == 1 or rank == 1):
            return array
        if len(shape) < rank:  # slopes without a batch axis
            shape, array = (1, *shape), array[..., None, :]
        array = array if batched[name] else array[None]
        stacked = jnp.broadcast_to(array, (size, batch, *shape[1:]))
        return stacked.reshape(size * batch, *shape[1:])

    return {name: join(name, array) for name, array in operands.items()}, batch


def _split_batch(size: int, batch: int, results: Arrays, operands: Arrays, batched: Mapping[str, bool]) -> Arrays:
    """Returns the results with vmap's axis in front. Sums the gradient of a bias that broadcasts over the batch."""
    split = {name: array.reshape(size, batch, *array.shape[1:]) for name, array in results.items()}
    if "grad_bias" in split and operands["bias"].shape[1 if batched["bias"] else 0] == 1:
        split["grad_bias"] = split["grad_bias"].sum(axis=1, keepdims=True, dtype=split["grad_bias"].dtype)
    return split


def _run(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    """Adds the call to the traced program: split as the mesh of the operands says, or for XLA to split.

    XLA splits kernels only: an Auto mesh gives the reference's callback whole arrays.
    """
    problem = call.problem(operands, gradients)
    results = _results(problem, gradients)
    if problem.is_empty:
        return _empty_results(problem, results)
    shapes = {name: tensor.shape for name, tensor in results.items()}
    one_device = functools.partial(_one_device, call, gradients)
    if partition.explicit_mesh(operands) is not None:
        split = partition.explicit(problem, operands)
        if split.batch or split.heads:
            return partition.run_explicit(split, functools.partial(_run, call, gradients), operands, shapes)
    if call.backend == "reference" or not auto.is_possible(operands):
        return one_device(operands)
    digest = auto.digest(problem, gradients, call.arch)
    return auto.run(problem, one_device, operands, shapes, digest)


def _one_device(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    """Adds the kernels, or the host callback of the reference, to the traced program."""
    problem = call.problem(operands, gradients)
    results = _results(problem, gradients)
    if call.backend == "reference":
        shapes = {name: jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(tensor.dtype)) for name, tensor in results.items()}
        host = functools.partial(_on_host, call, gradients)
        computed: Arrays = jax.pure_callback(host, shapes, operands, vmap_method="sequential")
        return computed
    return primitive.kernels_of(problem, call.score_terms, call.arch, call.kernels, tuple(operands), results)(operands)


def _results(problem: Problem, gradients: tuple[str, ...]) -> dict[str, Tensor]:
    if gradients:
        return {f"grad_{name}": getattr(problem, f"grad_{name}") for name in gradients}
    return {"output": problem.output, "logsumexp": Tensor.contiguous(problem.shape.logsumexp, "float32")}


def _empty_results(problem: Problem, results: Mapping[str, Tensor]) -> Arrays:
    """Returns the results of an empty problem: output and gradients 0, logsumexp -inf with +inf padding."""
    empty = {name: jnp.zeros(tensor.shape, tensor.dtype) for name, tensor in results.items()}
    if "logsumexp" in empty:
        rows = jnp.arange(empty["logsumexp"].shape[2])
        infinity = jnp.where(rows < problem.shape.num_queries, -jnp.inf, jnp.inf).astype(jnp.float32)
        empty["logsumexp"] = jnp.broadcast_to(infinity, empty["logsumexp"].shape)
    return empty


def as_varying(results: Arrays, operands: Arrays) -> Arrays:
    """Marks the results as varying over every shard_map axis that an operand varies over.

    Neither custom_vmap nor custom calls mark their results.
    """
    axes = varying_axes(operands)
    return {name: varying(array, axes) for name, array in results.items()}


def varying_axes(operands: Arrays) -> frozenset[str]:
    """Returns the axes of a shard_map that any operand varies over."""
    return frozenset().union(*(_varying_axes(array) for array in operands.values()))


def varying(array: Any, axes: Iterable[str]) -> Any:
    """Returns the array marked as varying over these axes of a shard_map; its gradient is summed over new ones."""
    missing = tuple(sorted(frozenset(axes) - _varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _varying_axes(array: Any) -> frozenset[str]:
    manual = getattr(jax.typeof(array), "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def _on_host(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    """Computes the results on the host by the NumPy reference."""
    arrays = {name: np.asarray(array) for name, array in operands.items()}
    options = call.options(arrays, gradients)
    arrays.pop(PHILOX, None)
    if not gradients:
        output, logsumexp = cpu_backend.forward(arrays, options)
        return {"output": output, "logsumexp": logsumexp}
    computed = cpu_backend.backward(arrays, options)
    return {f"grad_{name}": getattr(computed, name) for name in gradients}
