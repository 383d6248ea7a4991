"""What an inference engine needs beside attention: new rows for a paged cache, and the merge of partial results.

append_to_cache(key, value, key_cache, value_cache, slots)
output, logsumexp = merge_states(output_a, logsumexp_a, output_b, logsumexp_b)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cutlass_py_attn.api.calls import Kernels, Request, launch, problem_on_host, repeat
from cutlass_py_attn.api.options import backend_refusals, kernels_refusals
from cutlass_py_attn.api.unknown_options import refuses_unknown_options
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.append import CACHES, SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.reference import serving
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime.arrays import Array


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
    name = _Append, backend, kernels, key_scale is None, value_scale is None
    key_of_call, repeated = repeat(name, (*given.values(),), {}, stream)
    if repeated is not None:
        return
    request = _Append(given, backend, kernels)
    if request.is_on_host:
        _append_on_host(request, stream)
    else:
        launch(request, stream, key_of_call)


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
    name = _Merge, backend, kernels, type(max_seqlen_q), max_seqlen_q, *given
    key_of_call, repeated = repeat(name, (*given.values(),), {}, stream)
    if repeated is not None:
        return (repeated[0], repeated[1]) if out is None else (out, repeated[0])
    number = None if max_seqlen_q is None else integer_of(max_seqlen_q)
    request = _Merge(given, backend, kernels, max_seqlen_q if number is None else number)
    results = _merge_on_host(request, stream) if request.is_on_host else launch(request, stream, key_of_call)
    return results["output"], results["logsumexp"]


class _Rows(Request):
    """A call on rows, without attention. arrays: None for one that is missing.

    is_on_host: whether the CPU backend computes it. refusals: why the options are refused.
    """

    def __init__(self, arrays: Mapping[str, Any], backend: object, kernels: Kernels | None, *key: object) -> None:
        self.arrays = {name: array for name, array in arrays.items() if array is not None}
        self.kernels = kernels
        self.key = type(self), kernels, *key
        self.refusals = [
            refuse(name, None, "must be an array", "pass it") for name, array in arrays.items() if array is None
        ]
        self.has_all_arrays = not self.refusals
        self.refusals += [*backend_refusals(backend), *kernels_refusals(kernels)]
        self.is_on_host = isinstance(backend, str) and backend == "reference"

    def read(self, stream: int) -> dict[str, Array]:
        """Reads the arrays. NotSupported lists those that are missing or unreadable, and wrong options."""
        unreadable: list[Refusal] = []
        inputs: dict[str, Array] = {}
        try:
            inputs = super().read(stream)
        except NotSupported as error:
            unreadable += error.refusals
        if unreadable or not self.has_all_arrays:
            raise NotSupported([*self.refusals, *unreadable])
        return inputs

    def must_validate(self, inputs: Mapping[str, Array]) -> bool:
        return bool(self.refusals)

    def expect_none(self, problem: AppendProblem | MergeProblem, of_outputs: Sequence[Refusal]) -> None:
        """Raises NotSupported with every reason to refuse the options, the problem and the arrays for results."""
        if refusals := [*self.refusals, *problem.refusals(), *of_outputs]:
            raise NotSupported(refusals)


class _Append(_Rows):
    """A call of `append_to_cache`."""

    first = "key"

    def validate(
        self, inputs: Mapping[str, Array], of_outputs: Sequence[Refusal]
    ) -> tuple[AppendProblem, dict[str, Tensor]]:
        problem = AppendProblem(**{name: array.tensor for name, array in inputs.items()})
        self.expect_none(problem, of_outputs)
        return problem, {}

    def written(self, inputs: Mapping[str, Array]) -> tuple[str, ...]:
        return (*CACHES, *(name for name in SCALES if name in inputs and len(inputs[name].shape) > 2))

    def remedy(self, inputs: Mapping[str, Array]) -> str:
        if inputs["key_cache"].library == "jax":
            return "call cutlass_py_attn.jax.append_to_cache, which returns the caches"
        return "pass another array"


class _Merge(_Rows):
    """A call of `merge_states`."""

    first = "output_a"

    def __init__(self, arrays: Mapping[str, Any], backend: object, kernels: Kernels | None, max_seqlen_q: Any) -> None:
        super().__init__(arrays, backend, kernels, type(max_seqlen_q), max_seqlen_q)
        self._max_seqlen_q = max_seqlen_q

    def validate(
        self, inputs: Mapping[str, Array], of_outputs: Sequence[Refusal]
    ) -> tuple[MergeProblem, dict[str, Tensor]]:
        tensors = {name: array.tensor for name, array in inputs.items()}
        results = {
            name: Tensor.contiguous(tensors[source].shape, tensors[source].dtype)
            for name, source in {"output": "output_a", "logsumexp": "logsumexp_a"}.items()
        }
        output = tensors.pop("output", results["output"])
        problem = MergeProblem(**tensors, output=output, max_seqlen_q=self._max_seqlen_q)
        self.expect_none(problem, of_outputs)
        return problem, {name: tensor for name, tensor in results.items() if name not in inputs}

    def written(self, inputs: Mapping[str, Array]) -> tuple[str, ...]:
        return ("output",) if "output" in inputs else ()


def _append_on_host(request: _Append, stream: object) -> None:
    """Stores the rows by the NumPy reference."""
    problem_on_host(request, stream)
    given = request.arrays
    for name in ("key", "value"):
        serving.append(given[name], given[f"{name}_cache"], given["slots"], given.get(f"{name}_scale"))


def _merge_on_host(request: _Merge, stream: object) -> dict[str, Any]:
    """Returns output and logsumexp of the NumPy reference, in the dtypes of the operands."""
    problem_on_host(request, stream)
    given = dict(request.arrays)
    target = given.pop("output", None)
    output, logsumexp = serving.merge(**given)
    output = output.astype(given["output_a"].dtype if target is None else target.dtype)
    if target is not None:
        np.copyto(target, output)
        output = target
    return {"output": output, "logsumexp": logsumexp.astype(np.float32)}
