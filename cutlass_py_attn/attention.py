"""Attention: the two functions most users need; read this page first.

output, logsumexp = attention_forward(query, key, value, mask=Causal())
gradients = attention_backward(grad_output, query, key, value, output, logsumexp, mask=Causal())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Unpack

from cutlass_py_attn import arrays, driver, fill, recall
from cutlass_py_attn.abi import SEED
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NoDevice, NotSupported
from cutlass_py_attn.launch import Bound, bind_problem
from cutlass_py_attn.options import BackwardOptions, ForwardOptions, Settings, settings
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import F32_BYTES, ITEM_BYTES, OPERANDS, ROW_ALIGNMENT_BYTES, Problem, Shape, Tensor

KEPT_KERNELS: Final = 64  # bound problems that stay ready; a shape, stride or scale more makes another


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients with the shapes and dtype of what they belong to, in the caller's library; None where not asked
    for. sinks is float32."""

    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None
    sinks: Any = None


def attention_forward(query: Any, key: Any, value: Any, **options: Unpack[ForwardOptions]) -> tuple[Any, Any]:
    """softmax(scale Q K^T + bias, masked) V and the logarithm of the softmax's denominator.

    query [B, Mq, H, D], key [B, Mk, Hk, D], value [B, Mk, Hk, Dv]: float16, bfloat16 or float32, all of one
    dtype, last axis contiguous, Hk a divisor of H; CUDA arrays of any library, read in place, or NumPy arrays,
    copied over. Options: see ForwardOptions.

    Returns output [B, Mq, H, Dv] in the same dtype and logsumexp float32 [B, H, ceil32(Mq)] (natural
    logarithm, +inf in the padding; -inf and output 0 for a row that sees no key), in query's library. With
    sequences, B of logsumexp counts them, Mq is max_seqlen_q, and each row is padded from its sequence's length on.
    Device results are ready in the order of `stream`, which is not waited for, save for JAX; NumPy results
    are complete.

    NotSupported lists every objection before anything is launched; NoDevice: no GPU; CompileError, Stale:
    no kernel; DriverError: a driver call failed, device memory run out among them.
    """
    stream = options.pop("stream", None)
    call, found = recall.again("forward", (query, key, value), options, stream)
    if found is not None:
        return found[0], found[1]
    chosen = settings(options, ForwardOptions)
    operands = {"query": query, "key": key, "value": value, **chosen.arrays()}
    if chosen.backend == "reference":
        from cutlass_py_attn import on_cpu

        return on_cpu.forward(operands, chosen)
    given = {} if chosen.out is None else {"output": chosen.out}
    results = _on_gpu(call, "forward", operands, given, chosen, driver.stream_handle(stream))
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
    """Gradients of query, key and value, and of bias and sinks where asked for, from that of the forward's output.

    grad_output and output [B, Mq, H, Dv]; query, key and value as the forward had them; logsumexp float32
    [B, H, ceil32(Mq)] as the forward gave it. Options: see BackwardOptions; those that the forward had must be the
    same. The gradient of a bias is summed over its axes of size 1. Same dtypes, libraries and errors as
    `attention_forward`.
    """
    stream = options.pop("stream", None)
    given_arrays = grad_output, query, key, value, output, logsumexp
    call, found = recall.again("backward", given_arrays, options, stream)
    if found is not None:
        names = options.get("gradients")
        return Gradients(*found) if names is None else Gradients(**dict(zip(names, found, strict=True)))
    chosen = settings(options, BackwardOptions)
    operands = {
        "grad_output": grad_output,
        "query": query,
        "key": key,
        "value": value,
        "output": output,
        "logsumexp": logsumexp,
        **chosen.arrays(),
    }
    if chosen.backend == "reference":
        from cutlass_py_attn import on_cpu

        return on_cpu.backward(operands, chosen)
    out = Gradients() if chosen.out is None else chosen.out
    given = {f"grad_{name}": array for name in chosen.gradients if (array := getattr(out, name)) is not None}
    results = _on_gpu(call, "backward", operands, given, chosen, driver.stream_handle(stream))
    return Gradients(**{name: results[f"grad_{name}"] for name in chosen.gradients})


