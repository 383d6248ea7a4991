"""Which kernel writes the gradient of the bias, and where the main kernel of the sm90 family does."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_py_attn.launch.grad_bias import suits_wgmma
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import OPERANDS, ROW_ALIGNMENT_BYTES
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


def has_wgmma(problem: Problem) -> bool:
    """Returns whether an sm90 backward of this problem, of narrow heads, has a grad_bias kernel that uses wgmma."""
    tensor = problem.grad_bias
    return tensor is not None and suits_wgmma(grad_bias_mode(problem), problem.features, tensor.vector_bytes)


def unsupported_sm90(problem: Problem) -> Iterator[str]:
    """Yields what a grad_bias that the main kernel writes has and that of the sm90 family does not store, by TMA."""
    tensor = problem.grad_bias
    if tensor is None or grad_bias_mode(problem) != "main":
        return
    if problem.sequences is not None:
        yield "full gradient of the bias of variable lengths"
    if tensor.vector_bytes < ROW_ALIGNMENT_BYTES:
        yield f"full gradient of the bias with rows aligned to less than {ROW_ALIGNMENT_BYTES} bytes"
    if any(stride <= 0 for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1):
        yield "full gradient of the bias with strides of 0 or less"
