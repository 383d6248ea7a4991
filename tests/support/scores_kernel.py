"""Scores kernel: steps 2 and 4 of the sm90 backward on given products, without wgmma, written out in float32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.wgmma import Wgmma, row_view
from cutlass_py_attn.kernels.component_gemms.products import matmul_qk
from cutlass_py_attn.kernels.sm90_backward.transposed_scores import TransposedScores
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.kernels.sm90_common.swap_ab import swap_view
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build

SYMBOL = "transposed_scores"
HEAD = 1  # the query head whose scores these are
SIDES, EIGHT = 2, 8  # of a pair of queries; queries from one pair of a thread to the next


class Scores:
    """One block for each query block and key tile.

    query and key are the products S and dP; P and dS are written to output and grad_query. All four are float32
    (query rows, key rows), whole tiles. logsumexp_log2 and delta are those of the backward.
    """

    def __init__(self, build: Build) -> None:
        self.build, self.scores = build, TransposedScores(build)

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(p.num_queries, p.num_keys, 1), block=(self.build.threads, 1, 1))

    @cute.kernel
    def kernel(self, p: Any):
        build, scores = self.build, self.scores
        thread, _, _ = cute.arch.thread_idx()
        query_block, key_tile, _ = cute.arch.block_idx()
        of = seqlen_info.create(build, p, Int32(0))
        tile = ScoreTile(of, seqlen_info.band(build, p, of), Int32(HEAD), query_block, key_tile)
        mma_qk = Wgmma(replace(matmul_qk.spec(build, swap_ab=True), n=build.block_queries), build.dtype)
        coordinates = scores.coordinates(mma_qk, thread)
        pairs = cute.make_layout((SIDES, build.block_queries // EIGHT))
        r_s, r_dp = mma_qk.accumulator(thread), mma_qk.accumulator(thread)
        r_lse, r_delta = cute.make_rmem_tensor(pairs, Float32), cute.make_rmem_tensor(pairs, Float32)
        for index in range(cute.size(coordinates, mode=[0])):
            query = query_block * build.block_queries + coordinates[index, 0][0]
            r_lse[index] = params.load_scalar(p.logsumexp_log2, Float32, query)
            r_delta[index] = params.load_scalar(p.delta, Float32, query)
            for row in range(cute.size(coordinates, mode=[1])):
                offset = self.offset(coordinates[index, row], tile)
                swap_view(row_view(r_s))[index, row] = params.load_scalar(p.query, Float32, offset)
                swap_view(row_view(r_dp))[index, row] = params.load_scalar(p.key, Float32, offset)
        r_derivative = scores.apply_score_mod(p, mma_qk, r_s, tile, thread)
        scores.exponentiate(p, r_s, r_lse)
        scores.mask(mma_qk, r_s, tile, thread)
        weights = scores.operands(r_s, r_derivative, None)
        scores.gradient(p, r_dp, weights.r_factor, r_delta, None)
        for address, values in ((p.output, weights.r_p), (p.grad_query, tile_copy.converted(r_dp, scores.dtype))):
            view = swap_view(row_view(values))
            target = cute.make_tensor(params.pointer(address, Float32, 4), cute.make_layout(2**30))
            for index in cutlass.range_constexpr(cute.size(coordinates, mode=[0])):
                for row in cutlass.range_constexpr(cute.size(coordinates, mode=[1])):
                    target[self.offset(coordinates[index, row], tile)] = Float32(view[index, row])

    def offset(self, at: Any, tile: ScoreTile) -> Int64:
        """Returns the offset of an element of a tile, of two key tiles next to each other."""
        query0, key0 = tile.origin(self.build)
        return Int64(query0 + at[0]) * (2 * self.build.tile_n) + (key0 + at[1])


def trace(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """Replaces registry.trace."""
    return Scores(build), params.example_arguments(abi.fields_of(build))
