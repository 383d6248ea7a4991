"""Dropout kernel: what parts/dropout.py gives each element of a grid of tiles, written out one byte an element."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int8, Int32, Int64, Uint32

from cutlass_py_attn.gemm import matmul_qk, mma_sync, wgmma
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.parts import dropout, kept_bits, lengths, params
from cutlass_py_attn.parts.turned import turned, turned_view
from cutlass_py_attn.plan import Build

SYMBOL = "keep_bytes"
FIELDS = (
    ("out", "i64"),
    ("base", "i64"),
    ("philox_seed", "i64"),
    ("philox_offset", "i64"),
    ("philox_seed_address", "i64"),
    ("philox_offset_address", "i64"),
    ("dropout_threshold", "i32"),
    ("num_queries", "i32"),
    ("num_keys", "i32"),
    ("rounds", "i32"),
    ("num_heads", "i32"),
)
Params = params.struct("KeepBytesParams", FIELDS)


class KeepBytes:
    """One block for each tile of scores. `out` is uint8 [num_queries, num_keys], or where the kernel is `timed`
    uint32, one word a thread, and each block works on as many key tiles as `rounds` says."""

    def __init__(self, build: Build, timed: bool = False) -> None:
        self.build, self.timed = build, timed

    @cute.jit
    def __call__(self, *values):
        p = params.filled(Params, FIELDS, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(p.num_queries, p.num_keys, 1), block=(self.build.threads, 1, 1))

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        query_tile, key_tile, _ = cute.arch.block_idx()
        self.stream = dropout.stream(p)
        corner = (query_tile * self.build.tile_m, key_tile * self.build.tile_n)
        where = row_view(self.build, thread)
        if cutlass.const_expr(self.timed):
            mixed = Uint32(0)
            for i in cutlass.range(p.rounds, unroll=1):
                bits = dropout.keep_bits(self.stream, where, (corner[0], i * self.build.tile_n), p.base, p.num_keys)
                for row in cutlass.range_constexpr(cute.size(where, mode=[0])):
                    for column in cutlass.range_constexpr(0, cute.size(where, mode=[1]), 16):
                        mixed = mixed * Uint32(5) + bits[row, column]
            blocks, _, _ = cute.arch.grid_dim()
            index = (key_tile * blocks + query_tile) * self.build.threads + thread
            cute.make_tensor(params.pointer(p.out, Uint32, 4), cute.make_layout(2**30))[index] = mixed
        else:
            bits = dropout.keep_bits(self.stream, where, corner, p.base, p.num_keys)
            self.store(p, bits, where, corner)

    @cute.jit
    def store(self, p: Any, bits: cute.Tensor, where: cute.Tensor, corner: tuple):
        """Write a byte for each element inside the matrix."""
        target = cute.make_tensor(params.pointer(p.out, Int8, 1), cute.make_layout(2**30))
        query0, key0 = corner
        for row in cutlass.range_constexpr(cute.size(where, mode=[0])):
            for column in cutlass.range_constexpr(cute.size(where, mode=[1])):
                i, j = query0 + where[row, 0][0], key0 + where[0, column][1]
                if (i < p.num_queries) & (j < p.num_keys):
                    kept = cutlass.select_(dropout.keep(bits, row, column), Int8(1), Int8(0))
                    target[Int64(i) * p.num_keys + j] = kept


class TurnedBytes(KeepBytes):
    """The same for the scores of the Hopper backward: a byte is 2 where the mask of a pair of queries says otherwise
    than its bits."""

    @cute.kernel
    def kernel(self, p: Params):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        query_tile, key_tile, _ = cute.arch.block_idx()
        of, stream = lengths.sequence(build, SizesOf(p), Int32(0)), dropout.uniform_stream(p)
        stream.offset = stream.offset + p.base
        bits, target = kept_bits.KeptBits(build, None, build.scores[0] * 32), params.pointer(p.out, Int8, 1)
        found = bits.registers()
        for word in cutlass.range_constexpr(bits.words):
            found[word] = bits.word(p, stream, (of, Int32(0)), (query_tile, key_tile), thread, word)
        identity = transposed(cute.make_identity_tensor((build.tile_m, build.tile_n)))
        product = wgmma.Wgmma(turned(matmul_qk.spec(build)), build.dtype)
        where = turned_view(wgmma.row_view(product.mma.get_slice(thread).partition_C(identity)))
        self.store_turned(p, found, where, (query_tile * build.tile_m, key_tile * build.tile_n), target)

    @cute.jit
    def store_turned(self, p: Any, found: cute.Tensor, where: cute.Tensor, corner: tuple, out: cute.Pointer):
        """Write a byte for each element inside the matrix."""
        target = cute.make_tensor(out, cute.make_layout(2**30))
        for query in cutlass.range_constexpr(cute.size(where, mode=[0])):
            for row in cutlass.range_constexpr(2):
                side, eight = query % 2, query // 2
                i, j = corner[0] + where[query, row][0], corner[1] + where[query, row][1]
                half = (kept_bits.mask(found, row, eight) >> (16 * side)) & Uint32(0xFFFF)
                is_kept = kept_bits.is_kept(found, side, row, eight)
                expected = cutlass.select_(is_kept, Uint32(0xFFFF), Uint32(0))
                byte = cutlass.select_(half == expected, cutlass.select_(is_kept, Int8(1), Int8(0)), Int8(2))
                if (i < p.num_queries) & (j < p.num_keys):
                    target[Int64(i) * p.num_keys + j] = byte


class SizesOf:
    """The struct of a backward, of which a dense sequence needs the sizes."""

    def __init__(self, p: Any) -> None:
        self.num_queries, self.num_keys = p.num_queries, p.num_keys


def row_view(build: Build, thread: Int32) -> cute.Tensor:
    """(row, column) of each score of a thread."""
    spec = matmul_qk.spec(build)
    if build.family == "hopper":
        return wgmma.row_view(wgmma.Wgmma(spec, build.dtype).coordinates(thread))
    return mma_sync.row_view(mma_sync.MmaSync(spec, build.dtype).coordinates(thread))


def write_view(target: cute.Tensor, build: Build, thread: Int32) -> None:
    """Both coordinates of each score of one thread."""
    view = row_view(build, thread)
    for row in range(cute.size(view, mode=[0])):
        for column in range(cute.size(view, mode=[1])):
            for axis in range(2):
                target[thread, row, column, axis] = Int32(view[row, column][axis])


@cute.jit
def row_views(out: cute.Pointer, build: cutlass.Constexpr, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """(row, column) of each score [thread, row of its view, column of its view, 2]; runs on this machine's CPU."""
    shape, stride = (build.threads, rows, columns, 2), (rows * columns * 2, columns * 2, 2, 1)
    target = cute.make_tensor(out, cute.make_layout(shape, stride=stride))
    for thread in range(build.threads):
        write_view(target, build, thread)


def trace(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """Stands in for kernels.trace."""
    return KeepBytes(build), params.representative(FIELDS)


def trace_timed(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """The same for the kernel that is `timed`."""
    return KeepBytes(build, timed=True), params.representative(FIELDS)


def trace_turned(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """The same for the scores of the Hopper backward."""
    return TurnedBytes(build), params.representative(FIELDS)