def problem_of(
    direction: str, taken: Mapping[str, arrays.Array], chosen: Settings
) -> tuple[Problem, dict[str, Tensor]]:
    """The checked Problem of these arrays, and the results that are still to be made, by name.

    NotSupported lists every objection.
    """
    tensors = {name: array.tensor for name, array in taken.items()}
    sequences, reasons = None, []
    if chosen.sequences is not None:
        reasons += _bounds_objections(tensors)
        sequences = chosen.sequences.sequences(max(tensors["cu_seqlens_q"].shape[0] - 1, 0) if not reasons else 0)
    operands = {name: tensor for name, tensor in tensors.items() if name in Problem.__dataclass_fields__}
    problem = Problem(
        direction,
        **{"output": tensors["query"], **operands},
        mask=chosen.mask,
        scale=chosen.scale,
        softcap=chosen.softcap,
        dropout_p=chosen.dropout_p,
        philox_on_device=chosen.philox_on_device,
        sequences=sequences,
        deterministic=chosen.deterministic,
        num_splits_key=chosen.num_splits_key,
    )
    # Wrong ranks are objected to below, before any size is looked at.
    ranks = [len(tensors[name].shape) for name in OPERANDS]
    shape = problem.shape if ranks == [4, 4, 4] else Shape(0, 0, 0, 0, 0, 0)
    names = ("output",) if direction == "forward" else tuple(f"grad_{name}" for name in chosen.gradients)
    made = {name: _result(name, shape, tensors) for name in names if name not in tensors}
    if chosen.packed:
        made |= _packed(shape, tensors["query"].dtype)
        reasons += _packing_objections(shape, tensors)
    problem = problem.replace(**made)
    # The results follow from the operands: an objection to one repeats what is said of its operand.
    reasons = [*(text for text in problem.reasons() if text.split()[0] not in made), *reasons]
    reasons += _philox_objections(tensors)
    if "logsumexp" in tensors and shape.head_dim:
        reasons += _logsumexp_objections(shape, tensors["logsumexp"])
    if chosen.sequences is not None and shape.tokens is not None:
        reasons += chosen.sequences.objections(shape.tokens)
    if reasons:
        raise NotSupported(reasons)
    return problem, made


def _result(name: str, shape: Shape, tensors: Mapping[str, Tensor]) -> Tensor:
    """A dense result; that of bias or sinks is like them."""
    role = name.removeprefix("grad_")
    if role in ("bias", "sinks"):
        return Tensor.contiguous(tensors[role].shape, tensors[role].dtype)
    return Tensor.contiguous(shape.of(name), tensors["query"].dtype)


def _packed(shape: Shape, dtype: str) -> dict[str, Tensor]:
    """The gradients of query, key and value as slices of one [B, M, 3, H, D] array."""
    batch, rows, heads, columns = shape.of("query")
    row = heads * columns
    strides = 3 * rows * row, 3 * row, columns, 1
    step = row * ITEM_BYTES.get(dtype, 1)
    alignments = (ROW_ALIGNMENT_BYTES, *(math.gcd(ROW_ALIGNMENT_BYTES, i * step) for i in (1, 2)))
    return {
        f"grad_{name}": Tensor((batch, rows, heads, columns), strides, dtype, alignment)
        for name, alignment in zip(OPERANDS, alignments, strict=True)
    }


def _packing_objections(shape: Shape, tensors: Mapping[str, Tensor]) -> list[str]:
    given = [f"grad_{name}" for name in OPERANDS if f"grad_{name}" in tensors]
    reasons = [f"packed with out for {', '.join(given)}: must be one of the two; leave one out"] if given else []
    if not shape.of("query") == shape.of("key") == shape.of("value"):
        reasons.append(
            f"packed with query {shape.of('query')}, key {shape.of('key')} and value {shape.of('value')}: "
            "must have the same shape; leave packed False"
        )
    return reasons


def _bounds_objections(tensors: Mapping[str, Tensor]) -> list[str]:
    found = []
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        tensor = tensors.get(name)
        if tensor is None:
            continue
        entries = tensors["cu_seqlens_q"].shape[0] if tensors["cu_seqlens_q"].shape else 0
        wanted = (entries - 1,) if name == "seqused_k" else (max(entries, 1),)
        dense = len(tensor.shape) == 1 and (tensor.strides == (1,) or tensor.shape[0] <= 1)
        if tensor.dtype != "int32" or tensor.shape != wanted or not dense:
            found.append(
                f"{name} has shape {tensor.shape}, strides {tensor.strides} and dtype {tensor.dtype}: must be a "
                f"contiguous int32 array of shape {wanted}; convert it"
            )
    return found


