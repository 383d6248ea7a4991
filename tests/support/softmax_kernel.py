"""Softmax kernel: the online softmax of the sm90 forward on given scores, without matrix instructions."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.kernels.common.softmax import multiply_rows
from cutlass_py_attn.kernels.sm90_forward.chained_softmax import ChainedSoftmax
from cutlass_py_attn.kernels.sm90_forward.softmax_poly_exp2 import Exp2EmulatedSoftmax
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build

SYMBOL = "row_statistics"
TILES, ROWS, COLUMNS = 2, 2, 32  # of scores that a thread holds; a quad has COLUMNS of each of its four threads


class RowStatistics:
    """One warp. query: float32 scores (thread, tile, row, column); output: (thread, row, 2): the sum of the normalised
    weights of a row, which is 1, and the logsumexp in natural log."""

    def __init__(self, build: Build, kind: type[ChainedSoftmax], *, is_lazy: bool) -> None:
        self.build, self.kind, self.is_lazy = build, kind, is_lazy

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(p).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, p: Any):
        thread, _, _ = cute.arch.thread_idx()
        softmax = self.kind(ROWS, cute.make_rmem_tensor(ROWS, Float32))
        output = cute.make_rmem_tensor((ROWS, 1), Float32)
        output.fill(0.0)
        for tile in cutlass.range_constexpr(TILES):
            scores = cute.make_rmem_tensor((ROWS, COLUMNS), Float32)
            for row in cutlass.range_constexpr(ROWS):
                for column in cutlass.range_constexpr(COLUMNS):
                    place = ((thread * TILES + tile) * ROWS + row) * COLUMNS + column
                    scores[row, column] = params.load_scalar(p.query, Float32, place)
            factors = cute.make_rmem_tensor(ROWS, Float32)
            if cutlass.const_expr(self.is_lazy and tile > 0):
                if softmax.lazy_weights(scores, factors, p.scale_log2):
                    multiply_rows(output, factors)
            else:
                for row, factor in enumerate(softmax.weights(scores, p.scale_log2)):
                    factors[row] = factor
                multiply_rows(output, factors)
            for row in cutlass.range_constexpr(ROWS):
                total = scores[row, None].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                output[row, 0] = output[row, 0] + cute.arch.warp_reduction_sum(total, threads_in_group=4)
        lse = softmax.finish(output, p.scale_log2)
        target = cute.make_tensor(params.pointer(p.output, Float32, 4), cute.make_layout(2**20))
        for row in cutlass.range_constexpr(ROWS):
            target[(thread * ROWS + row) * 2] = output[row, 0]
            target[(thread * ROWS + row) * 2 + 1] = lse[row]


def trace(*, emulates_exp2: bool, is_lazy: bool) -> Callable[[Build], tuple[Any, tuple[Any, ...]]]:
    """Returns what replaces compilation.registry.trace."""
    kind = Exp2EmulatedSoftmax if emulates_exp2 else ChainedSoftmax
    return lambda build: (RowStatistics(build, kind, is_lazy=is_lazy), params.example_arguments(abi.fields_of(build)))
