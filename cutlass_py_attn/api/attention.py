"""The attention functions, of which most users need the first two alone. Read this module first.

output, logsumexp = attention_forward(query, key, value, mask=Causal())
gradients = attention_backward(grad_output, query, key, value, output, logsumexp, mask=Causal())
output, logsumexp = mla_attention_forward(query, cache, sequences=Paged(page_table, seqused_k))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Unpack

from cutlass_py_attn.api import call_cache
from cutlass_py_attn.api.declaration import implemented_by
from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.options import (
    MLA_HEAD_DIM_VALUE,
    BackwardOptions,
    ForwardOptions,
    MlaOptions,
    Options,
    VariableLength,
    check_options,
)
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.api.request import of_cache, problem_of
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NoDevice, NotSupported
from cutlass_py_attn.plan import performance
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.problem.masks import Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import OPERANDS, ROW_ALIGNMENT_BYTES, Tensor
from cutlass_py_attn.refusals import Refusal
from cutlass_py_attn.runtime import arrays, driver, fill, lifetimes, output_checks
from cutlass_py_attn.runtime.binding import Bound, bind_problem
from cutlass_py_attn.score_terms.dropout import Dropout

MAX_PREPARED_CALLS: Final = 64  # another shape, stride or scale is another prepared call


def _forward(query: Any, key: Any, value: Any, **options: Unpack[ForwardOptions]) -> tuple[Any, Any]:
    stream = options.pop("stream", None)
    key_of_call, cached = call_cache.lookup("forward", (query, key, value), options, stream)
    if cached is not None:
        return cached[0], cached[1]
    checked = check_options(options, ForwardOptions)
    operands = {"query": query, "key": key, "value": value, **checked.arrays()}
    if checked.backend == "reference":
        from cutlass_py_attn.api import cpu_backend

        driver.stream_handle(stream)  # refused if it is no stream, as on the GPU
        return cpu_backend.forward(operands, checked)
    outputs = {} if checked.out is None else {"output": checked.out}
    results = _launch("forward", operands, outputs, checked, stream, key_of_call)
    return results["output"], results["logsumexp"]


@implemented_by(_forward)
def attention_forward(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Mask = Full(),  # noqa: B008
    scale: float | None = None,
    bias: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: Dropout | None = None,
    score_terms: Mapping[str, Any] = {},
    sequences: VariableLength | Paged | None = None,
    stream: object = None,
    backend: str = "auto",
    kernels: Callable[[Build], Artifact] | None = None,
    out: Any = None,
    query_scale: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
) -> tuple[Any, Any]:
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
    raise NotImplementedError


def _mla_forward(query: Any, cache: Any, **options: Unpack[MlaOptions]) -> tuple[Any, Any]:
    stream = options.pop("stream", None)
    key_of_call, cached = call_cache.lookup("mla", (query, cache, cache), options, stream)
    if cached is not None:
        return cached[0], cached[1]
    checked = check_options({"head_dim_value": MLA_HEAD_DIM_VALUE, **options}, MlaOptions)
    operands = {"query": query, "key": cache, **checked.arrays()}
    try:
        if checked.backend == "reference":
            from cutlass_py_attn.api import cpu_backend

            driver.stream_handle(stream)  # refused if it is no stream, as on the GPU
            return cpu_backend.forward(operands, checked)
        outputs = {} if checked.out is None else {"output": checked.out}
        results = _launch("forward", operands, outputs, checked, stream, key_of_call)
    except NotSupported as error:
        raise of_cache(error) from error
    return results["output"], results["logsumexp"]


@implemented_by(_mla_forward)
def mla_attention_forward(
    query: Any,
    cache: Any,
    *,
    head_dim_value: int = MLA_HEAD_DIM_VALUE,
    cache_scale: Any = None,
    cache_rope: Any = None,
    mask: Mask = Full(),  # noqa: B008
    scale: float | None = None,
    sequences: VariableLength | Paged | None = None,
    stream: object = None,
    backend: str = "auto",
    kernels: Callable[[Build], Artifact] | None = None,
    out: Any = None,
) -> tuple[Any, Any]:
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
    raise NotImplementedError


def _backward(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    logsumexp: Any,
    **options: Unpack[BackwardOptions],
) -> Gradients:
    stream = options.pop("stream", None)
    arguments = grad_output, query, key, value, output, logsumexp
    key_of_call, cached = call_cache.lookup("backward", arguments, options, stream)
    if cached is not None:
        names = options.get("gradients")
        return Gradients(*cached) if names is None else Gradients(**dict(zip(names, cached, strict=True)))
    checked = check_options(options, BackwardOptions)
    operands = {
        "grad_output": grad_output,
        "query": query,
        "key": key,
        "value": value,
        "output": output,
        "logsumexp": logsumexp,
        **checked.arrays(),
    }
    if checked.backend == "reference":
        from cutlass_py_attn.api import cpu_backend

        driver.stream_handle(stream)  # refused if it is no stream, as on the GPU
        return cpu_backend.backward(operands, checked)
    out = Gradients() if checked.out is None else checked.out
    outputs = {f"grad_{name}": array for name in checked.gradients if (array := getattr(out, name)) is not None}
    results = _launch("backward", operands, outputs, checked, stream, key_of_call)
    return Gradients(**{name: results[f"grad_{name}"] for name in checked.gradients})


@implemented_by(_backward)
def attention_backward(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    logsumexp: Any,
    *,
    mask: Mask = Full(),  # noqa: B008
    scale: float | None = None,
    bias: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: Dropout | None = None,
    score_terms: Mapping[str, Any] = {},
    sequences: VariableLength | None = None,
    stream: object = None,
    backend: str = "auto",
    kernels: Callable[[Build], Artifact] | None = None,
    grad_logsumexp: Any = None,
    gradients: tuple[str, ...] = ("query", "key", "value"),
    out: Gradients | None = None,
    packed: bool = False,
    deterministic: bool = False,
    num_splits_key: int | None = None,
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
    raise NotImplementedError


def _launch(
    direction: str,
    operands: Mapping[str, object],
    outputs: Mapping[str, object],
    options: Options,
    given_stream: object,
    key_of_call: Hashable | None,
) -> dict[str, Any]:
    """Launches the kernels and returns every result by name.

    outputs: the caller's arrays for results. key_of_call: key of the call cache; None if the call is not cacheable.
    """
    lifetimes.release()
    stream = arrays.launch_stream(operands["query"], given_stream)
    inputs = arrays.read_operands({**operands, **outputs}, stream)
    if options.head_dim_value is not None:
        inputs = _with_value(inputs, options.head_dim_value)
    query = inputs["query"]
    gpu = device_of(query.device)
    call = prepare(direction, inputs, options, gpu.ordinal, output_checks.refusals(inputs, outputs))
    problem = call.problem
    if call.bound is None and not call.is_empty:  # before anything is copied: there may be no kernel
        call.bound = bind_kernels(problem, gpu.ordinal, options.kernels)
    with gpu.current(), arrays.OutputArrays(query.library, gpu, stream, given_stream) as output_arrays:
        pointers = {
            name: output_arrays.use(name, array) if name in outputs else output_arrays.operand(name, array)
            for name, array in inputs.items()
            if name != "value" or options.head_dim_value is None
        }
        if options.head_dim_value is not None:
            pointers["value"] = pointers["key"]
        if options.packed:
            pointers |= output_arrays.allocate_packed(*call.packed)
        for name, tensor in call.new_outputs.items():
            pointers[name] = output_arrays.allocate(name, tensor.shape, tensor.dtype)
        if call.is_empty or problem.has_ragged_rows:
            fill.fill(problem, pointers, stream)
        if call.bound is not None:
            if problem.dropout_p and not problem.philox_on_device and options.dropout is not None:
                dropout = options.dropout
                pointers |= {"philox_seed": dropout.philox_seed, "philox_offset": dropout.philox_offset}
            call.bound(pointers, stream)
            if key_of_call is not None and not options.packed:
                call_cache.store(key_of_call, call.bound, inputs, call.new_outputs)
        return output_arrays.results()


def _with_value(inputs: Mapping[str, arrays.Array], columns: int) -> dict[str, arrays.Array]:
    """Returns the operands with the first columns of key as value, in the order of `attention_forward`."""
    key = inputs["key"]
    value = key._replace(shape=(*key.shape[:-1], columns))
    return {"query": inputs["query"], "key": key, "value": value, **inputs}


def device_of(ordinal: int | None) -> driver.Device:
    """Returns the operands' GPU, or the current GPU for host operands. NoDevice names the CPU backend."""
    try:
        return driver.device(driver.current_ordinal() if ordinal is None else ordinal)
    except NoDevice as error:
        error.args = (f'{error}; backend="reference" computes on the CPU in NumPy float64',)  # its kind stays
        raise