def _logsumexp_objections(shape: Shape, found: Tensor) -> list[str]:
    wanted = Tensor.contiguous(shape.logsumexp, "float32")
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return [
            f"logsumexp has shape {found.shape} and dtype {found.dtype}: must be {wanted.shape} float32, "
            "as the forward gives it"
        ]
    if 0 not in found.shape and (found.steps != wanted.steps or found.alignment < F32_BYTES):
        return ["logsumexp is strided or misaligned: must be contiguous and 4-byte aligned; copy it"]
    return []


def _philox_objections(tensors: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name} has shape {tensors[name].shape} and dtype {tensors[name].dtype}: must be one int64; convert it"
        for name in SEED
        if name in tensors and (tensors[name].dtype != "int64" or math.prod(tensors[name].shape) != 1)
    ]


def _on_gpu(
    call: Hashable | None,
    direction: str,
    operands: Mapping[str, object],
    given: Mapping[str, object],
    chosen: Settings,
    stream: int,
) -> dict[str, Any]:
    """Launch, and every result by name; `given` are arrays to write results to; `call` is what `recall` knows it by."""
    taken = arrays.take({**operands, **given}, stream)
    query = taken["query"]
    gpu = _device(query.device)
    ready = _ready(direction, taken, chosen, gpu.ordinal)
    problem = ready.problem
    with gpu.current(), arrays.Exchange(query.library, gpu, stream) as exchange:
        pointers = {
            name: exchange.into(name, array) if name in given else exchange.address(name, array)
            for name, array in taken.items()
        }
        if chosen.packed:
            pointers |= exchange.empty_slices(*ready.packed)
        for name, tensor in ready.made.items():
            pointers[name] = exchange.empty(name, tensor.shape, tensor.dtype)
        if ready.is_empty or problem.sequences is not None:
            fill.fill(problem, pointers, stream)
        if not ready.is_empty:
            if problem.dropout_p and not problem.philox_on_device and chosen.dropout is not None:
                pointers |= {"philox_seed": chosen.dropout.philox_seed, "philox_offset": chosen.dropout.philox_offset}
            if ready.bound is None:
                ready.bound = _bound(problem, gpu.ordinal, chosen.kernels)
            ready.bound(pointers, stream)
            if call is not None and not chosen.packed:
                recall.remember(call, ready.bound, taken, ready.made)
        return exchange.results()


def _device(ordinal: int | None) -> driver.Device:
    """The operands' GPU; for host operands the current one. NoDevice names the way without."""
    try:
        return driver.device(driver.current_ordinal() if ordinal is None else ordinal)
    except NoDevice as error:
        raise NoDevice(f'{error}; backend="reference" computes on the CPU in NumPy float64') from error


class _Ready:
    """A problem that was judged, the results to be made for it, and its kernels once they are bound.

    made: by name, without those in `packed`, the names and shape of the one array that they are slices of.
    """

    def __init__(self, problem: Problem, made: Mapping[str, Tensor], packs: bool) -> None:
        self.problem = problem
        self.made = dict(made)
        if problem.direction == "forward":
            self.made["logsumexp"] = Tensor.contiguous(problem.shape.logsumexp, "float32")
        batch, rows, heads, columns = problem.shape.of("query")
        names = tuple(f"grad_{name}" for name in OPERANDS)
        self.packed = names, (batch, rows, 3, heads, columns), problem.dtype
        for name in names if packs else ():
            del self.made[name]
        self.is_empty = problem.is_empty
        self.bound: Bound | None = None


_kept: dict[tuple[object, ...], _Ready] = {}


def _ready(direction: str, taken: Mapping[str, arrays.Array], chosen: Settings, ordinal: int) -> _Ready:
    """Judge and plan; calls with operands that lie alike, and equal options, come past here once.

    Lengths in NumPy are judged by their values, each time.
    """
    lies = tuple([(name, array[1:5], array.pointer % ROW_ALIGNMENT_BYTES) for name, array in taken.items()])
    key = direction, ordinal, lies, chosen.key
    found = _kept.get(key)
    if found is None or (chosen.sequences is not None and taken["query"].device is None):
        found = _Ready(*problem_of(direction, taken, chosen), chosen.packed)
        while len(_kept) >= KEPT_KERNELS:
            _kept.pop(next(iter(_kept)), None)
        _kept[key] = found
    return found


def _bound(problem: Problem, ordinal: int, kernels: Callable[[Build], Artifact] | None) -> Bound:
    """Plan, compile or fetch, and bind."""
    return bind_problem(problem, kernels or default_kernels(), ordinal)


def default_kernels() -> Callable[[Build], Artifact]:
    """What compiles, and keeps on disk; imports the compiler."""
    from cutlass_py_attn.compiler import artifact_for

    return artifact_for
