"""Split-D: how head dims too wide for one block are split over blocks, and the shared memory of such a block.

Blocks that share a tile each accumulate one column block: some columns of O, or of dK and dV. If the accumulators of
dK and dV do not fit together, some blocks accumulate dK and others dV. S and dP sum over all columns of the head dim,
so every block that needs them computes them from chunks of columns. The chunks, and the rows of the tiles that the
other products read, pass through a pipeline in shared memory; what fills one pipeline stage is a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cutlass_py_attn.integers import ceil_div, round_up
from cutlass_py_attn.kernels.backward_parts.layout import product_piece, same_layout
from cutlass_py_attn.kernels.common.layout import copy_groups
from cutlass_py_attn.launch.build import COLUMN_MULTIPLE, Buffer, Build
from cutlass_py_attn.launch.smem import (
    TILE_ALIGNMENT,
    even_chunk,
    first_that_fits,
    stack,
    tile_bytes,
)
from cutlass_py_attn.problem.tensors import F32_BYTES


def tile_and_column_block(block: Any, column_blocks: int) -> tuple[Any, Any]:
    """Returns (tile, column block) of block `block` along x.

    The column blocks of a tile are neighbours, because they read the same tiles at the same time.
    """
    return block // column_blocks, block % column_blocks


HEAD_DIM_SPLIT_MULTIPLE = 64  # so that eight warps divide a column block and its rows are swizzled in full
CHUNK_ROW_BYTES = (512, 256, 128)  # of one row of a chunk in the forward; the widest that fits is chosen
STAGE_KIBIBYTES = (34, 18, 10)  # of one stage in the backward, likewise: 32, 16, 8 and the padding of float32 rows
STEP_ROWS = (64, 32, 16)  # of a tile in one step
DK_DV_REGISTERS = {2: 136, 4: 72}  # per thread for dK and dV together, by bytes per element


@dataclass(frozen=True, slots=True)
class ForwardSplit:
    """Steps of one key tile in the split-D forward.

    chunk: columns of Q and K in one score step; there are `score_steps` of them
    value_rows: keys of V's column block in one value step; there are `value_steps` of them, after the score steps
    keeps_query: whether the query tile stays in shared memory; if not, its chunks are loaded with those of K
    slot_bytes: bytes of one pipeline stage
    """

    chunk: int
    score_steps: int
    value_rows: int
    value_steps: int
    keeps_query: bool
    slot_bytes: int

    @property
    def steps(self) -> int:
        """All steps of one key tile."""
        return self.score_steps + self.value_steps


@dataclass(frozen=True, slots=True)
class HeadSide:
    """One half of the split-D backward: Q, K and dK of head_dim, or dO, V and dV of head_dim_value.

    width: columns of a column block, of which there are `blocks`
    chunk: columns of one score step; there are `steps` of them
    rows: queries of the column block in one gradient step; there are `parts` of them, if the gradient is wanted
    piece: columns that one gradient product computes
    keeps: whether the tile of K or V stays in shared memory; if not, its chunks are loaded with those of Q or dO
    """

    width: int
    blocks: int
    chunk: int
    steps: int
    rows: int
    parts: int
    piece: int
    keeps: bool

    @property
    def columns(self) -> int:
        """Columns of all column blocks."""
        return self.width * self.blocks


@dataclass(frozen=True, slots=True)
class BackwardSplit:
    """Both halves of the split-D backward, and the bytes of one pipeline stage."""

    key: HeadSide
    value: HeadSide
    slot_bytes: int


def even_head_dim_split(head_dim_split: int, widest: int) -> int:
    """Returns `head_dim_split`, or less if as many blocks then share the `widest` columns more evenly."""
    columns = ceil_div(widest, ceil_div(widest, head_dim_split))
    return min(head_dim_split, round_up(columns, HEAD_DIM_SPLIT_MULTIPLE))


def forward_split(build: Build) -> ForwardSplit:
    """Returns the steps of a split-D forward: the first candidate that fits the target, else the last."""
    return first_that_fits(build, ((split, _forward(build, split)) for split in _forward_splits(build)))


def backward_split(build: Build) -> BackwardSplit:
    """Returns the steps of a split-D backward: the first candidate that fits the target, else the last."""
    return first_that_fits(build, ((split, _backward(build, split)) for split in _backward_splits(build)))


def splits_dk_dv(build: Build) -> bool:
    """Returns whether a block of the split-D backward accumulates either dK or dV, because both do not fit."""
    both = build.tile_n * (build.block_columns + build.block_columns_value)
    return bool(build.head_dim_split) and both > DK_DV_REGISTERS[build.item_bytes] * build.threads


def column_blocks(build: Build) -> tuple[int, int]:
    """Returns the column blocks (of Q and K, of V and O) for which the backward has a result to compute."""
    key = ceil_div(build.columns, build.block_columns)
    for_bias = int(build.grad_bias_mode == "main")
    value = ceil_div(build.columns_value, build.block_columns_value)
    return (
        for_bias if {"query", "key"}.isdisjoint(build.gradients) else key,
        value if "value" in build.gradients else 0,
    )


def blocks_per_tile(build: Build) -> int:
    """Returns the blocks that share a query tile of the forward, or a key tile of the backward."""
    if build.kind == "forward":
        return ceil_div(build.columns_value, build.block_columns_value)
    return sum(column_blocks(build)) if splits_dk_dv(build) else max(column_blocks(build))


def gradient_columns(build: Build, width: int) -> int:
    """Returns the columns of dK or dV that one product computes, of `width` columns.

    All columns, except in a split-D float32 kernel: its products have registers of their own beside the accumulators.
    """
    return product_piece(build, build.tile_n, width) if build.head_dim_split and build.item_bytes > 2 else width


def split_d_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the shared-memory map of a split-D build."""
    if build.kind == "forward":
        return _forward(build, forward_split(build))
    return _backward(build, backward_split(build))


