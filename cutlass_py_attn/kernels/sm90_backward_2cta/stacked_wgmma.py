"""Stacked wgmma: one GEMM as wgmma instructions next to each other, each with some of the columns of C.

dV and dK of the 2-CTA backward are up to 256 columns wide. A wgmma that wide does not compile in a block of this many
threads, whatever registers a warpgroup has asked for.
"""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.kernels.common.wgmma import DescriptorOperand, Wgmma, smem_column_slice
from cutlass_py_attn.launch.gemm_spec import GemmSpec

MAX_COLUMNS, PART_COLUMNS = 192, 128  # of one wgmma with A in registers, and of the parts of a wider GEMM


@dataclass(frozen=True)
class StackedOperand:
    """B in shared memory: the columns of each part, all stages, and which stage is read."""

    parts: tuple[DescriptorOperand, ...]
    index: Int32 | None = None

    def stage(self, index: Int32) -> "StackedOperand":
        """Returns one stage of B."""
        return StackedOperand(self.parts, index)


@dataclass(frozen=True)
class StackedOperands:
    """A in registers, and one stage of B."""

    a: cute.Tensor
    b: StackedOperand


class StackedWgmma:
    """One GemmSpec with A in registers; the methods are those of Wgmma."""

    def __init__(self, spec: GemmSpec, dtype: str) -> None:
        self.spec = spec
        self.whole = Wgmma(spec, dtype)
        width = spec.n if spec.n <= MAX_COLUMNS else PART_COLUMNS
        starts = range(0, spec.n, width)
        self.mmas = [Wgmma(replace(spec, n=min(width, spec.n - first)), dtype) for first in starts]
        self.groups = len(self.mmas)  # wgmma groups that `issue` commits

    def accumulator(self, thread: Int32) -> cute.Tensor:
        """Returns the accumulator of all columns."""
        return self.whole.accumulator(thread)

    def coordinates(self, thread: Int32) -> cute.Tensor:
        """Returns (row, column) of each accumulator element."""
        return self.whole.coordinates(thread)

    def b_operand(self, tile: cute.Tensor) -> StackedOperand:
        """Returns B (n, k, stages) in shared memory."""
        if self.groups == 1:
            return StackedOperand((self.whole.b_operand(tile),))
        rows, first, parts = transposed(tile), 0, []
        for mma in self.mmas:
            parts.append(mma.b_operand(transposed(smem_column_slice(rows, first, mma.spec.n))))
            first += mma.spec.n
        return StackedOperand(tuple(parts))

    def register_operands(self, values: cute.Tensor, b: StackedOperand) -> StackedOperands:
        """Returns A in registers, in the layout of an accumulator, and one stage of B."""
        return StackedOperands(values, b)

    def issue(self, accumulator: cute.Tensor, operands: StackedOperands) -> None:
        """Starts C += A B as `groups` groups; nothing may touch `accumulator` before `wait`."""
        first = accumulator.iterator
        for mma, b in zip(self.mmas, operands.b.parts, strict=True):
            layout = mma.accumulator(0).layout
            columns = mma.register_operands(operands.a, b.stage(operands.b.index))
            mma.issue(cute.make_tensor(first, layout), columns)
            first = first + cute.size(layout)

    @staticmethod
    def wait(pending: int = 0) -> None:
        """Waits until at most `pending` of the groups issued so far are in flight."""
        Wgmma.wait(pending)
