"""Resources: what a Build needs in threads, registers and shared memory, checked before anything compiles."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_py_attn.errors import DoesNotFit
from cutlass_py_attn.plan import tile_rules
from cutlass_py_attn.plan.arch import Architecture
from cutlass_py_attn.plan.build import ROW_KINDS, Build, Warps
from cutlass_py_attn.plan.gemm_spec import MMA_COLUMNS, MMA_ROWS, WARP_THREADS
from cutlass_py_attn.plan.sm90_e4m3 import consumer_registers
from cutlass_py_attn.plan.sm90_smem import registers
from cutlass_py_attn.plan.sm90_wide import WARPGROUPS, value_columns
from cutlass_py_attn.plan.sm90_wide_backward import GRAD_KEY, GRAD_QUERY, GRAD_VALUE, result_columns
from cutlass_py_attn.plan.split_d import splits_dk_dv
from cutlass_py_attn.plan.variants import E4M3, KEEPS_DS, MLA, TWO_CTA, WIDE


def warp_grid(warps: int, m: int, n: int, item_bytes: int) -> Warps:
    """Returns the (rows, columns) of warps over an (m, n) product that read the least shared memory.

    A warp reads m / rows + n / columns operand vectors, so the block reads columns * m + rows * n of them. (0, 0) if no
    grid divides the product.
    """
    at_once = MMA_COLUMNS[item_bytes]
    grids = [(rows, warps // rows) for rows in range(1, warps + 1) if warps % rows == 0]
    fitting = [grid for grid in grids if m % (grid[0] * MMA_ROWS) == 0 and n % (grid[1] * at_once) == 0]
    return min(fitting, key=lambda grid: grid[1] * m + grid[0] * n, default=(0, 0))


def accumulator_registers(build: Build) -> int:
    """Returns the registers per thread for the accumulators that are alive at the same time.

    In the sm90 family these are the registers of a consumer thread, with the 16-bit weights that it holds beside them.
    """
    if build.family == "sm90":
        return _consumer_registers(build)
    threads = build.threads
    if build.family == "decode":  # every warp has some rows, some keys and all columns of the output
        rows, teams = build.warps_scores
        return build.tile_m // rows * (build.tile_n // teams + build.columns_value) * build.warps // threads
    if build.kind == "forward":
        return build.tile_m * (build.tile_n + build.block_columns_value) // threads
    scores = 2 * build.tile_m * build.tile_n
    widths = build.block_columns, build.block_columns_value
    return (scores + build.tile_n * (max(widths) if splits_dk_dv(build) else sum(widths))) // threads


def _consumer_registers(build: Build) -> int:
    threads = build.warps_scores[0] * WARP_THREADS
    if build.variant == WIDE and build.kind == "backward":
        widest = max(max(result_columns(build, each)) for each in (GRAD_QUERY, GRAD_KEY, GRAD_VALUE))
        return build.tile_m * (2 * build.tile_n + widest) // threads
    if build.variant == WIDE:
        return build.tile_m * (build.tile_n + build.tile_n // 2 + max(value_columns(build))) // threads
    if build.variant == MLA:
        return build.tile_m * (build.tile_n + build.tile_n // 2 + build.columns_value // WARPGROUPS) // threads
    if build.variant == E4M3:
        return consumer_registers(build, threads)
    if build.kind == "forward":
        return build.tile_m * (build.tile_n + build.tile_n // 2 + build.columns_value) // threads
    if build.variant == TWO_CTA:  # each warpgroup has one of both gradients
        widest = max(build.columns, build.columns_value)
        return build.tile_n * (build.tile_m + build.tile_m // 2 + widest) // threads
    scores = 2 * build.block_queries
    if build.variant in KEEPS_DS:  # dP beside the 16-bit weights; the next S is multiplied after dS
        scores = build.block_queries + build.block_queries // 2
    return build.tile_n * (scores + build.columns + build.columns_value) // threads


def accumulator_limit(build: Build, limits: Architecture) -> int:
    """Returns the registers of a thread that holds accumulators: in the sm90 family those of a consumer thread."""
    return registers(build)[-1] if build.family == "sm90" else register_limit(build, limits)


def register_limit(build: Build, limits: Architecture) -> int:
    """Returns the registers that a thread may use: what the hardware addresses and what one resident block leaves."""
    return min(limits.registers_per_thread, limits.registers_per_sm // build.threads // 8 * 8)


def objections(build: Build, limits: Architecture) -> list[str]:
    """Returns every reason why `build` cannot be compiled or run, each with the value, the reason and what to do.

    A fused Build without objections compiles and runs, unless ptxas spills, which only the compiler tells.
    """
    broken = tile_rules.objections(build)
    if broken or build.kind in ("component_gemm", *ROW_KINDS):
        return [*broken, *_sizes(build, limits)]
    return [*_sizes(build, limits), *_warp_grids(build), *_accumulators(build, limits)]


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


def _accumulators(build: Build, limits: Architecture) -> Iterator[str]:
    if build.family == "decode" and 0 in build.warps_scores:
        return
    needed, allowed = accumulator_registers(build), accumulator_limit(build, limits)
    if needed >= allowed:
        yield f"accumulators = {needed} registers a thread: {allowed} are left; use smaller tiles or more warps"


def _warp_grids(build: Build) -> Iterator[str]:
    """The warps of each mma.sync product divide its rows and columns."""
    if build.family != "sm80":
        return
    products: list[tuple[str, Warps, int, int]] = [("warps_scores", build.warps_scores, build.tile_m, build.tile_n)]
    if build.kind == "backward":
        products += [
            ("warps_grad_v", build.warps_grad_v, build.tile_n, build.block_columns_value),
            ("warps_grad_k", build.warps_grad_k, build.tile_n, build.block_columns),
            ("warps_grad_q", build.warps_grad_q, build.tile_m, build.block_columns),
        ]
    elif build.head_dim_split:
        products.append(("warps_grad_q", build.warps_grad_q, build.tile_m, build.block_columns_value))
    columns_at_once = MMA_COLUMNS[build.item_bytes]
    for name, (rows, columns), m, n in products:
        if rows * columns != build.warps:
            yield f"{name} = {rows} x {columns}: must have {build.warps} warps in all, for {m} x {n}; use another tile"
        elif m % (rows * MMA_ROWS) or n % (columns * columns_at_once):
            yield (
                f"{name} = {rows} x {columns}: each warp of {m} x {n} needs a multiple of {MMA_ROWS} rows and "
                f"{columns_at_once} columns; use another tile"
            )
