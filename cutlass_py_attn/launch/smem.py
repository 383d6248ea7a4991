"""Shared memory: bytes, padding and swizzle of tiles, rows that threads copy, and buffers placed one after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from cutlass_py_attn.integers import ceil_div, round_up
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import COLUMN_MULTIPLE, F32_ROW_PADDING, Buffer, Build
from cutlass_py_attn.problem.tensors import OPERAND_BYTES

Option = TypeVar("Option")

SWIZZLES = (128, 64, 32)
COPIED_BYTES = (128, 64, 32)  # of a row of a tile that neighbouring threads copy together; 32 of e4m3 codes alone
TILE_ALIGNMENT = 1024  # the 128-byte swizzle repeats every 1024 bytes
BUFFER_ALIGNMENT = 128
BARRIER_BYTES = 8


def swizzle_bytes(columns: int, item_bytes: int = 2) -> int:
    """Returns the swizzle width of a tile with `columns` columns, 16-bit unless said: the widest that divides a row."""
    width = next((width for width in SWIZZLES if columns * item_bytes % width == 0), None)
    assert width is not None, f"columns = {columns}: wgmma reads multiples of {SWIZZLES[-1] // item_bytes}"
    return width


def row_elements(dtype: str, columns: int) -> int:
    """Returns the elements from one row of a tile to the next: float32 rows are padded, 16-bit tiles are swizzled."""
    return columns + F32_ROW_PADDING if dtype == "float32" else columns


def tile_bytes(dtype: str, rows: int, columns: int) -> int:
    """Returns the bytes of one tile in shared memory."""
    return rows * row_elements(dtype, columns) * OPERAND_BYTES[dtype]


def threads_of_row(row_bytes: int, vector_bytes: int) -> int:
    """Returns how many neighbouring threads copy 128 bytes of a row together, or as many as divide it: 64 or 32."""
    return next(width for width in COPIED_BYTES if row_bytes % width == 0) // vector_bytes


def rows_copied_at_once(threads: int, row_bytes: int, vector_bytes: int) -> int:
    """Returns the rows of a tile that the threads copy at once; the rows of a tile are a multiple of them."""
    return threads // threads_of_row(row_bytes, vector_bytes)


def even_chunk(columns: int, widest: int) -> int:
    """Returns the columns of one chunk if as few chunks as possible cover `columns`, none wider than `widest`."""
    count = ceil_div(columns, max(widest, COLUMN_MULTIPLE))
    return round_up(ceil_div(columns, count), COLUMN_MULTIPLE)


def first_that_fits(build: Build, options: Iterable[tuple[Option, tuple[Buffer, ...]]]) -> Option:
    """Returns the first option whose shared-memory map fits the target, else the last option."""
    allowed = architecture(build.arch).shared_memory_per_block
    chosen = None
    for option, buffers in options:
        chosen = option
        if max(buffer.offset + buffer.bytes for buffer in buffers) <= allowed:
            break
    assert chosen is not None
    return chosen


def stack(*buffers: tuple[str, int, int, int]) -> tuple[Buffer, ...]:
    """Places buffers one after another; each is (name, bytes, first step, last step). Empty buffers are left out."""
    placed: list[Buffer] = []
    offset = 0
    for name, size, first, last in buffers:
        if size == 0:
            continue
        placed.append(Buffer(name, offset, size, first, last))
        offset = round_up(offset + size, TILE_ALIGNMENT if size >= TILE_ALIGNMENT else BUFFER_ALIGNMENT)
    return tuple(placed)
