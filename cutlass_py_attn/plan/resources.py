"""Resources: what a Build needs in threads, registers and shared memory, checked before anything compiles."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_py_attn.errors import DoesNotFit
from cutlass_py_attn.kernels.catalogue import kernel_of
from cutlass_py_attn.kernels.kernel import FusedKernel
from cutlass_py_attn.launch.arch import Architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import MMA_COLUMNS, MMA_ROWS
from cutlass_py_attn.plan import build_rules


def objections(build: Build, limits: Architecture) -> list[str]:
    """Returns every reason why `build` cannot be compiled or run, each with the value, the reason and what to do.

    A fused Build without objections compiles and runs, unless ptxas spills, which only the compiler tells.
    """
    broken = build_rules.objections(build)
    if broken:
        return [*broken, *_sizes(build, limits)]
    kernel = kernel_of(build)
    fused = (
        [*_warp_grids(build, kernel), *_accumulators(build, kernel, limits)] if isinstance(kernel, FusedKernel) else []
    )
    return [*_sizes(build, limits), *fused]


def check(build: Build, limits: Architecture) -> None:
    """Raises DoesNotFit with every objection, if there is one."""
    found = objections(build, limits)
    if found:
        raise DoesNotFit(found)


def _sizes(build: Build, limits: Architecture) -> Iterator[str]:
    if build.shared_memory_bytes > limits.shared_memory_per_block:
        yield (
            f"shared memory = {build.shared_memory_bytes} bytes: {limits.name} allows "
            f"{limits.shared_memory_per_block} a block; use smaller tiles or fewer stages"
        )
    if build.threads > limits.threads_per_block:
        yield f"threads = {build.threads}: {limits.name} allows {limits.threads_per_block} a block; use fewer warps"


def _accumulators(build: Build, kernel: FusedKernel, limits: Architecture) -> Iterator[str]:
    needed, allowed = kernel.accumulators(build), kernel.accumulator_limit(build, limits)
    if needed >= allowed:
        yield f"accumulators = {needed} registers a thread: {allowed} are left; use smaller tiles or more warps"


def _warp_grids(build: Build, kernel: FusedKernel) -> Iterator[str]:
    """The warps of each mma.sync product divide its rows and columns."""
    for name, (rows, columns), m, n in kernel.products(build):
        columns_at_once = MMA_COLUMNS[build.item_bytes]
        if rows * columns != build.warps:
            yield f"{name} = {rows} x {columns}: must have {build.warps} warps in all, for {m} x {n}; use another tile"
        elif m % (rows * MMA_ROWS) or n % (columns * columns_at_once):
            yield (
                f"{name} = {rows} x {columns}: each warp of {m} x {n} needs a multiple of {MMA_ROWS} rows and "
                f"{columns_at_once} columns; use another tile"
            )
