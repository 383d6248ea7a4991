"""Kernel of variant e4m3_cache: the forward over keys and values of e4m3 codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.kernel import Refusals, Tile, refuse
from cutlass_py_attn.kernels.sm90_common import kernel as sm90_common
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.kernels.sm90_e4m3_cache.layout import (
    MOST_VECTORS,
    REGISTERS,
    registers,
    rows_at_once,
    vectors_of_tile,
)
from cutlass_py_attn.kernels.sm90_forward import kernel as sm90_forward
from cutlass_py_attn.kernels.sm90_forward.rules import forward_keys, forward_rows, two_key_tiles
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS
from cutlass_py_attn.launch.variants import E4M3_CACHE
from cutlass_py_attn.score_terms import registry


def _refusals(build: Build) -> Refusals:
    yield from forward_rows(build, REGISTERS)
    yield from forward_keys(build)
    yield from _codes(build)
    yield from two_key_tiles(build)


def _codes(build: Build) -> Refusals:
    if not build.has(registry.KV8):
        rule = f"variant {E4M3_CACHE} converts keys and values of e4m3 codes"
        yield refuse(build, "variant", rule, "use the standard variant")
    at_once, most = rows_at_once(build), MOST_VECTORS
    if build.tile_n % at_once:
        yield refuse(build, "tile_n", f"a warpgroup converts {at_once} rows at once", "use a multiple of that")
    elif build.tile_n > WARPGROUP_THREADS:
        yield refuse(build, "tile_n", f"each of {WARPGROUP_THREADS} threads copies the scales of one row", "use fewer")
    elif vectors_of_tile(build) > most:
        rule = f"a thread has registers for {most} vectors of codes, not {vectors_of_tile(build)}"
        yield refuse(build, "tile_n", rule, "use fewer keys")


def _query_map(build: Build) -> dict[str, Tile]:
    """Returns the map of the query: threads load the codes of key and value."""
    return {"query": tma_tiles(build)["query"]}


FORWARD: Final = replace(
    sm90_forward.FORWARD,
    variant=E4M3_CACHE,
    takes_registered_terms=False,
    beside_ranges=None,
    module="sm90_e4m3_cache.forward",
    summary="persistent blocks over query tiles; one warpgroup converts every key and value tile of e4m3 codes to 16 "
    "bits",
    layouts=(*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.KV8_ROW),
    refusals=_refusals,
    accumulator_limit=sm90_common.limited_by(registers),
    tensor_maps=_query_map,
    reason=sm90_forward.forward_reason(loads="one loads keys and values and converts them to 16 bits"),
)
KERNELS: Final = (FORWARD,)
