"""Row numbers: the numbers and the addresses that a host passes to an append or a merge, each with its meaning."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.bundle import row_rules
from cutlass_py_attn.bundle.inputs import Input, Pointer
from cutlass_py_attn.bundle.row_rules import RowProblem
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Expr, contiguous_strides, round_up
from cutlass_py_attn.launch.names import BATCH, NUM_HEADS, NUM_QUERIES, TOKENS_K
from cutlass_py_attn.problem.append import SCALES, AppendProblem
from cutlass_py_attn.problem.tensors import LSE_PADDING, Tensor

_SIZES: Final = {
    "tokens_k": "new tokens, whose rows are appended",
    "num_heads_key": "heads of key and value",
    "page_size": "rows of a page",
    "num_pages": "pages of the cache",
    "batch": "batch size, or the number of sequences",
    "num_queries": "queries of one sequence, or of the longest one",
    "num_heads": "heads of the outputs",
    "tokens_q": "rows of the outputs: the queries of all sequences together, or more",
}
_POINTERS: Final = {
    "key": "rows of new keys",
    "value": "rows of new values",
    "key_cache": "pages of keys",
    "value_cache": "pages of values",
    "slots": "slot of each token, page * page_size + row; a token with a slot outside of the cache is skipped",
    "key_scale": "scales of the stored keys",
    "value_scale": "scales of the stored values",
    "output_a": "partial output over some keys",
    "output_b": "partial output over other keys",
    "output": "output over the keys of both",
    "logsumexp_a": "logsumexp of output_a",
    "logsumexp_b": "logsumexp of output_b",
    "logsumexp": "logsumexp of output",
    "cu_seqlens_q": "where the queries of each sequence start; the last entry is where they end",
}


def inputs(problem: RowProblem) -> dict[str, Input]:
    """Returns sizes and strides (in elements) by name."""
    found = {name: Input("i64", value, _SIZES[name]) for name, value in row_rules.sizes(problem).items()}
    for name, tensor in problem.tensors().items():
        if name in row_rules.shapes(problem):
            names = row_rules.stride_names(problem, name)
            for stride, step in zip(names, _steps(name, tensor, len(names)), strict=True):
                axis = stride.name.rpartition("_")[2]
                found[stride.name] = Input("i64", step, f"elements from one {axis} of {name} to the next")
    return found


def _steps(name: str, tensor: Tensor, count: int) -> tuple[int, ...]:
    """Returns the strides of `count` axes, columns left out; 0 along the leading axes that a scale does not have."""
    steps = tensor.steps if name in SCALES else tensor.steps[:-1]
    return (*(0,) * (count - len(steps)), *steps)


def pointers(problem: RowProblem, build: Build) -> dict[str, Pointer]:
    """Returns every array of the launch."""
    alignments = abi.address_alignments(build)
    shapes = row_rules.shapes(problem)
    written = problem.outputs if isinstance(problem, AppendProblem) else ("output", "logsumexp")
    if isinstance(problem, AppendProblem):
        others: dict[str, tuple[str, tuple[Expr, ...]]] = {"slots": ("int64", (TOKENS_K,))}
    else:
        rows = BATCH, NUM_HEADS, round_up(NUM_QUERIES, LSE_PADDING)
        others = dict.fromkeys(("logsumexp_a", "logsumexp_b", "logsumexp"), ("float32", rows))
        others |= {"cu_seqlens_q": ("int32", (BATCH + 1,))} if problem.is_packed else {}
    found = {}
    for name, alignment in alignments.items():
        access = "write" if name in written else "read"
        if name in others:
            dtype, shape = others[name]
            strides = contiguous_strides(shape)
        else:
            dtype, shape = problem.tensors()[name].dtype, shapes[name]
            strides = (*row_rules.stride_names(problem, name), ONE)[: len(shape)]
        found[name] = Pointer(dtype, shape, strides, alignment, access, _POINTERS[name])
    return found
