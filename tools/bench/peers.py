"""Bench peers: torch's kernels, FlashAttention-4 and cuDNN on the same memory as ours, timed by CUDA graph replays.

Torch is no dependency: if it is not installed there are no peers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cutlass_py_attn.bench.harness import Measurement
from cutlass_py_attn.bench.timing import Timed
from cutlass_py_attn.problem.masks import Full
from cutlass_py_attn.problem.spec import BATCH_BROADCAST, ProblemSpec
from cutlass_py_attn.problem.tensors import FLOAT8
from tools.bench import cudnn_frontend, flash4

BACKENDS: Final = {
    "mem_efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
_MASKS: Final = {"full": 0, "causal": 1}  # custom_mask_type of torch's memory-efficient operator


FLASH4: Final = "fa4"
CUDNN_FRONTEND: Final = "cudnn_frontend"
PACKAGES: Final = {FLASH4: flash4, CUDNN_FRONTEND: cudnn_frontend}  # peers that torch does not call
WARM_UP_CALLS: Final = 2  # before a capture: a first run may allocate, compile and load kernels


class Call(Protocol):
    """A peer's forward and backward of one case, and the context that both run in."""

    @property
    def backend(self) -> AbstractContextManager[Any]:
        """Chooses the kernels."""
        ...

    def forward(self) -> Any:
        """Launches the forward; returns what the backward needs."""
        ...

    def backward(self, forwarded: Any) -> Any:
        """Launches the backward of a forward; returns the gradients."""
        ...


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A torch forward, and its backward by autograd: the leaves that get gradients, and the output's gradient."""

    forward: Callable[[], Any]
    leaves: tuple[Any, ...]
    grad_output: Any
    backend: AbstractContextManager[Any]

    def backward(self, forwarded: Any) -> Any:
        """Returns the gradients of the leaves; may be called again with the same output."""
        autograd: Any = importlib.import_module("torch.autograd")
        return autograd.grad(forwarded, self.leaves, self.grad_output, retain_graph=True)


def names(case: ProblemSpec) -> tuple[str, ...]:
    """Returns the peers with an operator for this case; only a run shows whether they have a kernel for it."""
    called = (name for name, package in PACKAGES.items() if package.is_installed() and package.takes(case))
    return (*_torch_names(case), *called)


def _torch_names(case: ProblemSpec) -> tuple[str, ...]:
    if _is_unmapped(case):
        return ()
    if case.sequences:
        return () if case.bias or case.dropout_p or case.mask.form.has_left else ("mem_efficient", "flash")
    if case.mask.form.has_left:
        return () if case.bias or case.dropout_p else ("flash",)
    return ("mem_efficient", "flash") if case.dropout_p else tuple(BACKENDS)


def _is_unmapped(case: ProblemSpec) -> bool:
    """Whether the case has something that no call below passes to torch."""
    is_cache = case.page_size or case.value_in_key or case.e4m3_cache
    has_option = (
        case.dtype == FLOAT8 or case.softcap or case.alibi or case.sinks or case.deterministic or case.scale is not None
    )
    is_causal_of_rectangle = case.num_queries != case.num_keys and not isinstance(case.mask, Full)
    has_other_bias = case.bias not in ("", BATCH_BROADCAST)
    is_ragged = any(each.num_queries != each.num_keys or each.used_keys is not None for each in case.sequences)
    return bool(is_cache or case.has_array_mask or has_option or is_causal_of_rectangle or has_other_bias or is_ragged)


def usable_torch() -> Any:
    """Returns the module torch; None if it is not installed or sees no GPU."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def compile_ahead(
    cases: Iterable[tuple[ProblemSpec, Sequence[str]]], compute_capability: tuple[int, int], multiprocessors: int
) -> None:
    """Compiles what peers compile at a first call, so that no measurement waits for it; stderr lists what failed."""
    if usable_torch() is not None and flash4.is_installed():
        for message in flash4.compile_ahead(cases, compute_capability, multiprocessors):
            sys.stderr.write(f"{FLASH4} does not compile {message}\n")


def versions(torch: Any) -> dict[str, str]:
    """Returns what runs behind each peer's name, such as "cuDNN 9.19.0 of torch 2.11.0"."""
    attention: Any = importlib.import_module("torch.nn.attention")
    chosen = getattr(attention, "current_flash_attention_impl", lambda: None)() or "FA2"
    flash = f"FlashAttention-{chosen.removeprefix('FA')}"
    number = torch.backends.cudnn.version() or 0
    cudnn = f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}"
    kinds = {"mem_efficient": "memory-efficient attention", "flash": flash, "cudnn": cudnn}
    found = {peer: f"{kind} of torch {torch.__version__}" for peer, kind in kinds.items()}
    return {
        **found,
        FLASH4: f"FlashAttention-4 {flash4.version()}".rstrip(),
        CUDNN_FRONTEND: f"{cudnn} through cudnn-frontend {cudnn_frontend.version()}".rstrip(),
    }


