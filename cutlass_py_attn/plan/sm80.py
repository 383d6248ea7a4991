"""sm80 family (mma.sync, cp.async): its kernels, their warps, grids and key splits. It multiplies no e4m3 codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from cutlass_py_attn.plan import sm80_smem, tile_rules
from cutlass_py_attn.plan.build import Build, Warps
from cutlass_py_attn.plan.expressions import Expr, Grid, ceil_div, maximum, minimum, times
from cutlass_py_attn.plan.gemm_spec import MMA_COLUMNS, MMA_ROWS
from cutlass_py_attn.plan.kernel import (
    TERMS,
    Family,
    FusedKernel,
    Kernel,
    Product,
    block_registers,
    gemm_grid,
    no_splits,
    no_tensor_maps,
)
from cutlass_py_attn.plan.names import BATCH, NUM_HEADS, NUM_HEADS_KEY, NUM_KEYS, NUM_QUERIES, NUM_SMS, NUM_SPLITS_KEY
from cutlass_py_attn.plan.split_d import blocks_per_tile, dq_piece_columns, gradient_columns, split_d_map, splits_dk_dv
from cutlass_py_attn.plan.tiles import sm80_tiles
from cutlass_py_attn.plan.variants import SPLIT_D, STANDARD
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import has_codes
from cutlass_py_attn.problem.tensors import OPERANDS
from cutlass_py_attn.score_terms import registry

SPLIT_WAVES: Final = 32  # blocks per SM beyond which more key splits of the backward no longer shorten the last wave
MAX_HEAD_DIM_OF_CODES: Final = 256  # of an e4m3 cache, whose tiles have all columns
LEAST_COPY_OF_CODES: Final = 4  # bytes: the least that cp.async copies


def warp_grid(warps: int, m: int, n: int, item_bytes: int) -> Warps:
    """Returns the (rows, columns) of warps over an (m, n) product that read the least shared memory.

    A warp reads m / rows + n / columns operand vectors, so the block reads columns * m + rows * n of them. (0, 0) if no
    grid divides the product.
    """
    at_once = MMA_COLUMNS[item_bytes]
    grids = [(rows, warps // rows) for rows in range(1, warps + 1) if warps % rows == 0]
    fitting = [grid for grid in grids if m % (grid[0] * MMA_ROWS) == 0 and n % (grid[1] * at_once) == 0]
    return min(fitting, key=lambda grid: grid[1] * m + grid[0] * n, default=(0, 0))


def _grid(build: Build, m: int, n: int) -> Warps:
    return warp_grid(build.warps, m, n, build.item_bytes)


def _forward_warps(build: Build) -> Build:
    """Returns the forward with its warps: one has whole rows of S, because the softmax reduces along them."""
    return replace(build, warps_scores=(build.warps, 1))


def _split_d_forward_warps(build: Build) -> Build:
    return replace(
        build,
        warps_scores=_grid(build, build.tile_m, build.tile_n),
        warps_grad_q=_grid(build, build.tile_m, build.block_columns_value),
    )


def _backward_warps(build: Build) -> Build:
    return replace(
        build,
        warps_scores=_grid(build, build.tile_m, build.tile_n),
        warps_grad_v=_grid(build, build.tile_n, gradient_columns(build, build.block_columns_value)),
        warps_grad_k=_grid(build, build.tile_n, gradient_columns(build, build.block_columns)),
        warps_grad_q=_grid(build, build.tile_m, dq_piece_columns(build)),
    )


def _scores(build: Build) -> Product:
    return Product("warps_scores", build.warps_scores, build.tile_m, build.tile_n)


def _forward_products(build: Build) -> tuple[Product, ...]:
    return (_scores(build),)


def _split_d_forward_products(build: Build) -> tuple[Product, ...]:
    return _scores(build), Product("warps_grad_q", build.warps_grad_q, build.tile_m, build.block_columns_value)


def _backward_products(build: Build) -> tuple[Product, ...]:
    return (
        _scores(build),
        Product("warps_grad_v", build.warps_grad_v, build.tile_n, build.block_columns_value),
        Product("warps_grad_k", build.warps_grad_k, build.tile_n, build.block_columns),
        Product("warps_grad_q", build.warps_grad_q, build.tile_m, build.block_columns),
    )


def _forward_accumulators(build: Build) -> int:
    """Returns the registers of S and O."""
    return build.tile_m * (build.tile_n + build.block_columns_value) // build.threads


def _backward_accumulators(build: Build) -> int:
    """Returns the registers of S and dP, and of dK and dV, or of the wider if a block has one of them."""
    scores = 2 * build.tile_m * build.tile_n
    widths = build.block_columns, build.block_columns_value
    return (scores + build.tile_n * (max(widths) if splits_dk_dv(build) else sum(widths))) // build.threads


def main_grid(build: Build) -> Grid:
    """Returns the grid of the main kernel: query tiles in the forward, key splits in the backward, by head, batch."""
    if build.kind == "forward":
        query_tiles = ceil_div(NUM_QUERIES, build.tile_m)
        return times(query_tiles, blocks_per_tile(build)), NUM_HEADS, BATCH
    return times(NUM_SPLITS_KEY, blocks_per_tile(build)), NUM_HEADS_KEY, BATCH


def num_splits_key(build: Build) -> Expr:
    """Returns the blocks of the backward that share one (batch, key head): enough for SPLIT_WAVES blocks per SM.

    Never more than there are key tiles. With fewer blocks than key tiles, a block computes several key tiles and
    balances their unequal lengths under a causal mask. A deterministic block waits only for blocks that started before
    it, so each has one key tile.
    """
    key_tiles = ceil_div(NUM_KEYS, build.tile_n)
    if build.deterministic:
        return key_tiles
    return minimum(key_tiles, ceil_div(SPLIT_WAVES * NUM_SMS, maximum(BATCH * NUM_HEADS_KEY, 1)))


def _reason(problem: Problem, build: Build, values: Mapping[str, int]) -> str:
    return f"sm80 family (mma.sync, cp.async): the first tile of the table that fits {build.arch}'s shared memory"


def unsupported_features(problem: Problem) -> tuple[str, ...]:
    """Returns what the problem has that the sm80 kernels do not take, which concerns e4m3 codes alone."""
    if not has_codes(problem):
        return ()
    shape = problem.shape
    present = {
        "query of e4m3": not problem.has_e4m3_cache,
        f"head dims beyond {MAX_HEAD_DIM_OF_CODES}": max(shape.head_dim, shape.head_dim_value) > MAX_HEAD_DIM_OF_CODES,
        f"rows aligned to less than {LEAST_COPY_OF_CODES} bytes": min(
            getattr(problem, name).vector_bytes for name in (*OPERANDS, "output")
        ) < LEAST_COPY_OF_CODES,
    }  # fmt: skip
    return tuple(name for name, is_present in present.items() if is_present)


FORWARD: Final = FusedKernel(
    kind="forward",
    family="sm80",
    variant=STANDARD,
    module="sm80.forward",
    summary="one block per query tile",
    layouts=(*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.KV8_ROW),
    terms=TERMS,
    takes_registered_terms=True,
    refusals=tile_rules.sm80_forward,
    with_warps=_forward_warps,
    shared_memory=sm80_smem.forward_map,
    products=_forward_products,
    accumulators=_forward_accumulators,
    accumulator_limit=block_registers,
    main_grid=main_grid,
    num_splits_key=no_splits,
    tensor_maps=no_tensor_maps,
    reason=_reason,
)
SPLIT_D_FORWARD: Final = replace(
    FORWARD,
    variant=SPLIT_D,
    module="sm80_split_d.forward",
    summary="head_dim_value split over blocks",
    layouts=(*registry.LAYOUTS, registry.PAGED),
    refusals=tile_rules.split_d_forward,
    with_warps=_split_d_forward_warps,
    shared_memory=split_d_map,
    products=_split_d_forward_products,
)
BACKWARD: Final = replace(
    FORWARD,
    kind="backward",
    module="sm80.backward",
    summary="one block per key tile or split of the key tiles",
    layouts=registry.LAYOUTS,
    refusals=tile_rules.sm80_backward,
    with_warps=_backward_warps,
    shared_memory=sm80_smem.backward_map,
    products=_backward_products,
    accumulators=_backward_accumulators,
    num_splits_key=num_splits_key,
)
SPLIT_D_BACKWARD: Final = replace(
    BACKWARD,
    variant=SPLIT_D,
    module="sm80_split_d.backward",
    summary="head dims split over blocks",
    refusals=tile_rules.split_d_backward,
    shared_memory=split_d_map,
)
KERNELS: Final = (FORWARD, BACKWARD, SPLIT_D_FORWARD, SPLIT_D_BACKWARD)
COMPONENT_GEMM: Final = Kernel(
    kind="component_gemm",
    family="sm80",
    variant=STANDARD,
    module="component_gemms.standalone_sm80",
    summary="one block per tile",
    layouts=(),
    main_grid=gemm_grid,
    tensor_maps=no_tensor_maps,
)
FAMILY: Final = Family(
    name="sm80",
    needs_wgmma=False,
    unsupported_features=unsupported_features,
    tiles=lambda problem, num_sms, any_length: sm80_tiles(problem),
    refusals=lambda problem, tile: [],
    rejection=lambda problem: "",
)
