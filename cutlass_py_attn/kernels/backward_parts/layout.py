"""What the kernels around a backward share with its main kernel: sums of gradients, and where scores start."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.launch.build import COLUMN_MULTIPLE, Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS, WARPGROUP_WARPS
from cutlass_py_attn.launch.variants import DS_REGISTERS

NARROW_COLUMNS = 128  # most columns of a backward whose warpgroups have dK and dV both
PRODUCT_REGISTERS = {2: 32, 4: 64}  # per thread for a product beside those accumulators
SWIZZLED_COLUMNS = 64  # of 16-bit tiles; tiles with an odd multiple of 32 columns have another layout


def dq_piece_columns(build: Build) -> int:
    """Returns the columns of dQ that one product computes and that grad_query_accum stores together."""
    return product_piece(build, build.tile_m, build.block_columns) if build.head_dim_split else build.columns


def dq_pieces(build: Build) -> int:
    """Returns the pieces of `dq_piece_columns` columns that dQ of one query tile has in grad_query_accum."""
    return ceil_div(build.columns, build.block_columns) * build.block_columns // dq_piece_columns(build)


def product_piece(build: Build, rows: int, width: int) -> int:
    """Returns the widest divisor of `width` for which a product of `rows` rows fits PRODUCT_REGISTERS."""
    widths = range(COLUMN_MULTIPLE, width + 1, COLUMN_MULTIPLE)
    pieces = [piece for piece in widths if width % piece == 0 and same_layout(build, piece, width)]
    few = [piece for piece in pieces if rows * piece <= PRODUCT_REGISTERS[build.item_bytes] * build.threads]
    return max(few, default=pieces[0])


def same_layout(build: Build, columns: int, whole: int) -> bool:
    """Returns whether a tile with `columns` columns has the layout of a part of a tile with `whole` columns."""
    return build.item_bytes > 2 or (columns % SWIZZLED_COLUMNS == 0) == (whole % SWIZZLED_COLUMNS == 0)


def starts_from_logsumexp(build: Build) -> bool:
    """Returns whether S^T = K Q^T is added to -logsumexp / scale: 128 columns leave no registers for the logsumexp."""
    return build.variant == DS_REGISTERS and build.columns == NARROW_COLUMNS


@dataclass(frozen=True, slots=True)
class SharedTileLayout:
    """The sums of one key tile whose queries blocks share, in 32-bit words.

    key, value: where those of dK and dV start
    counts: where the counts of parts start, one for each warp
    total: words of the tile
    """

    key: int
    value: int
    counts: int
    total: int


def shared_tile_layout(build: Build) -> SharedTileLayout:
    """Returns the layout of the sums of one key tile whose queries blocks share."""
    value = build.tile_n * build.columns
    counts = value + build.tile_n * build.columns_value
    return SharedTileLayout(0, value, counts, counts + build.tile_n // WARPGROUP_ROWS * WARPGROUP_WARPS)
