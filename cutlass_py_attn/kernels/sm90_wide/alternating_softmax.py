"""Alternating softmax: online softmax of a query tile whose key tiles two warpgroups compute in turns.

The warpgroup of a key tile continues from the row maximum that the other has left in shared memory, and leaves its own
there with the factor by which both rescale their columns of O. Each keeps the sums of the rows over its own key tiles;
`finish` joins them.

Every value in shared memory has a place for each warpgroup, which writes its own places alone and reads the maxima of
the other. The named barriers that hand over P order these accesses.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.kernels.common.softmax import QUAD, exp2, finite
from cutlass_py_attn.kernels.sm90_forward.chained_softmax import GROWTH, chained, larger
from cutlass_py_attn.kernels.sm90_wide.layout import STATISTICS, WARPGROUPS
from cutlass_py_attn.score_terms.sinks import SINKS


class AlternatingSoftmax:
    """The softmax of one of both warpgroups.

    warpgroup: number of the warpgroup, 0 or 1
    statistics: the values in shared memory: STATISTICS of each row for each warpgroup
    rows: rows of the query tile
    tile_rows: those of which this thread holds a quarter
    scale_log2: factor of the scores in the exponent
    is_lazy: whether a maximum changes only when a score exceeds it by GROWTH. Which maximum is subtracted changes no
        result, as long as the weights stay within their type
    """

    def __init__(
        self,
        warpgroup: int,
        statistics: cute.Pointer,
        rows: int,
        tile_rows: list[Int32],
        scale_log2: Float32,
        is_lazy: bool,
    ) -> None:
        self.warpgroup, self.tile_rows, self.scale_log2, self.is_lazy = warpgroup, tile_rows, scale_log2, is_lazy
        places = cute.make_layout((rows, WARPGROUPS), stride=(1, rows))
        views = [cute.make_tensor(statistics + index * WARPGROUPS * rows, places) for index in range(STATISTICS)]
        self.maxima, self.factors, self.totals = views
        self.maximum = cute.make_rmem_tensor(len(tile_rows), Float32)
        self.sum = cute.make_rmem_tensor(len(tile_rows), Float32)
        self.maximum.fill(-Float32.inf)
        self.sum.fill(0.0)

    def clear_maximum(self) -> None:
        """Leaves -inf as this warpgroup's row maxima, so that `weights` needs no `is_first`."""
        for row in self.tile_rows:
            _store(self.maxima, row, self.warpgroup, -Float32.inf)

    def weights(self, scores: cute.Tensor, is_first: bool) -> None:
        """Turns the scores (rows x columns) of a key tile into exp2((s - max) scale_log2).

        is_first: whether this is the first key tile of all, before which no row has a maximum
        """
        for index, row in enumerate(self.tile_rows):
            values = scores[index, None].load()
            maximum = cute.arch.warp_reduction(chained(values, larger), larger, threads_in_group=QUAD)
            factor = Float32(1.0)
            if not is_first:
                before = self.maxima[row, 1 - self.warpgroup]
                maximum = self._maximum(before, maximum)
                factor = exp2((before - finite(maximum)) * self.scale_log2)
            base = finite(maximum)
            weights = exp2(values * self.scale_log2 - base * self.scale_log2)
            scores[index, None].store(weights)
            shrink = exp2((self.maximum[index] - base) * self.scale_log2)
            self.sum[index] = self.sum[index] * shrink + chained(weights, lambda a, b: a + b)
            self.maximum[index] = maximum
            _store(self.maxima, row, self.warpgroup, maximum)
            _store(self.factors, row, self.warpgroup, factor)

    def _maximum(self, before: Float32, found: Float32) -> Float32:
        """Returns the maximum to subtract after that of the key tile before and that of this one."""
        if not self.is_lazy:
            return larger(before, found)
        # -inf - (-inf) is NaN, which compares false: a row that has seen no key yet keeps -inf.
        return cutlass.select_((found - before) * self.scale_log2 > GROWTH, found, before)

    @cute.jit
    def rescale(self, outputs: list, warpgroup: Int32):
        """Multiplies the rows of O, of several accumulators (rows x columns), by the factors of a key tile.

        warpgroup: of the key tile
        """
        factors = [self.factors[row, warpgroup] for row in self.tile_rows]
        shrinks = factors[0] != 1.0
        for factor in factors[1:]:
            shrinks = shrinks | (factor != 1.0)
        if cute.arch.vote_any_sync(shrinks):
            for output in outputs:
                for index in cutlass.range_constexpr(len(factors)):
                    output[index, None].store(output[index, None].load() * factors[index])

    def leave_sums(self, last: Int32) -> None:
        """Leaves this warpgroup's sums, relative to the last maximum, in shared memory.

        last: warpgroup of the last key tile
        """
        for index, row in enumerate(self.tile_rows):
            total = cute.arch.warp_reduction_sum(self.sum[index], threads_in_group=QUAD)
            shrink = exp2((self.maximum[index] - finite(self.maxima[row, last])) * self.scale_log2)
            _store(self.totals, row, self.warpgroup, total * shrink)

    def finish(
        self, last: Int32, sink: Float32 | None, unit: float = math.log(2.0)
    ) -> tuple[list[Float32], list[Float32]]:
        """Returns the last factor of each row of O, 0 without keys, and the logsumexp, -inf without keys.

        Both warpgroups must have left their sums.

        sink: logit of a sink, in natural log; None for none
        unit: factor of the logsumexp in base 2: that of the natural log, or 1.0
        """
        factors, logsumexps = [], []
        for row in self.tile_rows:
            total = self.totals[row, 0] + self.totals[row, 1]
            maximum, shrink = self.maxima[row, last] * self.scale_log2, Float32(1.0)
            if sink is not None:
                seen, sink_log2 = maximum, sink * math.log2(math.e)
                maximum = cute.arch.fmax(seen, sink_log2)
                base = finite(maximum)
                shrink = exp2(seen - base)
                total = total * shrink + SINKS.weight(exp2, sink_log2, base)
            is_empty = total == 0.0
            factors.append(cutlass.select_(is_empty, Float32(0.0), shrink * cute.arch.rcp_approx(total)))
            lse = (maximum + cute.math.log2(total, fastmath=True)) * unit
            logsumexps.append(cutlass.select_(is_empty, -Float32.inf, lse))
        return factors, logsumexps


@cute.jit
def _store(values: cute.Tensor, row: Any, warpgroup: Any, value: Float32):
    """Stores the value of a row, which all threads of a quad hold, by one of them."""
    if cute.arch.lane_idx() % QUAD == 0:
        values[row, warpgroup] = value
