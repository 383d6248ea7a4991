"""Transposed scores: steps 2 and 4 of the sm90 backward, from S^T to P^T and from dP^T to dS^T.

The accumulators are those of swap A/B: a thread's rows are keys and its columns are queries.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_ops

from cutlass_py_attn.kernels.backward_parts.layout import starts_from_logsumexp
from cutlass_py_attn.kernels.common import masking, params, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.kernels.common.wgmma import Wgmma, row_view
from cutlass_py_attn.kernels.sm90_backward import dropout_transposed
from cutlass_py_attn.kernels.sm90_backward.transposed_bias import TransposedBias, TransposedScoreMod
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.kernels.sm90_common.swap_ab import PairCoordinate, column_pairs, pair_coordinates, swap_view
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import KEEPS_DS


@dataclass(frozen=True)
class WeightOperands:
    """What the GEMMs and step 4 need of the weights, in the operands' type.

    r_p: P^T for dV, without the weights that dropout drops
    r_factor: the factor of dS^T: P^T, times the derivative of the softcap if there is one
    """

    r_p: cute.Tensor
    r_factor: cute.Tensor


class TransposedScores:
    """Steps 2 and 4 of one Build."""

    def __init__(self, build: Build) -> None:
        self.build, self.dtype = build, DTYPES[build.dtype]
        self.score_mod = TransposedScoreMod(build)
        self.bias = TransposedBias(build) if build.has("bias") else None

    def thread(self, thread: Int32, before: int) -> Int32:
        """Returns the number of a thread that has `before` others ahead of it in the block.

        With score terms or dropout, registers are few: the number is read anew, so that values derived from it are
        recomputed for every tile.
        """
        recomputes = self.score_mod.present or self.build.has("dropout")
        return params.read_register("tid.x") - before if recomputes else thread

    def coordinates(self, mma_qk: Wgmma, thread: Int32) -> cute.Tensor:
        """Returns (query, key) in the tile of each of a thread's scores, as (queries, keys)."""
        identity = transposed(cute.make_identity_tensor((self.build.block_queries, self.build.tile_n)))
        return swap_view(row_view(mma_qk.mma.get_slice(thread).partition_C(identity)))

    def apply_score_mod(
        self, p: Any, mma_qk: Wgmma, r_s: cute.Tensor, tile: ScoreTile, thread: Int32
    ) -> cute.Tensor | None:
        """Turns raw products into scores in base 2 if the build has score terms.

        Returns the derivative of the softcap in the operands' type; None without softcap.
        """
        if not self.score_mod.present:
            return None
        view, bias = swap_view(row_view(r_s)), None
        if self.bias is not None:
            self.bias.wait()
            bias = self.bias.partition(mma_qk, thread)
        given = self.score_mod.load_operands(p, tile.seqlen.index, tile.head), bias
        coordinates, origin = self.coordinates(mma_qk, thread), tile.origin(self.build)
        derivative = self.score_mod.apply(p, view, coordinates, origin, tile.band, given)
        return None if derivative is None else tile_copy.converted(derivative, self.dtype)

    def exponentiate(self, p: Any, r_s: cute.Tensor, r_lse: cute.Tensor) -> None:
        """Replaces S^T by P^T = exp2(S - logsumexp), in base 2.

        With `starts_from_logsumexp`, r_s has S - logsumexp, and r_lse is not read.
        """
        scores, scale_log2 = column_pairs(r_s), Float32(1.0) if self.score_mod.present else p.scale_log2
        for at in pair_coordinates(scores):
            exponent = scores[at.element, at.row, at.pair] * scale_log2
            if not starts_from_logsumexp(self.build):
                exponent = exponent - r_lse[at.element, at.pair]
            scores[at.element, at.row, at.pair] = cute.math.exp2(exponent, fastmath=True)

    @cute.jit
    def mask(self, mma_qk: Any, r_s: cute.Tensor, tile: ScoreTile, thread: Int32):
        """Sets the weights that the mask hides to zero if the tile has any."""
        build = self.build
        if tile_order.needs_mask(tile.band, tile.query_block, tile.key_tile, build.block_queries, build.tile_n):
            origin, coordinates = tile.origin(build), self.coordinates(mma_qk, thread)
            masking.mask_weights(tile.band, swap_view(row_view(r_s)), coordinates, origin)

    def operands(
        self, r_s: cute.Tensor, r_derivative: cute.Tensor | None, r_kept: cute.Tensor | None
    ) -> WeightOperands:
        """Converts the weights.

        r_derivative: the derivative of the softcap, or None
        r_kept: dropout's mask bits, or None
        """
        weights = tile_copy.converted(r_s, self.dtype)
        factor = weights if r_derivative is None else self._multiply_slope(r_s, r_derivative)
        if r_kept is None:
            return WeightOperands(weights, factor)
        dropped = cute.make_rmem_tensor_like(weights)
        source, target = _words(weights), _words(dropped)
        for index in range(cute.size(source)):
            target[index] = source[index] & dropout_transposed.pair_mask(r_kept, index % 2, index // 2)
        return WeightOperands(dropped, factor)

    def _multiply_slope(self, r_s: cute.Tensor, r_derivative: cute.Tensor) -> cute.Tensor:
        """Returns the weights times the derivative of the softcap."""
        count = cute.size(r_s)
        weights = cute.make_tensor(r_s.iterator, cute.make_layout(count))
        product = cute.make_rmem_tensor(count, Float32)
        for index in range(count // 2):
            for element, derivative in enumerate(tile_copy.unpack_float32(_words(r_derivative)[index], self.dtype)):
                product[2 * index + element] = weights[2 * index + element] * derivative
        return tile_copy.converted(product, self.dtype)

    def gradient(
        self, p: Any, r_dp: cute.Tensor, r_factor: cute.Tensor, r_delta: cute.Tensor, r_kept: cute.Tensor | None
    ) -> None:
        """Replaces dP^T by dS^T = P^T (dP^T - delta).

        Variants ds_registers and key_registers have dP^T - delta in r_dp, and read no r_delta.
        """
        dp, words = column_pairs(r_dp), _words(r_factor)
        for row, pair in [(row, pair) for pair in range(cute.size(dp, mode=[2])) for row in range(2)]:
            for element, weight in enumerate(tile_copy.unpack_float32(words[pair * 2 + row], self.dtype)):
                grad = dp[element, row, pair]
                if r_kept is not None:
                    is_kept = dropout_transposed.is_kept(r_kept, PairCoordinate(element, row, pair))
                    grad = cutlass.select_(is_kept, grad, Float32(0.0)) * p.keep_scale
                if self.build.variant not in KEEPS_DS:
                    grad = grad - r_delta[element, pair]
                dp[element, row, pair] = weight * grad

    def store_ds(self, mma_qk: Wgmma, r_ds: cute.Tensor, s_ds: cute.Tensor, thread: Int32) -> None:
        """Stores dS^T, transposed back, to a (query, key) tile in shared memory where wgmma reads it."""
        op = warp_ops.StMatrix8x8x16bOp(transpose=True, num_matrices=4)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, self.dtype), mma_qk.mma).get_slice(thread)
        cute.copy(copy, copy.retile(r_ds), copy.partition_D(transposed(s_ds)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()


def _words(values: cute.Tensor) -> cute.Tensor:
    """Returns 16-bit registers as 32-bit words."""
    return cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Uint32), cute.make_layout(cute.size(values) // 2))
