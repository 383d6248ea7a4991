"""CPU backend: forward and backward by the NumPy reference in float64, for machines without a GPU. Slow.

Validation and results are those of the GPU. Infinities in operands give NaN without a warning, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cutlass_py_attn.api.calls import problem_on_host
from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.problem.mask_function import mask_of
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import E4M3, KEY_ROPE, OPERANDS
from cutlass_py_attn.reference import numpy_reference, paged, quantization
from cutlass_py_attn.runtime import arrays
from cutlass_py_attn.score_terms.dropout import keeper

if TYPE_CHECKING:
    from cutlass_py_attn.api.attention import AttentionRequest


def compute(request: AttentionRequest, stream: object = None) -> dict[str, Any]:
    """Returns the results of a call of NumPy arrays by name, in the caller's arrays for them if there are any."""
    problem = problem_on_host(request, stream)
    compute_results = _forward if request.direction == "forward" else _backward
    with np.errstate(invalid="ignore", over="ignore"):  # as kernels: infinities and NaN are results
        results = compute_results(problem, request.arrays, request.options)
    for name, target in request.outputs.items():
        np.copyto(target, results[name])
        results[name] = target
    return results


def _forward(problem: Problem, operands: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Returns output in the dtype of query, and logsumexp in float32."""
    if problem.key_rope is not None:
        latent = (operands[name] for name in ("key", "key_scale", KEY_ROPE))
        operands = {**operands, "key": quantization.dequantise_latent(*latent)}
    if options.head_dim_value is not None:
        operands = {**operands, "value": operands["key"][..., : options.head_dim_value]}
    terms: dict[str, Any] = {"mask": mask_of(problem, operands), "scale": problem.scale_value}
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
    output = output.astype(arrays.numpy_dtype(problem.output.dtype))
    return {"output": output, "logsumexp": logsumexp.astype(np.float32)}


def _backward(problem: Problem, operands: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Returns the gradients that `options` names, in the dtype of query; that of sinks in float32."""
    names = ("grad_output", "query", "key", "value", "output", "logsumexp")
    gradients = numpy_reference.backward(
        *(operands[name] for name in names),
        mask=mask_of(problem, operands),
        scale=problem.scale_value,
        score_mod=score_mod_of(problem, options),
        grad_logsumexp=operands.get("grad_logsumexp"),
    )
    dtype = operands["query"].dtype
    results = {
        f"grad_{name}": getattr(gradients, name).astype(np.float32 if name == "sinks" else dtype)
        for name in options.gradients
    }
    if options.packed:
        packed = np.stack([results[f"grad_{name}"] for name in OPERANDS], axis=2)
        results |= {f"grad_{name}": packed[:, :, i] for i, name in enumerate(OPERANDS)}
    return results


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
