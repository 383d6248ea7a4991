"""sm80 kernels (mma.sync, cp.async) whose blocks have all columns of the head dims. They multiply no e4m3 codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.backward_parts import kernel as backward_parts
from cutlass_py_attn.kernels.kernel import (
    TERMS,
    BufferRule,
    FusedKernel,
    Product,
    Refusals,
    block_registers,
    listed,
    no_splits,
    no_tensor_maps,
    refuse,
    warp_grid,
)
from cutlass_py_attn.kernels.sm80 import layout
from cutlass_py_attn.launch.build import Build, Warps
from cutlass_py_attn.launch.expressions import Expr, Grid, ceil_div, maximum, minimum
from cutlass_py_attn.launch.gemm_spec import MMA_ROWS
from cutlass_py_attn.launch.names import BATCH, NUM_HEADS, NUM_HEADS_KEY, NUM_KEYS, NUM_QUERIES, NUM_SMS, NUM_SPLITS_KEY
from cutlass_py_attn.launch.smem import rows_copied_at_once
from cutlass_py_attn.launch.variants import STANDARD
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import has_codes
from cutlass_py_attn.problem.tensors import E4M3_BYTES, OPERANDS, WORD_BYTES
from cutlass_py_attn.score_terms import registry

SPLIT_WAVES: Final = 32  # blocks per SM beyond which more key splits of the backward no longer shorten the last wave
MAX_HEAD_DIM_OF_CODES: Final = 256  # of an e4m3 cache, whose tiles have all columns
LEAST_COPY_OF_CODES: Final = 4  # bytes: the least that cp.async copies
TILE_M: Final = (32, 64, 128)
TILE_N: Final = (32, 64, 96, 128)
WARPS: Final = (4, 8)


def warps_of(build: Build, m: int, n: int) -> Warps:
    """Returns the warps of the block over an (m, n) product."""
    return warp_grid(build.warps, m, n, build.item_bytes)


def _forward_warps(build: Build) -> Build:
    """Returns the forward with its warps: one has whole rows of S, because the softmax reduces along them."""
    return replace(build, warps_scores=(build.warps, 1))


def _backward_warps(build: Build) -> Build:
    return replace(
        build,
        warps_scores=warps_of(build, build.tile_m, build.tile_n),
        warps_grad_v=warps_of(build, build.tile_n, build.columns_value),
        warps_grad_k=warps_of(build, build.tile_n, build.columns),
        warps_grad_q=warps_of(build, build.tile_m, build.columns),
    )


def scores_product(build: Build) -> Product:
    """Returns the product S = Q K^T of a block."""
    return Product("warps_scores", build.warps_scores, build.tile_m, build.tile_n)


def _forward_products(build: Build) -> tuple[Product, ...]:
    return (scores_product(build),)


def _backward_products(build: Build) -> tuple[Product, ...]:
    return (
        scores_product(build),
        Product("warps_grad_v", build.warps_grad_v, build.tile_n, build.columns_value),
        Product("warps_grad_k", build.warps_grad_k, build.tile_n, build.columns),
        Product("warps_grad_q", build.warps_grad_q, build.tile_m, build.columns),
    )


def _forward_accumulators(build: Build) -> int:
    """Returns the registers of S and O."""
    return build.tile_m * (build.tile_n + build.columns_value) // build.threads


def _backward_accumulators(build: Build) -> int:
    """Returns the registers of S and dP, and of dK and dV."""
    return build.tile_n * (2 * build.tile_m + build.columns + build.columns_value) // build.threads


def _forward_grid(build: Build) -> Grid:
    return ceil_div(NUM_QUERIES, build.tile_m), NUM_HEADS, BATCH


def _backward_grid(build: Build) -> Grid:
    return NUM_SPLITS_KEY, NUM_HEADS_KEY, BATCH


def _num_splits_key(build: Build) -> Expr:
    """Returns the blocks of the backward that share one (batch, key head): enough for SPLIT_WAVES blocks per SM.

    Never more than there are key tiles. With fewer blocks than key tiles, a block computes several key tiles and
    balances their unequal lengths under a causal mask. A deterministic block waits only for blocks that started before
    it, so each has one key tile.
    """
    key_tiles = ceil_div(NUM_KEYS, build.tile_n)
    if build.deterministic:
        return key_tiles
    return minimum(key_tiles, ceil_div(SPLIT_WAVES * NUM_SMS, maximum(BATCH * NUM_HEADS_KEY, 1)))


def backward_workspace(blocks_per_tile: Callable[[Build], int]) -> Callable[[Build], tuple[BufferRule, ...]]:
    """Returns `workspace` of a backward.

    blocks_per_tile: blocks that share a key tile

    tile_count_semaphore: (blocks_per_tile, num_heads_key, batch) int32 counts of blocks that have started, if
        deterministic
    """

    def of_build(build: Build) -> tuple[BufferRule, ...]:
        counters = NUM_HEADS_KEY * BATCH * (blocks_per_tile(build) * WORD_BYTES)
        semaphore = [BufferRule("tile_count_semaphore", counters, is_zeroed=True)] if build.deterministic else []
        return backward_parts.workspace(build, [*backward_parts.query_sums(build), *semaphore])

    return of_build


def _reason(problem: Problem, build: Build, values: Mapping[str, int]) -> str:
    return f"sm80 family (mma.sync, cp.async): the first tile of the table that fits {build.arch}'s shared memory"


def unsupported_features(problem: Problem) -> tuple[str, ...]:
    """Returns what the problem has that the sm80 kernels do not take: ranges of keys, and some e4m3 codes."""
    ranges = ("ranges of keys",) if problem.form.has_ranges else ()
    if not has_codes(problem):
        return ranges
    shape = problem.shape
    present = {
        "query of e4m3": not problem.has_e4m3_cache,
        f"head dims beyond {MAX_HEAD_DIM_OF_CODES}": max(shape.head_dim, shape.head_dim_value) > MAX_HEAD_DIM_OF_CODES,
        f"rows aligned to less than {LEAST_COPY_OF_CODES} bytes": min(
            getattr(problem, name).vector_bytes for name in (*OPERANDS, "output")
        ) < LEAST_COPY_OF_CODES,
    }  # fmt: skip
    return *ranges, *(name for name, is_present in present.items() if is_present)


def _forward_refusals(build: Build) -> Refusals:
    """Yields the rules of the forward."""
    yield from _tile(build)
    if build.query_stages != 1:
        yield refuse(build, "query_stages", "the standard sm80 forward has one key and value stage", "use 1")
    if build.tile_m % (build.warps * MMA_ROWS):
        rule = f"each of {build.warps} warps owns rows of S in multiples of {MMA_ROWS}"
        yield refuse(build, "tile_m", rule, "use such rows")
    yield from _copies(build)


def _backward_refusals(build: Build) -> Refusals:
    """Yields the rules of the backward."""
    yield from equal_stages(build)
    yield from _tile(build)
    if build.query_stages not in (1, 2):
        yield refuse(build, "query_stages", "the sm80 backward loads at most one query tile ahead", "use 1 or 2")
    yield from _copies(build)


def equal_stages(build: Build) -> Refusals:
    """Yields the rule that a backward has as many stages of grad_output as of query."""
    if build.grad_output_stages != build.query_stages:
        rule = f"must be query_stages = {build.query_stages}: the sm80 backward advances both together"
        yield refuse(build, "grad_output_stages", rule, "set it so")


def _tile(build: Build) -> Refusals:
    for field, allowed in (("tile_m", TILE_M), ("tile_n", TILE_N)):
        if getattr(build, field) not in allowed:
            yield refuse(build, field, f"the standard sm80 kernels have {listed(allowed)} rows", "use those")
    if build.warps not in WARPS:
        yield refuse(build, "warps", f"the sm80 kernels divide their tiles among {listed(WARPS)} warps", "use one")


def _copies(build: Build) -> Refusals:
    """The threads of a block copy several rows of a tile at once, so a tile has a multiple of these rows."""
    widths: list[tuple[int, tuple[str, ...]]]
    widths = [(columns * build.item_bytes, ("tile_m", "tile_n")) for columns in (build.columns, build.columns_value)]
    if build.has(registry.KV8):
        widths += [(columns * E4M3_BYTES, ("tile_n",)) for columns in (build.columns, build.columns_value)]
    for row_bytes, fields in sorted(set(widths)):
        at_once = rows_copied_at_once(build.threads, row_bytes, build.vector_bytes)
        for field in fields:
            # Fewer threads than one row needs copy no whole row; _tile refuses so few warps.
            if at_once and getattr(build, field) % at_once:
                rule = f"{build.threads} threads copy {at_once} rows at once"
                yield refuse(build, field, rule, "use a multiple of that")


FORWARD: Final = FusedKernel(
    kind="forward",
    family="sm80",
    variant=STANDARD,
    module="sm80.forward",
    summary="one block per query tile",
    layouts=(*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.KV8_ROW),
    terms=TERMS,
    takes_registered_terms=True,
    refusals=_forward_refusals,
    with_warps=_forward_warps,
    shared_memory=layout.forward_map,
    products=_forward_products,
    accumulators=_forward_accumulators,
    accumulator_limit=block_registers,
    main_grid=_forward_grid,
    num_splits_key=no_splits,
    tensor_maps=no_tensor_maps,
    reason=_reason,
)
BACKWARD: Final = replace(
    FORWARD,
    kind="backward",
    module="sm80.backward",
    summary="one block per key tile or split of the key tiles",
    layouts=registry.LAYOUTS,
    refusals=_backward_refusals,
    with_warps=_backward_warps,
    shared_memory=layout.backward_map,
    products=_backward_products,
    accumulators=_backward_accumulators,
    main_grid=_backward_grid,
    num_splits_key=_num_splits_key,
    workspace=backward_workspace(lambda build: 1),
)
KERNELS: Final = (FORWARD, BACKWARD)
