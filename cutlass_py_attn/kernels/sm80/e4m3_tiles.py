"""e4m3 tiles: key and value tiles of codes, which the sm80 forward converts to the dtype of query in shared memory.

cp.async loads the codes of a tile into a buffer of their own. All threads convert them once, into the tile that the
products read; a barrier of the block must follow. Scales multiply scores and the output in float32, so that codes are
converted exactly; only values with scales of rows are multiplied before they are rounded to 16 bits.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, Int64, Uint8, Uint32

from cutlass_py_attn.kernels.common import e4m3, paged_tile_copy, paging, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import F32_BYTES
from cutlass_py_attn.score_terms import registry

CODES = 8  # that a thread converts at once, to 16 bytes


class E4m3Tiles:
    """Key and value tiles of one Build."""

    def __init__(self, build: Build) -> None:
        self.build, self.dtype = build, DTYPES[build.dtype]
        self.columns = {"key": build.columns, "value": build.columns_value}
        self.widths = {"key": build.head_dim, "value": build.head_dim_value}
        self.has_row_scales = build.has(registry.KV8_ROW)

    def codes(self, name: str) -> cute.Tensor:
        """Returns the codes of a tile in shared memory, (tile_n, columns) bytes."""
        columns = self.columns[name]
        layout = cute.make_layout((self.build.tile_n, columns), stride=(columns, 1))
        return cute.make_tensor(tile_copy.smem_pointer(self.build, f"{name}_codes", Uint8), layout)

    def load(self, p: Any, name: str, seqlen: SeqlenInfo, head: Int32, key0: Int32, thread: Int32) -> None:
        """Starts copying the tile of key or value from row key0 on, for query head `head`, and its scales of rows."""
        build, key_head = self.build, seqlen_info.key_head(self.build, p, head)
        if build.has("paged"):
            tile = paged_tile_copy.paged_tile(build, p, name, seqlen, key_head, key0, self.widths[name], Uint8)
            paged_tile_copy.copy_g2s(p, thread, build.threads, tile, self.codes(name))
            if name == "key":
                paged_tile_copy.prefetch_entry(p, seqlen, key0 - build.tile_n + thread % build.tile_n)
        else:
            start = RowCoordinates(seqlen.batch, key_head, seqlen.key_start + key0)
            rows = seqlen.num_keys - key0
            tile = tile_copy.gmem_tile(build, p, name, start, rows, self.widths[name], Uint8)
            tile_copy.copy_g2s(thread, build.threads, tile, self.codes(name))
        if self.has_row_scales:
            for first in range(0, build.tile_n, build.threads):
                self.load_scale(p, name, seqlen, key_head, key0, thread + first)

    @cute.jit
    def load_scale(self, p: Any, name: cutlass.Constexpr, seqlen: Any, key_head: Int32, key0: Int32, row: Int32):
        """Starts copying the scale of a row of the tile; 0 behind the last key."""
        if row < self.build.tile_n:
            key = key0 + row
            in_bounds = key < seqlen.num_keys
            offset = e4m3.scale_offset(p, name, seqlen.index, key_head)
            if cutlass.const_expr(self.build.has("paged")):
                entry = Int32(0)
                if in_bounds:
                    entry = paging.entry(p, paging.page_row(p, seqlen.index), key >> paging.page_shift(p))
                offset = offset + Int64(entry) * getattr(p, f"{name}_scale_page")
                offset = offset + Int64(key & (p.page_size - 1)) * getattr(p, f"{name}_scale_row")
            else:
                offset = offset + Int64(seqlen.key_start + key) * getattr(p, f"{name}_scale_row")
            target = cute.recast_ptr(self.scales(name).iterator, dtype=Int8) + row * F32_BYTES
            e4m3.copy_scale(getattr(p, f"{name}_scale"), offset, target, in_bounds)

    def scales(self, name: str) -> cute.Tensor:
        """Returns the scales of the rows of a tile in shared memory, (tile_n,) float32."""
        return cute.make_tensor(tile_copy.smem_pointer(self.build, f"{name}_scales", Float32), self.build.tile_n)

    @cute.jit
    def convert(self, name: cutlass.Constexpr, tile: cute.Tensor, thread: Int32):
        """Converts the codes of key or value, which have arrived, to the numbers of the tile."""
        codes, columns = self.codes(name), self.columns[name]
        total = self.build.tile_n * columns // CODES
        for first in cutlass.range_constexpr(0, total, self.build.threads):
            place = first + thread
            if cutlass.const_expr(total - first >= self.build.threads):
                self.convert_part(name, codes, tile, place)
            else:
                if place < total:
                    self.convert_part(name, codes, tile, place)

    def convert_part(self, name: str, codes: cute.Tensor, tile: cute.Tensor, place: Int32) -> None:
        """Converts the codes with number CODES * place and those behind it, all of one row."""
        parts = self.columns[name] // CODES
        row, column = place // parts, place % parts
        source = cute.local_tile(codes, (1, CODES), (row, column))
        words = cute.make_rmem_tensor(CODES // 4, Uint32)
        pointer = cute.recast_ptr(source.iterator.align(CODES), dtype=Uint32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(CODES // 4)), words)
        scale = self.scales(name)[row] if self.has_row_scales and name == "value" else None
        found = cute.make_rmem_tensor(CODES, self.dtype)
        pairs = cute.make_tensor(cute.recast_ptr(found.iterator, dtype=Uint32), cute.make_layout(CODES // 2))
        for word in range(CODES // 4):
            halves = e4m3.to_f16(self.build.arch, Uint32(words[word]))
            for number, half in enumerate(halves):
                pairs[2 * word + number] = e4m3.rounded(half, self.dtype, scale)
        target = cute.local_tile(tile, (1, CODES), (row, column))
        cute.autovec_copy(found, cute.make_tensor(target.iterator.align(2 * CODES), cute.make_layout(CODES)))

    def scale_scores(self, scores: cute.Tensor, coordinates: cute.Tensor, scale: Any) -> None:
        """Multiplies products of the codes of key by their scales.

        scores: (rows, columns) of a thread. coordinates: (row, column) of each in the tile. scale: that of all rows.
        """
        if not self.has_row_scales:
            scores.store(scores.load() * scale)
            return
        scales = self.scales("key")
        for column in range(cute.size(scores, mode=[1])):
            of_row = scales[coordinates[0, column][1]]
            for row in range(cute.size(scores, mode=[0])):
                scores[row, column] = scores[row, column] * of_row

    def operand_scales(self, p: Any, sequence: Int32, key_head: Int32, has_keys: Any) -> tuple[Any, Any]:
        """Returns the scales of scores and of the output: 1 with scales of rows.

        has_keys: whether the block has a key; a sequence without keys may have any scale.
        """
        if self.has_row_scales:
            return Float32(1.0), Float32(1.0)
        key, value = (e4m3.scale(p, name, sequence, key_head) for name in ("key", "value"))
        return key, Float32(cutlass.select_(has_keys, value, Float32(0.0)))


def of(build: Build) -> E4m3Tiles | None:
    """Returns the tiles of codes of a build; None for key and value in the dtype of query."""
    return E4m3Tiles(build) if build.has(registry.KV8) else None
