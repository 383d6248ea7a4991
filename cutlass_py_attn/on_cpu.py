"""On CPU: the two directions by the NumPy reference, for machines without a GPU; slow, and right.

What is refused and what is computed are those of the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cutlass_py_attn import arrays, reference
from cutlass_py_attn.attention import Gradients, problem_of
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.options import Settings
from cutlass_py_attn.philox import keeper
from cutlass_py_attn.problem import Problem


def forward(operands: Mapping[str, Any], chosen: Settings) -> tuple[Any, Any]:
    """Output in query's dtype and logsumexp float32."""
    problem = _problem("forward", operands, chosen)
    output, logsumexp = reference.forward(
        *(operands[name] for name in ("query", "key", "value")),
        mask=problem.mask,
        scale=problem.scale_value,
        terms=terms_of(problem, chosen),
    )
    output = _into(chosen.out, output.astype(operands["query"].dtype))
    return output, logsumexp.astype(np.float32)


def backward(operands: Mapping[str, Any], chosen: Settings) -> Gradients:
    """The gradients that are asked for."""
    problem = _problem("backward", operands, chosen)
    names = ("grad_output", "query", "key", "value", "output", "logsumexp")
    found = reference.backward(
        *(operands[name] for name in names),
        mask=problem.mask,
        scale=problem.scale_value,
        terms=terms_of(problem, chosen),
    )
    dtype = operands["query"].dtype
    results = {}
    for name in chosen.gradients:
        gradient = getattr(found, name).astype(np.float32 if name == "sinks" else dtype)
        results[name] = _into(getattr(chosen.out, name, None), gradient)
    if chosen.packed:
        whole = np.stack([results[name] for name in ("query", "key", "value")], axis=2)
        results |= {name: whole[:, :, i] for i, name in enumerate(("query", "key", "value"))}
    return Gradients(**results)


def terms_of(problem: Problem, chosen: Settings) -> reference.Terms:
    """The score terms, dropout and lengths as the reference takes them."""
    lengths = None
    if chosen.sequences is not None:
        bounds = chosen.sequences
        lengths = reference.Lengths(
            cu_seqlens_q=bounds.cu_seqlens_q,
            cu_seqlens_k=bounds.cu_seqlens_k,
            max_seqlen_q=bounds.max_seqlen_q,
            max_seqlen_k=bounds.max_seqlen_k,
            seqused_k=bounds.seqused_k,
        )
    shape, keep = problem.shape, None
    if chosen.dropout is not None and chosen.dropout.is_active:
        keep = keeper(chosen.dropout, shape.num_heads, shape.num_queries, shape.num_keys)
    return reference.Terms(
        bias=chosen.bias,
        softcap=chosen.softcap,
        alibi_slopes=chosen.alibi_slopes,
        sinks=chosen.sinks,
        keep=keep,
        dropout_p=problem.dropout_p,
        lengths=lengths,
    )


def _problem(direction: str, operands: Mapping[str, Any], chosen: Settings) -> Problem:
    """The same judgement as for the GPU, so that what the reference computes the GPU takes too."""
    given = dict(operands)
    if direction == "forward" and chosen.out is not None:
        given["output"] = chosen.out
    if direction == "backward" and chosen.out is not None:
        outs = {f"grad_{name}": getattr(chosen.out, name) for name in chosen.gradients}
        given |= {name: array for name, array in outs.items() if array is not None}
    others = [name for name, value in given.items() if not isinstance(value, np.ndarray)]
    if others:
        raise NotSupported(f"{', '.join(others)}: must be NumPy arrays for backend='reference'; copy them to the host")
    return problem_of(direction, arrays.take(given, 0), chosen)[0]


def _into(target: Any, result: Any) -> Any:
    """The result, in the caller's array where there is one."""
    if target is None:
        return result
    np.copyto(target, result)
    return target
