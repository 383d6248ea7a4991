"""Scores kernel: steps 2 and 4 of the Hopper backward on given products, without wgmma, written out in float32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn import abi
from cutlass_py_attn.fused.backward import Params
from cutlass_py_attn.gemm import matmul_qk
from cutlass_py_attn.gemm.wgmma import Wgmma, row_view
from cutlass_py_attn.parts import lengths, moves, params
from cutlass_py_attn.parts.turned import turned, turned_view
from cutlass_py_attn.parts.turned_scores import TurnedScores
from cutlass_py_attn.plan import Build

SYMBOL = "turned_scores"
HEAD = 1  # the query head whose scores these are
SIDES, EIGHT = 2, 8  # of a pair of queries; queries from one pair of a thread to the next


class Scores:
    """A block for each query block and key tile. query and key: the products S and dP; output and grad_query: where P
    and dS go, all float32 [blocks of queries, tiles of keys]; logsumexp_log2 and delta as ever."""

    def __init__(self, build: Build) -> None:
        self.build, self.side = build, TurnedScores(build)

    @cute.jit
    def __call__(self, *values):
        p = params.filled(Params, abi.BACKWARD, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(p.num_queries, p.num_keys, 1), block=(self.build.threads, 1, 1))

    @cute.kernel
    def kernel(self, p: Params):
        build, side = self.build, self.side
        thread, _, _ = cute.arch.thread_idx()
        query_block, key_tile, _ = cute.arch.block_idx()
        of = lengths.sequence(build, p, Int32(0))
        band, tile = lengths.band(build, p, of), (of, Int32(HEAD), query_block, key_tile)
        product = Wgmma(turned(replace(matmul_qk.spec(build), m=build.block_queries)), build.dtype)
        side.bind(product)
        where, pairs = side.where(thread), cute.make_layout((SIDES, build.block_queries // EIGHT))
        r_s, r_dp = product.accumulator(thread), product.accumulator(thread)
        r_lse, r_delta = cute.make_rmem_tensor(pairs, Float32), cute.make_rmem_tensor(pairs, Float32)
        for index in range(cute.size(where, mode=[0])):
            query = query_block * build.block_queries + where[index, 0][0]
            r_lse[index] = params.scalar(p.logsumexp_log2, Float32, query)
            r_delta[index] = params.scalar(p.delta, Float32, query)
            for row in range(cute.size(where, mode=[1])):
                place = self.place(where[index, row], tile)
                turned_view(row_view(r_s))[index, row] = params.scalar(p.query, Float32, place)
                turned_view(row_view(r_dp))[index, row] = params.scalar(p.key, Float32, place)
        r_slope = side.finish_scores(p, r_s, band, thread, tile)
        side.weights(p, r_s, r_lse)
        side.clear(band, r_s, thread, tile)
        r_p, r_factor = side.operands(r_s, r_slope, None)
        side.gradient(p, r_dp, r_factor, r_delta, None)
        for address, values in ((p.output, r_p), (p.grad_query, moves.converted(r_dp, side.dtype))):
            view = turned_view(row_view(values))
            target = cute.make_tensor(params.pointer(address, Float32, 4), cute.make_layout(2**30))
            for index in cutlass.range_constexpr(cute.size(where, mode=[0])):
                for row in cutlass.range_constexpr(cute.size(where, mode=[1])):
                    target[self.place(where[index, row], tile)] = Float32(view[index, row])

    def place(self, at: Any, tile: tuple) -> Int64:
        """Where an element of a tile lies, of two tiles of keys side by side."""
        _, _, query_block, key_tile = tile
        build = self.build
        return Int64(query_block * build.block_queries + at[0]) * (2 * build.tile_n) + (key_tile * build.tile_n + at[1])


def trace(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """Stands in for kernels.trace."""
    return Scores(build), params.representative(abi.BACKWARD)
