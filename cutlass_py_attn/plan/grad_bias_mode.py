"""Which kernel writes the gradient of the bias."""

from __future__ import annotations

from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import OPERANDS
from cutlass_py_attn.score_terms import registry


def grad_bias_mode(problem: Problem) -> str:
    """Returns which kernel writes grad_bias, see Build.

    The main kernel has dS in registers. With a score term that has a derivative it only has dS times the derivative.
    """
    if problem.grad_bias is None:
        return ""
    summed = [
        axis
        for axis, size, full in zip("bhqk", problem.grad_bias.shape, problem.shape.bias, strict=True)
        if size == 1 and full > 1
    ]
    has_main = any(getattr(problem, f"grad_{name}") is not None for name in OPERANDS)
    if not summed and has_main and not any(term.has_derivative for term in registry.present(problem)):
        return "main"
    return "".join(summed) or "none"
