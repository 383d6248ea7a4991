"""Operands: what the axes of every array of a pass count, and which struct fields of a kernel are its strides.

The name of an axis says which launches have the same size:

    axis                                                value
    batch, num_heads, num_queries, tokens_q, ...        Shape.sizes, which may differ between launches of one kernel
    bounds, padded_queries, max_pages, tokens           what follows from these
    packed, head_dim, bias_0, ...                       the same number in every launch of a kernel
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.tensors import (
    BIASES,
    BLOCK_AXES,
    BMHK,
    F32_BYTES,
    KEY_ROPE,
    MASK_ARRAY_AXES,
    MASK_ARRAYS,
    OPERANDS,
    RANGE_AXES,
    RANGE_EDGES,
    ROW_STRIDES,
    VISIBLE_BLOCKS,
    Tensor,
)
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.bias import AXES as BIAS_STRIDES

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

LOGSUMEXP: Final = ("batch", "num_heads", "padded_queries")
_ROWS: Final = (*BMHK, KEY_ROPE)
_BIAS: Final = ("batch", "num_heads", "num_queries", "num_keys")
_GRADIENTS: Final = tuple(f"grad_{name}" for name in (*OPERANDS, *registry.gradients()))
_AXES: Final = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "page_indptr"), ("bounds",)),
    **dict.fromkeys(("logsumexp", "grad_logsumexp"), LOGSUMEXP),
    "seqused_k": ("batch",),
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One array of a pass, as kernels read or write it.

    name: of the argument, and of the struct field of its address
    tensor: its layout
    axes: what each axis counts
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
    operands = {name: of_tensor(problem, name) for name in problem.tensors()}
    operands["logsumexp"] = Operand("logsumexp", logsumexp, LOGSUMEXP, {}, problem.direction == "forward")
    return operands | {name: _vector(problem, name, tensor) for name, tensor in problem.vectors().items()}


def of_tensor(problem: Problem, name: str) -> Operand:
    """Returns one of the strided arrays of four axes: rows or a bias."""
    tensor: Tensor = getattr(problem, name)
    axes = axes_of(problem, name, tensor.shape)
    is_written = name in _GRADIENTS or (name == "output" and problem.direction == "forward")
    if name in BIASES:
        return Operand(name, tensor, axes, named_strides(name, BIAS_STRIDES, tensor.steps), is_written)
    first = ("page",) if axes[0] == "num_pages" else ROW_STRIDES[:1]
    strides = named_strides(name, (*first, *ROW_STRIDES[1:]), tensor.strides)
    strides |= {f"{name}_column": tensor.steps[3]} if name == "grad_output" else {}
    return Operand(name, tensor, axes, strides, is_written)


def axes_of(problem: Problem, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Returns what each axis of an array of this shape counts.

    An axis that counts nothing of the problem has a name of its own, as one does along which a bias broadcasts or its
    gradient is summed.
    """
    if name in _ROWS:
        axes = problem.shape.axes("key" if problem.value_in_key and name == "value" else name)
        return (*axes[:3], "code_columns") if problem.key_rope is not None and name in ("key", "value") else axes
    own = tuple(f"{name}_{axis}" for axis in range(len(shape)))
    if name == VISIBLE_BLOCKS:
        # A device's part of the heads is as the whole: its own size does not say which heads they are.
        whole = shape if problem.visible_blocks is None else problem.visible_blocks.shape
        heads = "num_heads" if whole[1:2] == (problem.shape.num_heads,) else "num_heads_key"
        full = "batch", heads, *own[2:]
        return tuple(one if size == 1 else axis for one, axis, size in zip(own, full, shape, strict=True))
    if name in (*BIASES, *RANGE_EDGES):
        broadcast = zip(own, _BIAS, shape, strict=False)
        return tuple(one if size == 1 else axis for one, axis, size in broadcast)
    if name in SCALES:
        return own if shape == (1,) else _scale_axes(problem)[len(shape)]
    if name == "page_table":
        return ("batch", "max_pages")[-len(shape) :]
    vectors = {term.vector.name: term.vector for term in registry.terms() if term.vector is not None}
    role = name.removeprefix("grad_")
    return vectors[role].axes_of(len(shape)) if role in vectors else _AXES.get(name, own)


def _scale_axes(problem: Problem) -> dict[int, tuple[str, ...]]:
    """Returns the axes of the scales of e4m3 codes by their number."""
    rows = problem.shape.axes("key")[:3]
    return {0: (), 1: rows[2:], 2: ("batch", rows[2]), 3: rows, 4: (*rows, "tiles")}


def _vector(problem: Problem, name: str, tensor: Tensor) -> Operand:
    """Returns the operand of one of the small arrays; a scale of a whole operand is one number."""
    tensor = tensor if tensor.shape else replace(tensor, shape=(1,), strides=(1,))
    axes = axes_of(problem, name, tensor.shape)
    strides: dict[str, int] = {}
    if name == "page_table":
        strides = named_strides(name, ("row",), tensor.strides[:-1])
    elif name in RANGE_EDGES:
        strides = named_strides(name, RANGE_AXES, tensor.steps)
    elif name in MASK_ARRAYS:
        strides = named_strides(name, MASK_ARRAY_AXES, tensor.steps)
    elif name == VISIBLE_BLOCKS:
        strides = named_strides(name, BLOCK_AXES, tensor.steps)
    elif name in SCALES and tensor.shape != (1,):
        of_rows = ("page" if axes[0] == "num_pages" else "batch", "row", "head", "tile")[: len(axes)]
        strides = named_strides(name, of_rows if len(axes) > 2 else ("batch", "head")[-len(axes) :], tensor.steps)
    elif len(axes) > 1 and name not in _AXES:
        fields = {term.vector.name: term.vector.batch_field for term in registry.terms() if term.vector is not None}
        strides = {fields[name]: problem.shape.num_heads}
    return Operand(name, tensor, axes, strides, name in _GRADIENTS)
