"""Operands: what the axes of every array of a pass count, and which struct fields of a kernel are its strides.

axis                                                value
batch, num_heads, num_queries, tokens_q, ...        Shape.sizes, which may differ between launches of one kernel
bounds, padded_queries, max_pages, tokens           what follows from these
packed, head_dim, tiles, ...                        the same number in every launch of a kernel
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cutlass_py_attn.problem.quantization import BATCH_HEAD, HEAD, ROW, TENSOR, TILE, granularity
from cutlass_py_attn.problem.tensors import BIASES, F32_BYTES, OPERANDS, Tensor
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.bias import AXES as BIAS_STRIDES

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

ROW_STRIDES: Final = ("batch", "row", "head")  # of rows; those of a pool begin with "page"
LOGSUMEXP: Final = ("batch", "num_heads", "padded_queries")
_GRADIENTS: Final = tuple(f"grad_{name}" for name in (*OPERANDS, *registry.gradients()))
_BIAS: Final = ("batch", "num_heads", "num_queries", "num_keys")
_VECTORS: Final = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "page_indptr"), ("bounds",)),
    "seqused_k": ("batch",),
    "grad_logsumexp": LOGSUMEXP,
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One array of a pass, as kernels read or write it.

    name: of the argument, and of the struct field of its address
    tensor: its layout
    axes: what each axis counts; an axis of size 1 that broadcasts, or over which a result is summed, is "one"
    strides: strides (elements) of the leading axes by their struct field; the other axes are contiguous
    is_written: whether the pass writes it
    """

    name: str
    tensor: Tensor
    axes: tuple[str, ...]
    strides: dict[str, int]
    is_written: bool = False


def named_strides(name: str, axes: tuple[str, ...], strides: tuple[int, ...]) -> dict[str, int]:
    """Returns the leading strides of an array by their struct fields."""
    return {f"{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=False)}


def of_problem(problem: Problem) -> dict[str, Operand]:
    """Returns every array of a problem without objections by name, in the order in which a launch names them."""
    logsumexp = replace(Tensor.contiguous(problem.shape.logsumexp, "float32"), alignment=F32_BYTES)
    found = [of_tensor(problem, name) for name in problem.tensors()]
    found.append(Operand("logsumexp", logsumexp, LOGSUMEXP, {}, problem.direction == "forward"))
    found += [_vector(problem, name, tensor) for name, tensor in problem.vectors().items()]
    return {operand.name: operand for operand in found}


def of_tensor(problem: Problem, name: str) -> Operand:
    """Returns one of the strided arrays of four axes: rows or a bias."""
    tensor: Tensor = getattr(problem, name)
    is_written = name in _GRADIENTS or (name == "output" and problem.direction == "forward")
    if name in BIASES:
        axes = tuple("one" if size == 1 else axis for axis, size in zip(_BIAS, tensor.shape, strict=True))
        return Operand(name, tensor, axes, named_strides(name, BIAS_STRIDES, tensor.steps), is_written)
    axes = problem.shape.axes(name)
    first = "page" if axes[0] == "num_pages" else "batch"
    strides = named_strides(name, (first, "row", "head"), tensor.strides)
    strides |= {f"{name}_column": tensor.steps[3]} if name == "grad_output" else {}
    return Operand(name, tensor, axes, strides, is_written)


def _vector(problem: Problem, name: str, tensor: Tensor) -> Operand:
    """Returns the operand of one of the small arrays."""
    is_written = name in _GRADIENTS
    if name in problem.scales:
        return _scale(problem, name, tensor)
    if name == "page_table":
        rows = ("batch", "max_pages")[-len(tensor.shape) :]
        return Operand(name, tensor, rows, named_strides(name, ("row",), tensor.strides[:-1]))
    for term in registry.present(problem):
        if term.vector is not None and name in term.vectors(problem):
            axes = term.vector.axes_of(len(tensor.shape))
            strides = {term.vector.batch_field: problem.shape.num_heads} if len(axes) > 1 else {}
            return Operand(name, tensor, axes, strides, is_written)
    return Operand(name, tensor, _VECTORS.get(name, ("one",)), {})


def _scale(problem: Problem, name: str, tensor: Tensor) -> Operand:
    """Returns the operand of a scale of e4m3 codes; a scale of the whole operand is one number."""
    grain = granularity(tensor)
    if grain == TENSOR:
        return Operand(name, replace(tensor, shape=(1,), strides=(1,)), ("one",), {})
    rows = problem.shape.axes("key")[:3]
    first = "page" if problem.pages is not None else "batch"
    axes, strides = {
        HEAD: (rows[2:], ("head",)),
        BATCH_HEAD: (("batch", *rows[2:]), ("batch", "head")),
        ROW: (rows, (first, "row", "head")),
        TILE: ((*rows, "tiles"), (first, "row", "head", "tile")),
    }[grain]
    return Operand(name, tensor, axes, named_strides(name, strides, tensor.steps))
