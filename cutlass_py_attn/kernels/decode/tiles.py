"""Tile table of the decode family: tiles by dtype, count of rows and head dim, the fastest first."""

from __future__ import annotations

from dataclasses import replace

from cutlass_py_attn.launch.tile_config import BLACKWELL, TileConfig, Tiles
from cutlass_py_attn.launch.variants import PERSISTENT
from cutlass_py_attn.problem.problem import Problem

# Decode kernels by the wider of both head dims; tile_m counts rows of queries and heads, stages are those of a team.
_DECODE_16: Tiles = {
    64: (TileConfig(16, 128, 4, 3), TileConfig(16, 64, 4, 2)),
    128: (TileConfig(16, 128, 8, 3), TileConfig(16, 64, 4, 3), TileConfig(16, 64, 4, 2)),
    256: (TileConfig(16, 64, 4, 2), TileConfig(16, 32, 2, 2)),
}
_DECODE_32: Tiles = {
    64: (TileConfig(16, 128, 8, 3), TileConfig(16, 64, 4, 3), TileConfig(16, 64, 4, 2)),
    128: (TileConfig(16, 64, 4, 3), TileConfig(16, 32, 2, 3), TileConfig(16, 32, 2, 2)),
}
# For more than 16 rows, and for more than 32 rows.
_DECODE_16_ROWS: Tiles = {
    64: (TileConfig(32, 128, 4, 3), TileConfig(32, 64, 4, 2)),
    128: (TileConfig(32, 64, 4, 3), TileConfig(32, 64, 4, 2)),
}
_DECODE_32_ROWS: Tiles = {64: (TileConfig(32, 64, 4, 3), TileConfig(32, 64, 4, 2))}
_DECODE_16_MORE: Tiles = {
    64: (TileConfig(64, 128, 8, 5), TileConfig(64, 128, 8, 3), TileConfig(32, 64, 4, 2)),
    128: (
        TileConfig(64, 128, 8, 2, not_on=BLACKWELL),
        TileConfig(64, 64, 8, 3),
        TileConfig(32, 64, 4, 3),
        TileConfig(32, 64, 4, 2),
    ),
}
_DECODE: dict[bool, dict[int, Tiles]] = {  # by whether float32, and up to how many rows
    False: {16: _DECODE_16, 32: _DECODE_16_ROWS, 64: _DECODE_16_MORE},
    True: {16: _DECODE_32, 32: _DECODE_32_ROWS, 64: _DECODE_32_ROWS},
}
# The persistent kernel for a cache in pages has two blocks on an SM where they fit.
_PERSISTENT_16: Tiles = {
    64: (TileConfig(16, 128, 4, 3), TileConfig(16, 64, 4, 2)),
    128: (TileConfig(16, 64, 4, 3), TileConfig(16, 64, 4, 2)),
    256: (TileConfig(16, 64, 4, 2), TileConfig(16, 32, 2, 2)),
}
# With so few rows (sequences times key heads) a block has hardly more than one, and one block on an SM has fewer pieces
# to join: 8 % faster at 1 x 8192 keys and 4 % at 8 x 8192 than two blocks, but 5 % slower at 256 x 1024 (H200).
_FEW_ROWS = 128
_PERSISTENT_16_FEW: Tiles = {
    **_PERSISTENT_16,
    128: (TileConfig(16, 128, 8, 3), *_PERSISTENT_16[128]),
}
_PERSISTENT_16_MORE: Tiles = {
    **_DECODE_16_MORE,
    128: (TileConfig(64, 128, 8, 3, not_on=BLACKWELL), *_DECODE_16_MORE[128][1:]),
}
_PERSISTENT: dict[bool, dict[int, Tiles]] = {
    False: {16: _PERSISTENT_16, 32: _DECODE_16_ROWS, 64: _PERSISTENT_16_MORE},
    True: {16: _DECODE_32, 32: _DECODE_32_ROWS, 64: _DECODE_32_ROWS},
}
# With an e4m3 cache: a warp has 32 keys, whose conversions hide each other's latency.
_KV8_16: Tiles = {
    64: (TileConfig(16, 128, 4, 3), TileConfig(16, 64, 4, 2)),
    128: (TileConfig(16, 128, 4, 3), TileConfig(16, 64, 4, 3)),
    256: (TileConfig(16, 64, 4, 2), TileConfig(16, 32, 2, 2)),
}
_KV8_16_ROWS: Tiles = {
    64: (TileConfig(32, 128, 4, 3), TileConfig(32, 64, 4, 2)),
    128: (TileConfig(32, 64, 4, 3), TileConfig(32, 64, 4, 2)),
}
_KV8_16_MORE: Tiles = {
    64: (TileConfig(64, 128, 8, 5), TileConfig(64, 128, 8, 3), TileConfig(32, 64, 4, 2)),
    128: (TileConfig(64, 64, 8, 3), TileConfig(32, 64, 4, 3), TileConfig(32, 64, 4, 2)),
}
_KV8: dict[int, Tiles] = {16: _KV8_16, 32: _KV8_16_ROWS, 64: _KV8_16_MORE}


def decode_tiles(problem: Problem) -> tuple[TileConfig, ...]:
    """Returns the tiles of the decode kernels for this problem, the fastest first."""
    shape = problem.shape
    widest = max(shape.head_dim, shape.head_dim_value)
    is_persistent = problem.pages is not None or problem.has_e4m3_cache
    tables = (_PERSISTENT if is_persistent else _DECODE)[problem.dtype == "float32"]
    if problem.has_e4m3_cache:
        tables = _KV8
    rows = shape.num_queries * shape.group
    table = next((table for most, table in tables.items() if rows <= most), tables[max(tables)])
    is_invariant = problem.pages is not None and problem.pages.invariant
    if widest > max(table) or is_invariant:  # a tile of its own for each count of rows would change the bits
        table = tables[min(tables)]
    if table is _PERSISTENT_16 and not is_invariant and shape.batch * shape.num_heads_key <= _FEW_ROWS:
        table = _PERSISTENT_16_FEW
    tiles = table[min(size for size in table if size >= widest)]
    return tuple(replace(tile, variant=PERSISTENT) for tile in tiles) if is_persistent else tiles
