"""Kernel of variant mla: decode of a latent cache, whose keys contain the values.

layout.py has what its machine code reads, decode/kernel.py the chunks of keys that blocks share.
"""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.kernels.kernel import FusedKernel, Refusals, Tile, no_products, no_splits, refuse
from cutlass_py_attn.kernels.sm90_common import kernel as sm90_common
from cutlass_py_attn.kernels.sm90_common.layout import LOAD_WARPGROUPS, tma_tiles
from cutlass_py_attn.kernels.sm90_common.rules import consumers, sm90_operands
from cutlass_py_attn.kernels.sm90_mla.layout import (
    ROPE_COLUMNS,
    SLOTS,
    WARP_ROWS,
    WARPGROUPS,
    forward_map,
    registers,
)
from cutlass_py_attn.kernels.sm90_wide import kernel as sm90_wide
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS
from cutlass_py_attn.launch.variants import MLA, MLA_HEAD_DIMS
from cutlass_py_attn.problem.tensors import KEY_ROPE
from cutlass_py_attn.score_terms import registry


def _refusals(build: Build) -> Refusals:
    yield from sm90_operands(build)
    if build.has(registry.KV8) != build.has(registry.KV8_TILE):
        rule = "variant mla reads e4m3 codes with scales of tiles of columns"
        yield refuse(build, "features", rule, f"use {registry.KV8_TILE} beside {registry.KV8}")
    for field, reason in (("tile_m", "both warpgroups have the same queries"), ("tile_n", "one warpgroup has S of")):
        if getattr(build, field) != WARPGROUP_ROWS:
            yield refuse(build, field, f"in variant mla {reason}, {WARPGROUP_ROWS} rows", f"use {WARPGROUP_ROWS}")
    yield from consumers(build, LOAD_WARPGROUPS, (WARPGROUPS,))
    if build.query_stages != SLOTS:
        yield refuse(build, "query_stages", "variant mla has a key tile for each warpgroup", f"use {SLOTS}")
    for field, size in zip(("head_dim", "head_dim_value"), MLA_HEAD_DIMS, strict=True):
        if getattr(build, field) != size:
            yield refuse(build, field, f"variant mla is for {size}", "use the variant of these head dims")


def _accumulators(build: Build) -> int:
    """Returns the registers of S, of the 16-bit weights beside it, and of the columns of O of a warpgroup."""
    columns = build.columns_value // WARPGROUPS
    return build.tile_m * (build.tile_n + build.tile_n // 2 + columns) // sm90_common.consumer_threads(build)


def _tensor_maps(build: Build) -> dict[str, Tile]:
    """Returns the maps of what TMA loads: latent rows, or beside codes the columns of the rotary embedding."""
    return {KEY_ROPE: (WARP_ROWS, ROPE_COLUMNS)} if build.has(registry.KV8_TILE) else {"key": tma_tiles(build)["key"]}


def _roles(build: Build) -> str:
    loads = (
        "four warps load keys and convert their e4m3 codes" if build.has(registry.KV8_TILE) else "one warp loads keys"
    )
    return (
        "blocks share the keys of all sequences: two warpgroups compute S of alternate key tiles and half of the "
        f"columns of O each, {loads}, whose first columns are the values"
    )


FORWARD: Final = FusedKernel(
    kind="forward",
    family="sm90",
    variant=MLA,
    module="sm90_mla.decode",
    summary="keys that contain the values: persistent blocks over chunks of the keys of all sequences, in which two "
    "warpgroups compute S of alternate key tiles and divide the columns of O",
    layouts=("grouped", registry.PAGED, "varlen", registry.KV8, registry.KV8_TILE),
    takes_negative_scales=False,
    refusals=_refusals,
    with_warps=sm90_wide.column_warps,
    shared_memory=forward_map,
    products=no_products,
    accumulators=_accumulators,
    accumulator_limit=sm90_common.limited_by(registers),
    main_grid=decode.main_grid,
    other_grids=decode.combine_grid,
    definitions=decode.definitions,
    workspace=decode.workspace,
    num_splits_key=no_splits,
    tensor_maps=_tensor_maps,
    reason=sm90_common.reason(_roles),
)
KERNELS: Final = (FORWARD,)
