"""What an inference engine needs beside attention: new rows for a paged cache, and the merge of partial results.

append_to_cache(key, value, key_cache, value_cache, slots)
output, logsumexp = merge_states(output_a, logsumexp_a, output_b, logsumexp_b)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import numpy as np

from cutlass_py_attn.api import repeated_calls
from cutlass_py_attn.api.attention import MAX_PREPARED_CALLS, default_kernels, device_of
from cutlass_py_attn.api.cpu_backend import check_is_numpy
from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.options import backend_refusals, kernels_refusals
from cutlass_py_attn.api.unknown_options import refuses_unknown_options
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.append import CACHES, SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.tensors import ROW_ALIGNMENT_BYTES, Tensor
from cutlass_py_attn.reference import serving
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime import arrays, driver, fill, lifetimes, output_checks
from cutlass_py_attn.runtime.binding import Bound, bind, portable_arch

Kernels = Callable[[Build], Artifact]


@refuses_unknown_options()
def append_to_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    *,
    key_scale: Any = None,
    value_scale: Any = None,
    stream: object = None,
    backend: str = "auto",
    kernels: Kernels | None = None,
) -> None:
    """Stores key and value rows of new tokens in the pages of a cache, in place.

    key: (tokens, num_heads_key, head_dim) float16, bfloat16 or float32.
    value: (tokens, num_heads_key, head_dim_value), of the same dtype.
    key_cache: (num_pages, page_size, num_heads_key, head_dim).
    value_cache: (num_pages, page_size, num_heads_key, head_dim_value), of the same dtype; of a latent cache in that of
        value.
    slots: (tokens,) int64: token t is stored in row slots[t] % page_size of page slots[t] // page_size. A token whose
        slot is negative, or beyond the cache, is skipped. Slots that are stored must differ: of two tokens with one
        slot, either may win.
    key_scale, value_scale: for an e4m3 cache alone, both; float32. () or (1,), one scale; (num_heads_key,), one of each
        head: a row is multiplied by 1 / scale and rounded. (num_pages, page_size, num_heads_key): the scale of each
        stored row, its largest magnitude / 448, is computed and written there. For a latent cache key_scale alone:
        (num_pages, page_size, num_heads_key, ceil(head_dim / 128)), the computed scale of each 128 columns of a row.
    stream, backend, kernels: as in `attention_forward`; "reference" computes on the CPU in NumPy.

    A cache has the dtype of key, whose bits are stored, or float8_e4m3fn, or uint8 for the bytes of e4m3 numbers. Its
    last axis is contiguous and its other strides are free, so that a (num_pages, num_heads_key, page_size, head_dim)
    pool is passed with its axes exchanged, and key and value may be parts of one pool. All arrays are of one device, or
    NumPy arrays. No value is read on the host, so that a CUDA graph may hold the call.

    A latent cache (MLA) of e4m3 codes, as `mla_attention_forward` reads it, has codes in key_cache and the columns of
    the rotary embedding, in the dtype of value, in value_cache. key has the compressed rows and value those columns,
    whose bits are stored. Caches and scales may be views of one pool of packed rows.

    e4m3 rounds to nearest even. Magnitudes beyond 448, infinities too, become 448; NaN becomes 0x7F. A computed scale
    ignores NaN, counts an infinity as float32's largest number, and is at least 2**-100 / 448.

    NotSupported lists every reason before a kernel is launched, among them read-only caches, and caches or scales that
    share memory with each other or another operand. NoDevice: there is no GPU. CompileError, Stale: there is no kernel.
    DriverError: a driver call failed.
    """
    given = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slots": slots}
    if key_scale is not None:
        given["key_scale"] = key_scale
    if value_scale is not None:
        given["value_scale"] = value_scale
    key_of_call, results = repeated_calls.look_up((_Append, backend, kernels), given, stream)
    if results is not None:
        return
    call = _Append(given, backend, kernels)
    if call.is_on_host:
        _append_on_host(call, stream)
    else:
        _launch(call, stream, key_of_call)


@refuses_unknown_options()
def merge_states(
    output_a: Any,
    logsumexp_a: Any,
    output_b: Any,
    logsumexp_b: Any,
    *,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    out: Any = None,
    stream: object = None,
    backend: str = "auto",
    kernels: Kernels | None = None,
) -> tuple[Any, Any]:
    """Joins two partial results of attention, of the same queries over different keys, by their logsumexps.

    output_a, output_b: (batch, num_queries, num_heads, head_dim_value) float16, bfloat16 or float32, of one dtype.
        output_a may also be float32 beside an output_b of 16 bits: a running total of many parts.
    logsumexp_a, logsumexp_b: (batch, num_heads, ceil32(num_queries)) float32, as `attention_forward` returns them.
    cu_seqlens_q, max_seqlen_q: of the `VariableLength` with which the partial results were computed. The outputs are
        then (1, tokens, num_heads, head_dim_value) and the logsumexps (count, num_heads, ceil32(max_seqlen_q)).
    out: array for the output, with its shape and dtype, any strides and memory of its own; None allocates one. Beside a
        float32 total it may have output_b's dtype, which rounds the last result.
    stream, backend, kernels: as in `attention_forward`; "reference" computes on the CPU in NumPy float64.

    Returns output and logsumexp, of the shapes and dtypes of output_a and logsumexp_a, in the library of output_a. With
    l_a and l_b the logsumexps of a row, output = (exp(l_a) output_a + exp(l_b) output_b) / (exp(l_a) + exp(l_b)) and
    logsumexp = log(exp(l_a) + exp(l_b)), computed in float32 without overflow. A part with logsumexp -inf counts as
    nothing; if both have it, output is 0 and logsumexp -inf. The padding of logsumexp is +inf, and rows of a packed
    output that belong to no sequence are 0.

    If the parts have disjoint sets of keys, and at most one of them has sinks, the result is that of attention over all
    the keys, up to the rounding of the partial outputs.

    NotSupported lists every reason before a kernel is launched. The other errors are those of `append_to_cache`.
    """
    given = {"output_a": output_a, "logsumexp_a": logsumexp_a, "output_b": output_b, "logsumexp_b": logsumexp_b}
    if cu_seqlens_q is not None:
        given["cu_seqlens_q"] = cu_seqlens_q
    if out is not None:
        given["output"] = out
    options = _Merge, backend, kernels, tuple(given), type(max_seqlen_q), max_seqlen_q
    key_of_call, repeated = repeated_calls.look_up(options, given, stream)
    if repeated is not None:
        return (repeated[0], repeated[1]) if out is None else (out, repeated[0])
    number = None if max_seqlen_q is None else integer_of(max_seqlen_q)
    call = _Merge(given, backend, kernels, max_seqlen_q if number is None else number)
    results = _merge_on_host(call, stream) if call.is_on_host else _launch(call, stream, key_of_call)
    return results["output"], results["logsumexp"]


class _Call(ABC):
    """One call: the caller's arrays by name, and what decides its kernel.

    first: name of the operand whose library gets the results. is_on_host: whether the CPU backend computes it.
    refusals: why the options are refused. key: what decides the problem beside the layouts of the arrays.
    """

    first: ClassVar[str]

    def __init__(self, given: Mapping[str, Any], backend: object, kernels: Kernels | None) -> None:
        self.given = {name: array for name, array in given.items() if array is not None}
        self.kernels = kernels
        self.key: Hashable = type(self)
        self.refusals = [
            refuse(name, None, "must be an array", "pass it") for name, array in given.items() if array is None
        ]
        self.has_all_arrays = not self.refusals
        self.refusals += [*backend_refusals(backend), *kernels_refusals(kernels)]
        self.is_on_host = isinstance(backend, str) and backend == "reference"

    @abstractmethod
    def problem(self, tensors: Mapping[str, Tensor]) -> AppendProblem | MergeProblem:
        """Returns the problem of these layouts, without a check."""

    @abstractmethod
    def outputs(self, found: Mapping[str, arrays.Array]) -> tuple[str, ...]:
        """Returns the names of the caller's arrays that are written."""

    @abstractmethod
    def new_outputs(self, found: Mapping[str, arrays.Array]) -> dict[str, Tensor]:
        """Returns the results to allocate, by name."""

    @abstractmethod
    def plan(self, problem: Any, arch: str) -> Plan:
        """Returns the plan of the problem."""

    def remedy(self, found: Mapping[str, arrays.Array]) -> str:
        """Returns what to do about an array that cannot be written; "" to leave it out."""
        return ""

    def read(self, stream: int) -> dict[str, arrays.Array]:
        """Reads the arrays. NotSupported lists those that are missing or unreadable, and wrong options."""
        unreadable: list[Refusal] = []
        found: dict[str, arrays.Array] = {}
        try:
            found = arrays.read_operands(self.given, stream)
        except NotSupported as error:
            unreadable += error.refusals
        if unreadable or not self.has_all_arrays:
            raise NotSupported([*self.refusals, *unreadable])
        return found

    def check(self, found: Mapping[str, arrays.Array]) -> Any:
        """Returns the problem of these arrays; NotSupported lists every reason to refuse them and the options."""
        problem = self.problem({name: array.tensor for name, array in found.items()})
        if refusals := [*self.refusals, *problem.refusals(), *self.memory_refusals(found)]:
            raise NotSupported(refusals)
        return problem

    def memory_refusals(self, found: Mapping[str, arrays.Array]) -> list[Refusal]:
        """Returns why arrays cannot be written: they are read-only, or share memory with another."""
        return output_checks.refusals(found, self.outputs(found), self.remedy(found))


