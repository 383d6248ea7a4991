"""Creates the validated Problem of one call from its arrays and options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from cutlass_py_attn.api.options import Options
from cutlass_py_attn.api.paged import Paged, layout_reasons
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.abi import SEED
from cutlass_py_attn.problem import paging
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import output_dtype
from cutlass_py_attn.problem.tensors import ITEM_BYTES, OPERANDS, ROW_ALIGNMENT_BYTES, Shape, Tensor
from cutlass_py_attn.problem.validation import logsumexp_objections
from cutlass_py_attn.runtime import arrays
from cutlass_py_attn.score_terms import registry

_KEY: Final = re.compile(r"\bkey(?=\b|_scale\b|_rope\b)")


def problem_of(
    direction: str,
    inputs: Mapping[str, arrays.Array],
    options: Options,
    output_reasons: Sequence[str] = (),
) -> tuple[Problem, dict[str, Tensor]]:
    """Returns the validated Problem of these arrays, and the outputs that must be allocated, by name.

    inputs: the operands, and the outputs for which the caller passed an array.
    output_reasons: why the caller's arrays for outputs are refused, by `runtime.output_checks`.

    NotSupported lists every reason.
    """
    tensors = {name: array.tensor for name, array in inputs.items()}
    if options.head_dim_value is not None:
        tensors["value"] = first_columns(tensors["key"], options.head_dim_value)
    sequences, pages, reasons = None, None, []
    if isinstance(options.sequences, Paged):
        reasons += layout_reasons(options.sequences, tensors)
        pages = options.sequences.pages(tensors["page_table"], next(iter(tensors["seqused_k"].shape), 0))
    elif options.sequences is not None:
        reasons += _lengths_reasons(tensors)
        sequences = options.sequences.sequences(max(tensors["cu_seqlens_q"].shape[0] - 1, 0) if not reasons else 0)
    operands = {name: tensor for name, tensor in tensors.items() if name in Problem.__dataclass_fields__}
    problem = Problem(
        direction,
        **{"output": tensors["query"], **operands},
        mask=options.mask,
        scale=options.scale,
        softcap=options.softcap,
        dropout_p=options.dropout_p,
        philox_on_device=options.philox_on_device,
        sequences=sequences,
        pages=pages,
        value_in_key=options.head_dim_value is not None,
        score_terms=tuple((name, tensors[name]) for name in sorted(options.score_terms)),
        deterministic=options.deterministic,
        num_splits_key=options.num_splits_key,
    )
    # `Problem.reasons` refuses wrong ranks below; until then no size may be used.
    ranks = [len(tensors[name].shape) for name in OPERANDS]
    is_table = pages is None or not any(paging.kind_objections(pages))
    shape = problem.shape if ranks == [4, 4, 4] and is_table else Shape(0, 0, 0, 0, 0, 0)
    names = ("output",) if direction == "forward" else tuple(f"grad_{name}" for name in options.gradients)
    new_outputs = {name: _result(name, shape, tensors) for name in names if name not in tensors}
    if options.packed:
        new_outputs |= _packed_gradients(shape, tensors["query"].dtype)
        reasons += _packed_reasons(shape, tensors)
    problem = problem.replace(**new_outputs)
    # New outputs follow from the operands: a reason to refuse one repeats the reason of its operand.
    reasons = [*(text for text in problem.reasons() if text.split()[0] not in new_outputs), *reasons]
    reasons += _philox_reasons(tensors)
    if "logsumexp" in tensors and shape.head_dim:
        reasons += logsumexp_objections("logsumexp", tensors["logsumexp"], shape)
    if isinstance(options.sequences, Paged):
        if shape.pool is not None and not reasons:
            reasons += options.sequences.reasons(None if shape.tokens is None else shape.tokens[0], shape.pool)
    elif options.sequences is not None and shape.tokens is not None:
        reasons += options.sequences.reasons(shape.tokens)
    reasons += output_reasons
    if reasons:
        raise NotSupported(reasons)
    return problem, new_outputs


def first_columns(tensor: Tensor, columns: int) -> Tensor:
    """Returns the first columns of a tensor, in the same memory."""
    return replace(tensor, shape=(*tensor.shape[:-1], columns))


def of_cache(error: NotSupported) -> NotSupported:
    """Returns the error of a call of `mla_attention_forward`, whose key is called cache."""
    return NotSupported(_KEY.sub("cache", reason) for reason in error.reasons)


def _result(name: str, shape: Shape, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns a dense output; the gradient of a score term's operand has the operand's shape and dtype."""
    role = name.removeprefix("grad_")
    if role in registry.gradients():
        return Tensor.contiguous(tensors[role].shape, tensors[role].dtype)
    return Tensor.contiguous(shape.of(name), output_dtype(tensors["query"].dtype))


def _packed_gradients(shape: Shape, dtype: str) -> dict[str, Tensor]:
    """Returns the gradients as slices of one (batch, seqlen, 3, num_heads, head_dim) array."""
    batch, rows, heads, columns = shape.of("query")
    elements = heads * columns  # of one row of one gradient
    strides = 3 * rows * elements, 3 * elements, columns, 1
    slice_bytes = elements * ITEM_BYTES.get(dtype, 1)
    alignments = (ROW_ALIGNMENT_BYTES, *(math.gcd(ROW_ALIGNMENT_BYTES, i * slice_bytes) for i in (1, 2)))
    return {
        f"grad_{name}": Tensor((batch, rows, heads, columns), strides, dtype, alignment)
        for name, alignment in zip(OPERANDS, alignments, strict=True)
    }


def _packed_reasons(shape: Shape, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns why the gradients cannot be packed."""
    given = [f"grad_{name}" for name in OPERANDS if f"grad_{name}" in tensors]
    reasons = [f"packed with out for {', '.join(given)}: must be one of the two; leave one out"] if given else []
    if not shape.of("query") == shape.of("key") == shape.of("value"):
        reasons.append(
            f"packed with query {shape.of('query')}, key {shape.of('key')} and value {shape.of('value')}: "
            "must have the same shape; leave packed False"
        )
    return reasons


def _lengths_reasons(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns why the arrays of sequence lengths are wrong."""
    reasons = []
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        tensor = tensors.get(name)
        if tensor is None:
            continue
        entries = tensors["cu_seqlens_q"].shape[0] if tensors["cu_seqlens_q"].shape else 0
        expected = (entries - 1,) if name == "seqused_k" else (max(entries, 1),)
        dense = len(tensor.shape) == 1 and (tensor.strides == (1,) or tensor.shape[0] <= 1)
        if tensor.dtype != "int32" or tensor.shape != expected or not dense:
            reasons.append(
                f"{name} has shape {tensor.shape}, strides {tensor.strides} and dtype {tensor.dtype}: must be a "
                f"contiguous int32 array of shape {expected}; convert it"
            )
    return reasons


def _philox_reasons(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns why a seed or offset in device memory is wrong."""
    return [
        f"{name} has shape {tensors[name].shape} and dtype {tensors[name].dtype}: must be one int64; convert it"
        for name in SEED
        if name in tensors and (tensors[name].dtype != "int64" or math.prod(tensors[name].shape) != 1)
    ]
