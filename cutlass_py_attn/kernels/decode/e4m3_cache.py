"""e4m3 cache: keys and values of e4m3 codes for the persistent decode kernel, converted to float16 in registers.

A register holds four codes. No lane passes a code to another: the products sum in an order in which each lane has what
it needs.

    S = Q K^T   lane t of a quad has 16 consecutive codes of a key, or 8 where columns are no multiple of 64; the
                columns of Q are stored in that order
    O += P V    ldmatrix transposes pairs of columns; the even columns are one product of 8 columns, the odd ones the
                next, and the columns of O are found where the products left them

Scales turn codes into numbers. Those of keys multiply the scores, those of values the output. With scales of each row,
those of values multiply the weights, in units of the largest that a warp has seen, so that float16 holds the weights.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32

from cutlass_py_attn.kernels.common import e4m3, paging, params, tile_copy
from cutlass_py_attn.kernels.common.mma_sync import row_view
from cutlass_py_attn.kernels.common.paged_copy import BLOCK_ROWS, PagedCopy, PagedRows
from cutlass_py_attn.kernels.common.softmax import QUAD
from cutlass_py_attn.kernels.decode import layout as decode_smem
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import F32_BYTES
from cutlass_py_attn.score_terms import registry

LINE_BYTES = 128  # of shared memory that all banks have at once
CHUNK_BYTES = 16  # of one load of a lane
MMA_DEPTH = 16  # keys or columns that an instruction sums over
NAMES = ("key", "value")
LEAST_UNIT = 2.0**-120  # of scales of values: its reciprocal is finite


def query_column(columns: int, column: Any) -> Any:
    """Returns where a column of Q is stored: in the order in which the lanes of a quad hold the codes of a key."""
    width = 64 if columns % 64 == 0 else 32  # columns that a quad loads at once
    lane_codes = width // QUAD
    block, inside = column // width, column % width
    lane, code = inside // lane_codes, inside % lane_codes
    step = block * (width // MMA_DEPTH) + code // 4
    return step * MMA_DEPTH + code % 4 // 2 * 8 + lane * 2 + code % 2


def output_column(column: Any, odd: int) -> Any:
    """Returns where the products left column `column` + `odd` of O; column is even, odd 0 or 1."""
    return column // 16 * 16 + 8 * odd + column % 16 // 2


class E4m3Cache:
    """Keys and values of one Build: `rows` keys of a tile for each team of `threads` threads."""

    def __init__(self, build: Build, rows: int, threads: int) -> None:
        self.build, self.rows, self.threads = build, rows, threads
        self.columns = {"key": build.columns, "value": build.columns_value}
        self.widths = {"key": build.head_dim, "value": build.head_dim_value}
        self.has_row_scales = build.has(registry.KV8_ROW)
        self.paged = PagedCopy(build, rows, threads) if build.has("paged") else None

    def stage_start(self, team: Any, stage: Any) -> cute.Pointer:
        """Returns where a team's stage starts in shared memory: codes of keys, of values, then scales of rows."""
        build = self.build
        number = team * build.query_stages + stage
        base = tile_copy.smem_base(build) + build.buffer("ring").offset
        return base + number * sum(decode_smem.stage_bytes(build))

    def codes_start(self, start: cute.Pointer, name: str) -> cute.Pointer:
        """Returns where the codes of keys or values of a stage start."""
        return start if name == "key" else start + self.rows * self.columns["key"]

    def scales(self, start: cute.Pointer, name: str) -> cute.Pointer:
        """Returns where the row scales of a stage start, (rows,) float32."""
        codes = self.rows * (self.columns["key"] + self.columns["value"])
        return start + (codes + NAMES.index(name) * self.rows * F32_BYTES)

    def byte_of(self, name: str, row: Any, byte: Any) -> Any:
        """Returns where a byte of a row is stored in a tile: chunks of 16 are swapped so that no banks collide."""
        columns = self.columns[name]
        period = math.gcd(columns, LINE_BYTES)
        chunk = byte // CHUNK_BYTES
        if name == "key":  # a quarter of a warp reads 64 bytes of two rows
            chunk = chunk ^ (row % 2 * 4) if period == LINE_BYTES else chunk
        else:  # ldmatrix reads 16 bytes of eight rows
            chunk = chunk ^ (row * period // LINE_BYTES % (period // CHUNK_BYTES))
        return row * columns + chunk * CHUNK_BYTES + byte % CHUNK_BYTES

    def load(self, p: Any, piece: Any, warp: Any, key0: Int32, entry: Int32, start: Any) -> None:
        """Starts loading the team's rows from key0 on into a stage; rows behind the last key become zero.

        entry: this lane's entry of the table, see `PagedCopy.entry`; not used without pages.
        """
        rows = PagedRows(piece.head_key, key0, piece.seqlen.num_keys, entry)
        if self.paged is None:
            for name in NAMES:
                self.copy_block(p, name, warp.member, self.row_of(p, name, piece, key0), rows, (0, self.rows), start)
        else:
            self.load_pages(p, warp.member, rows, start)
        if self.has_row_scales:
            self.load_scales(p, piece, warp.member, rows, start)

    @cute.jit
    def load_pages(self, p: Any, member: Int32, rows: Any, start: Any):
        """Does `load` for codes in pages."""
        if p.page_size >= BLOCK_ROWS:
            self.copy_blocks(p, member, rows, start)
        else:
            self.copy_single_rows(p, member, rows, start)

    def copy_blocks(self, p: Any, member: Int32, rows: PagedRows, start: Any) -> None:
        """Copies blocks of rows of one page each."""
        for first in range(0, self.rows, BLOCK_ROWS):
            page = cute.arch.shuffle_sync(rows.entry, first)
            inside = (rows.key0 + first) & (p.page_size - 1)
            for name in NAMES:
                source = paging.offset(p, name, page, inside, rows.head_key)
                self.copy_block(p, name, member, source, rows, (first, BLOCK_ROWS), start)

    def row_of(self, p: Any, name: str, piece: Any, key: Int32) -> Int64:
        """Returns where a row of a dense or variable-length cache starts (elements)."""
        indices = piece.seqlen.batch, piece.seqlen.key_start + key, piece.head_key
        strides = (params.stride(p, name, axis) for axis in ("batch", "row", "head"))
        return sum((Int64(index) * stride for index, stride in zip(indices, strides, strict=True)), start=Int64(0))

    def pieces(self, name: str, rows: int) -> list[int]:
        """Returns the numbers of the first thread's copies; a copy has `vector_bytes` bytes."""
        return list(range(0, rows * self.columns[name] // self.build.vector_bytes, self.threads))

    def place(self, name: str, member: Int32, number: int) -> tuple[Any, Any]:
        """Returns (row, byte) of a thread's copy."""
        of_row = self.columns[name] // self.build.vector_bytes
        index = member + number
        return index // of_row, index % of_row * self.build.vector_bytes

    def copy_block(
        self, p: Any, name: str, member: Int32, source: Any, rows: PagedRows, block: tuple[int, int], start: Any
    ) -> None:
        """Copies (first, count) rows, the first at `source`, that lie one row stride apart."""
        first, count = block
        left = rows.num_keys - rows.key0 - first
        codes = self.codes_start(start, name)
        base, row_stride = getattr(p, name) + source, params.stride(p, name, "row")
        total = count * self.columns[name] // self.build.vector_bytes
        for number in self.pieces(name, count):
            row, byte = self.place(name, member, number)
            address = base + Int64(row) * row_stride + byte
            in_bounds = (row < left) & (byte < self.widths[name])
            target = codes + self.byte_of(name, first + row, byte)
            self.copy(address, target, in_bounds, total - number < self.threads, member + number < total)

    def copy_single_rows(self, p: Any, member: Int32, rows: PagedRows, start: Any) -> None:
        """Copies rows of several pages: the lane that holds the entry of a row passes it on."""
        for name in NAMES:
            codes = self.codes_start(start, name)
            total = self.rows * self.columns[name] // self.build.vector_bytes
            for number in self.pieces(name, self.rows):
                row, byte = self.place(name, member, number)
                page = cute.arch.shuffle_sync(rows.entry, row % self.rows)
                key = rows.key0 + row
                source = getattr(p, name) + paging.offset(p, name, page, key & (p.page_size - 1), rows.head_key)
                in_bounds = (key < rows.num_keys) & (byte < self.widths[name])
                target = codes + self.byte_of(name, row, byte)
                self.copy(source + byte, target, in_bounds, total - number < self.threads, member + number < total)

    def copy(self, address: Any, target: Any, in_bounds: Any, is_last: bool, is_needed: Any) -> None:
        """Starts one copy of `vector_bytes` bytes; zeros if out of bounds.

        is_last: whether not all threads have such a copy. is_needed: whether this one has.
        """
        if is_last:
            _copy_if(address, target, in_bounds, is_needed, self.build.vector_bytes)
        else:
            e4m3.copy_async(address, target, in_bounds, self.build.vector_bytes)

    @cute.jit
    def load_scales(self, p: Any, piece: Any, row: Int32, rows: Any, start: Any):
        """Starts loading the scales of the team's rows, one a thread; 0 behind the last key."""
        if row < self.rows:
            self.copy_scales(p, piece, row, rows, start)

    def copy_scales(self, p: Any, piece: Any, row: Int32, rows: PagedRows, start: Any) -> None:
        """Starts loading the scales of one row."""
        key = rows.key0 + row
        for name in NAMES:
            offset = e4m3.scale_offset(p, name, piece.seqlen.index, piece.head_key)
            if self.paged is None:
                offset = offset + Int64(piece.seqlen.key_start + key) * getattr(p, f"{name}_scale_row")
            else:
                offset = offset + Int64(rows.entry) * getattr(p, f"{name}_scale_page")
                offset = offset + Int64(key & (p.page_size - 1)) * getattr(p, f"{name}_scale_row")
            target = self.scales(start, name) + row * F32_BYTES
            e4m3.copy_scale(getattr(p, f"{name}_scale"), offset, target, key < rows.num_keys)

    def scale(self, p: Any, name: str, piece: Any) -> Float32:
        """Returns the scale of a sequence and a key head; 1 without scales."""
        return e4m3.scale(p, name, piece.seqlen.index, piece.head_key)

    def column_scales(self, start: Any, name: str, coordinates: cute.Tensor) -> list[Float32]:
        """Returns the scales of the keys that a thread has scores of; coordinates: of its scores (rows, columns)."""
        scales = cute.make_tensor(cute.recast_ptr(self.scales(start, name).align(16), dtype=Float32), self.rows)
        return [scales[coordinates[0, column][1]] for column in range(cute.size(coordinates, mode=[1]))]

    def scale_scores(self, r_s: cute.Tensor, key_scale: Any, start: Any, coordinates: cute.Tensor) -> None:
        """Multiplies products of codes by the scales of the keys."""
        if not self.has_row_scales:
            r_s.store(r_s.load() * key_scale)
            return
        scores = row_view(r_s)
        for column, scale in enumerate(self.column_scales(start, "key", coordinates)):
            for row in range(cute.size(scores, mode=[0])):
                scores[row, column] = scores[row, column] * scale

    def scale_weights(self, r_s: cute.Tensor, unit: Any, start: Any, coordinates: cute.Tensor) -> tuple[Any, Any]:
        """Multiplies weights by the scales of the values, in units of the largest seen by the warp.

        unit: the largest seen before. Returns the largest now, and the factor of the output so far.
        """
        scales = self.column_scales(start, "value", coordinates)
        largest = unit
        for scale in scales:
            largest = cute.arch.fmax(largest, cute.arch.fmax(scale, -scale))
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=QUAD)
        inverse = cute.arch.rcp_approx(largest)
        weights = row_view(r_s)
        for column, scale in enumerate(scales):
            for row in range(cute.size(weights, mode=[0])):
                weights[row, column] = weights[row, column] * (scale * inverse)
        return largest, unit * inverse

    def keys_operand(self, start: Any, lane: Int32) -> "KeyCodes":
        """Returns K of a stage as the B operand of S = Q K^T."""
        return KeyCodes(self, self.codes_start(start, "key"), lane)

    def values_operand(self, start: Any, lane: Int32) -> "ValueCodes":
        """Returns V of a stage as the B operand of O += P V."""
        return ValueCodes(self, self.codes_start(start, "value"), lane)


class KeyCodes:
    """The codes of K in shared memory as the B operand, (keys, columns), of m16n8k16."""

    def __init__(self, cache: E4m3Cache, codes: cute.Pointer, lane: Int32) -> None:
        self.cache, self.codes, self.lane = cache, codes, lane
        self.lane_bytes = CHUNK_BYTES if cache.columns["key"] % 64 == 0 else CHUNK_BYTES // 2
        self.loaded: dict[int, list] = {}

    def fragment(self, k: int) -> cute.Tensor:
        """Converts step k of the columns and returns its registers, ((2, 2), keys / 8)."""
        tiles, words = self.cache.rows // 8, self.lane_bytes // 4
        block, word = k // words, k % words
        if word == 0:
            self.loaded[block] = [self.load(tile, block) for tile in range(tiles)]
        found = cute.make_rmem_tensor(tiles * 2, Uint32)
        for tile in range(tiles):
            low, high = e4m3.to_f16(self.cache.build.arch, Uint32(self.loaded[block][tile][word]))
            found[2 * tile], found[2 * tile + 1] = low, high
        return _fragment(found, tiles)

    def load(self, tile: int, block: int) -> cute.Tensor:
        """Loads this lane's codes of a key of a tile of eight, as words."""
        row = tile * 8 + self.lane // QUAD
        byte = block * (QUAD * self.lane_bytes) + self.lane % QUAD * self.lane_bytes
        source = (self.codes + self.cache.byte_of("key", row, byte)).align(self.lane_bytes)
        words = cute.make_rmem_tensor(self.lane_bytes // 4, Uint32)
        cute.autovec_copy(
            cute.make_tensor(cute.recast_ptr(source, dtype=Uint32), cute.make_layout(self.lane_bytes // 4)), words
        )
        return words


class ValueCodes:
    """The codes of V in shared memory as the B operand, (columns, keys), of m16n8k16."""

    def __init__(self, cache: E4m3Cache, codes: cute.Pointer, lane: Int32) -> None:
        self.cache, self.codes, self.lane = cache, codes, lane

    def fragment(self, k: int) -> cute.Tensor:
        """Converts step k of the keys and returns its registers, ((2, 2), columns / 8)."""
        tiles = self.cache.columns["value"] // 8
        found = cute.make_rmem_tensor(tiles * 2, Uint32)
        for pair in range(tiles // 4):  # 32 columns: two chunks of keys 0 to 7 and of keys 8 to 15
            row = k * MMA_DEPTH + self.lane % MMA_DEPTH
            byte = (pair * 2 + self.lane // MMA_DEPTH) * CHUNK_BYTES
            address = self.codes + self.cache.byte_of("value", row, byte)
            words = cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
                write_only_types=[Uint32] * 4,
                read_only_args=[Uint32(address.toint())],
            )
            for chunk in range(2):
                for half in range(2):
                    # (key, column) of the bytes: (0, 0), (0, 1), (1, 0), (1, 1); columns together afterwards
                    word = cute.arch.inline_ptx(
                        "prmt.b32 {$w0}, {$r0}, 0, 0x3120;",
                        write_only_types=[Uint32],
                        read_only_args=[words[chunk * 2 + half]],
                    )
                    even, odd = e4m3.to_f16(self.cache.build.arch, Uint32(word))
                    tile = (pair * 2 + chunk) * 2
                    found[2 * tile + half], found[2 * tile + 2 + half] = even, odd
        return _fragment(found, tiles)


def _fragment(words: cute.Tensor, tiles: int) -> cute.Tensor:
    """Returns words of float16 pairs as the B registers of one step, ((2, 2), tiles)."""
    layout = cute.make_layout(((2, 2), tiles), stride=((1, 2), 4))
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Float16), layout)


@cute.jit
def _copy_if(address: Any, target: Any, in_bounds: Any, is_needed: Any, num_bytes: cutlass.Constexpr):
    """Does `_copy_async` in the threads that have such a copy."""
    if is_needed:
        e4m3.copy_async(address, target, in_bounds, num_bytes)
