"""TMA: the tensor maps of the fused sm90 kernels, and the copies of tiles and row statistics to shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.experimental.primitives as prim
from cutlass import Int32, Int64

from cutlass_py_attn.kernels.common import params, tile_copy
from cutlass_py_attn.kernels.common.layout import RAGGED_ROWS
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import swizzle_bytes
from cutlass_py_attn.launch.variants import PER_HEAD

SWIZZLES = {
    128: tensor_maps.TensorMapSwizzle.s128b,
    64: tensor_maps.TensorMapSwizzle.s64b,
    32: tensor_maps.TensorMapSwizzle.s32b,
}
# L2 cache policies, as createpolicy.fractional encodes them.
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000


def placeholder_map(p: Any, address: Int64, dtype, rows: int, columns: int) -> tensor_maps.TensorMap:
    """Returns a tensor map for tracing: the launch passes the map of the plan, and the kernel reads 128 bytes."""
    item_bytes = dtype.width // 8
    width = swizzle_bytes(columns, item_bytes)
    head = cute.assume(Int64(p.query_head), divby=16 // item_bytes)
    layout = cute.make_layout((p.batch, p.num_heads, p.num_queries, columns), stride=(head * 64, head, head * 8, 1))
    view = cute.make_tensor(params.pointer(address, dtype), layout)
    return tensor_maps.create_tensor_map_tiled_from_view(
        view, box_dims=(1, 1, rows, width // item_bytes), stride_order=(3, 2, 1, 0), swizzle=SWIZZLES[width]
    )


def tile_coordinates(build: Build, row: Any, head: Any, seqlen: Any, side: str) -> tuple[Any, ...]:
    """Returns the coordinates, without the column, of the tile that starts at `row` of a sequence.

    side: "query" or "key". Rows past the last of the sequence are read as zeros.
    """
    if not build.has("varlen"):
        return row, head, seqlen.batch
    start, count = getattr(seqlen, f"{side}_start"), {"query": seqlen.num_queries, "key": seqlen.num_keys}[side]
    return RAGGED_ROWS - count + row, head, start + count, RAGGED_ROWS


@dataclass(frozen=True)
class Strips:
    """One stage of buffer `name` in shared memory as strips of columns as wide as the swizzle, each with all rows.

    One TMA instruction copies one strip. offset: bytes of the stage in shared memory; width: bytes of a strip's rows.
    """

    offset: Any
    rows: int
    width: int
    count: int
    item_bytes: int

    @staticmethod
    def create(build: Build, name: str, tile: tuple[int, int], stage: Int32) -> "Strips":
        """Returns the strips of a (rows, columns) tile."""
        rows, columns = tile
        width = swizzle_bytes(columns, build.item_bytes)
        offset = build.buffer(name).offset + stage * (rows * columns * build.item_bytes)
        return Strips(offset, rows, width, columns * build.item_bytes // width, build.item_bytes)

    def smem_offset(self, strip: Any) -> Any:
        """Returns the offset of a strip in shared memory (bytes)."""
        return cute.assume(self.offset + strip * (self.rows * self.width), divby=1024)

    def column(self, strip: Any) -> Int32:
        """Returns the first column of a strip."""
        return Int32(strip * (self.width // self.item_bytes))


def load_tile(
    build: Build, source: Any, name: str, tile: tuple[int, int], coordinates: tuple, stage: Int32, barrier: Any
) -> None:
    """Issues the copies of a (rows, columns) tile at `tile_coordinates` to a stage of buffer `name`.

    One warp calls this. `barrier` counts the bytes.
    """
    hint = EVICT_FIRST if build.variant == PER_HEAD else None  # keeps L2 for the accumulator of dQ
    base = tile_copy.smem_base(build)
    strips = Strips.create(build, name, tile, stage)
    with cute.arch.elect_one():
        for strip in range(strips.count):
            prim.cp_async_bulk_tensor_shared_cta_global(
                base + strips.smem_offset(strip),
                source.get_ptr(),
                [strips.column(strip), *map(Int32, coordinates)],
                barrier,
                l2_cache_hint=hint,
            )


def load_rows(source: cute.Pointer, target: cute.Pointer, count: int, barrier: Any) -> None:
    """Issues the copy of `count` float32 row statistics. One warp calls this."""
    with cute.arch.elect_one():
        prim.cp_async_bulk_shared_cluster_global(target, source, barrier, count * 4)