def measure(
    case: ProblemSpec, direction: str, arrays: Mapping[str, Any], timed: Timed, calls: int = 1
) -> Iterator[Measurement]:
    """Yields the time of one call of each peer that has an operator for this case; stderr says why one has no time.

    arrays: the tensors of the case by name, as objects with `__dlpack__`; cu_seqlens, page_table and seqused_k have the
    bits of int32.
    calls: number of calls in the CUDA graph that `timed` replays.
    """
    torch = usable_torch()
    if torch is None:
        return
    known = versions(torch)
    for peer in names(case):
        try:
            call = prepare(torch, peer, case, direction, arrays)
            yield Measurement(peer, known[peer], _milliseconds(torch, call, direction, timed, calls))
        except Exception as error:  # a peer may raise anything, which must not end our own measurement
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            sys.stderr.write(f"{case.name} {direction}: no {peer}: {reason}\n")
            yield Measurement(peer, known[peer], None, reason)
        finally:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def prepare(torch: Any, peer: str, case: ProblemSpec, direction: str, arrays: Mapping[str, Any]) -> Call:
    """Returns the call of that peer, with the case mapped to its arguments."""
    given = {name: torch.from_dlpack(array) for name, array in arrays.items()}
    if peer in PACKAGES:
        return PACKAGES[peer].prepare(torch, case, given)
    if case.sequences:
        return _variable_length(torch, peer, case, direction, given)
    if case.mask.form.has_left:
        return _window(torch, case, direction, given)
    return _dense(torch, peer, case, direction, given)


def _leaf(tensor: Any, direction: str) -> Any:
    return tensor.detach().requires_grad_(direction == "backward")


def _dense(torch: Any, peer: str, case: ProblemSpec, direction: str, given: Mapping[str, Any]) -> TorchCall:
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
            is_causal=case.mask.form.grows,
            enable_gqa=grouped,
        )

    wanted = (*leaves, bias) if case.bias_gradient else tuple(leaves)
    backend = attention.sdpa_kernel(getattr(attention.SDPBackend, BACKENDS[peer]))
    return TorchCall(forward, wanted, given["grad_output"].transpose(1, 2), backend)


def _window(torch: Any, case: ProblemSpec, direction: str, given: Mapping[str, Any]) -> TorchCall:
    """Calls the flash operator itself: scaled_dot_product_attention has no window."""
    leaves = tuple(_leaf(given[name], direction) for name in ("query", "key", "value"))
    sizes = case.shape.num_queries, case.shape.num_keys

    def forward() -> Any:
        return torch.ops.aten._flash_attention_forward(
            *leaves, None, None, *sizes, 0.0, False, False,
            window_size_left=case.mask.left, window_size_right=case.mask.right,
        )[0]  # fmt: skip

    return TorchCall(forward, leaves, given["grad_output"], nullcontext())


def _variable_length(torch: Any, peer: str, case: ProblemSpec, direction: str, given: Mapping[str, Any]) -> TorchCall:
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
        return operator(*leaves, bounds, bounds, *sizes, 0.0, form.grows, False)[0]

    def mem_efficient() -> Any:
        operator = torch.ops.aten._efficient_attention_forward
        saved = direction == "backward"  # the logsumexp, which only a backward needs
        return operator(*leaves, None, bounds, bounds, *sizes, 0.0, _MASKS[form], saved)[0]

    return TorchCall(flash if peer == "flash" else mem_efficient, leaves, tensors["grad_output"], nullcontext())


def _milliseconds(torch: Any, call: Call, direction: str, timed: Timed, calls: int) -> float:
    """Returns the milliseconds of one call: those of a replay of a graph of `calls` calls, divided by their number."""
    stream = torch.cuda.Stream()
    with call.backend, torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            forwarded = call.forward()
            if direction == "backward":
                call.backward(forwarded)
        stream.synchronize()
        if direction == "forward":
            return _timed(torch, stream, call.forward, timed, calls)
        # A captured forward keeps dropout's seed on the device, an eager one on the host: a captured backward
        # needs a captured forward.
        first, forwarded = _captured(torch, stream, call.forward, 1)
        first.replay()
        return _timed(torch, stream, lambda: call.backward(forwarded), timed, calls)


def _timed(torch: Any, stream: Any, launch: Callable[[], Any], timed: Timed, calls: int) -> float:
    graph, results = _captured(torch, stream, launch, calls)
    found = timed(graph.replay, int(stream.cuda_stream)) / calls
    del results  # the graph writes to them until here
    return found


def _captured(torch: Any, stream: Any, launch: Callable[[], Any], calls: int) -> tuple[Any, Any]:
    """Returns a graph of `calls` times what `launch` launches on the stream, and the last results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            kept = launch()
    return graph, kept
