"""Kernels: which module traces a Build, which entries its cubin has, and which sources decide its code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn import abi
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan import Build
from cutlass_py_attn.shared_memory import is_wide_backward

Trace = tuple[Callable[..., Any], tuple[object, ...]]

# Each module defines trace(build); imported on use, for it imports the DSL.
_MODULES: Final[dict[tuple[str, ...], str]] = {
    ("forward", "generic"): "cutlass_py_attn.fused.forward",
    ("backward", "generic"): "cutlass_py_attn.fused.backward",
    ("forward", "generic", "streamed"): "cutlass_py_attn.fused.streamed_forward",
    ("backward", "generic", "streamed"): "cutlass_py_attn.fused.streamed_backward",
    ("forward", "hopper"): "cutlass_py_attn.fused.hopper_forward",
    ("backward", "hopper"): "cutlass_py_attn.fused.hopper_backward",
    ("backward", "hopper", "wide"): "cutlass_py_attn.fused.wide_backward",
    ("forward", "decode"): "cutlass_py_attn.fused.decode",
    ("room", "generic"): "cutlass_py_attn.gemm.alone",
    ("room", "hopper"): "cutlass_py_attn.gemm.alone_hopper",
}

_SUFFIXES: Final = {"main": "", "delta": "delta_", "finish": "finish_", "bias": "bias_", "sinks": "sinks_"}
_LAUNCH_ORDER: Final = ("delta", "main", "finish", "bias", "sinks")
ROW_THREADS: Final = 128  # of the kernels that work row by row

# Struct fields that a kernel reads through a CUtensorMap, in the order of its parameters.
_TENSOR_MAPS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("room", "hopper"): ("a", "b"),
    ("forward", "hopper"): ("query", "key", "value"),
    ("backward", "hopper"): ("query", "grad_output", "key", "value"),
}

# device.py, problem.py, plan.py and planner.py hold limits, paddings and thread counts that kernels read but no
# field of Build repeats, philox.py the constants of the generator; compiler.py holds the compiler's options.
_SOURCES: Final = (
    *("gemm/*.py", "fused/*.py", "parts/*.py"),
    *("masks.py", "abi.py", "shared_memory.py", "device.py", "problem.py", "plan.py", "planner.py"),
    *("kernels.py", "compiler.py", "streams.py", "hopper.py", "philox.py", "decode.py"),
)


def trace(build: Build) -> Trace:
    """The @cute.jit host function of `build` and its representative arguments, as cute.compile takes them."""
    module = _MODULES.get((build.kind, build.family, *_form(build)))
    if module is None:
        known = ", ".join("/".join(pair) for pair in _MODULES)
        raise NotSupported(f"kind/family = {build.kind}/{build.family}: has no kernel; allowed are {known}")
    host, arguments = importlib.import_module(module).trace(build)
    return host, arguments


def _form(build: Build) -> tuple[str, ...]:
    if build.column_block:
        return ("streamed",)
    return ("wide",) if is_wide_backward(build) else ()


def entries(build: Build) -> dict[str, str]:
    """Symbol of each entry of the build's cubin by its role, in the order of the plan's launches.

    main; in a decode also combine, which a plan with one split does not launch; in the backward also delta (row
    statistics), finish (the query gradient's type), bias (a gradient that is summed over axes of the bias) and sinks.
    """
    if build.kind != "backward":
        combine = {"combine": f"{build.symbol}_combine_1"} if build.family == "decode" else {}
        return {"main": f"{build.symbol}_0", **combine}
    needed = {
        "main": build.has_main,
        "delta": True,
        "finish": "query" in build.gradients and not build.whole_heads,
        "bias": "bias" in build.gradients and build.bias_gradient != "main",
        "sinks": "sinks" in build.gradients,
    }
    # The compiler numbers the entries in the order in which the host function launches them, which is this one.
    present = [role for role, is_needed in needed.items() if is_needed]
    symbols = {role: f"{build.symbol}_{_SUFFIXES[role]}{number}" for number, role in enumerate(present)}
    return {role: symbols[role] for role in _LAUNCH_ORDER if role in symbols}


def entry_symbols(build: Build) -> tuple[str, ...]:
    """Entries of the build's cubin, in the order of the plan's launches."""
    return tuple(entries(build).values())


def entry_threads(build: Build, role: str) -> int:
    """Threads of a block of the entry with this role."""
    if role in ("delta", "sinks", "combine"):
        return ROW_THREADS
    if role == "finish" and build.family == "hopper":
        return ROW_THREADS  # those of the warpgroup that multiplied dQ
    return build.threads


def parameters(build: Build, role: str = "main") -> tuple[tuple[str, int], ...]:
    """(name, bytes) of each parameter of the entry with this role: the main one's tensor maps, then the struct."""
    maps = _TENSOR_MAPS.get((build.kind, build.family), ()) if role == "main" else ()
    struct = abi.numpy_struct(abi.fields_of(build.kind, build.family))
    return (*((f"map_{field}", abi.TENSOR_MAP_BYTES) for field in maps), ("params", struct.itemsize))


def source_modules() -> tuple[str, ...]:
    """Files of this package, relative to it, whose text belongs to the cache key."""
    package = Path(__file__).parent
    return tuple(path.relative_to(package).as_posix() for glob in _SOURCES for path in sorted(package.glob(glob)))
