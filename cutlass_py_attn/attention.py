"""Attention: the two functions most users need; read this page first.

output, logsumexp = attention_forward(query, key, value, mask=Causal())
gradients = attention_backward(grad_output, query, key, value, output, logsumexp, mask=Causal())
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict, Unpack

import numpy as np

from cutlass_py_attn import arrays, driver, planner
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NoDevice, NotSupported
from cutlass_py_attn.launch import Bound, bind, generic_arch
from cutlass_py_attn.masks import Full, Mask
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import Problem, Shape, Tensor

BACKENDS: Final = ("auto", "gpu", "reference")
KEPT_KERNELS: Final = 64  # bound problems that stay ready; a shape, stride or scale more makes another
_RESULTS: Final = {"forward": ("output",), "backward": ("grad_query", "grad_key", "grad_value")}
_INFINITY: Final = 0x7F800000  # float32 bits
_MINUS_INFINITY: Final = 0xFF800000
_F32_BYTES: Final = 4


class ForwardOptions(TypedDict, total=False):
    """Options of `attention_forward`.

    mask: who sees whom; Full() when left out.
    scale: factor of Q K^T; None for 1 / sqrt(head_dim).
    stream: None is the legacy default stream; else a CUstream handle as int, or a stream object of CuPy,
        torch, Numba or cuda.core.
    backend: "auto" and "gpu" compute on the GPU; "reference" in NumPy float64 on the CPU, slowly. Neither
        ever stands in for the other.
    kernels: gives the Artifact of a Build, such as artifact.Folder(path); None compiles, and keeps on disk.
    """

    mask: Mask
    scale: float | None
    stream: object
    backend: str
    kernels: Callable[[Build], Artifact] | None


class BackwardOptions(ForwardOptions, total=False):
    """Options of `attention_backward`.

    deterministic: the query gradient is the same in every bit from run to run; slower.
    num_splits_key: blocks that share one (batch, head); None lets the plan choose.
    """

    deterministic: bool
    num_splits_key: int | None


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients with the shapes and dtype of query, key and value, in the caller's library."""

    query: Any
    key: Any
    value: Any


@dataclass(frozen=True, slots=True)
class _Settings:
    """All options with their defaults."""

    mask: Mask = field(default_factory=Full)
    scale: float | None = None
    stream: object = None
    backend: str = "auto"
    kernels: Callable[[Build], Artifact] | None = None
    deterministic: bool = False
    num_splits_key: int | None = None


def attention_forward(query: Any, key: Any, value: Any, **options: Unpack[ForwardOptions]) -> tuple[Any, Any]:
    """softmax(scale Q K^T + mask) V and the logarithm of the softmax's denominator.

    query [B, Mq, H, D], key [B, Mk, H, D], value [B, Mk, H, Dv]: float16, bfloat16 or float32, all of one
    dtype, last axis contiguous; CUDA arrays of any library, read in place, or NumPy arrays, copied over.

    Returns output [B, Mq, H, Dv] in the same dtype and logsumexp float32 [B, H, ceil32(Mq)] (natural
    logarithm, +inf in the padding; -inf and output 0 for a row that sees no key), in query's library.
    Device results are ready in the order of `stream`, which is not waited for, save for JAX; NumPy results
    are complete.

    NotSupported lists every objection before anything is launched; NoDevice: no GPU; CompileError, Stale:
    no kernel; DriverError: a driver call failed, device memory run out among them.
    """
    settings = _settings(options, ForwardOptions)
    operands = {"query": query, "key": key, "value": value}
    if settings.backend == "reference":
        return _reference_forward(operands, settings)
    results = _on_gpu("forward", operands, settings)
    return results["output"], results["logsumexp"]


def attention_backward(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    logsumexp: Any,
    **options: Unpack[BackwardOptions],
) -> Gradients:
    """Gradients of query, key and value, from the gradient of the forward's output.

    grad_output and output [B, Mq, H, Dv]; query, key and value as the forward had them; logsumexp float32
    [B, H, ceil32(Mq)] as the forward gave it. Same dtypes, libraries and errors as `attention_forward`.
    """
    settings = _settings(options, BackwardOptions)
    operands = {
        "grad_output": grad_output,
        "query": query,
        "key": key,
        "value": value,
        "output": output,
        "logsumexp": logsumexp,
    }
    if settings.backend == "reference":
        return _reference_backward(operands, settings)
    results = _on_gpu("backward", operands, settings)
    return Gradients(results["grad_query"], results["grad_key"], results["grad_value"])


def _settings(options: Mapping[str, Any], allowed: type) -> _Settings:
    """The options with defaults; NotSupported lists every unknown name and wrong value."""
    names = allowed.__annotations__
    reasons = [
        f"option {name!r} is unknown: must be one of {', '.join(names)}; check the spelling"
        for name in options
        if name not in names
    ]
    mask, backend = options.get("mask"), options.get("backend", "auto")
    if "mask" in options and not isinstance(mask, Mask):
        reasons.append(f"mask = {mask!r}: must be a mask object such as Full() or Causal(); make one")
    if backend not in BACKENDS:
        reasons.append(f"backend = {backend!r}: must be one of {', '.join(BACKENDS)}")
    if reasons:
        raise NotSupported(reasons)
    return _Settings(**options)


