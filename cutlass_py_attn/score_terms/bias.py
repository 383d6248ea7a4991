"""Bias: a tensor (batch, num_heads, num_queries, num_keys) of the operands' dtype is added to the scores.

An axis of size 1 or of stride 0 broadcasts. The derivative by the score is 1, so the gradient of the bias is dS, summed
over the axes along which grad_bias has size 1. Without a sum, main kernels store the dS that they multiply: the sm90
backward through TMA (kernels/sm90_backward/grad_bias_store.py), for sequences of one length and rows aligned to 16
bytes. Other problems with that gradient run in the sm80 kernels, where kernels/backward_parts sums it if the main
kernel cannot.

The kernels load a bias tile ahead of its scores: the sm80 kernels and the sm90 backward by cp.async into shared memory
(kernels/sm90_backward/transposed_bias.py), the sm90 forward into registers
(kernels/sm90_forward/score_mod_registers.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.score_terms.term import ScoreTerm, StructFields

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem
    from cutlass_py_attn.problem.tensors import Shape, Tensor

Array = npt.NDArray[Any]

AXES = ("batch", "head", "row", "column")  # of the strides; an axis that broadcasts has stride 0
LOG2_E = math.log2(math.e)


class Bias(ScoreTerm):
    """An additive bias with a gradient."""

    name = "bias"
    field = "bias"
    gradient = "bias"
    struct = StructFields(addresses=("bias", *(f"bias_{axis}" for axis in AXES)))
    tile_tables = ("bias", "score_mod")  # a bias tile takes shared memory
    needs_registers_sm90 = True

    def refusals(self, problem: Problem) -> Iterator[Refusal]:
        if problem.bias is None:
            return
        whole = problem.shape.bias
        if not _broadcasts(problem.bias, whole):
            rule = f"each axis must be 1 or that of [batch, heads, queries, keys] = {whole}"
            yield refuse("bias.shape", problem.bias.shape, rule, "reshape or expand it")
        elif problem.grad_bias is not None and not _broadcasts(problem.grad_bias, whole):
            rule = f"each axis must be 1 (summed over) or that of {whole}"
            yield refuse("grad_bias.shape", problem.grad_bias.shape, rule, "allocate it like the bias")

    def example(self, shape: Shape) -> dict[str, Any]:
        return {"bias": shape.bias}

    def modify_scores(self, row: Any, operand: Any) -> None:
        row.values = row.values + row.bias() * LOG2_E

    def reference_operand(self, given: Array, sequence: int, head: int) -> Any:
        return given[sequence if given.shape[0] > 1 else 0, head if given.shape[1] > 1 else 0]

    def reference_added(self, tile: Any, operand: Any) -> Array:
        return tile.rounded(tile.part_of(operand))


def _broadcasts(tensor: Tensor, whole: tuple[int, ...]) -> bool:
    return all(size in (1, full) for size, full in zip(tensor.shape, whole, strict=True))
