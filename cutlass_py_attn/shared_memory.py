"""Shared memory: where each tile lies in a block's shared memory and during which steps it is alive."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeVar

from cutlass_py_attn.device import architecture
from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.parts.streaming import even_chunk
from cutlass_py_attn.plan import F32_ROW_PADDING, Buffer, Build
from cutlass_py_attn.problem import F32_BYTES, ITEM_BYTES, WORD_BYTES

# The numbered steps of the fused kernels: a buffer's first and last step count in these.
STEPS = {
    "forward": ("load", "S", "softmax", "O", "store"),
    "backward": ("load", "S", "P", "dP", "dS", "dV", "dK", "dQ", "store"),
    "room": (),
}

Cut = TypeVar("Cut")

COPIED_BYTES = 128  # of a tile's row, by neighbouring threads
TILE_ALIGNMENT = 1024  # the 128-byte swizzle repeats every 1024 bytes
BARRIER_BYTES = 8
RECORD_WORDS = 12  # int32, of an item that a block of the Hopper backward has taken
RECORDS = 2  # for each slot of the key
KEPT_TILES = 32, 16, 8, 4  # of which the Hopper family draws dropout's bits at once, the first that there is room for
KEPT_KEYS, KEPT_QUERIES = 16, 64  # of a word of dropout's bits in the Hopper backward: what a warp draws together
# Of a thread of the Hopper forward that loads and of those that multiply, by tile_m: 64 rows a warpgroup.
FORWARD_REGISTERS = {128: (24, 240), 192: (32, 160)}
BIAS_CHUNK_BYTES = (256, 128)  # of a row of a chunk in the kernel of grad_bias; the widest that fits is taken
BIAS_SLOTS = 2  # of its ring: one chunk is multiplied while the next is on its way


def row_elements(dtype: str, columns: int) -> int:
    """Elements from one row of a tile to the next: float32 rows are padded, 16-bit tiles are swizzled instead."""
    return columns + F32_ROW_PADDING if dtype == "float32" else columns


def tile_bytes(dtype: str, rows: int, columns: int) -> int:
    """Bytes of one tile in shared memory."""
    return rows * row_elements(dtype, columns) * ITEM_BYTES[dtype]


def threads_of_row(row_bytes: int, access_bytes: int) -> int:
    """Neighbouring threads that copy a part of a row of a tile together: 128 bytes, or 64 where rows are odd multiples
    of those."""
    return (COPIED_BYTES if row_bytes % COPIED_BYTES == 0 else COPIED_BYTES // 2) // access_bytes


def rows_copied_at_once(threads: int, row_bytes: int, access_bytes: int) -> int:
    """Rows of a tile that the threads copy at once; a tile has a multiple of them."""
    return threads // threads_of_row(row_bytes, access_bytes)


def shared_memory_map(build: Build) -> tuple[Buffer, ...]:
    """The map of this build's main kernel."""
    if build.column_block:
        from cutlass_py_attn.streams import streamed_map

        return streamed_map(build)
    if build.family == "decode":
        from cutlass_py_attn.decode import decode_map

        return decode_map(build)
    if build.family == "hopper":
        if build.kind == "forward":
            return _hopper_forward(build)
        return _wide_backward(build) if is_wide_backward(build) else _hopper_backward(build)
    return _forward(build) if build.kind == "forward" else _backward(build)


