"""Streams: how a head too wide for one block is cut, and where its pieces lie in shared memory.

Blocks share a tile by column blocks: each accumulates its own columns of O, or of dK and dV. Where not even both of
these fit, some blocks accumulate dK and others dV. What is summed over the whole head (S and dP) every block computes
that needs it, from chunks of columns that pass through a ring of slots; so do rows of the tiles that the other
products read. What fills a slot is a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.parts.streaming import even_chunk
from cutlass_py_attn.plan import COLUMN_MULTIPLE, Buffer, Build
from cutlass_py_attn.problem import F32_BYTES
from cutlass_py_attn.shared_memory import TILE_ALIGNMENT, first_that_fits, rows_copied_at_once, stack, tile_bytes

COPY_BYTES = 16  # what a thread copies at once
CHUNK_BYTES = (512, 256, 128)  # of one row of a chunk in the forward; the widest that fits is taken
SLOT_KIBIBYTES = (34, 18, 10)  # of one slot in the backward, likewise: 32, 16, 8 and the padding of float32 rows
ROWS = (64, 32, 16)  # of a tile in one step
BOTH_REGISTERS = {2: 136, 4: 72}  # of a thread for dK and dV together, by bytes per element
PIECE_REGISTERS = {2: 32, 4: 64}  # of a thread for a product beside those accumulators
SWIZZLED_COLUMNS = 64  # of 16-bit tiles; those with an odd multiple of 32 are laid out in another way


@dataclass(frozen=True, slots=True)
class ForwardCut:
    """The steps of one key tile: `score_steps` chunks of `chunk` columns of Q and K, then `value_steps` times
    `value_rows` keys of V's column block. keeps_query: the query tile stays, else its chunks are streamed too."""

    chunk: int
    score_steps: int
    value_rows: int
    value_steps: int
    keeps_query: bool
    slot_bytes: int

    @property
    def steps(self) -> int:
        """Of one key tile."""
        return self.score_steps + self.value_steps


