"""Score kernel: the score terms of an sm80 build and its mask on given products, without matrix instructions."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.common import masking, params, seqlen_info
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, row_view
from cutlass_py_attn.kernels.common.score_mod import ScoreMod
from cutlass_py_attn.kernels.component_gemms.products import matmul_qk
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build

SYMBOL = "modified_scores"
BATCH, HEAD = 1, 1  # of the scores that are computed
KEY_TILES = 2


class ModifiedScores:
    """A block for each query tile and key tile. query: float32 products (query tiles, KEY_TILES); output: the scores in
    base 2, -inf outside the mask, in the same layout."""

    def __init__(self, build: Build) -> None:
        self.build, self.score_mod = build, ScoreMod(build)

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(p.num_queries, p.num_keys, 1), block=(self.build.threads, 1, 1))

    @cute.kernel
    def kernel(self, p: Any):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        query_tile, key_tile, _ = cute.arch.block_idx()
        tile_origin = query_tile * build.tile_m, key_tile * build.tile_n
        band = seqlen_info.band(build, p, seqlen_info.create(build, p, Int32(BATCH)))
        product = MmaSync(matmul_qk.spec(build), build.dtype)
        coordinates, r_s = row_view(product.coordinates(thread)), product.accumulator(thread)
        scores = row_view(r_s)
        for row in range(cute.size(coordinates, mode=[0])):
            for column in range(cute.size(coordinates, mode=[1])):
                scores[row, column] = params.load_scalar(
                    p.query, Float32, self.place(coordinates, row, column, tile_origin)
                )
        operands = self.score_mod.load_operands(p, Int32(BATCH), Int32(HEAD))
        self.score_mod.apply(p, scores, coordinates, tile_origin, band, (operands, None))
        masking.mask_scores(band, scores, coordinates, tile_origin)
        target = cute.make_tensor(params.pointer(p.output, Float32, 4), cute.make_layout(2**30))
        for row in cutlass.range_constexpr(cute.size(coordinates, mode=[0])):
            for column in cutlass.range_constexpr(cute.size(coordinates, mode=[1])):
                target[self.place(coordinates, row, column, tile_origin)] = scores[row, column]

    def place(self, coordinates: cute.Tensor, row: int, column: int, tile_origin: tuple) -> Int64:
        """Index of an element in the row-major matrix of all tiles."""
        width = KEY_TILES * self.build.tile_n
        return Int64(tile_origin[0] + coordinates[row, 0][0]) * width + (tile_origin[1] + coordinates[0, column][1])


def trace(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """Replaces compilation.registry.trace."""
    return ModifiedScores(build), params.example_arguments(abi.fields_of(build))