def _forward(build: Build) -> tuple[Buffer, ...]:
    """query (reused for the output), key, value and bias of the forward, and four partial sums of each query row."""
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    return stack(
        ("query", tile_bytes(dtype, tile_m, max(build.columns, build.columns_value)), 0, 4),
        ("key", tile_bytes(dtype, tile_n, build.columns), 0, 1),
        ("value", tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("bias", tile_bytes(dtype, tile_m, tile_n) if build.has("bias") else 0, 0, 2),
        ("sums", 4 * tile_m * F32_BYTES, 2, 4),
    )


def _hopper_forward(build: Build) -> tuple[Buffer, ...]:
    """Two slots for the query where they fit: the next query tile is there before this one's last value tile. With
    dropout room for the bits of several key tiles."""
    tiles = KEPT_TILES if build.has("dropout") else (0,)
    maps = {cut: _hopper_forward_with(build, *cut) for cut in itertools.product((2, 1), tiles)}
    return maps[first_that_fits(build, maps.items())]


def _hopper_forward_with(build: Build, queries: int, kept_tiles: int) -> tuple[Buffer, ...]:
    """Rings of query, key and value, dropout's bits, and the full and the empty barrier of every slot."""
    dtype, tile_m, tile_n, stages = build.dtype, build.tile_m, build.tile_n, build.query_stages
    return stack(
        ("query", queries * tile_bytes(dtype, tile_m, build.columns), 0, 1),
        ("key", stages * tile_bytes(dtype, tile_n, build.columns), 0, 1),
        ("value", stages * tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("kept", kept_tiles * kept_bytes(build), 0, 2),
        ("barriers", 2 * BARRIER_BYTES * (queries + 2 * stages), 0, 4),
    )


def kept_bytes(build: Build) -> int:
    """A bit for each score of a tile."""
    return build.tile_m * build.tile_n // 8


def _hopper_backward(build: Build) -> tuple[Buffer, ...]:
    """With dropout room for the bits of several query tiles."""
    tiles = KEPT_TILES if build.has("dropout") else (0,)
    maps = {count: _hopper_backward_with(build, count) for count in tiles}
    return maps[first_that_fits(build, maps.items())]


def _hopper_backward_with(build: Build, kept_tiles: int) -> tuple[Buffer, ...]:
    """Rings of key, query, grad_output, dS and of their row statistics, value, dropout's bits, the full and the empty
    barrier of every slot, and the records of items; where blocks take whole heads also the barrier of a sum that is
    asked for."""
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    queries, grads, rows = build.query_stages, build.grad_output_stages, build.block_queries
    ds = grads * rows // tile_m
    slots = queries + grads + ds + build.key_stages + 1
    return stack(
        ("key", build.key_stages * tile_bytes(dtype, tile_n, build.columns), 0, 7),
        ("value", tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("query", queries * tile_bytes(dtype, rows, build.columns), 0, 6),
        ("grad_output", grads * tile_bytes(dtype, rows, build.columns_value), 0, 5),
        ("ds", ds * tile_bytes(dtype, tile_m, tile_n), 4, 7),
        ("staging", grad_query_bytes(build), 7, 7),
        ("logsumexp", queries * rows * F32_BYTES, 0, 2),
        ("delta", grads * rows * F32_BYTES, 0, 4),
        ("kept", kept_tiles * kept_bytes(build), 0, 2),
        ("barriers", BARRIER_BYTES * (2 * slots + build.whole_heads), 0, 8),
        ("items", build.key_stages * RECORDS * RECORD_WORDS * WORD_BYTES, 0, 8),
    )


def is_wide_backward(build: Build) -> bool:
    """Whether this is the Hopper backward in clusters, of whose warpgroups one keeps dK and another dV of 64 keys; in
    the other one a warpgroup keeps both."""
    return (build.kind, build.family) == ("backward", "hopper") and build.tile_n != 128


def _wide_backward(build: Build) -> tuple[Buffer, ...]:
    """Two slots of P and dS where they fit."""
    maps = {count: _wide_backward_with(build, count) for count in (2, 1)}
    return maps[first_that_fits(build, maps.items())]


def _wide_backward_with(build: Build, scores: int) -> tuple[Buffer, ...]:
    """key, value, this block's columns of the other block's keys, rings of query, grad_output and of their row
    statistics, of P, in whose place dS comes, and of the other block's dS, and the full and the empty barrier of every
    slot."""
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    queries, grads = build.query_stages, build.grad_output_stages
    tile = scores * tile_bytes(dtype, tile_m, tile_n)
    return stack(
        ("key", tile_bytes(dtype, tile_n, build.columns), 0, 7),
        ("value", tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("other_key", tile_bytes(dtype, tile_n, shared_columns(build)), 0, 7),
        ("query", queries * tile_bytes(dtype, tile_m, build.columns), 0, 6),
        ("grad_output", grads * tile_bytes(dtype, tile_m, build.columns_value), 0, 5),
        ("p_ds", tile, 2, 7),
        ("other_ds", tile, 4, 7),
        ("logsumexp", queries * tile_m * F32_BYTES, 0, 2),
        ("delta", grads * tile_m * F32_BYTES, 0, 4),
        ("barriers", 2 * BARRIER_BYTES * (queries + grads + scores + 2), 0, 8),
    )


def shared_columns(build: Build) -> int:
    """Columns of dQ that the first block of a cluster adds to, in whole pieces; the second has no more."""
    _, columns = grad_query_piece(build)
    return ceil_div(build.columns, 2 * columns) * columns


def registers(build: Build) -> tuple[int, ...]:
    """Registers of a thread of a Hopper kernel that loads, in the backward of one that multiplies dQ, and of the
    others: those keep scores and O, or dK and dV of 64 keys, and need a few beside them."""
    if build.kind == "forward":
        return FORWARD_REGISTERS[build.tile_m]
    if is_wide_backward(build):
        return 32, 64, 208
    if build.block_queries < build.tile_m:
        return 24, 56, 216
    held = (build.columns + build.columns_value) // 2 + build.tile_m
    if held <= 176:
        return 24, 104, 192
    return (24, 72, 208) if build.whole_heads and not build.has("dropout") else (32, 64, 208)


def grad_query_piece(build: Build) -> tuple[int, int]:
    """Rows and columns of dQ that the Hopper backward's warpgroup of dQ has registers for at once: all columns, or such
    as divide a strip of the key tile."""
    of_dq = registers(build)[1]
    if of_dq >= build.columns // 2 + 40:
        return 64, build.columns
    return 64, 32 if build.columns % 64 or of_dq < 64 else 64


def grad_query_bytes(build: Build) -> int:
    """A piece of dQ in float32, on its way to its sum; none where query tiles are worked in blocks or blocks in
    clusters: those add from registers."""
    if build.block_queries < build.tile_m or is_wide_backward(build):
        return 0
    rows, columns = grad_query_piece(build)
    return rows * columns * F32_BYTES


def _backward(build: Build) -> tuple[Buffer, ...]:
    """key, value, rings of query, grad_output and bias, P, dS, and the rings of logsumexp and delta."""
    dtype, tile_m, tile_n, stages = build.dtype, build.tile_m, build.tile_n, build.query_stages
    scores = tile_bytes(dtype, tile_m, tile_n)
    return stack(
        ("key", tile_bytes(dtype, tile_n, build.columns), 0, 8),
        ("value", tile_bytes(dtype, tile_n, build.columns_value), 0, 8),
        ("query", stages * tile_bytes(dtype, tile_m, build.columns), 0, 6),
        ("grad_output", build.grad_output_stages * tile_bytes(dtype, tile_m, build.columns_value), 0, 5),
        ("bias", stages * scores if build.has("bias") else 0, 0, 2),
        ("p", scores, 2, 5),
        ("ds", scores, 4, 7),
        ("logsumexp", stages * tile_m * F32_BYTES, 0, 2),
        ("delta", stages * tile_m * F32_BYTES, 0, 4),
    )


def first_that_fits(build: Build, candidates: Iterable[tuple[Cut, tuple[Buffer, ...]]]) -> Cut:
    """The first of the candidates whose map fits the target, else the last."""
    allowed = architecture(build.arch).shared_memory_per_block
    chosen = None
    for cut, buffers in candidates:
        chosen = cut
        if max(buffer.offset + buffer.bytes for buffer in buffers) <= allowed:
            break
    assert chosen is not None
    return chosen


def bias_gradient_chunk(build: Build) -> int:
    """Columns of the head that the kernel which computes grad_bias alone multiplies at a time."""
    columns = max(build.columns, build.columns_value)
    chunks = (even_chunk(columns, row_bytes // build.item_bytes) for row_bytes in BIAS_CHUNK_BYTES)
    return first_that_fits(build, ((chunk, _bias_gradient_map(build, chunk)) for chunk in chunks))


def bias_gradient_map(build: Build) -> tuple[Buffer, ...]:
    """The map of the kernel which computes grad_bias alone; it does not grow with the head dim."""
    return _bias_gradient_map(build, bias_gradient_chunk(build))


def _bias_gradient_map(build: Build, chunk: int) -> tuple[Buffer, ...]:
    """left and right: rings of chunks of Q and K, then of dO and V; left also for the result. bias, logsumexp, delta
    of one tile."""
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    scores = tile_bytes(dtype, tile_m, tile_n)
    return stack(
        ("left", max(BIAS_SLOTS * tile_bytes(dtype, tile_m, chunk), scores), 0, 8),
        ("right", BIAS_SLOTS * tile_bytes(dtype, tile_n, chunk), 0, 3),
        ("bias", scores, 0, 2),
        ("logsumexp", tile_m * F32_BYTES, 0, 2),
        ("delta", tile_m * F32_BYTES, 0, 4),
    )


def stack(*buffers: tuple[str, int, int, int]) -> tuple[Buffer, ...]:
    """Buffers behind each other, from (name, bytes, first step, last step); those without bytes are left out."""
    placed: list[Buffer] = []
    offset = 0
    for name, size, first, last in buffers:
        if size == 0:
            continue
        placed.append(Buffer(name, offset, size, first, last))
        offset = round_up(offset + size, TILE_ALIGNMENT if size >= TILE_ALIGNMENT else 128)
    return tuple(placed)
