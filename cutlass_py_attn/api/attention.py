"""The attention functions, of which most users need the first two alone. Read this module first.

output, logsumexp = attention_forward(query, key, value, mask=Causal())
gradients = attention_backward(grad_output, query, key, value, output, logsumexp, mask=Causal())
output, logsumexp = mla_attention_forward(query, cache, sequences=Paged(page_table, seqused_k))

A call that `calls.repeat` does not know becomes an AttentionRequest: `calls.launch` validates it by `problem_of`, plans
and binds its kernels, and launches them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Unpack

from cutlass_py_attn.api import calls
from cutlass_py_attn.api.options import (
    MLA_HEAD_DIM_VALUE,
    BackwardOptions,
    ForwardOptions,
    MlaOptions,
    Options,
    check_options,
    takes_options,
)
from cutlass_py_attn.api.paged import Paged, array_refusals, layout_refusals
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.abi import SEED
from cutlass_py_attn.problem import paging
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import output_dtype
from cutlass_py_attn.problem.tensors import ITEM_BYTES, OPERANDS, ROW_ALIGNMENT_BYTES, Shape, Tensor
from cutlass_py_attn.problem.validation import logsumexp_refusals
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime.arrays import Array
from cutlass_py_attn.score_terms import registry

_KEY: Final = re.compile(r"\bkey(?=\b|_scale\b|_rope\b)")


@takes_options(ForwardOptions)
def attention_forward(query: Any, key: Any, value: Any, **options: Unpack[ForwardOptions]) -> tuple[Any, Any]:
    """Computes softmax(scale Q K^T + bias, masked) V, and the logarithm of the softmax's denominator.

    query: (batch, num_queries, num_heads, head_dim).
    key: (batch, num_keys, num_heads_key, head_dim); num_heads_key divides num_heads.
    value: (batch, num_keys, num_heads_key, head_dim_value).
    The options are keywords; `ForwardOptions` describes each.

    The operands are float16, bfloat16 or float32, all of one dtype, with a contiguous last axis. They are CUDA arrays
    of any library, which are read in place, or NumPy arrays, which are copied to the device.

    They may be e4m3 codes (float8_e4m3fn, or uint8 for their bytes), with query_scale, key_scale and value_scale. All
    three on sm_90a, with head dims that are multiples of 16 up to 256; the output is then bfloat16, or float16 in a
    float16 `out`. Or key and value alone, an e4m3 cache, beside a query of 16 bits: the decode kernels read it with up
    to 128 queries of a group of heads, in float16, in which a query beyond 65504 overflows; the forwards with more.

    Returns output (batch, num_queries, num_heads, head_dim_value) in the operands' dtype, and logsumexp
    (batch, num_heads, ceil32(num_queries)) float32, both in the library of query. logsumexp is a natural logarithm;
    its padding is +inf. A row without keys has output 0 and logsumexp -inf. With `sequences`, the batch of logsumexp
    is the number of sequences, num_queries is max_seqlen_q, and the padding of a row starts at its sequence's length.
    With `sequences=Paged(...)`, key and value are pools (pages, page_size, num_heads_key, head_dim).
    Device results are ready in the order of `stream`; the function waits for the stream only for JAX arrays. NumPy
    results are complete.

    NotSupported lists every reason before a kernel is launched. NoDevice: there is no GPU. CompileError, Stale: there
    is no kernel. DriverError: a driver call failed, for example because device memory ran out.
    """
    stream = options.pop("stream", None)
    key_of_call, repeated = calls.repeat("forward", (query, key, value), options, stream)
    if repeated is not None:
        return repeated[0], repeated[1]
    operands = {"query": query, "key": key, "value": value}
    results = _compute(
        AttentionRequest("forward", operands, check_options(options, ForwardOptions)), stream, key_of_call
    )
    return results["output"], results["logsumexp"]


@takes_options(MlaOptions, head_dim_value=MLA_HEAD_DIM_VALUE)
def mla_attention_forward(query: Any, cache: Any, **options: Unpack[MlaOptions]) -> tuple[Any, Any]:
    """Computes `attention_forward` of keys that contain the values: the latent cache of multi-head latent attention.

    query: (batch, num_queries, num_heads, head_dim): the absorbed query and its columns of the rotary embedding.
    cache: (batch, num_keys, num_heads_key, head_dim), or a pool (pages, page_size, num_heads_key, head_dim) with
        `sequences=Paged(...)`; num_heads_key is 1 in DeepSeek's models. A row is a key, and its first head_dim_value
        columns are the value. It is read once for both.
    head_dim_value: 512 in DeepSeek's models, whose head_dim is 576.
    The options are keywords; `MlaOptions` describes each. The scale is usually not that of 576 columns, but
    1 / sqrt(192), that of the query before its absorption: pass it.

    The cache may be e4m3 codes (float8_e4m3fn, or uint8 for their bytes) of the columns of the value, with their scales
    in cache_scale and the other columns in cache_rope. Each of the three has strides of its own, so that they may be
    views of packed rows. A number is code times scale, rounded to the dtype of query, float16 or bfloat16. Only the
    kernel of sm_90a reads such a cache, with head dims 576 and 512. `append_to_cache` writes it.

    With head dims 576 and 512 of 16-bit operands, sm_90a has a kernel that shares the keys of all sequences among all
    multiprocessors. Other head dims and targets are computed by the kernels of `attention_forward`.

    Returns output (batch, num_queries, num_heads, head_dim_value) and logsumexp as `attention_forward` does; dtypes,
    libraries and errors are those of `attention_forward`.
    """
    stream = options.pop("stream", None)
    key_of_call, repeated = calls.repeat("mla", (query, cache), options, stream)
    if repeated is not None:
        return repeated[0], repeated[1]
    checked = check_options({"head_dim_value": MLA_HEAD_DIM_VALUE, **options}, MlaOptions)
    try:
        request = AttentionRequest("forward", {"query": query, "key": cache}, checked)
        results = _compute(request, stream, key_of_call)
    except NotSupported as error:
        raise of_cache(error) from error
    return results["output"], results["logsumexp"]


@takes_options(BackwardOptions)
def attention_backward(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    logsumexp: Any,
    **options: Unpack[BackwardOptions],
) -> Gradients:
    """Computes the gradients of query, key and value, and on request those of bias and sinks.

    grad_output, output: (batch, num_queries, num_heads, head_dim_value).
    query, key, value: as in the forward.
    logsumexp: (batch, num_heads, ceil32(num_queries)) float32, from the forward.
    The options are keywords; `BackwardOptions` describes each. Those that the forward has too must be the same.

    With `grad_logsumexp` they are the gradients of a function of output and logsumexp both: rowsum(grad_output *
    output) - grad_logsumexp takes the place of rowsum(grad_output * output) (Dao et al. 2022, FlashAttention,
    appendix B.2; the derivative of logsumexp by a score is the score's weight).

    The gradient of a bias is summed over the bias's axes of size 1. dtypes, libraries and errors are those of
    `attention_forward`.
    """
    stream = options.pop("stream", None)
    arguments = grad_output, query, key, value, output, logsumexp
    key_of_call, repeated = calls.repeat("backward", arguments, options, stream)
    if repeated is not None:
        names = options.get("gradients")
        return Gradients(*repeated) if names is None else Gradients(**dict(zip(names, repeated, strict=True)))
    checked = check_options(options, BackwardOptions)
    operands = dict(zip(_BACKWARD_OPERANDS, arguments, strict=True))
    results = _compute(AttentionRequest("backward", operands, checked), stream, key_of_call)
    return Gradients(**{name: results[f"grad_{name}"] for name in checked.gradients})


_BACKWARD_OPERANDS: Final = ("grad_output", *OPERANDS, "output", "logsumexp")


def _compute(request: AttentionRequest, stream: object, key: Hashable | None) -> dict[str, Any]:
    """Returns the results of a call by name. key: of `calls.repeat`."""
    if request.options.backend != "reference":
        return calls.launch(request, stream, key)
    from cutlass_py_attn.api import cpu_backend

    return cpu_backend.compute(request, stream)


class AttentionRequest(calls.Request):
    """A forward or a backward. operands: by name. options: checked; their arrays are operands too."""

    first: ClassVar[str] = "query"

    def __init__(self, direction: str, operands: Mapping[str, Any], options: Options) -> None:
        self.direction, self.options, self.kernels = direction, options, options.kernels
        self.key = direction, options.key
        self.outputs = options.outputs(direction)
        self.arrays = {**operands, **options.arrays(), **self.outputs}
        dropout = options.dropout
        if dropout is not None and dropout.is_active and not options.philox_on_device:
            self.numbers = {"philox_seed": dropout.philox_seed, "philox_offset": dropout.philox_offset}

    def validate(self, inputs: Mapping[str, Array], of_outputs: Sequence[Refusal]) -> tuple[Problem, dict[str, Tensor]]:
        problem, results = problem_of(self.direction, inputs, self.options, of_outputs)
        if self.direction == "forward":
            results["logsumexp"] = Tensor.contiguous(problem.shape.logsumexp, "float32")
        packed = self.packed(problem)
        return problem, {name: tensor for name, tensor in results.items() if packed is None or name not in packed[0]}

    def written(self, inputs: Mapping[str, Array]) -> Collection[str]:
        return self.outputs

    def must_validate(self, inputs: Mapping[str, Array]) -> bool:
        return self.options.sequences is not None and inputs["query"].device is None  # lengths whose values count

    def packed(self, problem: Problem) -> tuple[tuple[str, ...], tuple[int, ...], str] | None:
        if not self.options.packed:
            return None
        batch, rows, heads, columns = problem.shape.of("query")
        return tuple(f"grad_{name}" for name in OPERANDS), (batch, rows, 3, heads, columns), problem.dtype


def problem_of(
    direction: str,
    inputs: Mapping[str, Array],
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
    operands: dict[str, Any] = {n: tensor for n, tensor in tensors.items() if n in Problem.__dataclass_fields__}
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
        block_size=options.block_size,
        mask_program=options.mask_program,
        mask_scalars=options.mask_scalars,
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