class _Append(_Call):
    """A call of `append_to_cache`."""

    first = "key"

    def problem(self, tensors: Mapping[str, Tensor]) -> AppendProblem:
        return AppendProblem(**tensors)

    def outputs(self, found: Mapping[str, arrays.Array]) -> tuple[str, ...]:
        return (*CACHES, *(name for name in SCALES if name in found and len(found[name].shape) > 2))

    def new_outputs(self, found: Mapping[str, arrays.Array]) -> dict[str, Tensor]:
        return {}

    def plan(self, problem: Any, arch: str) -> Plan:
        return plan_append(problem, arch)

    def remedy(self, found: Mapping[str, arrays.Array]) -> str:
        if found["key_cache"].library == "jax":
            return "call cutlass_py_attn.jax.append_to_cache, which returns the caches"
        return "pass another array"


class _Merge(_Call):
    """A call of `merge_states`."""

    first = "output_a"

    def __init__(self, given: Mapping[str, Any], backend: object, kernels: Kernels | None, max_seqlen_q: Any) -> None:
        super().__init__(given, backend, kernels)
        self._max_seqlen_q = max_seqlen_q
        self.key = type(self), type(max_seqlen_q), max_seqlen_q

    def problem(self, tensors: Mapping[str, Tensor]) -> MergeProblem:
        return MergeProblem(**{"output": _dense(tensors["output_a"]), **tensors}, max_seqlen_q=self._max_seqlen_q)

    def outputs(self, found: Mapping[str, arrays.Array]) -> tuple[str, ...]:
        return ("output",) if "output" in found else ()

    def new_outputs(self, found: Mapping[str, arrays.Array]) -> dict[str, Tensor]:
        results = {"output": _dense(found["output_a"].tensor), "logsumexp": _dense(found["logsumexp_a"].tensor)}
        return {name: tensor for name, tensor in results.items() if name not in found}

    def plan(self, problem: Any, arch: str) -> Plan:
        return plan_merge(problem, arch)