class PreparedCall:
    """A validated problem, the outputs to allocate, and the bound kernels once there are any.

    new_outputs: shape and dtype of each output to allocate, by name, without the packed ones.
    packed: names, shape and dtype for `OutputArrays.allocate_packed`.
    bound: None until the first launch.
    """

    def __init__(self, problem: Problem, new_outputs: Mapping[str, Tensor], is_packed: bool) -> None:
        self.problem = problem
        self.new_outputs = dict(new_outputs)
        if problem.direction == "forward":
            self.new_outputs["logsumexp"] = Tensor.contiguous(problem.shape.logsumexp, "float32")
        batch, rows, heads, columns = problem.shape.of("query")
        names = tuple(f"grad_{name}" for name in OPERANDS)
        self.packed = names, (batch, rows, 3, heads, columns), problem.dtype
        for name in names if is_packed else ():
            del self.new_outputs[name]
        self.is_empty = problem.is_empty
        self.bound: Bound | None = None


_prepared_calls: LruCache[PreparedCall] = LruCache(MAX_PREPARED_CALLS)


def prepare(
    direction: str,
    inputs: Mapping[str, arrays.Array],
    options: Options,
    ordinal: int,
    of_outputs: Sequence[Refusal],
) -> PreparedCall:
    """Validates a call once per layout of its arrays and options.

    NumPy arrays of sequence lengths are validated in every call, because the values count.

    of_outputs: why the caller's arrays for outputs are refused; they depend on addresses.
    """
    layouts = tuple([(name, array[1:5], array.pointer % ROW_ALIGNMENT_BYTES) for name, array in inputs.items()])
    key = direction, ordinal, layouts, options.key
    try:
        call = _prepared_calls.get(key)
    except TypeError:  # an option without a hash
        return PreparedCall(*problem_of(direction, inputs, options, of_outputs), options.packed)
    if call is None or of_outputs or (options.sequences is not None and inputs["query"].device is None):
        call = PreparedCall(*problem_of(direction, inputs, options, of_outputs), options.packed)
        _prepared_calls.put(key, call)
    return call


def bind_kernels(problem: Problem, ordinal: int, kernels: Callable[[Build], Artifact] | None) -> Bound:
    """Plans the problem, compiles or loads its kernels, and binds them to the GPU.

    Gives a PerformanceWarning if another layout of the call is estimated to be several times as fast.
    """
    bound = bind_problem(problem, kernels or default_kernels(), ordinal)
    performance.warn(bound.plan)
    return bound


def default_kernels() -> Callable[[Build], Artifact]:
    """Returns the compiler with its disk cache. Imports the compiler module, but not the DSL."""
    from cutlass_py_attn.compilation.turns import artifact_for

    return artifact_for
