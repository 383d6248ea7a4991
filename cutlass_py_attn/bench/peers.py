"""Bench peers: torch's attention kernels on the same memory as ours, timed by CUDA graph replays.

Torch is no dependency: only this module imports it, and if it is not installed there are no peers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.bench.timing import Timed
from cutlass_py_attn.problem.masks import Full
from cutlass_py_attn.problem.spec import BATCH_BROADCAST, ProblemSpec

BACKENDS: Final = {
    "mem_efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
_MASKS: Final = {"full": 0, "causal": 1}  # custom_mask_type of torch's memory-efficient operator


@dataclass(frozen=True, slots=True)
class Call:
    """A torch forward: its leaves with gradients, the gradient of its output, and the context it runs in."""

    forward: Callable[[], Any]
    leaves: tuple[Any, ...]
    grad_output: Any
    backend: AbstractContextManager[Any]


def names(case: ProblemSpec) -> tuple[str, ...]:
    """Returns the peers with an operator for this case; only a run shows whether they have a kernel for it."""
    if _is_unmapped(case):
        return ()
    if case.sequences:
        return () if case.bias or case.dropout_p or case.mask.form == "local" else ("mem_efficient", "flash")
    if case.mask.form == "local":
        return () if case.bias or case.dropout_p else ("flash",)
    return ("mem_efficient", "flash") if case.dropout_p else tuple(BACKENDS)


def _is_unmapped(case: ProblemSpec) -> bool:
    """Whether the case has something that no call below passes to torch."""
    has_option = case.softcap or case.alibi or case.sinks or case.deterministic or case.scale is not None
    is_causal_of_rectangle = case.num_queries != case.num_keys and not isinstance(case.mask, Full)
    has_other_bias = case.bias not in ("", BATCH_BROADCAST)
    is_ragged = any(each.num_queries != each.num_keys or each.used_keys is not None for each in case.sequences)
    return bool(has_option or is_causal_of_rectangle or has_other_bias or is_ragged)


def measure(case: ProblemSpec, direction: str, arrays: Mapping[str, Any], timed: Timed) -> Iterator[tuple[str, float]]:
    """Yields (peer, milliseconds) for each peer that supports this case; stderr says why one does not.

    arrays: the tensors of the case by name, as objects with `__dlpack__`; cu_seqlens_q has the bits of int32.
    """
    try:
        torch: Any = importlib.import_module("torch")
        usable = torch.cuda.is_available()
    except ImportError:
        return
    for peer in names(case) if usable else ():
        try:
            yield peer, _milliseconds(torch, prepare(torch, peer, case, direction, arrays), direction, timed)
        except Exception as error:  # torch may raise anything, which must not end our own measurement
            reason = (str(error).splitlines() or [""])[0]
            sys.stderr.write(f"{case.name} {direction}: no {peer}: {type(error).__name__}: {reason}\n")
        finally:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def prepare(torch: Any, peer: str, case: ProblemSpec, direction: str, arrays: Mapping[str, Any]) -> Call:
    """Returns the call of that peer, with the case mapped to torch's arguments."""
    given = {name: torch.from_dlpack(array) for name, array in arrays.items()}
    if case.sequences:
        return _variable_length(torch, peer, case, direction, given)
    if case.mask.form == "local":
        return _window(torch, case, direction, given)
    return _dense(torch, peer, case, direction, given)


def _leaf(tensor: Any, direction: str) -> Any:
    return tensor.detach().requires_grad_(direction == "backward")