def _dense(tensor: Tensor) -> Tensor:
    return Tensor.contiguous(tensor.shape, tensor.dtype)


class _Prepared:
    """A validated problem, and its bound kernels by the ordinal of their GPU."""

    def __init__(self, problem: AppendProblem | MergeProblem) -> None:
        self.problem = problem
        self.bound: dict[int, Bound] = {}


_prepared: LruCache[_Prepared] = LruCache(MAX_PREPARED_CALLS)


def _launch(call: _Call, given_stream: object, key_of_call: Hashable | None) -> dict[str, Any]:
    """Launches the kernel of a call and returns its results by name.

    key_of_call: key under which the call is repeated; None if it is not repeatable.
    """
    lifetimes.release()
    stream = arrays.launch_stream(call.given.get(call.first), given_stream)
    found = call.read(stream)
    prepared = _prepare(call, found)
    problem, library = prepared.problem, found[call.first].library
    gpu = device_of(found[call.first].device)
    bound = None if problem.is_empty else prepared.bound.get(gpu.ordinal)
    if bound is None and not problem.is_empty:  # before anything is copied: there may be no kernel
        plan = call.plan(problem, portable_arch(gpu.compute_capability))
        bound = bind((call.kernels or default_kernels())(plan.build), plan, device=gpu.ordinal)
        prepared.bound[gpu.ordinal] = bound
    outputs = call.outputs(found)
    with gpu.current(), arrays.OutputArrays(library, gpu, stream, given_stream) as output_arrays:
        pointers = {
            name: output_arrays.use(name, array) if name in outputs else output_arrays.operand(name, array)
            for name, array in found.items()
        }
        new_outputs = call.new_outputs(found)
        for name, tensor in new_outputs.items():
            pointers[name] = output_arrays.allocate(name, tensor.shape, tensor.dtype)
        cleared = problem.output if isinstance(problem, MergeProblem) and problem.is_packed else None
        if cleared is not None:
            fill.clear(cleared, pointers["output"], stream)  # rows that belong to no sequence
        if bound is not None:
            bound(pointers, stream)
            if key_of_call is not None:
                repeated_calls.store(key_of_call, bound, found, outputs, new_outputs, cleared)
        return output_arrays.results()


