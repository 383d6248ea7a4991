"""TMA: the tensor maps of the fused Hopper kernels, and how one thread asks for a tile or for row statistics."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.experimental.primitives as prim
from cutlass import Int32, Int64

from cutlass_py_attn.gemm.plans import swizzle_bytes
from cutlass_py_attn.hopper import RAGGED_ROWS
from cutlass_py_attn.parts import params
from cutlass_py_attn.plan import Build

SWIZZLES = {
    128: tensor_maps.TensorMapSwizzle.s128b,
    64: tensor_maps.TensorMapSwizzle.s64b,
    32: tensor_maps.TensorMapSwizzle.s32b,
}
# What becomes of lines in the L2 cache, as createpolicy.fractional encodes it.
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000


def stand_in(p: Any, address: Int64, dtype, rows: int, columns: int) -> tensor_maps.TensorMap:
    """A map for tracing: the launch passes the map of the plan's recipe, and the kernel sees 128 bytes."""
    width = swizzle_bytes(columns)
    head = cute.assume(Int64(p.query_head), divby=8)
    layout = cute.make_layout((p.batch, p.num_heads, p.num_queries, columns), stride=(head * 64, head, head * 8, 1))
    view = cute.make_tensor(params.pointer(address, dtype), layout)
    return tensor_maps.create_tensor_map_tiled_from_view(
        view, box_dims=(1, 1, rows, width // 2), stride_order=(3, 2, 1, 0), swizzle=SWIZZLES[width]
    )


def place(build: Build, row: Any, head: Any, of: Any, side: str) -> tuple[Any, ...]:
    """Where `fetch` finds the rows from `row` on of a sequence, of its queries or its keys; rows behind the last are
    zeros."""
    if not build.has("varlen"):
        return row, head, of.batch
    start, count = getattr(of, f"{side}_start"), {"query": of.num_queries, "key": of.num_keys}[side]
    return RAGGED_ROWS - count + row, head, start + count, RAGGED_ROWS


def fetch(build: Build, source: Any, name: str, tile: tuple[int, int], at: tuple, slot: Int32, barrier: Any) -> None:
    """Ask for the tile (rows, columns) at a `place` for a slot of buffer `name`, a strip as wide as the swizzle at a
    time; a warp calls this."""
    rows, columns = tile
    width = swizzle_bytes(columns)
    hint = EVICT_FIRST if build.whole_heads else None  # leave the cache to the sums of dQ
    base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
    start = build.buffer(name).offset + slot * (rows * columns * build.item_bytes)
    with cute.arch.elect_one():
        for strip in range(columns * build.item_bytes // width):
            offset = cute.assume(start + strip * rows * width, divby=1024)
            corner = [Int32(strip * width // build.item_bytes), *map(Int32, at)]
            prim.cp_async_bulk_tensor_shared_cta_global(
                base + offset, source.get_ptr(), corner, barrier, l2_cache_hint=hint
            )


def fetch_rows(source: cute.Pointer, target: cute.Pointer, count: int, barrier: Any) -> None:
    """Ask for `count` float32 row statistics; a warp calls this."""
    with cute.arch.elect_one():
        prim.cp_async_bulk_shared_cluster_global(target, source, barrier, count * 4)
