"""e4m3 cache tiles: key and value tiles of codes, which one warpgroup converts to 16 bits for wgmma.

Codes never lie in shared memory. Each thread loads vectors of 16 codes from global memory into registers, one tile
ahead: a vector of the next tile is loaded as soon as that of this tile has been converted, and arrives while the rest
of the tile is converted. Shared memory then has only the stores of the converted tiles beside the reads of wgmma, which
use much of its bandwidth. Threads find the pages of their own rows, so that pages may have any size. Rows that are no
keys are not loaded: those of value become zeros, the scores of those of key are masked.

Scores are multiplied by the scales of keys, and the output by those of values, so that codes are converted exactly.
Only values with scales of rows are multiplied before they are rounded to 16 bits. cp.async copies the scales of the
rows of a key tile and of its value tile to shared memory, while the keys are converted.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, Int64, Uint32

from cutlass_py_attn.kernels.common import e4m3, paging, params, tile_copy
from cutlass_py_attn.kernels.common.paging import PageRow
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.kernels.sm90_e4m3.value_transpose import SwizzledTile
from cutlass_py_attn.kernels.sm90_e4m3_cache.layout import (
    VECTOR_BYTES,
    VECTOR_CODES,
    rows_at_once,
    threads_of_row,
    vectors_of_row,
)
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import swizzle_bytes
from cutlass_py_attn.problem.tensors import F32_BYTES
from cutlass_py_attn.score_terms import registry

WORDS = VECTOR_CODES // 4  # of a vector of codes
CACHED = ("key", "value")


@dataclass(frozen=True)
class CachedRows:
    """The rows of key and value of one sequence and one of their heads.

    pages: the sequence's entries of the table; None without pages
    """

    seqlen: SeqlenInfo
    head: Any
    pages: PageRow | None


@dataclass(frozen=True)
class CodedTile:
    """A tile to load.

    name: "key" or "value"
    first: first row of the tile in the sequence
    end: rows of the sequence that may be loaded; 0 for none
    entries: the table's entry of each of this thread's rows; unused without pages
    """

    name: str
    first: Any
    end: Any
    entries: cute.Tensor


class E4m3CacheTiles:
    """Key and value tiles of one Build. All threads of the first warpgroup call every method."""

    def __init__(self, build: Build) -> None:
        self.build, self.dtype = build, DTYPES[build.dtype]
        self.lanes, self.row_step = threads_of_row(build), rows_at_once(build)
        self.rows = build.tile_n // self.row_step
        columns = {"key": build.columns, "value": build.columns_value}
        self.widths = {"key": build.head_dim, "value": build.head_dim_value}
        self.columns, self.vectors = columns, {name: vectors_of_row(build, count) for name, count in columns.items()}
        self.targets = {name: SwizzledTile(build.tile_n, swizzle_bytes(count)) for name, count in columns.items()}
        self.has_row_scales = build.has(registry.KV8_ROW)

    def held_codes(self) -> cute.Tensor:
        """Returns uninitialised registers for the codes of a tile: (words of a vector, vectors of a row, rows)."""
        return cute.make_rmem_tensor((WORDS, max(self.vectors.values()), self.rows), Uint32)

    def held_entries(self) -> cute.Tensor:
        """Returns uninitialised registers for the table's entry of each of this thread's rows."""
        return cute.make_rmem_tensor(self.rows, Int32)

    def cached_rows(self, p: Any, seqlen: SeqlenInfo, head: Int32) -> CachedRows:
        """Returns the rows of a sequence."""
        return CachedRows(seqlen, head, paging.page_row(p, seqlen.index) if self.build.has("paged") else None)

    def row_of(self, first: Int32, number: int) -> Int32:
        """Returns row `number` of this thread, of the tile whose first row is `first`, in the sequence."""
        thread, _, _ = cute.arch.thread_idx()
        return first + thread // self.lanes + number * self.row_step

    def load_entries(self, p: Any, rows: CachedRows, first: Int32, end: Any, entries: cute.Tensor) -> None:
        """Starts loading the table's entries of this thread's rows; from row `end` on they may be anything."""
        if rows.pages is None:
            return
        for number in range(self.rows):
            row = self.row_of(first, number)
            entries[number] = paging.start_entry(p, rows.pages, row >> paging.page_shift(p), row < end)

    def load(self, p: Any, rows: CachedRows, tile: CodedTile, held: cute.Tensor) -> None:
        """Starts loading a tile into registers."""
        for number in range(self.rows):
            row = self.row_of(tile.first, number)
            offset = self.row_offset(p, rows, tile, row, number)
            for vector in range(self.vectors[tile.name]):
                self.load_vector(p, tile, row, offset, number, vector, held)

    def convert(
        self,
        p: Any,
        rows: CachedRows,
        name: str,
        stage: Int32,
        held: cute.Tensor,
        following: CodedTile,
        scales: cute.Tensor | None = None,
    ) -> None:
        """Converts the tile of key or value in registers to a stage in shared memory.

        Starts loading the tile `following` into the registers that become free.
        scales: of the rows of the tile, by which its numbers are multiplied
        """
        target = self.target_address(name, stage)
        present, loaded = self.vectors[name], self.vectors[following.name]
        for number in range(self.rows):
            row = self.row_of(following.first, number)
            offset = self.row_offset(p, rows, following, row, number)
            scale = None if scales is None else scales[self.row_of(Int32(0), number)]
            for vector in range(max(present, loaded)):
                if vector < present:
                    words = [Uint32(held[word, vector, number]) for word in range(WORDS)]
                    self.store_vector(name, target, number, vector, words, scale)
                if vector < loaded:
                    self.load_vector(p, following, row, offset, number, vector, held)

    @cute.jit
    def copy_scales(self, p: Any, rows: Any, stage: Int32, first: Int32, entries: cute.Tensor):
        """Starts copying the scales of a key tile and its value tile to a stage; 0 behind the last key.

        Each thread copies those of one of the rows whose codes the threads beside it have.
        """
        thread = params.read_register("tid.x")
        number = thread % self.lanes
        place = thread // self.lanes + number * self.row_step
        if place < self.build.tile_n:
            row = first + place
            for name in cutlass.range_constexpr(2):
                self.copy_scale(p, rows, CACHED[name], stage, place, row, self.entry_of(entries, number))
        cute.arch.cp_async_commit_group()

    def entry_of(self, entries: cute.Tensor, number: Int32) -> Int32:
        """Returns entry `number` of registers."""
        found = entries[0]
        for index in range(1, self.rows):
            found = Int32(cutlass.select_(number == index, entries[index], found))
        return found

    def copy_scale(
        self, p: Any, rows: CachedRows, name: str, stage: Int32, place: Int32, row: Int32, entry: Int32
    ) -> None:
        """Starts copying the scale of a row; place: its number in the tile. entry: that of the table."""
        page_step, row_step = (getattr(p, f"{name}_scale_{axis}") for axis in ("page", "row"))
        offset = e4m3.scale_offset(p, name, rows.seqlen.index, rows.head)
        if rows.pages is None:
            offset = offset + Int64(rows.seqlen.key_start + row) * row_step
        else:
            offset = offset + Int64(paging.clamped(p, entry)) * page_step + Int64(row & (p.page_size - 1)) * row_step
        target = cute.recast_ptr(self.scales(name, stage).iterator, dtype=Int8) + place * F32_BYTES
        e4m3.copy_scale(getattr(p, f"{name}_scale"), offset, target, row < rows.seqlen.num_keys)

    def scales(self, name: str, stage: Int32) -> cute.Tensor:
        """Returns the scales of the rows of a stage of key or value, (tile_n,) float32 in shared memory."""
        first = tile_copy.smem_pointer(self.build, f"{name}_scales", Float32) + stage * self.build.tile_n
        return cute.make_tensor(first, cute.make_layout(self.build.tile_n))

    @cute.jit
    def clear_last_rows(self, first: Int32, end: Int32, held: cute.Tensor):
        """Sets the rows in registers that are no keys to zero, which the weight 0 does not hide if they are NaN.

        first, end: first row of the tile in the sequence, and rows of the sequence
        """
        if first + self.build.tile_n > end:
            for number in cutlass.range_constexpr(self.rows):
                is_key = self.row_of(first, number) < end
                for vector in cutlass.range_constexpr(self.vectors["value"]):
                    for word in cutlass.range_constexpr(WORDS):
                        found = Uint32(held[word, vector, number])
                        held[word, vector, number] = Uint32(cutlass.select_(is_key, found, Uint32(0)))

    def row_offset(self, p: Any, rows: CachedRows, tile: CodedTile, row: Int32, number: int) -> Int64:
        """Returns where a row starts in its tensor (bytes)."""
        if rows.pages is not None:
            return paging.offset(
                p, tile.name, paging.clamped(p, tile.entries[number]), row & (p.page_size - 1), rows.head
            )
        batch, head, step = (params.stride(p, tile.name, axis) for axis in ("batch", "head", "row"))
        start = Int64(rows.seqlen.batch) * batch + Int64(rows.head) * head
        return start + Int64(rows.seqlen.key_start + row) * step

    def load_vector(
        self, p: Any, tile: CodedTile, row: Int32, offset: Int64, number: int, vector: int, held: cute.Tensor
    ) -> None:
        """Starts loading a vector of codes; columns behind the last become zeros."""
        thread, _, _ = cute.arch.thread_idx()
        column = (thread % self.lanes + vector * self.lanes) * VECTOR_CODES
        is_valid, width = row < tile.end, self.widths[tile.name]
        is_padded = self.columns[tile.name] != width
        is_valid = is_valid & (column < width) if is_padded else is_valid
        words = params.load_words(getattr(p, tile.name) + offset + Int64(column), is_valid, WORDS, has_zeros=is_padded)
        for index, word in enumerate(words):
            held[index, vector, number] = word

    def target_address(self, name: str, stage: Int32) -> Int32:
        """Returns the address in shared memory of this thread's first vector of a stage."""
        build, target = self.build, self.targets[name]
        thread = params.read_register("tid.x")
        lane, row = thread % self.lanes, thread // self.lanes
        base = tile_copy.smem_base(build) + build.buffer(name).offset
        place = (lane * (VECTOR_BYTES // 16)) ^ target.swizzle(row)
        tile_bytes = build.tile_n * self.columns[name] * build.item_bytes
        return Int32(base.toint()) + stage * tile_bytes + row * target.width + place * 16

    def store_vector(
        self, name: str, target: Int32, number: int, vector: int, words: list[Uint32], scale: Float32 | None
    ) -> None:
        """Converts a vector of codes and stores it in shared memory.

        target: address of this thread's first vector. The swizzle changes bits 4 to 6 of an address, and rows of a
        thread are a multiple of its period apart.
        """
        tile = self.targets[name]
        column = vector * self.lanes * VECTOR_BYTES
        start = target ^ (column % tile.width)
        start = start + (tile.strip_offset(column) + number * self.row_step * tile.width)
        pairs = [e4m3.rounded(half, self.dtype, scale) for word in words for half in e4m3.to_f16(self.build.arch, word)]
        store_words(start, pairs[:WORDS])
        store_words(start ^ 16, pairs[WORDS:])


def store_words(address: Int32, words: list[Uint32]) -> None:
    """Stores four words in shared memory."""
    text = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(text, read_only_args=[Int32(address), *words])
