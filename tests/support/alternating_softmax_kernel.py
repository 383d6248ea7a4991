"""Alternating softmax kernel: the softmax of the wide forward on given scores, without matrix instructions."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.kernels.common.softmax import multiply_rows
from cutlass_py_attn.kernels.sm90_wide.alternating_softmax import AlternatingSoftmax
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build

SYMBOL = "alternating_softmax"
TILES, ROWS, COLUMNS = 3, 2, 16  # of scores that a thread holds; a quad has COLUMNS of each of its four threads
TILE_ROWS = 16  # of all quads of the warp


class Statistics:
    """One warp in the place of both warpgroups. query: float32 scores (thread, tile, row, column); key: the values that
    are in shared memory; output: (thread, row, 2): the sum of the normalised weights of a row, and the logsumexp."""

    def __init__(self, build: Build, *, is_lazy: bool, has_sink: bool) -> None:
        self.build, self.is_lazy, self.has_sink = build, is_lazy, has_sink

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, p: Any):
        thread, _, _ = cute.arch.thread_idx()
        statistics = params.pointer(p.key, Float32, 4)
        rows = [thread // 4 * ROWS + row for row in range(ROWS)]
        both = [
            AlternatingSoftmax(warpgroup, statistics, TILE_ROWS, rows, p.scale_log2, self.is_lazy)
            for warpgroup in range(2)
        ]
        output = cute.make_rmem_tensor((ROWS, 1), Float32)
        output.fill(0.0)
        for tile in cutlass.range_constexpr(TILES):
            scores = cute.make_rmem_tensor((ROWS, COLUMNS), Float32)
            for row in cutlass.range_constexpr(ROWS):
                for column in cutlass.range_constexpr(COLUMNS):
                    place = ((thread * TILES + tile) * ROWS + row) * COLUMNS + column
                    scores[row, column] = params.load_scalar(p.query, Float32, place)
            both[tile % 2].weights(scores, tile == 0)
            cute.arch.sync_warp()
            both[1 - tile % 2].rescale([output], Int32(tile % 2))
            for row in cutlass.range_constexpr(ROWS):
                total = scores[row, None].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                output[row, 0] = output[row, 0] + cute.arch.warp_reduction_sum(total, threads_in_group=4)
        for softmax in both:
            softmax.leave_sums(Int32((TILES - 1) % 2))
        cute.arch.sync_warp()
        sink = p.softcap if cutlass.const_expr(self.has_sink) else None
        factors, lse = both[0].finish(Int32((TILES - 1) % 2), sink)
        multiply_rows(output, factors)
        target = cute.make_tensor(params.pointer(p.output, Float32, 4), cute.make_layout(2**20))
        for row in cutlass.range_constexpr(ROWS):
            target[(thread * ROWS + row) * 2] = output[row, 0]
            target[(thread * ROWS + row) * 2 + 1] = lse[row]


def trace(*, is_lazy: bool, has_sink: bool) -> Callable[[Build], tuple[Any, tuple[Any, ...]]]:
    """Returns what replaces compilation.registry.trace."""
    return lambda build: (
        Statistics(build, is_lazy=is_lazy, has_sink=has_sink),
        params.example_arguments(abi.fields_of(build)),
    )
