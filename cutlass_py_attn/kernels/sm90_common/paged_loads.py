"""Loads of key and value tiles from pages by TMA: the producer warp issues a box for each page and strip of columns.

A tile whose rows are all keys is read through a 4-D map (columns, rows of a page, heads, pages). The tile of the last
key may have rows behind it, which may hold NaN. The scores of these rows are masked, and key is read through the same
map. Their weights are 0, which does not hide NaN in value: this tile of value is read through a map like that of
variable lengths, whose boxes end with the last key. That map is slow with many small boxes. With it for all tiles, the
forward took 476 TFLOP/s with 16-row pages, and 687 with the 4-D map (2048 queries of 16384 keys, causal, one H200).

A stage becomes empty about half a key tile before its next tile is needed, which is hardly longer than a load takes. So
the producer knows the pages of a tile before it waits for an empty stage: it reads the table two key tiles ahead, and
exchanges the pages of the first boxes one key tile ahead, while it waits for the consumers anyway.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Int32

from cutlass_py_attn.integers import ceil_div, larger, smaller
from cutlass_py_attn.kernels.common import paging, params, seqlen_info, tile_copy, tma
from cutlass_py_attn.kernels.common.layout import RAGGED_ROWS, most_box_rows
from cutlass_py_attn.kernels.common.paging import PageRow
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import swizzle_bytes

# Most boxes, and copies of their strips, that are issued together, so that their addresses overlap. The producer has no
# registers for more.
MOST_BOXES, MOST_COPIES = 2, 4
LEAST_ROWS = 16  # of a box
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
    first_pages: pages of the boxes that are issued first
    """

    head: Any
    row: Any
    num_keys: Any
    page: Any
    first_pages: tuple[Any, ...]


