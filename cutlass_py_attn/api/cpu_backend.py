"""CPU backend: forward and backward by the NumPy reference in float64, for machines without a GPU. Slow.

Validation and results are those of the GPU. Infinities in operands give NaN without a warning, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.api.request import problem_of
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import E4M3, KEY_ROPE, OPERANDS
from cutlass_py_attn.reference import numpy_reference, paged, quantization
from cutlass_py_attn.refusals import refuse
from cutlass_py_attn.runtime import arrays, output_checks
from cutlass_py_attn.score_terms.dropout import keeper


@np.errstate(invalid="ignore", over="ignore")  # as kernels: infinities and NaN are results
def forward(operands: Mapping[str, Any], options: Options) -> tuple[Any, Any]:
    """Returns output in the dtype of query, and logsumexp in float32."""
    problem = _problem("forward", operands, options)
    if problem.key_rope is not None:
        latent = (operands[name] for name in ("key", "key_scale", KEY_ROPE))
        operands = {**operands, "key": quantization.dequantise_latent(*latent)}
    if options.head_dim_value is not None:
        operands = {**operands, "value": operands["key"][..., : options.head_dim_value]}
    terms: dict[str, Any] = {"mask": problem.mask, "scale": problem.scale_value}
    terms["score_mod"] = score_mod_of(problem, options)
    if isinstance(options.sequences, Paged):
        given = options.sequences
        table = paged.PageTable(
            page_table=given.page_table,
            seqused_k=given.seqused_k,
            cu_seqlens_q=given.cu_seqlens_q,
            max_seqlen_q=given.max_seqlen_q or 0,
            page_indptr=given.page_indptr,
        )
        has_codes = operands["key"].dtype.name in E4M3
        scales = (options.key_scale, options.value_scale) if has_codes else None
        query, key, value = (operands[name] for name in OPERANDS)
        output, logsumexp = paged.forward(query, key, value, table, scales=scales, **terms)
    else:
        output, logsumexp = numpy_reference.forward(*_numbers(operands, options), **terms)
    output = _into(options.out, output.astype(arrays.numpy_dtype(problem.output.dtype)))
    return output, logsumexp.astype(np.float32)


@np.errstate(invalid="ignore", over="ignore")  # as kernels: infinities and NaN are results
def backward(operands: Mapping[str, Any], options: Options) -> Gradients:
    """Returns the gradients that `options` names."""
    problem = _problem("backward", operands, options)
    names = ("grad_output", "query", "key", "value", "output", "logsumexp")
    gradients = numpy_reference.backward(
        *(operands[name] for name in names),
        mask=problem.mask,
        scale=problem.scale_value,
        score_mod=score_mod_of(problem, options),
        grad_logsumexp=operands.get("grad_logsumexp"),
    )
    dtype = operands["query"].dtype
    results = {}
    for name in options.gradients:
        gradient = getattr(gradients, name).astype(np.float32 if name == "sinks" else dtype)
        results[name] = _into(getattr(options.out, name, None), gradient)
    if options.packed:
        packed = np.stack([results[name] for name in ("query", "key", "value")], axis=2)
        results |= {name: packed[:, :, i] for i, name in enumerate(("query", "key", "value"))}
    return Gradients(**results)


def _numbers(operands: Mapping[str, Any], options: Options) -> list[Any]:
    """Returns query, key and value without pages; e4m3 codes times their scales, in float64."""
    found = []
    for name in OPERANDS:
        array = operands[name]
        if array.dtype.name in E4M3:
            starts = None
            if isinstance(options.sequences, VariableLength):
                given = options.sequences
                starts = given.cu_seqlens_q if name == "query" else given.cu_seqlens_k
            array = quantization.dequantise(array, getattr(options, f"{name}_scale"), starts)
        found.append(array)
    return found


def score_mod_of(problem: Problem, options: Options) -> numpy_reference.ReferenceScoreMod:
    """Converts score modification, dropout and sequence lengths to the reference's arguments."""
    lengths = None
    if options.sequences is not None and not isinstance(options.sequences, Paged):
        sequences = options.sequences
        lengths = numpy_reference.CuSeqlens(
            cu_seqlens_q=sequences.cu_seqlens_q,
            cu_seqlens_k=sequences.cu_seqlens_k,
            max_seqlen_q=sequences.max_seqlen_q,
            max_seqlen_k=sequences.max_seqlen_k,
            seqused_k=sequences.seqused_k,
        )
    shape, keep = problem.shape, None
    if options.dropout is not None and options.dropout.is_active:
        keep = keeper(options.dropout, shape.num_heads, shape.num_queries, shape.num_keys)
    return numpy_reference.ReferenceScoreMod(
        bias=options.bias,
        softcap=options.softcap,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        keep=keep,
        dropout_p=problem.dropout_p,
        cu_seqlens=lengths,
        score_terms=options.score_terms,
    )


def check_is_numpy(operands: Mapping[str, Any]) -> None:
    """Raises NotSupported with every operand that is no NumPy array."""
    if refusals := [
        refuse(name, value, "must be a NumPy array for backend='reference'", "copy it to the host")
        for name, value in operands.items()
        if not isinstance(value, np.ndarray)
    ]:
        raise NotSupported(refusals)


def _problem(direction: str, operands: Mapping[str, Any], options: Options) -> Problem:
    """Validates the call as for the GPU, so that the reference computes nothing that the GPU refuses."""
    outputs = {}
    if direction == "forward" and options.out is not None:
        outputs = {"output": options.out}
    if direction == "backward" and options.out is not None:
        given = {f"grad_{name}": getattr(options.out, name) for name in options.gradients}
        outputs = {name: array for name, array in given.items() if array is not None}
    inputs = {**operands, **outputs}
    check_is_numpy(inputs)
    described = arrays.read_operands(inputs, 0)
    return problem_of(direction, described, options, output_checks.refusals(described, outputs))[0]


def _into(target: Any, result: Any) -> Any:
    """Copies the result to the caller's array, if there is one, and returns the array."""
    if target is None:
        return result
    np.copyto(target, result)
    return target
