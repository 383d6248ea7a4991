"""Streaming: how a head too wide to hold is shared out, as plain functions of Python ints and traced integers."""

from __future__ import annotations

from typing import Any

from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.plan import COLUMN_MULTIPLE


def tile_and_column_block(block: Any, column_blocks: int) -> tuple[Any, Any]:
    """(tile, column block) of block `block` along x: the column blocks of a tile are neighbours, for they read the
    same tiles at the same time."""
    return block // column_blocks, block % column_blocks


def even_chunk(columns: int, widest: int) -> int:
    """Columns of one chunk where as few as possible, none wider than `widest`, cover `columns`."""
    count = ceil_div(columns, max(widest, COLUMN_MULTIPLE))
    return round_up(ceil_div(columns, count), COLUMN_MULTIPLE)
