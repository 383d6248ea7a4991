"""Plan table: the tiles of the fused kernels by dtype and padded head dim, widest first.

The planner takes the first row that fits the target's shared memory; the rows behind it serve parts with
99 KiB. What each row was measured against is in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cutlass_py_attn.parts.integers import round_up
from cutlass_py_attn.plan import COLUMN_MULTIPLE
from cutlass_py_attn.problem import Shape


@dataclass(frozen=True, slots=True)
class Tile:
    """One row: query rows, key rows, warps, stages of query and grad_output (0: the kernel has none), ptxas's
    register usage level (5 is its own choice), and targets for which ptxas spills whatever the level."""

    tile_m: int
    tile_n: int
    warps: int
    query_stages: int = 1
    grad_output_stages: int = 0
    register_usage_level: int = 5
    not_on: tuple[str, ...] = ()


def padded(head_dim: int) -> int:
    """head_dim as it is held in a tile."""
    return round_up(head_dim, COLUMN_MULTIPLE)


_BLACKWELL = ("sm_100", "sm_120")
_FORWARD_16 = {
    64: (Tile(128, 128, 4, not_on=_BLACKWELL), Tile(128, 64, 4)),
    128: (Tile(128, 64, 4, not_on=_BLACKWELL), Tile(64, 64, 4)),
}
_FORWARD_32 = {128: (Tile(64, 64, 4, 1, 0, 3, _BLACKWELL), Tile(64, 32, 4, 1, 0, 3))}
_BACKWARD_16 = {
    64: (Tile(128, 128, 8, 2, 2), Tile(64, 128, 8, 1, 1)),
    128: (Tile(64, 128, 8, 2, 2), Tile(64, 64, 8, 1, 1)),
}
_BACKWARD_32 = {
    64: (Tile(64, 64, 4, 1, 1), Tile(32, 64, 4, 1, 1)),
    128: (Tile(64, 64, 8, 1, 1, 3), Tile(32, 32, 8, 1, 1)),
}


def _rows(table: Mapping[int, tuple[Tile, ...]], shape: Shape) -> tuple[Tile, ...]:
    widest = max(padded(shape.head_dim), padded(shape.head_dim_value))
    return table[min(size for size in table if size >= widest)]


def forward_tiles(dtype: str, shape: Shape) -> tuple[Tile, ...]:
    """Candidate rows of the forward for this dtype and these head dims."""
    return _rows(_FORWARD_32 if dtype == "float32" else _FORWARD_16, shape)


def backward_tiles(dtype: str, shape: Shape) -> tuple[Tile, ...]:
    """Candidate rows of the backward for this dtype and these head dims."""
    return _rows(_BACKWARD_32 if dtype == "float32" else _BACKWARD_16, shape)
