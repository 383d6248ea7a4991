"""sm90 forward of variant e4m3_cache: how the threads of one warpgroup share the codes of a key or value tile.

A thread loads vectors of 16 codes of a row, converts them, and stores 32 bytes. Neighbouring threads have a strip of a
row, as wide as the swizzle of the converted tile, so that eight threads store to all banks. A thread has the same rows
of key and value, and keeps the codes of one tile in registers. A tile has at most a row for each thread, which copies
the scales of that row.

warpgroup      warps
1              load and convert key and value tiles; 0 also loads the query tile by TMA
1 to 3         64 query rows each
"""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS
from cutlass_py_attn.launch.smem import swizzle_bytes

VECTOR_CODES: Final = 16  # of a row, that a thread loads at once
VECTOR_BYTES: Final = 2 * VECTOR_CODES  # of these codes in 16 bits
MOST_VECTORS: Final = 8  # of a tile in one thread's registers
# Registers per thread by tile_m: of the warpgroup that converts, of those that compute.
REGISTERS: Final = {64: (120, 240), 128: (88, 208), 192: (80, 144)}
# The same of 128 query rows with the most vectors, if these are of more rows, whose pages a thread has too.
REGISTERS_OF_MORE_ROWS, FEW_ROWS = (120, 192), 2


def threads_of_row(build: Build) -> int:
    """Returns how many neighbouring threads convert a strip of a row: the narrower strip of both operands."""
    return min(swizzle_bytes(columns) for columns in (build.columns, build.columns_value)) // VECTOR_BYTES


def rows_at_once(build: Build) -> int:
    """Returns the rows of a strip that all threads convert at once."""
    return WARPGROUP_THREADS // threads_of_row(build)


def vectors_of_row(build: Build, columns: int) -> int:
    """Returns the vectors that one thread converts of each of its rows of a tile with so many columns."""
    return columns // (threads_of_row(build) * VECTOR_CODES)


def rows_of_thread(build: Build) -> int:
    """Returns the rows of a tile that one thread has."""
    return ceil_div(build.tile_n, rows_at_once(build))


def vectors_of_tile(build: Build) -> int:
    """Returns the vectors of the wider operand's tile that one thread has in registers."""
    return rows_of_thread(build) * max(
        vectors_of_row(build, columns) for columns in (build.columns, build.columns_value)
    )


def registers(build: Build) -> tuple[int, int]:
    """Returns the registers per thread of each role: converts, computes."""
    has_more = vectors_of_tile(build) == MOST_VECTORS and rows_of_thread(build) > FEW_ROWS
    return REGISTERS_OF_MORE_ROWS if build.tile_m == 128 and has_more else REGISTERS[build.tile_m]
