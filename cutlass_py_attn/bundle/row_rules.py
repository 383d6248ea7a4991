"""Row rules: the launches of `append_to_cache` and `merge_states` for other sizes and strides, as expressions.

What `numbers`, `launch_rules` and `preconditions` are for attention. The names are those of the struct's fields, and

    tokens_k    append: rows of key and value, which are those of new tokens
    num_pages   append: pages of the cache
    batch       merge: batch size, or the number of sequences
    tokens_q    merge of packed outputs: rows of all sequences together
"""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.bundle import numbers
from cutlass_py_attn.bundle.inputs import Input, Pointer
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import Expr, Name
from cutlass_py_attn.launch.names import (
    BATCH,
    NUM_HEADS,
    NUM_HEADS_KEY,
    NUM_PAGES,
    NUM_QUERIES,
    PAGE_SIZE,
    TOKENS_K,
    TOKENS_Q,
)
from cutlass_py_attn.plan import preconditions
from cutlass_py_attn.plan.launch_rules import shape, strides
from cutlass_py_attn.plan.preconditions import Condition
from cutlass_py_attn.problem import append, merge
from cutlass_py_attn.problem.append import SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem

RowProblem = AppendProblem | MergeProblem

DIRECTIONS: Final = (AppendProblem.direction, MergeProblem.direction)
_MEANINGS: Final = {
    "tokens_k": "new tokens, whose rows are appended",
    "num_heads_key": "heads of key and value",
    "page_size": "rows of a page",
    "num_pages": "pages of the cache",
    "batch": "batch size, or the number of sequences",
    "num_queries": "queries of one sequence, or of the longest one",
    "num_heads": "heads of the outputs",
    "tokens_q": "rows of the outputs: the queries of all sequences together, or more",
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
}


def inputs(problem: RowProblem) -> dict[str, Input]:
    """Returns sizes and strides (in elements) by name."""
    steps = (step for operand in problem.operands().values() for step in operand.strides.items())
    return {name: Input("i64", value, _meaning(name)) for name, value in (*problem.sizes.items(), *steps)}


def pointers(problem: RowProblem, build: Build) -> dict[str, Pointer]:
    """Returns every array of the launch, with the alignment of the kernel's loads."""
    alignments = abi.address_alignments(build)
    operands = problem.operands().values()
    return {each.name: numbers.pointer(each, alignments[each.name], _meaning(each.name)) for each in operands}


def _meaning(name: str) -> str:
    return _MEANINGS.get(name) or numbers.meaning(name)


def definitions(problem: RowProblem) -> dict[str, Expr]:
    """Returns numbers that grids and struct fields name, in terms of the sizes."""
    if isinstance(problem, AppendProblem):
        return {"num_rows": TOKENS_K * NUM_HEADS_KEY, "num_slots": NUM_PAGES * PAGE_SIZE}
    return {"num_rows": BATCH * NUM_QUERIES * NUM_HEADS}


def conditions(problem: RowProblem, build: Build) -> list[Condition]:
    """Returns every condition on sizes and strides; each expression is 1 (true) for the planned problem."""
    found = [(Name(name) >= 1, f"{name} must be at least 1; with none there is nothing to launch")
             for name in problem.sizes]  # fmt: skip
    if isinstance(problem, MergeProblem) and problem.is_packed:
        says = "num_queries, of the longest sequence, must be at most tokens_q"
        found += [(NUM_QUERIES <= TOKENS_Q, says), (TOKENS_Q <= merge.MAX_ROWS, _most("tokens_q"))]
    operands = [operand for operand in problem.operands().values() if operand.strides]
    unit = build.vector_bytes // build.item_bytes
    for operand in (operand for operand in operands if operand.name not in SCALES):
        for size, stride in list(zip(shape(operand), strides(operand), strict=True))[:-1]:
            found += preconditions.multiple(size, stride, unit)
    return [*found, *(preconditions.distinct(operand) for operand in operands if operand.is_written)]


def limits(problem: RowProblem) -> list[Condition]:
    """Returns every condition on the definitions."""
    found = [(Name("num_rows") <= append.MAX_ROWS, _most("num_rows"))]
    if isinstance(problem, AppendProblem):
        says = f"num_pages * page_size must be at most {append.MAX_SLOTS}; use several caches"
        found.append((Name("num_slots") <= append.MAX_SLOTS, says))
    return found


def _most(name: str) -> str:
    return f"{name} must be at most {append.MAX_ROWS}; call once for each slice"
