"""Turned scores: from S^T to P^T and from dP^T to dS^T, where a thread's rows are keys and its columns queries."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.gemm.wgmma import Wgmma, row_view
from cutlass_py_attn.parts import kept_bits, masking, moves, params, schedule
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.parts.terms import Terms
from cutlass_py_attn.parts.turned import by_columns, places, turned_view
from cutlass_py_attn.plan import Build


class TurnedScores:
    """Steps 2 and 4 of one Build: `at` is (sequence, query head, query block, key tile). A query block has the queries
    of one product of scores: a query tile, or a part of one."""

    def __init__(self, build: Build) -> None:
        self.build, self.dtype = build, DTYPES[build.dtype]
        self.terms = Terms(build)

    def bind(self, product: Wgmma) -> None:
        """The product that gives S^T."""
        self.product = product

    def place(self, thread: Int32, before: int) -> Int32:
        """The number of a thread that has `before` others before it; what is derived of it is formed again for every
        tile where registers are few."""
        is_full = self.terms.present or self.build.has("dropout")
        return params.fresh("tid.x") - before if is_full else thread

    def where(self, thread: Int32) -> cute.Tensor:
        """(query, key) in the tile of each element of a thread's scores, as queries x keys."""
        identity = transposed(cute.make_identity_tensor((self.build.block_queries, self.build.tile_n)))
        return turned_view(row_view(self.product.mma.get_slice(thread).partition_C(identity)))

    def corner(self, at: tuple) -> tuple[Int32, Int32]:
        """The first query and key of a tile."""
        query_block, key_tile = at[-2:]
        return query_block * self.build.block_queries, key_tile * self.build.tile_n

    def finish_scores(self, p: Any, r_s: cute.Tensor, band: Any, thread: Int32, at: tuple) -> cute.Tensor | None:
        """Score terms on a tile of products; the derivative of the softcap, where there is one, as 16-bit numbers."""
        if not self.terms.present:
            return None
        of, head, _, _ = at
        view, given = turned_view(row_view(r_s)), (self.terms.slope(p, of.index, head), None)
        derivative = self.terms.apply(p, view, self.where(thread), self.corner(at), band, given)
        return None if derivative is None else moves.converted(derivative, self.dtype)

    def weights(self, p: Any, r_s: cute.Tensor, lse: cute.Tensor) -> None:
        """S^T becomes P^T."""
        scores, scale_log2 = by_columns(r_s), Float32(1.0) if self.terms.present else p.scale_log2
        for side, row, eight in places(scores):
            exponent = scores[side, row, eight] * scale_log2 - lse[side, eight]
            scores[side, row, eight] = cute.math.exp2(exponent, fastmath=True)

    @cute.jit
    def clear(self, band: Any, r_s: cute.Tensor, thread: Int32, at: tuple):
        """Zero the weights that the mask hides, where the tile has any; of `at` the tiles alone are needed."""
        query_block, key_tile = at[-2:]
        build = self.build
        if schedule.needs_mask(band, query_block, key_tile, build.block_queries, build.tile_n):
            corner, where = self.corner(at), self.where(thread)
            masking.clear(band, turned_view(row_view(r_s)), where, corner)

    def operands(
        self, r_s: cute.Tensor, r_slope: cute.Tensor | None, kept: cute.Tensor | None
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Of the weights: P^T for dV, without what dropout drops, and the factor of dS^T."""
        weights = moves.converted(r_s, self.dtype)
        factor = weights if r_slope is None else self.times(r_s, r_slope)
        if kept is None:
            return weights, factor
        dropped = cute.make_rmem_tensor_like(weights)
        source, target = words_of(weights), words_of(dropped)
        for index in range(cute.size(source)):
            target[index] = source[index] & kept_bits.mask(kept, index % 2, index // 2)
        return dropped, factor

    def times(self, r_s: cute.Tensor, r_slope: cute.Tensor) -> cute.Tensor:
        """The weights times the derivative of the softcap."""
        count = cute.size(r_s)
        weights = cute.make_tensor(r_s.iterator, cute.make_layout(count))
        product = cute.make_rmem_tensor(count, Float32)
        for index in range(count // 2):
            for side, slope in enumerate(moves.in_float32(words_of(r_slope)[index], self.dtype)):
                product[2 * index + side] = weights[2 * index + side] * slope
        return moves.converted(product, self.dtype)

    def gradient(
        self, p: Any, r_dp: cute.Tensor, r_factor: cute.Tensor, delta: cute.Tensor, kept: cute.Tensor | None
    ) -> None:
        """dP^T becomes dS^T."""
        dp, words = by_columns(r_dp), words_of(r_factor)
        for row, eight in [(row, eight) for eight in range(cute.size(dp, mode=[2])) for row in range(2)]:
            for side, weight in enumerate(moves.in_float32(words[eight * 2 + row], self.dtype)):
                grad = dp[side, row, eight]
                if kept is not None:
                    is_kept = kept_bits.is_kept(kept, side, row, eight)
                    grad = cutlass.select_(is_kept, grad, Float32(0.0)) * p.keep_scale
                dp[side, row, eight] = weight * (grad - delta[side, eight])


def words_of(values: cute.Tensor) -> cute.Tensor:
    """Registers of 16-bit numbers as words."""
    return cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Uint32), cute.make_layout(cute.size(values) // 2))
