"""Loads of key and value tiles from pages by TMA: the producer warp issues a box for each page and strip of columns.

A tile whose rows are all keys is read through a 4-D map (columns, rows of a page, heads, pages). The tile of the last
key may have rows behind it, which may hold NaN. The scores of these rows are masked, and key is read through the same
map. Their weights are 0, which does not hide NaN in value: this tile of value is read through a map like that of
variable lengths, whose boxes end with the last key. That map is slow with many small boxes. With it for all tiles, the
forward took 476 TFLOP/s with 16-row pages, and 687 with the 4-D map (2048 queries of 16384 keys, causal, one H200).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Int32

from cutlass_py_attn.integers import larger, smaller
from cutlass_py_attn.kernels.common import paging, tma
from cutlass_py_attn.kernels.common.paging import PageRow
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.sm90_smem import RAGGED_ROWS, most_box_rows, tma_tiles

# Boxes, and copies of their strips, that are issued together, so that their shuffles and addresses overlap. The
# producer has no registers for more.
MOST_BOXES, MOST_COPIES = 4, 8
NO_PAGE = -1  # TMA reads zeros outside of a map


@dataclass(frozen=True)
class PageBoxes:
    """How each tile of key and value is divided into boxes of one page.

    shift: log2 of the rows of a box
    count: boxes of a tile, in each strip of columns
    """

    shift: Any
    count: Any


@dataclass(frozen=True)
class PagedKeyTile:
    """A tile of key and value of one sequence.

    head: head of key and value
    row: first row of the tile in the sequence
    num_keys: keys of the sequence
    page: page of this lane's box: lane i has that of box i. NO_PAGE behind the last key
    """

    head: Any
    row: Any
    num_keys: Any
    page: Any


class PagedLoads:
    """Loads of key and value tiles of one Build. One warp calls every method."""

    def __init__(self, build: Build) -> None:
        self.build = build

    def boxes(self, p: Any) -> PageBoxes:
        """Returns how tiles are divided."""
        most = most_box_rows(self.build).bit_length() - 1
        shift = smaller(paging.page_shift(p), most)
        return PageBoxes(shift, Int32(self.build.tile_n) >> shift)

    @cute.jit
    def lane_page(self, p: Any, pages: PageRow, seqlen: SeqlenInfo, boxes: PageBoxes, key_tile: Int32):
        """Returns the page of this lane's box of a key tile. The table is not read behind the last key."""
        page, row = Int32(NO_PAGE), key_tile * self.build.tile_n + (cute.arch.lane_idx() << boxes.shift)
        if row < seqlen.num_keys:
            page = paging.entry(p, pages, row >> paging.page_shift(p))
        return page

    def load_key(self, p: Any, pipe: Any, state: Any, source: Any, boxes: PageBoxes, tile: PagedKeyTile) -> None:
        """Waits for an empty stage and issues the loads of a tile of key."""
        pipe.producer_acquire(state)
        self.load_boxes(p, "key", source, state.index, pipe.producer_get_barrier(state), boxes, tile)

    @cute.jit
    def load_value(self, p: Any, pipe: Any, state: Any, sources: tuple, boxes: Any, tile: Any):
        """Waits for an empty stage and issues the loads of a tile of value.

        sources: the map of tiles whose rows are all keys, and the map of the tile with the last key
        """
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        if tile.row + self.build.tile_n <= tile.num_keys:
            self.load_boxes(p, "value", sources[0], state.index, barrier, boxes, tile)
        else:
            self.load_last_value(p, sources[1], state.index, barrier, boxes, tile)

    @cute.jit
    def load_boxes(
        self, p: Any, name: cutlass.Constexpr, source: Any, stage: Int32, barrier: Any, boxes: Any, tile: Any
    ):
        """Issues the boxes of a tile through the 4-D map."""
        strips = tma.Strips.create(self.build, name, tma_tiles(self.build)[name], stage)
        together = max(min(MOST_COPIES // strips.count, MOST_BOXES), 1)
        for group in cutlass.range(boxes.count // together, unroll=1):
            first = group * together
            pages = [cute.arch.shuffle_sync(tile.page, first + box) for box in range(together)]
            with cute.arch.elect_one():
                for box in cutlass.range_constexpr(together):
                    self.issue(p, source, strips, barrier, (first + box) << boxes.shift, tile, pages[box])
        for box in cutlass.range(boxes.count // together * together, boxes.count, unroll=1):
            page = cute.arch.shuffle_sync(tile.page, box)
            with cute.arch.elect_one():
                self.issue(p, source, strips, barrier, box << boxes.shift, tile, page)

    def issue(self, p: Any, source: Any, strips: Any, barrier: Any, row: Any, tile: PagedKeyTile, page: Any) -> None:
        """Issues the copies of the box that starts at `row` of a tile through the 4-D map. One thread calls this."""
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        coordinates = box_coordinates(p, tile.row + row, tile.head, page)
        for strip in range(strips.count):
            prim.cp_async_bulk_tensor_shared_cta_global(
                base + box_offset(strips, strip, row),
                source.get_ptr(),
                [strips.column(strip), *coordinates],
                barrier,
            )

    @cute.jit
    def load_last_value(self, p: Any, source: Any, stage: Int32, barrier: Any, boxes: Any, tile: Any):
        """Issues the boxes of the tile of value with the last key; rows behind it become zero."""
        strips = tma.Strips.create(self.build, "value", tma_tiles(self.build)["value"], stage)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        for box in cutlass.range(boxes.count, unroll=1):
            page = cute.arch.shuffle_sync(tile.page, box)
            with cute.arch.elect_one():
                row = tile.row + (box << boxes.shift)
                count = smaller(larger(tile.num_keys - row, 0), Int32(1) << boxes.shift)
                coordinates = last_box_coordinates(p, row, count, tile.head, page)
                for strip in cutlass.range_constexpr(strips.count):
                    prim.cp_async_bulk_tensor_shared_cta_global(
                        base + box_offset(strips, strip, box << boxes.shift),
                        source.get_ptr(),
                        [strips.column(strip), *map(Int32, coordinates)],
                        barrier,
                    )


def box_coordinates(p: Any, row: Any, head: Any, page: Any) -> tuple[Any, ...]:
    """Returns the coordinates, without the column, of the box that starts at `row` of a sequence, in the 4-D map."""
    return row & (p.page_size - 1), head, page


def last_box_coordinates(p: Any, row: Any, count: Any, head: Any, page: Any) -> tuple[Any, ...]:
    """Returns the coordinates, without the column, of a box with `count` keys in the map of the last tile.

    The map is that of `launch_rules.tensor_map`: its rows end with the box's keys, whatever page they are in.
    """
    end = page * p.value_page_rows + (row & (p.page_size - 1)) + count
    return RAGGED_ROWS - count, head, end, RAGGED_ROWS


def box_offset(strips: tma.Strips, strip: int, row: Int32) -> Any:
    """Returns the offset in shared memory of the box that starts at `row` of a strip."""
    return cute.assume(strips.offset + (strip * strips.rows * strips.width + row * strips.width), divby=1024)
