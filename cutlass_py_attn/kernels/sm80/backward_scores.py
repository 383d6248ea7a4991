"""Backward scores: steps 2 and 4 on accumulators of mma.sync: from S to P, from dP to dS, and dS as grad_bias."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.mma_sync import row_view
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.score_mod import ScoreMod, bias_of
from cutlass_py_attn.kernels.sm80.backward_grid import BackwardGrid, KeyTileWork, QueryTileRange
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import Band


@dataclass(frozen=True)
class ScoreTile:
    """One (tile_m, tile_n) tile of scores: sequence, mask, query head, and the tile's first query and key."""

    seqlen: seqlen_info.SeqlenInfo
    band: Band
    head: Any
    origin: tuple[Any, Any]


class BackwardScores:
    """Steps 2 and 4 of one Build."""

    def __init__(self, build: Build, grid: BackwardGrid) -> None:
        self.build, self.grid = build, grid
        self.score_mod = ScoreMod(build)
        self.dtype = DTYPES[build.dtype]

    def apply_score_mod(
        self, p: Any, mma_qk: Any, r_s: cute.Tensor, coordinates: cute.Tensor, tile: ScoreTile, s_bias: Any
    ) -> cute.Tensor | None:
        """Turns raw products into scores in base 2 if the build has score terms.

        s_bias: the bias tile in shared memory; None without bias
        Returns the derivative of the softcap in the operands' type; None without softcap.
        """
        if not self.score_mod.present:
            return None
        bias = None
        if self.build.has("bias"):
            bias = mma_qk.mma.get_slice(params.read_register("tid.x")).partition_C(s_bias)
        given = self.score_mod.load_operands(p, tile.seqlen.index, tile.head), bias
        derivative = self.score_mod.apply(p, row_view(r_s), coordinates, tile.origin, tile.band, given)
        return None if derivative is None else tile_copy.converted(derivative, self.dtype)

    def exponentiate(self, r_s: cute.Tensor, coordinates: cute.Tensor, s_lse: cute.Tensor, scale_log2: Float32) -> None:
        """Replaces S by P = exp2(S - logsumexp), in base 2."""
        scores = row_view(r_s)
        for row in range(cute.size(scores, mode=[0])):
            exponent = scores[row, None].load() * (1.0 if self.score_mod.present else scale_log2)
            exponent = exponent - s_lse[coordinates[row, 0][0]]
            scores[row, None].store(cute.math.exp2(exponent, fastmath=True))

    def gradient(self, r_dp: cute.Tensor, r_p: cute.Tensor, coordinates: cute.Tensor, s_delta: cute.Tensor) -> None:
        """Replaces dP by dS = P (dP - delta)."""
        dp, p = row_view(r_dp), row_view(r_p)
        for row in range(cute.size(dp, mode=[0])):
            delta_row = coordinates[row, 0][0]
            dp[row, None].store(p[row, None].load().to(Float32) * (dp[row, None].load() - s_delta[delta_row]))

    def store_grad_bias(self, p: Any, tile: ScoreTile, s_ds: cute.Tensor, thread: Int32) -> None:
        """Writes dS as grad_bias if the main kernel has that output."""
        if self.build.grad_bias_mode == "main":
            target = bias_of(self.build, p, "grad_bias", tile.seqlen, tile.head, tile.origin)
            tile_copy.copy_s2g(thread, self.build.threads, s_ds, target)

    @cute.jit
    def zero_unvisited_grad_bias(self, p: Any, work: KeyTileWork, thread: Int32):
        """Writes zeros to grad_bias of the query tiles that the key tile does not visit."""
        build = self.build
        if cutlass.const_expr(build.grad_bias_mode == "main" and not build.form.sees_all):
            every = QueryTileRange(Int32(0), ceil_div(work.seqlen.num_queries, build.tile_m))
            for iteration in cutlass.range(self.grid.iterations(p, every), unroll=1):
                tile = self.grid.query_tile(p, work.seqlen, every, iteration)
                if (tile.index < work.query_tiles.start) | (tile.index >= work.query_tiles.end):
                    origin = tile.index * build.tile_m, work.key_tile * build.tile_n
                    target = bias_of(build, p, "grad_bias", tile.seqlen, tile.head, origin)
                    tile_copy.clear_gmem(thread, build.threads, (build.tile_m, build.tile_n), self.dtype, target)
