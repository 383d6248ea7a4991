"""Split: one call whose rows are split over ranks, and the cuts of its operands that strategies share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.distributed.machine import Arrays, Machine, along
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.problem import split_rows
from cutlass_py_attn.problem.split_rows import ULYSSES, Chunk
from cutlass_py_attn.problem.tensors import LSE_PADDING

OF_KEY: Final = ("key", "value")
OF_QUERY: Final = ("query", "output", "grad_output")
OF_LOGSUMEXP: Final = ("logsumexp", "grad_logsumexp")
LENGTHS: Final = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


@dataclass(frozen=True, slots=True)
class Split:
    """One call of a rank.

    options: checked; of the call on all rows
    """

    machine: Machine
    strategy: str
    zigzag: bool
    options: Options

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self.machine.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.machine.group.size

    def chunks(self, rows: int, rank: int) -> list[Chunk]:
        """Returns the runs of consecutive rows of a rank."""
        return split_rows.chunks(self.size, self.zigzag, rows, rank)

    def with_options(self, **changes: Any) -> Options:
        """Returns the options of a part of the call."""
        return dataclasses.replace(self.options, **changes)

    def new_output(self, operands: Arrays) -> Any:
        """Returns the array of the call's output."""
        query, value = operands["query"], operands["value"]
        return self.machine.result("output", (*query.shape[:3], value.shape[3]), str(query.dtype))

    def new_logsumexp(self, operands: Arrays) -> Any:
        """Returns the array of the call's logsumexp, (batch, heads, ceil32(rows)), filled with +inf."""
        found = self.machine.result("logsumexp", self.logsumexp_shape(operands), "float32")
        self.machine.fill_infinite(found)
        return found

    def logsumexp_shape(self, operands: Arrays) -> tuple[int, ...]:
        """Returns the shape of the logsumexp that the forward of these operands returns."""
        batch, rows, heads, _ = operands["query"].shape
        sequences = self.options.sequences
        if sequences is None:
            return batch, heads, round_up(rows, LSE_PADDING)
        assert isinstance(sequences, VariableLength)
        count, longest = len(sequences.cu_seqlens_q) - 1, int(sequences.max_seqlen_q)
        if self.strategy == ULYSSES:
            return count, heads // self.size, round_up(longest, LSE_PADDING)
        runs = self.chunks(rows, self.rank)
        return len(runs), count, heads, round_up(min(longest, runs[0].count), LSE_PADDING)

    def new_gradient(self, operands: Arrays, name: str) -> Any:
        """Returns the array of an operand's gradient, which has the operand's shape and dtype."""
        return self.machine.result(f"grad_{name}", tuple(operands[name].shape), str(operands[name].dtype))

    def rows(self, operands: Arrays, first: int, count: int) -> Arrays:
        """Returns the operands of some rows of query, with all keys."""
        found, rows = dict(operands), operands["query"].shape[1]
        for name in OF_QUERY:
            if name in found:
                found[name] = found[name][along(1, first, first + count)]
        for name in OF_LOGSUMEXP:
            if name in found:
                found[name] = self.machine.rows_of_logsumexp(found[name], first, count, rows)
        if "bias" in found:
            found["bias"] = found["bias"][range_of(found["bias"], 2, first, first + count)]
        return found


def range_of(bias: Any, axis: int, first: int, last: int) -> tuple[slice, ...]:
    """Returns the index of a range of a bias, which is not cut along an axis of size 1."""
    return along(axis, first, last) if bias.shape[axis] > 1 else (slice(None),)


def keys(operands: Arrays, first: int, last: int, column: int) -> Arrays:
    """Returns the operands of some keys. column: index of the first among the columns of the bias."""
    found = dict(operands)
    for name in OF_KEY:
        found[name] = found[name][along(1, first, last)]
    if "bias" in found:
        found["bias"] = found["bias"][range_of(found["bias"], 3, column, column + last - first)]
    return found


def block(bias: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    """Returns some rows and columns of a bias or its gradient."""
    return bias[range_of(bias, 2, *rows)][range_of(bias, 3, *columns)]
