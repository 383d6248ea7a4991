"""Wide scores kernel: steps 2 and 4 of the wide sm90 backward on given products, without wgmma, in float32."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.kernels.common.wgmma import Wgmma
from cutlass_py_attn.kernels.component_gemms.products import matmul_qk
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.kernels.sm90_wide.backward_layout import Gradient
from cutlass_py_attn.kernels.sm90_wide.scores import WideScores
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS

SYMBOL = "wide_scores"
HEAD = 1  # the query head whose scores these are


class ScoresWithExchange(WideScores):
    """WideScores that exchange statistics in global memory, at `value`; one warpgroup has the place of both."""

    p: Any = None

    def exchanged(self, warpgroup: int) -> cute.Pointer:
        column, row, _ = cute.arch.block_idx()
        columns, _, _ = cute.arch.grid_dim()
        return params.pointer(self.p.value, Float32) + (row * columns + column) * WARPGROUP_THREADS


class Scores:
    """One block for each query tile and key tile.

    query and key are the products S and dP; P and dS are written to output and grad_query. All four are float32
    (query rows, key rows), whole tiles. logsumexp_log2 and delta are those of the backward.
    """

    def __init__(self, build: Build, gradient: Gradient) -> None:
        self.build, self.gradient = build, gradient

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(p.num_queries, p.num_keys, 1), block=(WARPGROUP_THREADS, 1, 1))

    @cute.kernel
    def kernel(self, p: Any):
        build, is_transposed = self.build, self.gradient.is_transposed
        scores = ScoresWithExchange(build, self.gradient)
        scores.p = p
        thread, _, _ = cute.arch.thread_idx()
        query_tile, key_tile, _ = cute.arch.block_idx()
        of = seqlen_info.create(build, p, Int32(0))
        tile = ScoreTile(of, seqlen_info.band(build, p, of), Int32(HEAD), query_tile, key_tile)
        mma = Wgmma(matmul_qk.spec(build, swap_ab=is_transposed), build.dtype)
        coordinates = scores.coordinates(mma, thread)
        r_s, r_dp = mma.accumulator(thread), mma.accumulator(thread)
        for index in cutlass.range_constexpr(cute.size(coordinates, mode=[0])):
            for key in cutlass.range_constexpr(cute.size(coordinates, mode=[1])):
                offset = self.offset(coordinates[index, key], tile)
                scores.view(r_s)[index, key] = params.load_scalar(p.query, Float32, offset)
                scores.view(r_dp)[index, key] = params.load_scalar(p.key, Float32, offset)
        if cutlass.const_expr(is_transposed):
            statistics = scores.share_columns(scores.load_columns(p, tile, thread), 0, thread)
        else:
            statistics = scores.read_rows(p, tile, coordinates)
        scores.compute_weights(p, r_s, mma, tile, thread, statistics)
        scores.compute_gradients(r_s, r_dp, statistics)
        for address, values in ((p.output, r_s), (p.grad_query, r_dp)):
            target = cute.make_tensor(params.pointer(address, Float32, 4), cute.make_layout(2**30))
            for index in cutlass.range_constexpr(cute.size(coordinates, mode=[0])):
                for key in cutlass.range_constexpr(cute.size(coordinates, mode=[1])):
                    target[self.offset(coordinates[index, key], tile)] = scores.view(values)[index, key]

    def offset(self, at: Any, tile: ScoreTile) -> Int64:
        """Returns the offset of an element of a tile, of two key tiles next to each other."""
        query0, key0 = tile.origin(self.build)
        return Int64(query0 + at[0]) * (2 * self.build.tile_n) + (key0 + at[1])


def trace(gradient: Gradient) -> Callable[[Build], tuple[Any, tuple[Any, ...]]]:
    """Returns what replaces compilation.registry.trace."""
    return lambda build: (Scores(build, gradient), params.example_arguments(abi.fields_of(build)))