def _problem(direction: str, taken: Mapping[str, arrays.Array], settings: _Settings) -> Problem:
    """The checked Problem of these operands; the results are dense."""
    tensors = {name: array.tensor for name, array in taken.items() if name != "logsumexp"}
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    # Wrong ranks are objected to below, before any size is looked at.
    shape = Shape(0, 0, 0, 0, 0, 0)
    if len(query.shape) == len(key.shape) == len(value.shape) == 4:
        batch, num_queries, num_heads, head_dim = query.shape
        shape = Shape(batch, num_queries, key.shape[1], num_heads, head_dim, value.shape[3])
    for name in _RESULTS[direction]:
        tensors[name] = Tensor.contiguous(shape.of(name), query.dtype)
    problem = Problem(
        direction,
        **tensors,
        mask=settings.mask,
        scale=settings.scale,
        deterministic=settings.deterministic,
        num_splits_key=settings.num_splits_key,
    )
    # The results follow from the operands: an objection to one repeats what is said of its operand.
    reasons = [text for text in problem.reasons() if text.split()[0] not in _RESULTS[direction]]
    if "logsumexp" in taken and shape.head_dim:
        reasons += _logsumexp_objections(shape, taken["logsumexp"].tensor)
    if reasons:
        raise NotSupported(reasons)
    return problem


def _logsumexp_objections(shape: Shape, found: Tensor) -> list[str]:
    wanted = Tensor.contiguous(shape.logsumexp, "float32")
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return [
            f"logsumexp has shape {found.shape} and dtype {found.dtype}: must be {wanted.shape} float32, "
            "as the forward gives it"
        ]
    if 0 not in found.shape and found != wanted:
        return ["logsumexp is strided or misaligned: must be contiguous and 16-byte aligned; copy it"]
    return []


def _on_gpu(direction: str, operands: Mapping[str, object], settings: _Settings) -> dict[str, Any]:
    stream = driver.stream_handle(settings.stream)
    taken = arrays.take(operands, stream)
    problem = _problem(direction, taken, settings)
    gpu = _device(taken["query"].device)
    with gpu.current(), arrays.Exchange(taken["query"].library, gpu, stream) as exchange:
        pointers = {name: exchange.address(name, array) for name, array in taken.items()}
        results = {name: problem.tensors()[name] for name in _RESULTS[direction]}
        if direction == "forward":
            results["logsumexp"] = Tensor.contiguous(problem.shape.logsumexp, "float32")
        for name, tensor in results.items():
            pointers[name] = exchange.empty(name, tensor.shape, tensor.dtype)
        if problem.is_empty:
            _fill_empty(problem, results, pointers, stream)
        else:
            _bound(problem, gpu.ordinal, settings.kernels)(pointers, stream)
        return exchange.results()


def _device(ordinal: int | None) -> driver.Device:
    """The operands' GPU; for host operands the current one. NoDevice names the way without."""
    try:
        return driver.device(driver.current_ordinal() if ordinal is None else ordinal)
    except NoDevice as error:
        raise NoDevice(f'{error}; backend="reference" computes on the CPU in NumPy float64') from error


@functools.lru_cache(maxsize=KEPT_KERNELS)
def _bound(problem: Problem, ordinal: int, kernels: Callable[[Build], Artifact] | None) -> Bound:
    """Plan, compile or fetch, and bind; repeated calls with equal problems come here once."""
    gpu = driver.device(ordinal)
    arch = generic_arch(gpu.compute_capability)
    if problem.direction == "forward":
        plan = planner.plan_forward(problem, arch)
    else:
        plan = planner.plan_backward(problem, arch, gpu.num_sms)
    if kernels is None:
        from cutlass_py_attn.compiler import artifact_for

        kernels = artifact_for
    return bind(kernels(plan.build), plan, problem, ordinal)


def _fill_empty(problem: Problem, results: Mapping[str, Tensor], pointers: Mapping[str, int], stream: int) -> None:
    """Without queries or keys nothing is launched: zeros, and a logsumexp of -inf with +inf padding."""
    for name, tensor in results.items():
        size = int(np.prod(tensor.shape)) * arrays.numpy_dtype(tensor.dtype).itemsize
        if size and name != "logsumexp":
            driver.clear(pointers[name], size, stream)
    batch, num_heads, padded = problem.shape.logsumexp
    rows, address = batch * num_heads, pointers["logsumexp"]
    if "logsumexp" in results and rows * padded:
        driver.fill_words(address, padded * _F32_BYTES, _INFINITY, padded, rows, stream)
        driver.fill_words(address, padded * _F32_BYTES, _MINUS_INFINITY, problem.shape.num_queries, rows, stream)


def _on_host(direction: str, operands: Mapping[str, Any], settings: _Settings) -> Problem:
    """The same judgement as for the GPU, so that what the reference computes the GPU takes too."""
    others = [name for name, value in operands.items() if not isinstance(value, np.ndarray)]
    if others:
        raise NotSupported(f"{', '.join(others)}: must be NumPy arrays for backend='reference'; copy them to the host")
    return _problem(direction, arrays.take(operands, 0), settings)


def _reference_forward(operands: Mapping[str, Any], settings: _Settings) -> tuple[Any, Any]:
    from cutlass_py_attn import reference

    problem = _on_host("forward", operands, settings)
    output, logsumexp = reference.forward(**operands, mask=problem.mask, scale=problem.scale_value)
    return output.astype(operands["query"].dtype), logsumexp.astype(np.float32)


def _reference_backward(operands: Mapping[str, Any], settings: _Settings) -> Gradients:
    from cutlass_py_attn import reference

    problem = _on_host("backward", operands, settings)
    found = reference.backward(*operands.values(), mask=problem.mask, scale=problem.scale_value)
    return Gradients(*(gradient.astype(operands["query"].dtype) for gradient in found))
