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
from cutlass_py_attn.refusals import Refusal, refuse


def refusals(build: Build, limits: Architecture) -> list[Refusal]:
    """Returns every reason why `build` cannot be compiled or run.

    A fused Build without refusals compiles and runs, unless ptxas spills, which only the compiler tells.
    """
    broken = build_rules.refusals(build)
    if broken:
        return [*broken, *_sizes(build, limits)]
    kernel = kernel_of(build)
    fused = (
        [*_warp_grids(build, kernel), *_accumulators(build, kernel, limits)] if isinstance(kernel, FusedKernel) else []
    )
    return [*_sizes(build, limits), *fused]


def check(build: Build, limits: Architecture) -> None:
    """Raises DoesNotFit with every refusal, if there is one."""
    if found := refusals(build, limits):
        raise DoesNotFit(found)


def _sizes(build: Build, limits: Architecture) -> Iterator[Refusal]:
    if build.shared_memory_bytes > limits.shared_memory_per_block:
        rule = f"{limits.name} allows {limits.shared_memory_per_block} bytes a block"
        yield refuse("shared memory", build.shared_memory_bytes, rule, "use smaller tiles or fewer stages")
    if build.threads > limits.threads_per_block:
        yield refuse("threads", build.threads, f"{limits.name} allows {limits.threads_per_block}", "use fewer warps")


def _accumulators(build: Build, kernel: FusedKernel, limits: Architecture) -> Iterator[Refusal]:
    needed, allowed = kernel.accumulators(build), kernel.accumulator_limit(build, limits)
    if needed >= allowed:
        rule = f"{allowed} registers a thread are left"
        yield refuse("accumulators", needed, rule, "use smaller tiles or more warps")


def _warp_grids(build: Build, kernel: FusedKernel) -> Iterator[Refusal]:
    """The warps of each mma.sync product divide its rows and columns."""
    for name, grid, m, n in kernel.products(build):
        (rows, columns), columns_at_once = grid, MMA_COLUMNS[build.item_bytes]
        if rows * columns != build.warps:
            yield refuse(name, grid, f"must have {build.warps} warps in all, for {m} x {n}", "use another tile")
        elif m % (rows * MMA_ROWS) or n % (columns * columns_at_once):
            rule = f"each warp of {m} x {n} needs a multiple of {MMA_ROWS} rows and {columns_at_once} columns"
            yield refuse(name, grid, rule, "use another tile")
