"""Creates the validated Problem of one call from its arrays and options."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from cutlass_py_attn.api.options import Options
from cutlass_py_attn.api.paged import Paged, array_refusals, layout_refusals
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan.abi import SEED
from cutlass_py_attn.problem import paging
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import output_dtype
from cutlass_py_attn.problem.tensors import ITEM_BYTES, OPERANDS, ROW_ALIGNMENT_BYTES, Shape, Tensor
from cutlass_py_attn.problem.validation import logsumexp_refusals
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime import arrays
from cutlass_py_attn.score_terms import registry

_KEY: Final = re.compile(r"\bkey(?=\b|_scale\b|_rope\b)")


def problem_of(
    direction: str,
    inputs: Mapping[str, arrays.Array],
    options: Options,
    of_outputs: Sequence[Refusal] = (),
) -> tuple[Problem, dict[str, Tensor]]:
    """Returns the validated Problem of these arrays, and the outputs that must be allocated, by name.

    inputs: the operands, and the outputs for which the caller passed an array.
    of_outputs: why the caller's arrays for outputs are refused, by `runtime.output_checks`.

    NotSupported lists every reason.
    """
    tensors = {name: array.tensor for name, array in inputs.items()}
    if options.head_dim_value is not None:
        tensors["value"] = first_columns(tensors["key"], options.head_dim_value)
    sequences, pages = None, None
    refusals: list[Refusal] = []
    if isinstance(options.sequences, Paged):
        refusals += layout_refusals(options.sequences, tensors)
        pages = options.sequences.pages(tensors["page_table"], next(iter(tensors["seqused_k"].shape), 0))
    elif options.sequences is not None:
        refusals += _lengths(tensors)
        sequences = options.sequences.sequences(max(tensors["cu_seqlens_q"].shape[0] - 1, 0) if not refusals else 0)
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
    # `Problem.refusals` refuses wrong ranks below; until then no size may be used.
    ranks = [len(tensors[name].shape) for name in OPERANDS]
    is_table = pages is None or not any(paging.kind_refusals(pages))
    shape = problem.shape if ranks == [4, 4, 4] and is_table else Shape(0, 0, 0, 0, 0, 0)
    names = ("output",) if direction == "forward" else tuple(f"grad_{name}" for name in options.gradients)
    new_outputs = {name: _result(name, shape, tensors) for name in names if name not in tensors}
    if options.packed:
        new_outputs |= _packed_gradients(shape, tensors["query"].dtype)
        refusals += _packed(shape, tensors)
    problem = problem.replace(**new_outputs)
    # New outputs follow from the operands: a refusal of one repeats that of its operand.
    refusals = [*(some for some in problem.refusals() if some.name not in new_outputs), *refusals]
    refusals += _philox(tensors)
    if "logsumexp" in tensors and shape.head_dim:
        refusals += logsumexp_refusals("logsumexp", tensors["logsumexp"], shape)
    if isinstance(options.sequences, Paged):
        if shape.pool is not None and not refusals:
            refusals += options.sequences.refusals(None if shape.tokens is None else shape.tokens[0], shape.pool)
    elif options.sequences is not None and shape.tokens is not None:
        refusals += options.sequences.refusals(shape.tokens)
    refusals += of_outputs
    if refusals:
        raise NotSupported(refusals)
    return problem, new_outputs


def first_columns(tensor: Tensor, columns: int) -> Tensor:
    """Returns the first columns of a tensor, in the same memory."""
    return replace(tensor, shape=(*tensor.shape[:-1], columns))


def of_cache(error: NotSupported) -> NotSupported:
    """Returns the error of a call of `mla_attention_forward`, whose key is called cache."""
    return error.renamed(lambda text: _KEY.sub("cache", text))


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


def _packed(shape: Shape, tensors: Mapping[str, Tensor]) -> Iterator[Refusal]:
    """Yields why the gradients cannot be packed."""
    given = [f"grad_{name}" for name in OPERANDS if f"grad_{name}" in tensors]
    if given:
        yield refuse("packed", True, f"must be False with out for {', '.join(given)}", "leave one out")
    query, key, value = (shape.of(name) for name in OPERANDS)
    if not query == key == value:
        rule = f"query {query}, key {key} and value {value} must have the same shape"
        yield refuse("packed", True, rule, "leave packed False")


def _lengths(tensors: Mapping[str, Tensor]) -> Iterator[Refusal]:
    """Yields why the arrays of sequence lengths are wrong."""
    entries = tensors["cu_seqlens_q"].shape[0] if tensors["cu_seqlens_q"].shape else 0
    shapes = {"cu_seqlens_q": max(entries, 1), "cu_seqlens_k": max(entries, 1), "seqused_k": entries - 1}
    for name, size in shapes.items():
        if name in tensors:
            yield from array_refusals(name, tensors[name], (size,))


def _philox(tensors: Mapping[str, Tensor]) -> Iterator[Refusal]:
    """Yields why a seed or offset in device memory is wrong."""
    for name in SEED:
        if name in tensors and (tensors[name].dtype != "int64" or math.prod(tensors[name].shape) != 1):
            yield refuse(name, tensors[name], "must be one int64", "convert it")
