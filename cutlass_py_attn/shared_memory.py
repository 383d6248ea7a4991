"""Shared memory: where each tile lies in a block's shared memory and during which steps it is alive."""

from __future__ import annotations

from cutlass_py_attn.parts.integers import round_up
from cutlass_py_attn.plan import F32_ROW_PADDING, Buffer
from cutlass_py_attn.plan_table import Tile, padded
from cutlass_py_attn.problem import ITEM_BYTES, Shape

# The numbered steps of the fused kernels: a buffer's first and last step count in these.
STEPS = {
    "forward": ("load", "S", "softmax", "O", "store"),
    "backward": ("load", "S", "P", "dP", "dS", "dV", "dK", "dQ", "store"),
    "room": (),
}

TILE_ALIGNMENT = 1024  # the 128-byte swizzle repeats every 1024 bytes
F32_BYTES = 4


def row_elements(dtype: str, columns: int) -> int:
    """Elements from one row of a tile to the next: float32 rows are padded, 16-bit tiles are swizzled instead."""
    return columns + F32_ROW_PADDING if dtype == "float32" else columns


def tile_bytes(dtype: str, rows: int, columns: int) -> int:
    """Bytes of one tile in shared memory."""
    return rows * row_elements(dtype, columns) * ITEM_BYTES[dtype]


def forward_map(dtype: str, shape: Shape, tile: Tile) -> tuple[Buffer, ...]:
    """query (reused for the output), key and value of the forward, and four partial sums of each query row."""
    columns, columns_value = padded(shape.head_dim), padded(shape.head_dim_value)
    query = max(tile_bytes(dtype, tile.tile_m, columns), tile_bytes(dtype, tile.tile_m, columns_value))
    return _stack(
        ("query", query, 0, 4),
        ("key", tile_bytes(dtype, tile.tile_n, columns), 0, 1),
        ("value", tile_bytes(dtype, tile.tile_n, columns_value), 0, 3),
        ("sums", 4 * tile.tile_m * F32_BYTES, 2, 4),
    )


def backward_map(dtype: str, shape: Shape, tile: Tile) -> tuple[Buffer, ...]:
    """key, value, rings of query and grad_output, P, dS, and the rings of logsumexp and delta."""
    columns, columns_value = padded(shape.head_dim), padded(shape.head_dim_value)
    scores = tile_bytes(dtype, tile.tile_m, tile.tile_n)
    return _stack(
        ("key", tile_bytes(dtype, tile.tile_n, columns), 0, 8),
        ("value", tile_bytes(dtype, tile.tile_n, columns_value), 0, 8),
        ("query", tile.query_stages * tile_bytes(dtype, tile.tile_m, columns), 0, 6),
        ("grad_output", tile.grad_output_stages * tile_bytes(dtype, tile.tile_m, columns_value), 0, 5),
        ("p", scores, 2, 5),
        ("ds", scores, 4, 7),
        ("logsumexp", tile.query_stages * tile.tile_m * F32_BYTES, 0, 2),
        ("delta", tile.query_stages * tile.tile_m * F32_BYTES, 0, 4),
    )


def _stack(*buffers: tuple[str, int, int, int]) -> tuple[Buffer, ...]:
    placed: list[Buffer] = []
    offset = 0
    for name, size, first, last in buffers:
        placed.append(Buffer(name, offset, size, first, last))
        offset = round_up(offset + size, TILE_ALIGNMENT if size >= TILE_ALIGNMENT else 128)
    return tuple(placed)