def _forward_splits(build: Build) -> Iterator[ForwardSplit]:
    """Yields the candidates, best first: those that keep the query tile, and of those the widest chunks."""
    columns_value = build.block_columns_value
    rows = _rows(build, build.tile_n, columns_value, tile_bytes(build.dtype, STEP_ROWS[1], columns_value))
    for keeps_query in (True, False):
        for row_bytes in CHUNK_ROW_BYTES:
            chunk = even_chunk(build.columns, row_bytes // build.item_bytes)
            score_rows = build.tile_n if keeps_query else build.tile_m + build.tile_n
            sizes = (tile_bytes(build.dtype, score_rows, chunk), tile_bytes(build.dtype, rows, columns_value))
            slot = round_up(max(sizes), TILE_ALIGNMENT)
            yield ForwardSplit(chunk, ceil_div(build.columns, chunk), rows, build.tile_n // rows, keeps_query, slot)


def _backward_splits(build: Build) -> Iterator[BackwardSplit]:
    """Yields the candidates, best first: those that keep K and V, and of those the largest stages."""
    for keeps_key, keeps_value in itertools.product((True, False), repeat=2):
        for kibibytes in STAGE_KIBIBYTES:
            key = _side(build, build.columns, build.block_columns, keeps_key, kibibytes * 1024)
            value = _side(build, build.columns_value, build.block_columns_value, keeps_value, kibibytes * 1024)
            slot = max(_side_bytes(build, key), _side_bytes(build, value))
            yield BackwardSplit(key, value, round_up(slot, TILE_ALIGNMENT))


def _side(build: Build, columns: int, width: int, keeps: bool, slot_bytes: int) -> HeadSide:
    rows = _rows(build, build.tile_m, width, slot_bytes)
    # If K stays in shared memory, its chunks and its column block are one tile, so both need the same layout.
    widths = range(COLUMN_MULTIPLE, width + 1, COLUMN_MULTIPLE)
    chunks = [chunk for chunk in widths if width % chunk == 0 and same_layout(build, chunk, width)]
    fitting = [chunk for chunk in chunks if tile_bytes(build.dtype, _chunk_rows(build, keeps), chunk) <= slot_bytes]
    chunk, blocks = max(fitting, default=chunks[0]), ceil_div(columns, width)
    steps, parts = ceil_div(columns, chunk), build.tile_m // rows
    return HeadSide(width, blocks, chunk, steps, rows, parts, gradient_columns(build, width), keeps)


def _chunk_rows(build: Build, keeps: bool) -> int:
    return build.tile_m if keeps else build.tile_m + build.tile_n


def _side_bytes(build: Build, side: HeadSide) -> int:
    chunk = tile_bytes(build.dtype, _chunk_rows(build, side.keeps), side.chunk)
    return max(chunk, tile_bytes(build.dtype, side.rows, side.width))


def _rows(build: Build, tile_rows: int, columns: int, allowed_bytes: int) -> int:
    """Returns the rows of a tile in one step: the most within `allowed_bytes` that the threads can copy.

    The fewest rows that the threads can copy if none are within `allowed_bytes`.
    """
    possible = copyable_rows(build, tile_rows, columns)
    fitting = [rows for rows in possible if tile_bytes(build.dtype, rows, columns) <= allowed_bytes]
    return max(fitting, default=possible[-1])


def copyable_rows(build: Build, tile_rows: int, columns: int) -> list[int]:
    """Returns the rows of a tile that the threads can copy in one step, the most first."""
    return [rows for rows in STEP_ROWS if tile_rows % rows == 0 and _divides(build, rows, columns)]


def _divides(build: Build, rows: int, columns: int) -> bool:
    """Returns whether every group of threads copies columns that have the layout of the tile."""
    width, left = divmod(columns, copy_groups(build, rows, columns))
    return left == 0 and width % COLUMN_MULTIPLE == 0 and same_layout(build, width, columns)


def _forward(build: Build, split: ForwardSplit) -> tuple[Buffer, ...]:
    """Places the buffers of the forward.

    query: the chunks of the query tile, if it stays
    ring: pipeline stages, reused for the output
    p: the bias, then P
    statistics: of each row, one number for each warp along the row, and a factor
    """
    dtype, tile_m = build.dtype, build.tile_m
    ring = build.query_stages * split.slot_bytes
    return stack(
        ("query", split.score_steps * tile_bytes(dtype, tile_m, split.chunk) if split.keeps_query else 0, 0, 1),
        ("ring", max(ring, tile_bytes(dtype, tile_m, build.block_columns_value)), 0, 4),
        ("p", tile_bytes(dtype, tile_m, build.tile_n), 0, 3),
        ("statistics", (build.warps_scores[1] + 1) * tile_m * F32_BYTES, 2, 4),
    )


def _backward(build: Build, split: BackwardSplit) -> tuple[Buffer, ...]:
    """Places the buffers of the backward. All but the statistics are reused for dK and dV in the end.

    key: K, or its column block; value: V if it stays
    ring: pipeline stages
    p: P, if a block needs it beside dS; ds: the bias, then dS or P
    statistics: stages of logsumexp and delta
    """
    dtype, tile_m, tile_n, stages = build.dtype, build.tile_m, build.tile_n, build.query_stages
    scores = tile_bytes(dtype, tile_m, tile_n)
    return stack(
        ("key", tile_bytes(dtype, tile_n, split.key.columns if split.key.keeps else split.key.width), 0, 7),
        ("value", tile_bytes(dtype, tile_n, split.value.columns) if split.value.keeps else 0, 0, 3),
        ("ring", stages * split.slot_bytes, 0, 6),
        ("p", 0 if splits_dk_dv(build) else scores, 2, 5),
        ("ds", scores, 0, 7),
        ("statistics", 2 * stages * tile_m * F32_BYTES, 0, 4),
    )