class PagedLoads:
    """Loads of key and value tiles of one Build. One warp calls every method."""

    def __init__(self, build: Build) -> None:
        self.build = build
        most, tile_n = most_box_rows(build), build.tile_n
        # Boxes of a tile, for each number of rows that a box can have.
        rows = (most >> halvings for halvings in range(most.bit_length()))
        self.counts = tuple(tile_n // each for each in rows if each >= LEAST_ROWS)
        # A tile of 2^n rows has one box, or whole pages.
        self.has_whole_pages = most == tile_n
        columns = build.columns, build.columns_value
        strips = max(width * build.item_bytes // swizzle_bytes(width, build.item_bytes) for width in columns)
        self.together = max(min(MOST_COPIES // strips, MOST_BOXES), 1)

    def boxes(self, p: Any) -> PageBoxes:
        """Returns how tiles are divided."""
        most = most_box_rows(self.build).bit_length() - 1
        shift = smaller(paging.page_shift(p), most)
        return PageBoxes(shift, Int32(self.build.tile_n) >> shift)

    @cute.jit
    def lane_page(self, p: Any, pages: PageRow, seqlen: SeqlenInfo, boxes: PageBoxes, key_tile: Int32):
        """Returns the page of this lane's box of a key tile. The table is not read behind the last key."""
        page, row = Int32(NO_PAGE), self.lane_row(boxes, key_tile, 0)
        if row < seqlen.num_keys:
            page = paging.entry(p, pages, row >> paging.page_shift(p))
        return page

    @cute.jit
    def load_tiles(
        self,
        p: Any,
        pipes: Any,
        maps: tuple,
        k_state: Any,
        v_state: Any,
        work: Any,
        boxes: Any,
        count: cutlass.Constexpr,
    ):
        """Loads all key and value tiles of a work tile, with `count` boxes each. Returns the states of both pipelines.

        maps: of key, value, and the tile of value with the last key
        """
        seqlen, last = work.seqlen, work.end - 1
        table, head = self.table_row(p, seqlen), seqlen_info.key_head(self.build, p, work.head)
        entry = self.lane_entry(p, table, seqlen, boxes, last, count)
        page, first_pages = self.tile_pages(p, seqlen, boxes, last, entry, count)
        next_entry = self.lane_entry(p, table, seqlen, boxes, larger(last - 1, 0), count)
        for i in cutlass.range(work.end - work.first, unroll=1):
            key_tile = last - i
            tile = PagedKeyTile(head, key_tile * self.build.tile_n, seqlen.num_keys, page, first_pages)
            self.load_key(p, pipes.key, k_state, maps[0], boxes, tile, count)
            k_state.advance()
            cute.arch.sync_warp()  # the compiler moves nothing of the next tile before these loads
            page, first_pages = self.tile_pages(p, seqlen, boxes, larger(key_tile - 1, 0), next_entry, count)
            next_entry = self.lane_entry(p, table, seqlen, boxes, larger(key_tile - 2, 0), count)
            self.load_value(p, pipes.value, v_state, maps[1:], boxes, tile, count)
            v_state.advance()
        return k_state, v_state

    @cute.jit
    def lane_entry(
        self, p: Any, table: Any, seqlen: SeqlenInfo, boxes: PageBoxes, key_tile: Int32, count: cutlass.Constexpr
    ):
        """Returns the table's entry for this lane's box of a key tile as it is; 0 behind the last key.

        table: where the entries of the sequence start
        Nothing here waits for the entry, which is read long before `tile_pages` clamps it.
        """
        found, row = Int32(0), self.lane_row(boxes, key_tile, count)
        if row < seqlen.num_keys:
            found = cute.make_tensor(table + (row >> paging.page_shift(p)), cute.make_layout(1))[0]
        return found

    def table_row(self, p: Any, seqlen: SeqlenInfo) -> cute.Pointer:
        """Returns where the entries of a sequence start."""
        return params.pointer(p.page_table, Int32, Int32.width // 8) + paging.page_row(p, seqlen.index).start

    def lane_row(self, boxes: PageBoxes, key_tile: Int32, count: int) -> Int32:
        """Returns the first row of this lane's box of a key tile in the sequence: of the only box in all lanes."""
        row = key_tile * self.build.tile_n
        return row if count == 1 else row + (cute.arch.lane_idx() << boxes.shift)

    def tile_pages(
        self, p: Any, seqlen: SeqlenInfo, boxes: PageBoxes, key_tile: Int32, found: Int32, count: int
    ) -> tuple[Int32, tuple[Int32, ...]]:
        """Returns (page, first_pages) of a PagedKeyTile. found: its `lane_entry`."""
        has_keys = self.lane_row(boxes, key_tile, count) < seqlen.num_keys
        page = cutlass.select_(has_keys, paging.clamped(p, found), Int32(NO_PAGE))
        return page, (page,) if count == 1 else self.pages_from(page, 0, min(count, self.together))

    def load_key(
        self, p: Any, pipe: Any, state: Any, source: Any, boxes: PageBoxes, tile: PagedKeyTile, count: int
    ) -> None:
        """Waits for an empty stage and issues the loads of a tile of key."""
        pipe.producer_acquire(state)
        self.load_boxes(p, "key", source, state.index, pipe.producer_get_barrier(state), boxes, tile, count)

    @cute.jit
    def load_value(
        self, p: Any, pipe: Any, state: Any, sources: tuple, boxes: Any, tile: Any, count: cutlass.Constexpr
    ):
        """Waits for an empty stage and issues the loads of a tile of value.

        sources: the map of tiles whose rows are all keys, and the map of the tile with the last key
        """
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        if tile.row + self.build.tile_n <= tile.num_keys:
            self.load_boxes(p, "value", sources[0], state.index, barrier, boxes, tile, count)
        else:
            self.load_last_value(p, sources[1], state.index, barrier, boxes, tile)

    @cute.jit
    def load_boxes(
        self,
        p: Any,
        name: cutlass.Constexpr,
        source: Any,
        stage: Int32,
        barrier: Any,
        boxes: Any,
        tile: Any,
        count: cutlass.Constexpr,
    ):
        """Issues the boxes of a tile through the 4-D map, in groups of `together` boxes."""
        strips = tma.Strips.create(self.build, name, tma_tiles(self.build)[name], stage)
        pages, first, together = tile.first_pages, Int32(0), self.together
        if cutlass.const_expr(count > together):
            for _ in cutlass.range(ceil_div(count, together) - 1, unroll=1):
                next_pages = self.pages_from(tile.page, first + together, together)
                with cute.arch.elect_one():
                    self.issue(p, source, strips, barrier, boxes, tile, first, pages)
                pages, first = next_pages, first + together
        with cute.arch.elect_one():
            self.issue(p, source, strips, barrier, boxes, tile, first, pages[: (count - 1) % together + 1])

    def pages_from(self, page: Int32, first: Any, count: int) -> tuple[Int32, ...]:
        """Returns the pages of `count` boxes from box `first` on, in all lanes. page: of this lane's box."""
        return tuple(cute.arch.shuffle_sync(page, first + box) for box in range(count))

    def issue(
        self, p: Any, source: Any, strips: Any, barrier: Any, boxes: Any, tile: Any, first: Any, pages: tuple
    ) -> None:
        """Issues the copies of the boxes from box `first` on through the 4-D map. One thread calls this.

        pages: of these boxes
        """
        base = tile_copy.smem_base(self.build)
        for box, page in enumerate(pages):
            row = (first + box) << boxes.shift
            start = tile.row if self.has_whole_pages else tile.row + row
            coordinates = box_coordinates(p, start, tile.head, page)
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
        base = tile_copy.smem_base(self.build)
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
