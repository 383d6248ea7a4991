"""Kernels: which module traces a Build, which entries its cubin has, and which sources decide its code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn import abi
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan import Build

Trace = tuple[Callable[..., Any], tuple[object, ...]]

# Each module defines trace(build); imported on use, for it imports the DSL.
_MODULES: Final[dict[tuple[str, str], str]] = {
    ("forward", "generic"): "cutlass_py_attn.fused.forward",
    ("backward", "generic"): "cutlass_py_attn.fused.backward",
    ("room", "generic"): "cutlass_py_attn.gemm.alone",
    ("room", "hopper"): "cutlass_py_attn.gemm.alone_hopper",
}

# Struct fields that a kernel reads through a CUtensorMap, in the order of its parameters.
_TENSOR_MAPS: Final[dict[tuple[str, str], tuple[str, ...]]] = {("room", "hopper"): ("a", "b")}

# device.py, problem.py, plan.py and planner.py hold limits, paddings and thread counts that kernels read but no
# field of Build repeats; compiler.py holds the compiler's options.
_SOURCES: Final = (
    *("gemm/*.py", "fused/*.py", "parts/*.py"),
    *("masks.py", "abi.py", "shared_memory.py", "device.py", "problem.py", "plan.py", "planner.py"),
    *("kernels.py", "compiler.py"),
)


def trace(build: Build) -> Trace:
    """The @cute.jit host function of `build` and its representative arguments, as cute.compile takes them."""
    module = _MODULES.get((build.kind, build.family))
    if module is None:
        known = ", ".join("/".join(pair) for pair in _MODULES)
        raise NotSupported(f"kind/family = {build.kind}/{build.family}: has no kernel; allowed are {known}")
    host, arguments = importlib.import_module(module).trace(build)
    return host, arguments


def entry_symbols(build: Build) -> tuple[str, ...]:
    """Entries of the build's cubin, in the order of the plan's launches.

    The compiler numbers them in the order in which the host function launches them: the main kernel first.
    """
    ends = ("_delta_1", "_0", "_finish_2") if build.kind == "backward" else ("_0",)
    return tuple(build.symbol + end for end in ends)


def parameters(build: Build) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of each parameter of every entry: the tensor maps, then the struct."""
    maps = _TENSOR_MAPS.get((build.kind, build.family), ())
    struct = abi.numpy_struct(abi.FIELDS[build.kind])
    return (*((f"map_{field}", abi.TENSOR_MAP_BYTES) for field in maps), ("params", struct.itemsize))


def source_modules() -> tuple[str, ...]:
    """Files of this package, relative to it, whose text belongs to the cache key."""
    package = Path(__file__).parent
    return tuple(path.relative_to(package).as_posix() for glob in _SOURCES for path in sorted(package.glob(glob)))
