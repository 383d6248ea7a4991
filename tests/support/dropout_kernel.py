"""Dropout kernel: stores the mask of kernels/common/dropout.py for a grid of tiles, one byte an element."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int8, Int32, Int64, Uint32

from cutlass_py_attn.kernels.common import dropout, mma_sync, params, seqlen_info, wgmma
from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.kernels.component_gemms.products import matmul_qk
from cutlass_py_attn.kernels.sm90_backward import dropout_transposed
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.kernels.sm90_common.swap_ab import PairCoordinate, swap_view
from cutlass_py_attn.launch.build import Build

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
    ("num_heads", "i32"),
)
Params = params.struct_type("KeepBytesParams", FIELDS)


class KeepBytes:
    """Stores the mask as (num_queries, num_keys) uint8, one block for each tile of scores."""

    def __init__(self, build: Build) -> None:
        self.build = build

    @cute.jit
    def __call__(self, *values):
        p = params.build_struct(Params, FIELDS, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(p.num_queries, p.num_keys, 1), block=(self.build.threads, 1, 1))

    @cute.kernel
    def kernel(self, p: Params):
        thread, _, _ = cute.arch.thread_idx()
        query_tile, key_tile, _ = cute.arch.block_idx()
        stream = dropout.load_stream(p)
        coordinates = row_view(self.build, thread)
        tile_origin = (query_tile * self.build.tile_m, key_tile * self.build.tile_n)
        bits = dropout.keep_bits(stream, coordinates, tile_origin, p.base, p.num_keys)
        self.store(p, bits, coordinates, tile_origin)

    @cute.jit
    def store(self, p: Any, bits: cute.Tensor, coordinates: cute.Tensor, tile_origin: tuple):
        """Stores one byte for each element inside the matrix."""
        target = cute.make_tensor(params.pointer(p.out, Int8, 1), cute.make_layout(2**30))
        query0, key0 = tile_origin
        for row in cutlass.range_constexpr(cute.size(coordinates, mode=[0])):
            for column in cutlass.range_constexpr(cute.size(coordinates, mode=[1])):
                i, j = query0 + coordinates[row, 0][0], key0 + coordinates[0, column][1]
                if (i < p.num_queries) & (j < p.num_keys):
                    kept = cutlass.select_(dropout.is_kept(bits, row, column), Int8(1), Int8(0))
                    target[Int64(i) * p.num_keys + j] = kept


class TransposedBytes(KeepBytes):
    """The same for the transposed scores of the sm90 backward; a byte is 2 if `pair_mask` disagrees with `is_kept`."""

    @cute.kernel
    def kernel(self, p: Params):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        query_tile, key_tile, _ = cute.arch.block_idx()
        of, stream = seqlen_info.create(build, SizesOf(p), Int32(0)), dropout.load_uniform_stream(p)
        stream.offset = stream.offset + p.base
        bits, target = (
            dropout_transposed.TransposedDropout(build, None, build.warps_scores[0] * 32),
            params.pointer(p.out, Int8, 1),
        )
        found = bits.registers()
        tile = ScoreTile(of, None, Int32(0), query_tile, key_tile)
        for word in cutlass.range_constexpr(bits.words):
            found[word] = bits.word(p, stream, tile, thread, word)
        identity = transposed(cute.make_identity_tensor((build.tile_m, build.tile_n)))
        product = wgmma.Wgmma(matmul_qk.spec(build, swap_ab=True), build.dtype)
        coordinates = swap_view(wgmma.row_view(product.mma.get_slice(thread).partition_C(identity)))
        self.store_transposed(p, found, coordinates, (query_tile * build.tile_m, key_tile * build.tile_n), target)

    @cute.jit
    def store_transposed(
        self, p: Any, found: cute.Tensor, coordinates: cute.Tensor, tile_origin: tuple, out: cute.Pointer
    ):
        """Stores one byte for each element inside the matrix."""
        target = cute.make_tensor(out, cute.make_layout(2**30))
        for query in cutlass.range_constexpr(cute.size(coordinates, mode=[0])):
            for row in cutlass.range_constexpr(2):
                element = PairCoordinate(query % 2, row, query // 2)
                i, j = tile_origin[0] + coordinates[query, row][0], tile_origin[1] + coordinates[query, row][1]
                half = (dropout_transposed.pair_mask(found, row, element.pair) >> (16 * element.element)) & Uint32(
                    0xFFFF
                )
                is_kept = dropout_transposed.is_kept(found, element)
                expected = cutlass.select_(is_kept, Uint32(0xFFFF), Uint32(0))
                byte = cutlass.select_(half == expected, cutlass.select_(is_kept, Int8(1), Int8(0)), Int8(2))
                if (i < p.num_queries) & (j < p.num_keys):
                    target[Int64(i) * p.num_keys + j] = byte


class SizesOf:
    """The fields of the parameter struct that a dense sequence needs."""

    def __init__(self, p: Any) -> None:
        self.num_queries, self.num_keys = p.num_queries, p.num_keys


def row_view(build: Build, thread: Int32) -> cute.Tensor:
    """Returns (row, column) of each score of a thread."""
    spec = matmul_qk.spec(build)
    if build.family == "sm90":
        return wgmma.row_view(wgmma.Wgmma(spec, build.dtype).coordinates(thread))
    return mma_sync.row_view(mma_sync.MmaSync(spec, build.dtype).coordinates(thread))


def write_view(target: cute.Tensor, build: Build, thread: Int32) -> None:
    """Writes both coordinates of each score of one thread."""
    view = row_view(build, thread)
    for row in range(cute.size(view, mode=[0])):
        for column in range(cute.size(view, mode=[1])):
            for axis in range(2):
                target[thread, row, column, axis] = Int32(view[row, column][axis])


@cute.jit
def row_views(out: cute.Pointer, build: cutlass.Constexpr, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """Writes (row, column) of each score, (threads, rows, columns, 2); executed on the CPU."""
    shape, stride = (build.threads, rows, columns, 2), (rows * columns * 2, columns * 2, 2, 1)
    target = cute.make_tensor(out, cute.make_layout(shape, stride=stride))
    for thread in range(build.threads):
        write_view(target, build, thread)


def trace(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """Replaces registry.trace."""
    return KeepBytes(build), params.example_arguments(FIELDS)


def trace_timed(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """The same for the kernel that is `timed`."""
    return KeepBytes(build, timed=True), params.example_arguments(FIELDS)


def trace_transposed(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """The same for the transposed scores of the sm90 backward."""
    return TransposedBytes(build), params.example_arguments(FIELDS)
