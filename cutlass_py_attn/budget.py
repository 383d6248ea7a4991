"""Budget: what a Build costs in threads, registers and shared memory, checked before anything compiles."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_py_attn.device import Architecture
from cutlass_py_attn.errors import DoesNotFit
from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.plan import Build, Warps
from cutlass_py_attn.shared_memory import is_wide_backward, registers, rows_copied_at_once
from cutlass_py_attn.streams import is_apart

MMA_ROWS = 16
MMA_COLUMNS = {2: 16, 4: 8}  # columns that one warp computes at once, by bytes per element


def warp_grid(warps: int, m: int, n: int, item_bytes: int) -> Warps:
    """(rows, columns) of warps for an m x n product that reads the least shared memory; (0, 0) when none divides.

    A warp reads m / rows + n / columns operand vectors, so the block reads columns * m + rows * n of them.
    """
    at_once = MMA_COLUMNS[item_bytes]
    grids = [(rows, warps // rows) for rows in range(1, warps + 1) if warps % rows == 0]
    fitting = [grid for grid in grids if m % (grid[0] * MMA_ROWS) == 0 and n % (grid[1] * at_once) == 0]
    return min(fitting, key=lambda grid: grid[1] * m + grid[0] * n, default=(0, 0))


def accumulator_registers(build: Build) -> int:
    """Registers a thread of a fused kernel holds for the accumulators that are alive at the same time; in the Hopper
    family a thread of the warpgroups that have them, with the 16-bit weights that it then holds."""
    if build.family == "hopper":
        return _held_by_warpgroups(build)
    threads = build.threads
    if build.family == "decode":  # every warp has some rows, some keys and all columns of the output
        rows, teams = build.scores
        return build.tile_m // rows * (build.tile_n // teams + build.columns_value) * build.warps // threads
    if build.kind == "forward":
        return build.tile_m * (build.tile_n + build.block_columns_value) // threads
    scores = 2 * build.tile_m * build.tile_n
    widths = build.block_columns, build.block_columns_value
    return (scores + build.tile_n * (max(widths) if is_apart(build) else sum(widths))) // threads


def _held_by_warpgroups(build: Build) -> int:
    threads = build.scores[0] * WARP_THREADS
    if build.kind == "forward":
        return build.tile_m * (build.tile_n + build.tile_n // 2 + build.columns_value) // threads
    if is_wide_backward(build):  # one of both gradients each
        widest = max(build.columns, build.columns_value)
        return build.tile_n * (build.tile_m + build.tile_m // 2 + widest) // threads
    return build.tile_n * (2 * build.block_queries + build.columns + build.columns_value) // threads


def accumulator_limit(build: Build, limits: Architecture) -> int:
    """Registers of a thread that holds accumulators: in the Hopper family what its warpgroup takes from those that hold
    none, else `register_limit`."""
    return registers(build)[-1] if build.family == "hopper" else register_limit(build, limits)


def register_limit(build: Build, limits: Architecture) -> int:
    """Registers a thread may use: what the hardware addresses and what one resident block leaves."""
    return min(limits.registers_per_thread, limits.registers_per_sm // build.threads // 8 * 8)


def objections(build: Build, limits: Architecture) -> list[str]:
    """Everything that does not fit, each with the number found and the number allowed."""
    return [*_resources(build, limits), *_warp_grids(build), *_copies(build)]


def check(build: Build, limits: Architecture) -> None:
    """Raise DoesNotFit with every objection, if there is one."""
    found = objections(build, limits)
    if found:
        raise DoesNotFit(found)


def _resources(build: Build, limits: Architecture) -> Iterator[str]:
    if build.shared_memory_bytes > limits.shared_memory_per_block:
        yield (
            f"shared memory = {build.shared_memory_bytes} bytes: {limits.name} allows "
            f"{limits.shared_memory_per_block} a block; use smaller tiles or fewer stages"
        )
    if build.threads > limits.threads_per_block:
        yield f"threads = {build.threads}: {limits.name} allows {limits.threads_per_block} a block; use fewer warps"
    if build.kind == "backward" and build.family == "generic" and build.grad_output_stages != build.query_stages:
        yield (
            f"grad_output_stages = {build.grad_output_stages}: must be query_stages = {build.query_stages}; "
            "the generic backward turns both rings together"
        )
    needed, allowed = accumulator_registers(build), accumulator_limit(build, limits)
    if needed >= allowed:
        yield f"accumulators = {needed} registers a thread: {allowed} are left; use smaller tiles or more warps"


def _warp_grids(build: Build) -> Iterator[str]:
    if build.family != "generic" or build.kind == "room":
        return
    products: list[tuple[str, Warps, int, int]] = [("scores", build.scores, build.tile_m, build.tile_n)]
    if build.kind == "backward":
        products += [
            ("grad_v", build.grad_v, build.tile_n, build.block_columns_value),
            ("grad_k", build.grad_k, build.tile_n, build.block_columns),
            ("grad_q", build.grad_q, build.tile_m, build.block_columns),
        ]
    elif build.column_block:
        products.append(("grad_q", build.grad_q, build.tile_m, build.block_columns_value))
    columns_at_once = MMA_COLUMNS[build.item_bytes]
    for name, (rows, columns), m, n in products:
        if rows * columns != build.warps:
            yield f"{name} = {rows} x {columns} warps: must have {build.warps} in all"
        elif m % (rows * MMA_ROWS) or n % (columns * columns_at_once):
            yield (
                f"{name}: {m} x {n} over {rows} x {columns} warps: each warp needs a multiple of "
                f"{MMA_ROWS} rows and {columns_at_once} columns"
            )


def _copies(build: Build) -> Iterator[str]:
    """The threads copy some rows of a tile at once, and a tile must have a multiple of them; streams.py sees to that
    where columns are streamed."""
    if build.family != "generic" or build.kind == "room" or build.column_block:
        return
    for columns in {build.columns, build.columns_value}:
        at_once = rows_copied_at_once(build.threads, columns * build.item_bytes, build.access_bytes)
        for name, rows in (("tile_m", build.tile_m), ("tile_n", build.tile_n)):
            if rows % at_once:
                yield f"{name} = {rows}: {build.threads} threads copy {at_once} rows at once; use a multiple of that"