def _dense(torch: Any, peer: str, case: ProblemSpec, direction: str, given: Mapping[str, Any]) -> Call:
    """Calls scaled_dot_product_attention, whose axes are (batch, heads, rows, columns), on views of the same memory."""
    attention: Any = importlib.import_module("torch.nn.attention")
    group = case.shape.group
    grouped = group > 1 and peer != "mem_efficient"
    key, value = given["key"], given["value"]
    if group > 1 and not grouped:  # this backend has no grouped heads: the heads are repeated before the timing
        key, value = key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)
    leaves = [_leaf(tensor.transpose(1, 2), direction) for tensor in (given["query"], key, value)]
    bias = None
    if case.bias:
        bias = given["bias"] if case.bias_gradient == "sum" else given["bias"].expand(*case.shape.bias)
        bias = bias.detach().requires_grad_(direction == "backward" and bool(case.bias_gradient))

    def forward() -> Any:
        # Expanded here, so that the sum over the batch is a part of the backward.
        mask = bias.expand(*case.shape.bias) if bias is not None and case.bias_gradient == "sum" else bias
        return torch.nn.functional.scaled_dot_product_attention(
            *leaves[:3],
            attn_mask=mask,
            dropout_p=case.dropout_p,
            is_causal=case.mask.form == "causal",
            enable_gqa=grouped,
        )

    wanted = (*leaves, bias) if case.bias_gradient else tuple(leaves)
    backend = attention.sdpa_kernel(getattr(attention.SDPBackend, BACKENDS[peer]))
    return Call(forward, wanted, given["grad_output"].transpose(1, 2), backend)


def _window(torch: Any, case: ProblemSpec, direction: str, given: Mapping[str, Any]) -> Call:
    """Calls the flash operator itself: scaled_dot_product_attention has no window."""
    leaves = tuple(_leaf(given[name], direction) for name in ("query", "key", "value"))
    sizes = case.shape.num_queries, case.shape.num_keys

    def forward() -> Any:
        return torch.ops.aten._flash_attention_forward(
            *leaves, None, None, *sizes, 0.0, False, False,
            window_size_left=case.mask.left, window_size_right=case.mask.right,
        )[0]  # fmt: skip

    return Call(forward, leaves, given["grad_output"], nullcontext())


def _variable_length(torch: Any, peer: str, case: ProblemSpec, direction: str, given: Mapping[str, Any]) -> Call:
    """Calls the operators below scaled_dot_product_attention, which have cu_seqlens."""
    bounds = given["cu_seqlens_q"].view(torch.int32)
    sizes = case.shape.num_queries, case.shape.num_keys
    tensors = {name: given[name] for name in ("query", "key", "value", "grad_output")}
    if peer == "flash":  # its operands are (tokens, heads, columns)
        tensors = {name: tensor.squeeze(0) for name, tensor in tensors.items()}
    elif case.shape.group > 1:
        for name in ("key", "value"):
            tensors[name] = tensors[name].repeat_interleave(case.shape.group, dim=2)
    leaves = tuple(_leaf(tensors[name], direction) for name in ("query", "key", "value"))
    form = case.mask.form

    def flash() -> Any:
        operator = torch.ops.aten._flash_attention_forward
        return operator(*leaves, bounds, bounds, *sizes, 0.0, form == "causal", False)[0]

    def mem_efficient() -> Any:
        operator = torch.ops.aten._efficient_attention_forward
        saved = direction == "backward"  # the logsumexp, which only a backward needs
        return operator(*leaves, None, bounds, bounds, *sizes, 0.0, _MASKS[form], saved)[0]

    return Call(flash if peer == "flash" else mem_efficient, leaves, tensors["grad_output"], nullcontext())


def _milliseconds(torch: Any, call: Call, direction: str, timed: Timed) -> float:
    stream = torch.cuda.Stream()

    def backward(output: Any) -> Any:
        return torch.autograd.grad(output, call.leaves, call.grad_output, retain_graph=True)

    with call.backend, torch.cuda.stream(stream):
        output = call.forward()  # outside a capture: a first run may allocate and load kernels
        if direction == "backward":
            backward(output)
        stream.synchronize()
        # A captured forward keeps dropout's seed on the device, an eager one on the host: a captured backward
        # needs a captured forward.
        first, output = _captured(torch, stream, call.forward)
        first.replay()
        if direction == "forward":
            return timed(first.replay, int(stream.cuda_stream))
        graph, gradients = _captured(torch, stream, lambda: backward(output))
        found = timed(graph.replay, int(stream.cuda_stream))
        del gradients  # the graph writes to them until here
    return found


def _captured(torch: Any, stream: Any, launch: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns a graph of what `launch` launches on the stream, and its results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = launch()
    return graph, kept