def _prepare(call: _Call, found: Mapping[str, arrays.Array]) -> _Prepared:
    """Validates a call once per layout of its arrays. Whether arrays overlap depends on their addresses too."""
    layouts = tuple([(name, array[1:5], array.pointer % ROW_ALIGNMENT_BYTES) for name, array in found.items()])
    key = call.key, layouts, call.kernels
    try:
        prepared = None if call.refusals else _prepared.get(key)
    except TypeError:  # `kernels` without a hash
        return _Prepared(call.check(found))
    if prepared is not None and call.memory_refusals(found):
        prepared = None
    if prepared is None:
        prepared = _Prepared(call.check(found))
        _prepared.put(key, prepared)
    return prepared


def _on_host(call: _Call, stream: object) -> dict[str, Any]:
    """Returns the NumPy arrays of a call of the CPU backend, checked as for the GPU."""
    driver.stream_handle(stream)  # refused if it is no stream, as on the GPU
    check_is_numpy(call.given)
    call.check(call.read(0))
    return dict(call.given)


def _append_on_host(call: _Call, stream: object) -> None:
    """Stores the rows by the NumPy reference."""
    given = _on_host(call, stream)
    for name in ("key", "value"):
        serving.append(given[name], given[f"{name}_cache"], given["slots"], given.get(f"{name}_scale"))


def _merge_on_host(call: _Call, stream: object) -> dict[str, Any]:
    """Returns output and logsumexp of the NumPy reference, in the dtypes of the operands."""
    given = _on_host(call, stream)
    target = given.pop("output", None)
    output, logsumexp = serving.merge(**given)
    output = output.astype(given["output_a"].dtype if target is None else target.dtype)
    if target is not None:
        np.copyto(target, output)
        output = target
    return {"output": output, "logsumexp": logsumexp.astype(np.float32)}
