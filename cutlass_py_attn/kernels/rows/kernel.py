"""Row kernels: those that append rows to a cache or merge partial results, without a product."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.kernel import Kernel, no_tensor_maps
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Grid, Name, ceil_div
from cutlass_py_attn.launch.variants import E4M3, E4M3_ROW, E4M3_TILE, LAST, STANDARD, SUM, SUM_LAST, TOTAL


def main_grid(build: Build) -> Grid:
    """Returns the grid: a block for some rows."""
    return ceil_div(Name("num_rows"), build.tile_m), ONE, ONE


APPEND: Final = Kernel(
    kind="append",
    family="sm80",
    variant=STANDARD,
    module="rows.append",
    summary="a few threads per row",
    layouts=(),
    main_grid=main_grid,
    tensor_maps=no_tensor_maps,
)
MERGE: Final = replace(APPEND, kind="merge", module="rows.merge", layouts=("varlen",))
KERNELS: Final = (
    APPEND,
    replace(APPEND, variant=E4M3, summary="a few threads per row, which they scale"),
    replace(APPEND, variant=E4M3_ROW, summary="a few threads per row, which find its scale"),
    replace(
        APPEND,
        variant=E4M3_TILE,
        summary="a few threads per row, which find the scales of its tiles of columns; the row of value is copied",
    ),
    MERGE,
    replace(MERGE, variant=TOTAL, summary="a few threads per row, into a float32 total"),
    replace(MERGE, variant=LAST, summary="a few threads per row, of a float32 total"),
    replace(MERGE, variant=SUM, summary="a few threads per row, added to a float32 total", layouts=()),
    replace(MERGE, variant=SUM_LAST, summary="a few threads per row, added and rounded", layouts=()),
)
