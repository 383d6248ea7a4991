"""Bench FlashAttention-4: calls of the package flash-attn-4, and compilation of its kernels ahead of the measurements.

The package is no dependency: if it is not installed, it is no peer. It compiles a kernel at the first call of each
variant, which takes seconds; `compile_ahead` does that in processes of their own and leaves the kernels in the
package's cache on disk, from which the process that measures loads them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn import extras
from cutlass_py_attn.bench import cases as bench_cases
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.spec import ProblemSpec, parse
from cutlass_py_attn.problem.tensors import OPERANDS

DISTRIBUTION: Final = "flash-attn-4"
INTERFACE: Final = "flash_attn.cute.interface"
MEASURED: Final = "4.0.0b36"  # the version whose private functions are called, and that the record was measured with
_SHARED: Final = ("softmax_scale", "softcap", "causal", "window_size_left", "window_size_right", "learnable_sink")
_PACKED: Final = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_PAGED: Final = ("page_table", "seqused_k")
FUNCTIONS: Final = {  # private functions and their arguments that are given by keyword
    "_flash_attn_fwd": (*_SHARED, *_PACKED, *_PAGED, "return_lse"),
    "_flash_attn_bwd": (*_SHARED, *_PACKED, "deterministic"),
}
CACHE: Final = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(Path(tempfile.gettempdir()) / "cutlass_py_attn_flash4"),
}
DTYPES: Final = ("bfloat16", "float16")
PROCESSES: Final = 16
SHORT: Final = 256  # rows; a kernel depends on the length only where one or two tiles cover it


@dataclass(frozen=True, slots=True)
class Flash4Call:
    """Forward and backward of FlashAttention-4 on its layout: (batch, seqlen, heads, head_dim), or packed tokens.

    grad_output: None for a case that has no backward.
    """

    interface: Any
    operands: tuple[Any, Any, Any]
    grad_output: Any
    options: dict[str, Any]
    sinks: Any = None
    deterministic: bool = False
    backend: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def forward(self) -> Any:
        """Returns (output, logsumexp)."""
        options = {**self.options, "learnable_sink": self.sinks, "return_lse": True}
        return self.interface._flash_attn_fwd(*self.operands, **options)[:2]

    def backward(self, forwarded: Any) -> Any:
        """Returns the gradients of query, key, value and, if there are sinks, of these."""
        output, logsumexp = forwarded
        options = {**self.options, "learnable_sink": self.sinks, "deterministic": self.deterministic}
        return self.interface._flash_attn_bwd(*self.operands, output, self.grad_output, logsumexp, **options)


def is_installed() -> bool:
    """Whether the package is installed; does not import it."""
    return bool(version())


def version() -> str:
    """Returns the version of the package; "" if it is not installed."""
    return extras.version(DISTRIBUTION)


def takes(case: ProblemSpec) -> bool:
    """Whether `prepare` has an argument for everything in the case; a call shows whether the package has the kernel.

    Its masks end in the bottom-right corner, as ours do in square problems. Codes beside a query of 16 bits are not
    passed, nor scales of codes, nor the numbers of used keys without a page table.
    """
    has_other_term = bool(case.bias or case.alibi or case.dropout_p or case.descale or case.float16_output)
    lengths = case.sequences or (case,)
    is_square = all(each.num_queries == each.num_keys for each in lengths) and not case.has_used_keys
    has_its_mask = is_square or case.mask.form.sees_all or case.mask.bottom_right
    has_unpaged_lengths = case.has_used_keys and not case.page_size
    return has_its_mask and not (case.has_array_mask or has_other_term or case.e4m3_cache or has_unpaged_lengths)


def prepare(torch: Any, case: ProblemSpec, given: Mapping[str, Any]) -> Flash4Call:
    """Returns the call of a case. given: torch tensors by name, integers with the bits of int32.

    NotSupported: the installed version has other private functions than MEASURED.
    """
    interface: Any = importlib.import_module(INTERFACE)
    if missing := [*_missing(interface)]:
        lacks = ", no ".join(missing)
        raise NotSupported(
            f"{DISTRIBUTION} {version()}: {INTERFACE} has no {lacks}; install {DISTRIBUTION}=={MEASURED}"
        )
    packed = {"query"} if case.has_ragged_queries else set()
    if case.sequences and not case.page_size:
        packed = {*OPERANDS, "grad_output"}
    tensors = {name: tensor.squeeze(0) if name in packed else tensor for name, tensor in given.items()}
    if case.value_in_key:
        tensors["value"] = tensors["value"][..., : case.head_dim_value]
    return Flash4Call(
        interface,
        (tensors["query"], tensors["key"], tensors["value"]),
        tensors.get("grad_output"),
        {**_options(case), **_bounds(torch, case, given)},
        given.get("sinks") if case.sinks else None,
        case.deterministic,
    )


def _missing(interface: Any) -> Iterator[str]:
    """Yields the functions, and arguments of functions, that the calls need and the package does not have."""
    for name, needed in FUNCTIONS.items():
        function = getattr(interface, name, None)
        if not callable(function):
            yield name
            continue
        known = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            yield from (f"argument {argument} of {name}" for argument in needed if argument not in known)


def _options(case: ProblemSpec) -> dict[str, Any]:
    """Options that forward and backward share."""
    options: dict[str, Any] = {"softmax_scale": case.scale, "softcap": case.softcap}
    if case.mask.form.has_left:
        return {**options, "window_size_left": case.mask.left, "window_size_right": case.mask.right}
    return {**options, "causal": case.mask.form.grows}


def _bounds(torch: Any, case: ProblemSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    names = ["cu_seqlens_q"] if case.has_ragged_queries else []
    if case.page_size:
        names += _PAGED
    elif case.sequences:
        names.append("cu_seqlens_k")
    if not names:
        return {}
    bounds = {name: given[name].view(torch.int32) for name in names}
    return {**bounds, "max_seqlen_q": case.num_queries, "max_seqlen_k": case.num_keys}


def use_cache() -> None:
    """Makes the package keep its compiled kernels on disk; before its first import. Variables that are set stay."""
    for name, value in CACHE.items():
        os.environ.setdefault(name, value)


def variants(cases: Iterable[tuple[ProblemSpec, Sequence[str]]]) -> list[tuple[str, bool]]:
    """Returns (name of a small case, whether backward is needed) for the kernels that these cases and directions need.

    Cases that differ in batch, number of groups of heads, or lengths above SHORT share their kernels.
    """
    found: dict[str, bool] = {}
    for case, directions in cases:
        if takes(case) and case.dtype in DTYPES:
            name = _smallest(case).name
            found[name] = found.get(name, False) or "backward" in directions
    return sorted(found.items(), key=lambda item: not item[1])  # the slow ones first


def _smallest(case: ProblemSpec) -> ProblemSpec:
    group = case.shape.group
    heads = {"num_heads": group, "num_heads_key": 1 if group > 1 else 0}
    if case.has_ragged_queries:
        return case.replace(sequences=case.sequences[:1], **heads)
    changes = {"sequences": (), "batch": 1, **heads}
    return case.replace(num_queries=min(case.num_queries, SHORT), num_keys=min(case.num_keys, SHORT), **changes)


def compile_ahead(
    cases: Iterable[tuple[ProblemSpec, Sequence[str]]], compute_capability: tuple[int, int], multiprocessors: int
) -> list[str]:
    """Compiles the kernels of the cases into the package's cache, in parallel; returns a message for each failure.

    The processes use torch's fake tensors: they allocate nothing on the GPU and launch nothing.
    """
    needed = variants(cases)
    if not needed:
        return []
    use_cache()
    major, minor = compute_capability
    target = {
        "FLASH_ATTENTION_ARCH": f"sm_{major}{minor}",
        "FLASH_ATTENTION_NUM_SMS": str(multiprocessors),
        "CUTE_DSL_ARCH": f"sm_{major}{minor}{'a' if major >= 9 else ''}",
    }
    workers = min(len(needed), PROCESSES, os.cpu_count() or 1)
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), _set_environment, (target,)) as pool:
            found = list(pool.map(compile_variant, *zip(*needed, strict=True)))
    except BrokenProcessPool as error:  # the kernels that are missing are compiled at their first call
        return [f"ahead: {error}"]
    return [message for message in found if message]


def _set_environment(values: dict[str, str]) -> None:
    """Sets environment variables in a process that compiles; os.environ.update itself cannot be pickled."""
    os.environ.update(values)


def compile_variant(name: str, has_backward: bool) -> str:
    """Compiles what a case needs, with fake tensors; returns why that failed, "" if it did not."""
    case = parse(name)
    warnings.simplefilter("ignore")  # its compiler's warnings concern no caller
    try:
        torch: Any = importlib.import_module("torch")
        fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
        with fake.FakeTensorMode():
            call = prepare(torch, case, _fake_tensors(torch, case))
            forwarded = call.forward()
            if has_backward:
                call.backward(forwarded)
    except Exception as error:  # the package asserts, and its compiler may raise anything
        return f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def _fake_tensors(torch: Any, case: ProblemSpec) -> dict[str, Any]:
    problem = case.problem("forward" if bench_cases.is_forward_only(case) else "backward")
    described = {**problem.tensors(), **problem.vectors()}
    return {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="cuda")
        for name, tensor in described.items()
    }
