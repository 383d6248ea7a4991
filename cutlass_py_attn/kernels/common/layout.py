"""What shared device code reads of a Build: rows of tensor maps, the address of shared memory, copies of a tile."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import rows_copied_at_once
from cutlass_py_attn.launch.variants import E4M3, E4M3_CACHE, QUERY_HEADS

# Tensor map over sequences of several lengths, see launch_rules.tensor_map: its rows per sequence.
RAGGED_ROWS: Final = 1 << 30
RAGGED_STRIDE_BYTES: Final = (1 << 64) // RAGGED_ROWS  # its last axis steps by this less a row
# Columns of the kernels with a fixed address of shared memory: of backwards and of forwards more than the first two, of
# float16 forwards at most the third.
FIXED_BASE_BACKWARD_COLUMNS, FIXED_BASE_COLUMNS, FIXED_BASE_F16_COLUMNS = 32, 192, 64
COPY_BYTES = 16  # of one copy of a thread


def has_fixed_smem_base(build: Build) -> bool:
    """Returns whether the kernel has the address of dynamic shared memory as a number, and not as that of a symbol.

    Wherever it uses an mbarrier, ptxas derives a symbol's address from the rank of the block in its cluster, a special
    register. Without clusters the rank is 0, and the memory starts behind what the driver reserves, because no kernel
    has static shared memory. Everything between is scheduled differently with the number. On one H100 backwards are 0.3
    to 4 % faster, float16 forwards of d 64 and forwards of d 256 1 %. Other kernels are up to 1.5 % slower.
    """
    is_fused = build.family == "sm90" and build.kind != "component_gemm"
    if not is_fused or build.cluster > 1 or build.variant in (E4M3, E4M3_CACHE, QUERY_HEADS):
        return False
    if build.kind == "backward":
        return build.columns > FIXED_BASE_BACKWARD_COLUMNS
    is_narrow_f16 = build.dtype == "float16" and build.columns_value <= FIXED_BASE_F16_COLUMNS
    return is_narrow_f16 or build.columns_value > FIXED_BASE_COLUMNS


def copy_groups(build: Build, rows: int, columns: int) -> int:
    """Returns the groups of threads that copy a tile with `rows` rows, if all threads at once would copy more rows."""
    return max(rows_copied_at_once(build.threads, columns * build.item_bytes, COPY_BYTES) // rows, 1)


def most_box_rows(build: Build) -> int:
    """Returns the most rows of one box of a paged key or value tile: boxes divide pages, and a tile has whole boxes."""
    return build.tile_n & -build.tile_n