@dataclass(frozen=True, slots=True)
class Side:
    """One half of the backward: Q, K and dK, or dO, V and dV.

    width: columns of a column block, of which there are `blocks`. First come `steps` chunks of `chunk` columns for
    the scores; later, where a gradient is wanted, `parts` times `rows` queries of the column block, which are
    multiplied `piece` columns at a time. keeps: the tile of K or V stays in shared memory, else its chunks are
    streamed too.
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
        """Of all column blocks."""
        return self.width * self.blocks


@dataclass(frozen=True, slots=True)
class BackwardCut:
    """Both halves, and the bytes of one slot."""

    key: Side
    value: Side
    slot_bytes: int


def forward_cut(build: Build) -> ForwardCut:
    """How a streamed forward is cut: the first candidate that fits the target, else the last."""
    return first_that_fits(build, ((cut, _forward(build, cut)) for cut in _forward_cuts(build)))


def backward_cut(build: Build) -> BackwardCut:
    """How a streamed backward is cut: the first candidate that fits the target, else the last."""
    return first_that_fits(build, ((cut, _backward(build, cut)) for cut in _backward_cuts(build)))


def is_apart(build: Build) -> bool:
    """Whether a block of the backward accumulates dK or dV, not both."""
    both = build.tile_n * (build.block_columns + build.block_columns_value)
    return bool(build.column_block) and both > BOTH_REGISTERS[build.item_bytes] * build.threads


def shares(build: Build) -> tuple[int, int]:
    """Column blocks of Q and K, and of V and O, that the backward has something to compute for."""
    key = ceil_div(build.columns, build.block_columns)
    for_bias = int(build.bias_gradient == "main")
    value = ceil_div(build.columns_value, build.block_columns_value)
    return (
        for_bias if {"query", "key"}.isdisjoint(build.gradients) else key,
        value if "value" in build.gradients else 0,
    )


def blocks_of_tile(build: Build) -> int:
    """Blocks that share a query tile of the forward, or a key tile of the backward."""
    if build.kind == "forward":
        return ceil_div(build.columns_value, build.block_columns_value)
    return sum(shares(build)) if is_apart(build) else max(shares(build))


def gradient_piece(build: Build, width: int) -> int:
    """Columns of dK or dV that one product computes: all, but float32 products sum apart from their accumulator."""
    return _piece(build, build.tile_n, width) if build.column_block and build.item_bytes > 2 else width


def sum_columns(build: Build) -> int:
    """Columns of the query gradient that one product computes and that are summed together."""
    return _piece(build, build.tile_m, build.block_columns) if build.column_block else build.columns


def sums_of_tile(build: Build) -> int:
    """Sums that the gradient of one query tile has side by side."""
    return ceil_div(build.columns, build.block_columns) * build.block_columns // sum_columns(build)


def streamed_map(build: Build) -> tuple[Buffer, ...]:
    """The shared-memory map of a build with a column block."""
    if build.kind == "forward":
        return _forward(build, forward_cut(build))
    return _backward(build, backward_cut(build))


def copies_side_by_side(build: Build, rows: int, columns: int) -> int:
    """Groups that the threads form to copy a tile: all of them at once would copy more than its `rows` rows."""
    return max(rows_copied_at_once(build.threads, columns * build.item_bytes, COPY_BYTES) // rows, 1)


def _forward_cuts(build: Build) -> Iterator[ForwardCut]:
    """The query tile kept rather than streamed, then wide chunks rather than narrow ones."""
    columns_value = build.block_columns_value
    rows = _rows(build, build.tile_n, columns_value, tile_bytes(build.dtype, ROWS[1], columns_value))
    for keeps_query in (True, False):
        for row_bytes in CHUNK_BYTES:
            chunk = even_chunk(build.columns, row_bytes // build.item_bytes)
            score_rows = build.tile_n if keeps_query else build.tile_m + build.tile_n
            sizes = (tile_bytes(build.dtype, score_rows, chunk), tile_bytes(build.dtype, rows, columns_value))
            slot = round_up(max(sizes), TILE_ALIGNMENT)
            yield ForwardCut(chunk, ceil_div(build.columns, chunk), rows, build.tile_n // rows, keeps_query, slot)


def _backward_cuts(build: Build) -> Iterator[BackwardCut]:
    """Both of K and V kept rather than one, then large slots rather than small ones."""
    for keeps_key, keeps_value in itertools.product((True, False), repeat=2):
        for kibibytes in SLOT_KIBIBYTES:
            key = _side(build, build.columns, build.block_columns, keeps_key, kibibytes * 1024)
            value = _side(build, build.columns_value, build.block_columns_value, keeps_value, kibibytes * 1024)
            slot = max(_side_bytes(build, key), _side_bytes(build, value))
            yield BackwardCut(key, value, round_up(slot, TILE_ALIGNMENT))


def _side(build: Build, columns: int, width: int, keeps: bool, slot_bytes: int) -> Side:
    rows = _rows(build, build.tile_m, width, slot_bytes)
    # Chunks of K that stays form one tile with its column block, so that both are laid out in the same way.
    widths = range(COLUMN_MULTIPLE, width + 1, COLUMN_MULTIPLE)
    chunks = [chunk for chunk in widths if width % chunk == 0 and _alike(build, chunk, width)]
    fitting = [chunk for chunk in chunks if tile_bytes(build.dtype, _chunk_rows(build, keeps), chunk) <= slot_bytes]
    chunk, blocks = max(fitting, default=chunks[0]), ceil_div(columns, width)
    steps, parts = ceil_div(columns, chunk), build.tile_m // rows
    return Side(width, blocks, chunk, steps, rows, parts, gradient_piece(build, width), keeps)


def _piece(build: Build, rows: int, width: int) -> int:
    """The most columns of a part of `width` for which a product of `rows` rows needs few registers."""
    widths = range(COLUMN_MULTIPLE, width + 1, COLUMN_MULTIPLE)
    pieces = [piece for piece in widths if width % piece == 0 and _alike(build, piece, width)]
    few = [piece for piece in pieces if rows * piece <= PIECE_REGISTERS[build.item_bytes] * build.threads]
    return max(few, default=pieces[0])


def _alike(build: Build, columns: int, whole: int) -> bool:
    """Whether a tile with `columns` columns is laid out as part of one with `whole` columns."""
    return build.item_bytes > 2 or (columns % SWIZZLED_COLUMNS == 0) == (whole % SWIZZLED_COLUMNS == 0)


def _chunk_rows(build: Build, keeps: bool) -> int:
    return build.tile_m if keeps else build.tile_m + build.tile_n


def _side_bytes(build: Build, side: Side) -> int:
    chunk = tile_bytes(build.dtype, _chunk_rows(build, side.keeps), side.chunk)
    return max(chunk, tile_bytes(build.dtype, side.rows, side.width))


def _rows(build: Build, tile_rows: int, columns: int, allowed_bytes: int) -> int:
    """Rows of a tile in one step: the most within `allowed_bytes` that the threads can copy, else the fewest."""
    possible = [rows for rows in ROWS if tile_rows % rows == 0 and _divides(build, rows, columns)]
    fitting = [rows for rows in possible if tile_bytes(build.dtype, rows, columns) <= allowed_bytes]
    return max(fitting, default=possible[-1])


def _divides(build: Build, rows: int, columns: int) -> bool:
    """Whether every group of threads gets columns of a tile that are laid out as the tile is."""
    width, left = divmod(columns, copies_side_by_side(build, rows, columns))
    return left == 0 and width % COLUMN_MULTIPLE == 0 and _alike(build, width, columns)


def _forward(build: Build, cut: ForwardCut) -> tuple[Buffer, ...]:
    """The query tile's chunks if they stay, the ring (reused for the output), P (before it the bias), and each row's
    statistics: a number for each warp along it, and its factor."""
    dtype, tile_m = build.dtype, build.tile_m
    ring = build.query_stages * cut.slot_bytes
    return stack(
        ("query", cut.score_steps * tile_bytes(dtype, tile_m, cut.chunk) if cut.keeps_query else 0, 0, 1),
        ("ring", max(ring, tile_bytes(dtype, tile_m, build.block_columns_value)), 0, 4),
        ("p", tile_bytes(dtype, tile_m, build.tile_n), 0, 3),
        ("statistics", (build.scores[1] + 1) * tile_m * F32_BYTES, 2, 4),
    )


def _backward(build: Build, cut: BackwardCut) -> tuple[Buffer, ...]:
    """K, or its column block; V if it stays; the ring; P, where a block needs it beside dS; dS, or P alone (before it
    the bias); rings of logsumexp and delta.

    All but the statistics make room for dK and dV in the end, one after the other.
    """
    dtype, tile_m, tile_n, stages = build.dtype, build.tile_m, build.tile_n, build.query_stages
    scores = tile_bytes(dtype, tile_m, tile_n)
    return stack(
        ("key", tile_bytes(dtype, tile_n, cut.key.columns if cut.key.keeps else cut.key.width), 0, 7),
        ("value", tile_bytes(dtype, tile_n, cut.value.columns) if cut.value.keeps else 0, 0, 3),
        ("ring", stages * cut.slot_bytes, 0, 6),
        ("p", 0 if is_apart(build) else scores, 2, 5),
        ("ds", scores, 0, 7),
        ("statistics", 2 * stages * tile_m * F32_BYTES, 0, 4),
    )
