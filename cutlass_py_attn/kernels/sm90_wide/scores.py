"""Scores of the sm90 backward of wide heads: steps 2 and 4, from S to P and from dP to dS, of one streamed tile.

The rows of an accumulator are queries for dQ. They are keys for dK and dV, whose scores are transposed. Views are
(queries, keys) for both.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.common import masking, params, tile_copy
from cutlass_py_attn.kernels.common.score_mod import ScoreMod
from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.kernels.common.wgmma import Wgmma, row_view
from cutlass_py_attn.kernels.sm90_common.named_barriers import WideBarrier
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.kernels.sm90_common.swap_ab import swap_view
from cutlass_py_attn.kernels.sm90_wide.backward_layout import Gradient
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS

PAIR = 2  # neighbouring columns of an accumulator that a thread holds


@dataclass(frozen=True)
class Statistics:
    """logsumexp in base 2 and delta of a thread's queries."""

    lse: cute.Tensor
    delta: cute.Tensor


class WideScores:
    """Steps 2 and 4 of one gradient of a Build."""

    def __init__(self, build: Build, gradient: Gradient) -> None:
        self.build, self.gradient = build, gradient
        self.score_mod = ScoreMod(build)

    def view(self, accumulator: cute.Tensor) -> cute.Tensor:
        """Returns an accumulator of scores as (queries, keys)."""
        view = row_view(accumulator)
        return swap_view(view) if self.gradient.is_transposed else view

    def coordinates(self, mma: Wgmma, thread: Int32) -> cute.Tensor:
        """Returns (query, key) in the tile of each of a thread's scores, as (queries, keys)."""
        identity = cute.make_identity_tensor((self.build.tile_m, self.build.tile_n))
        if self.gradient.is_transposed:
            identity = transposed(identity)
        return self.view(mma.mma.get_slice(thread).partition_C(identity))

    def first_row(self, p: Any, tile: ScoreTile) -> Int64:
        """Returns the row of a query tile in the workspace of its statistics."""
        of = tile.seqlen
        return (Int64(tile.head) * p.total_tiles + of.first_tile + tile.query_block) * self.build.tile_m

    def read_rows(self, p: Any, tile: ScoreTile, coordinates: cute.Tensor) -> Statistics:
        """Returns the statistics of a thread's rows, for dQ: those of the block's queries, for all key tiles.

        Rows past the last query have weights of zero.
        """
        first, count = self.first_row(p, tile), cute.size(coordinates, mode=[0])
        found = Statistics(cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32))
        found.lse.fill(Float32.inf)
        found.delta.fill(0.0)
        left = tile.seqlen.num_queries - tile.query_block * self.build.tile_m
        for index in range(count):
            row = coordinates[index, 0][0]
            _load_if(row < left, p.logsumexp_log2, first + row, found.lse, index)
            _load_if(row < left, p.delta, first + row, found.delta, index)
        return found

    def load_columns(self, p: Any, tile: ScoreTile, thread: Int32) -> Float32:
        """Returns one statistic of a query tile, for dK and dV: half of the warpgroup has logsumexp, half delta."""
        rows = self.build.tile_m
        address = p.logsumexp_log2 + Int64(thread // rows) * (p.delta - p.logsumexp_log2)
        return params.load_scalar(address, Float32, self.first_row(p, tile) + thread % rows)

    def share_columns(self, loaded: Float32, warpgroup: int, thread: Int32) -> Statistics:
        """Returns the statistics of a thread's columns, which the warpgroup exchanges through shared memory."""
        rows, shared = self.build.tile_m, self.exchanged(warpgroup)
        cute.make_tensor(shared + thread, cute.make_layout(1))[0] = loaded
        cute.arch.barrier(barrier_id=WideBarrier.WARPGROUP_0 + warpgroup, number_of_threads=WARPGROUP_THREADS)
        pairs = cute.make_layout((PAIR, rows // 8), stride=(1, 8))
        found = []
        for start in (0, rows):
            values = cute.make_rmem_tensor(cute.make_layout((PAIR, rows // 8)), Float32)
            first = shared + (start + thread % 4 * PAIR)
            cute.autovec_copy(cute.make_tensor(first.align(8), pairs), values)
            found.append(cute.make_tensor(values.iterator, cute.make_layout(cute.size(values))))
        return Statistics(*found)

    def exchanged(self, warpgroup: int) -> cute.Pointer:
        """Returns where the threads of a warpgroup leave one statistic each."""
        return tile_copy.smem_pointer(self.build, "row_statistics", Float32) + warpgroup * WARPGROUP_THREADS

    def compute_weights(
        self, p: Any, r_s: cute.Tensor, mma: Wgmma, tile: ScoreTile, thread: Int32, of: Statistics
    ) -> None:
        """Replaces S by P = exp2(S - logsumexp); for dQ and dK, by P times the derivative of the softcap."""
        scores, derivative = self.view(r_s), None
        if self.score_mod.present:
            given = self.score_mod.load_operands(p, tile.seqlen.index, tile.head), None
            coordinates = self.coordinates(mma, thread)
            derivative = self.score_mod.apply(p, scores, coordinates, tile.origin(self.build), tile.band, given)
        scale = Float32(1.0) if self.score_mod.present else p.scale_log2
        for query in range(cute.size(scores, mode=[0])):
            for key in range(cute.size(scores, mode=[1])):
                weight = cute.math.exp2(scores[query, key] * scale - of.lse[query], fastmath=True)
                if derivative is not None and self.gradient.has_ds:
                    weight = weight * derivative[query, key]
                scores[query, key] = weight
        self.mask_if_needed(mma, r_s, tile, thread)

    @cute.jit
    def mask_if_needed(self, mma: Any, r_s: cute.Tensor, tile: Any, thread: Int32):
        """Sets the weights that the mask hides to zero if the tile has any."""
        build = self.build
        if tile_order.needs_mask(tile.band, tile.query_block, tile.key_tile, build.tile_m, build.tile_n):
            masking.mask_weights(tile.band, self.view(r_s), self.coordinates(mma, thread), tile.origin(build))

    def compute_gradients(self, r_p: cute.Tensor, r_dp: cute.Tensor, of: Statistics) -> None:
        """Replaces dP by dS = P (dP - delta)."""
        weights, gradients = self.view(r_p), self.view(r_dp)
        for query in range(cute.size(weights, mode=[0])):
            for key in range(cute.size(weights, mode=[1])):
                gradients[query, key] = weights[query, key] * (gradients[query, key] - of.delta[query])


@cute.jit
def _load_if(condition: Any, address: Int64, index: Int64, values: cute.Tensor, number: cutlass.Constexpr):
    """Loads a float32 from global memory to element `number` of registers if the condition holds."""
    if condition:
        values[number] = params.load_scalar(address, Float32, index)
