"""Forward or backward as one XLA custom call, checked when it is traced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.api import cpu_backend
from cutlass_py_attn.api.attention import AttentionRequest, problem_of
from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.jax import auto, host_threads, partition, primitive
from cutlass_py_attn.jax.handler import PHILOX
from cutlass_py_attn.jax.rows import Context
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import MASK_ARRAYS, OPERANDS, RANGE_EDGES, VISIBLE_BLOCKS, Tensor
from cutlass_py_attn.runtime.arrays import Array
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.dropout import Dropout
from cutlass_py_attn.score_terms.term import ScoreTerm

Arrays = dict[str, Any]

CHECKPOINT_NAME: Final = "cutlass_py_attn"
RESULTS: Final = ("output", "logsumexp")

_LENGTHS: Final = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


@dataclass(frozen=True, slots=True)
class Call:
    """The static arguments of a call.

    max_seqlens: max_seqlen_q and max_seqlen_k of the variable-length layout; None for other layouts.
    paged: max_seqlen_q, or None, and invariant of a cache in pages; None for other layouts.
    score_terms: the registered terms whose arrays are among the operands, each under its name.
    head_dim_value: first columns of key that are the value, in the same memory; None if value is an array of its own.
    context: how the rows are split over a mesh axis inside shard_map; None if all rows are on this device.
    checkpoint_name: name of output and logsumexp for policies of jax.checkpoint.
    block_size: queries and keys of a visible block.
    mask_program, mask_scalars: of a mask function, as in a Problem.
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
    checkpoint_name: str = CHECKPOINT_NAME
    block_size: tuple[int, int] = (128, 128)
    mask_program: str | None = None
    mask_scalars: tuple[int, ...] | None = None

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
        return problem_of("backward" if gradients else "forward", inputs, options)[0]

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
            block_size=self.block_size,
            mask_program=self.mask_program,
            mask_scalars=self.mask_scalars,
            **score_arrays,
        )


def _describe(array: Any) -> Array:
    """Describes a traced array as dense and aligned, which XLA guarantees; read as a host array is."""
    dense = Tensor.contiguous(tuple(array.shape), str(array.dtype))
    return Array(0, dense.shape, dense.strides, dense.dtype, None, "jax", None)


def result_names(gradients: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of a call's results, in order."""
    return tuple(f"grad_{name}" for name in gradients) or RESULTS


def run(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    """Adds the call to the traced program: split as the mesh of the operands says, or for XLA to split.

    gradients: operands whose gradients are the results; () for output (batch, num_queries, num_heads, head_dim_value)
        and logsumexp, as `attention_forward` returns them
    operands: by name. The backward has those of the forward, and grad_output, output and logsumexp; with
        grad_logsumexp among them, logsumexp has a gradient too.

    XLA splits kernels only: an Auto mesh gives the reference's callback whole arrays.
    """
    computed = _computed(call, gradients, operands)
    if computed != gradients:
        found = run(call, computed, operands)
        return {name: found[name] for name in result_names(gradients)}
    problem = call.problem(operands, gradients)
    results = _results(problem, gradients)
    if problem.is_empty:
        return _empty_results(problem, results)
    shapes = {name: tensor.shape for name, tensor in results.items()}
    operands = {name: partition.whole(array) if name in MASK_ARRAYS else array for name, array in operands.items()}
    one_device = functools.partial(_of_program, _one_device, call, gradients)
    if partition.explicit_mesh(operands) is not None:
        split = partition.explicit(problem, operands)
        if split.batch or split.heads:
            return partition.run_explicit(split, functools.partial(_of_program, run, call, gradients), operands, shapes)
    if call.backend == "reference" or not auto.is_possible(operands):
        return one_device(call.mask_program, operands)
    digest = auto.digest(problem, gradients, call.arch)
    return auto.run(problem, one_device, operands, shapes, digest)


def _of_program(
    compute: Callable[[Call, tuple[str, ...], Arrays], Arrays],
    call: Call,
    gradients: tuple[str, ...],
    mask_program: str | None,
    operands: Arrays,
) -> Arrays:
    """Computes the call with this program of a mask function."""
    return compute(dataclasses.replace(call, mask_program=mask_program), gradients, operands)


def _computed(call: Call, gradients: tuple[str, ...], operands: Arrays) -> tuple[str, ...]:
    """Returns the gradients that are computed for these: kernels of masks in memory compute those of all operands."""
    has_arrays = bool({RANGE_EDGES[0], VISIBLE_BLOCKS} & operands.keys())
    if not gradients or not (has_arrays or call.mask_program):
        return gradients
    return *OPERANDS, *(name for name in gradients if name not in OPERANDS)


def _one_device(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    """Adds the kernels, or the host callback of the reference, to the traced program."""
    problem = call.problem(operands, gradients)
    results = _results(problem, gradients)
    if call.backend == "reference":
        host_threads.expect_enough(operands)
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
    """Marks the results as varying over every shard_map axis that an operand varies over; custom calls do not."""
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
    return cpu_backend.compute(AttentionRequest("backward" if gradients else "forward", arrays, options))
