"""Shared memory, registers and loops of the sm90 forward: what its machine code reads of a Build."""

from __future__ import annotations

import itertools
from typing import Final

from cutlass_py_attn.kernels.sm90_common.layout import DROPOUT_TILES, dropout_tile_bytes
from cutlass_py_attn.launch.build import Buffer, Build
from cutlass_py_attn.launch.smem import BARRIER_BYTES, first_that_fits, stack, tile_bytes
from cutlass_py_attn.launch.variants import SPECULATIVE
from cutlass_py_attn.problem.tensors import F32_BYTES
from cutlass_py_attn.score_terms import registry

# Registers per thread of the forward by tile_m: of the warpgroup that loads, of those that compute.
FORWARD_REGISTERS: Final = {64: (24, 240), 128: (24, 240), 192: (32, 160)}
SPLIT_WITH_TERMS_COLUMNS: Final = 64  # most columns of heads whose forward splits its key loop with any score term


def forward_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map of the forward, with two query stages and with dropout bits of several key tiles if they fit.

    With two query stages, the next query tile is loaded before the last value tile of this one is multiplied. Loads
    from pages take longer: key and value in pages have one more stage if it fits, even where only one query stage is
    left (d 128 with 16-row pages on an H200: 0.90 of the speed without pages; with two query stages, and one more stage
    of key alone, 0.81).
    """
    dropout_tiles = DROPOUT_TILES if build.has("dropout") else (0,)
    more_stages = (1, 0) if build.has("paged") and not build.has(registry.KV8) else (0,)
    options = itertools.product(more_stages, (2, 1), dropout_tiles)
    maps = {option: _forward_with(build, *option) for option in options}
    return maps[first_that_fits(build, maps.items())]


def _forward_with(build: Build, more_stages: int, query_stages: int, dropout_tiles: int) -> tuple[Buffer, ...]:
    """Places the stages of query, key and value, the dropout bits, and a full and an empty barrier for each stage.

    With scales of rows also those of the keys and values of each stage.
    """
    dtype, tile_m, tile_n, stages = build.dtype, build.tile_m, build.tile_n, build.query_stages + more_stages
    scales = stages * tile_n * F32_BYTES if build.has(registry.KV8_ROW) else 0
    return stack(
        ("query", query_stages * tile_bytes(dtype, tile_m, build.columns), 0, 1),
        ("key", stages * tile_bytes(dtype, tile_n, build.columns), 0, 1),
        ("value", stages * tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("key_scales", scales, 0, 1),
        ("value_scales", scales, 0, 0),
        ("dropout_bits", dropout_tiles * dropout_tile_bytes(build), 0, 2),
        ("barriers", 2 * BARRIER_BYTES * (query_stages + 2 * stages), 0, 4),
    )


def splits_key_loop(build: Build) -> bool:
    """Returns whether the forward has a loop of its own for key tiles that every row sees completely.

    Against the version before, which had one loop and no chains, it was slower with a window (TFLOP/s on an H200, bf16
    d 64, window 1024: 346, before 365) and, in wide heads, with ALiBi (d 128: 545, before 584) or softcap (545, before
    554). In heads of 64 columns these are faster with it (378, before 368; 363, before 351). So is a bias in both
    (d 64: 251, before 243; d 128: 425, before 421). Option speculative needs the loop.
    """
    if SPECULATIVE in build.options:
        return True
    is_wide = max(build.columns, build.columns_value) > SPLIT_WITH_TERMS_COLUMNS
    return not build.form.has_left and not (is_wide and (build.has("alibi") or build.has("softcap")))


def deals_last_rounds(build: Build) -> bool:
    """Returns whether the GPU deals the tiles of the forward's last rounds, each to a block of its own.

    With 192 query rows a tile, a head has few tiles of unequal length, which rounds of all blocks share unevenly.
    """
    is_causal = build.kind == "forward" and build.form.grows
    return is_causal and build.tile_m == 192 and not build.has("varlen") and not build.has_combine


def registers(build: Build) -> tuple[int, ...]:
    """Returns the registers per thread of each role: loads, computes S and O."""
    return FORWARD_REGISTERS[build.tile_m]
