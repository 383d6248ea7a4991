"""Plan of `merge_states`: which threads merge which rows, and the struct of the kernel."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.variants import LAST, STANDARD, SUM, SUM_LAST, TOTAL
from cutlass_py_attn.plan.append import row_build, row_plan, strides, vector_elements
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import arch_refusals
from cutlass_py_attn.problem.merge import OUTPUTS, MergeProblem
from cutlass_py_attn.refusals import refuse

_MERGED: Final = "each row is the mean of two, weighted by exp(logsumexp), in float32"
_ADDED: Final = "each row is the sum of two, in float32"
REASONS: Final = {
    STANDARD: _MERGED,
    TOTAL: f"{_MERGED}, into a float32 total",
    LAST: f"{_MERGED}, of a float32 total and the last part",
    SUM: f"{_ADDED}, into a float32 total",
    SUM_LAST: f"{_ADDED}, of a float32 total and the last part",
}


def plan_merge(problem: MergeProblem, arch: str) -> Plan:
    """Returns the plan of a `merge_states`.

    problem: layouts of the arrays
    arch: target, such as "sm_90"

    NotSupported lists every reason why the problem cannot be computed.
    """
    if not isinstance(problem, MergeProblem):
        wrong = refuse("problem", problem, "must be a MergeProblem", "create one")
        raise NotSupported([wrong, *arch_refusals(arch)])
    if refusals := [*problem.refusals(), *arch_refusals(arch)]:
        raise NotSupported(refusals)
    _, tokens, num_heads, columns = problem.output_a.shape
    tensors = [getattr(problem, name) for name in OUTPUTS]
    dtype, vector = problem.output_b.dtype, vector_elements(*tensors)
    variant = variant_of(problem)
    build = row_build("merge", variant, arch, dtype, (columns, columns), vector, problem.features)
    params = (
        *strides(problem),
        ("num_heads", num_heads),
        ("num_queries", problem.num_queries),
        ("num_rows", problem.num_rows),
        *((("tokens_q", tokens), ("tokens_k", 0)) if problem.is_packed else ()),
    )
    return row_plan(build, problem.num_rows, problem.num_rows, params, REASONS[variant])


def variant_of(problem: MergeProblem) -> str:
    """Returns the variant of a problem: whether rows are merged or added, and where they are float32."""
    is_last = problem.output.dtype != problem.output_a.dtype
    if problem.is_sum:
        return SUM_LAST if is_last else SUM
    if problem.output_a.dtype == problem.output_b.dtype:
        return STANDARD
    return LAST if is_last else TOTAL
