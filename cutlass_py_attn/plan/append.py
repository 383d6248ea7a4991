"""Plan of `append_to_cache`: which threads copy which rows, and the struct of the kernel.

A few threads, a power of two, copy the key row and the value row of one (token, head), `vector_bytes` at a time. The
rows of a token's heads follow each other, so that a block reads neighbouring rows.
"""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.rows.kernel import APPEND
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.variants import E4M3, E4M3_ROW, E4M3_TILE, STANDARD
from cutlass_py_attn.plan.plan import Launch, Plan, Workspace
from cutlass_py_attn.plan.planner import arch_refusals
from cutlass_py_attn.problem.append import GIVEN_SCALES, NO_SCALES, ROW_SCALES, TILE_SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.quantization import SCALE_COLUMNS
from cutlass_py_attn.problem.tensors import ITEM_BYTES, OPERAND_BYTES, Tensor
from cutlass_py_attn.refusals import refuse

WARPS: Final = 4
_NONE: Final = (0, 0)  # warps of a product that the kernel does not have
_VARIANTS: Final = {NO_SCALES: STANDARD, GIVEN_SCALES: E4M3, ROW_SCALES: E4M3_ROW, TILE_SCALES: E4M3_TILE}
SCALES_OF: Final = {variant: scales for scales, variant in _VARIANTS.items()}
_REASONS: Final = {
    NO_SCALES: "rows are copied as they are",
    GIVEN_SCALES: "rows are divided by scales from the device and rounded to e4m3",
    ROW_SCALES: "rows are divided by a scale of their own, their largest magnitude / 448, and rounded to e4m3",
    TILE_SCALES: f"each {SCALE_COLUMNS} columns of a row of key are divided by a scale of their own, their largest "
    "magnitude / 448, and rounded to e4m3; rows of value are copied as they are",
}


def plan_append(problem: AppendProblem, arch: str) -> Plan:
    """Returns the plan of an `append_to_cache`.

    problem: layouts of the arrays
    arch: target, such as "sm_90"

    NotSupported lists every reason why the problem cannot be computed.
    """
    if not isinstance(problem, AppendProblem):
        wrong = refuse("problem", problem, "must be an AppendProblem", "create one")
        raise NotSupported([wrong, *arch_refusals(arch)])
    if refusals := [*problem.refusals(), *arch_refusals(arch)]:
        raise NotSupported(refusals)
    dims = problem.key.shape[2], problem.value.shape[2]
    vector = vector_elements(problem.key, problem.value, problem.key_cache, problem.value_cache)
    build = row_build("append", _VARIANTS[problem.scales], arch, problem.key.dtype, dims, vector)
    rows = problem.tokens * problem.num_heads_key
    params = (
        *strides(problem),
        ("page_size", problem.key_cache.shape[1]),
        ("num_slots", problem.num_slots),
        ("num_heads_key", problem.num_heads_key),
        ("num_rows", rows),
    )
    return row_plan(build, rows, 0 if problem.is_empty else rows, params, _REASONS[problem.scales])


def strides(problem: AppendProblem | MergeProblem) -> tuple[tuple[str, int], ...]:
    """Returns the strides of every array (elements) by their struct fields."""
    return tuple(field for operand in problem.operands().values() for field in operand.strides.items())


def vector_elements(*tensors: Tensor) -> int:
    """Returns the elements of one load or store: a power of two that suits rows, strides and addresses of all tensors.

    It is at most 16 bytes of each tensor. Their last axes are contiguous.
    """
    return min(tensor.vector_bytes // OPERAND_BYTES[tensor.dtype] for tensor in tensors)


def row_build(
    kind: str,
    variant: str,
    arch: str,
    dtype: str,
    dims: tuple[int, int],
    vector: int,
    features: tuple[str, ...] = (),
) -> Build:
    """Returns the Build of a kernel that computes row by row: kind "append" or "merge".

    dims: columns of the two kinds of rows. vector: elements of one load.
    """
    threads = WARPS * WARP_THREADS
    lanes = min(1 << (ceil_div(max(dims), vector) - 1).bit_length(), WARP_THREADS)
    return Build(
        kind=kind,
        family=APPEND.family,
        variant=variant,
        arch=arch,
        dtype=dtype,
        head_dim=dims[0],
        head_dim_value=dims[1],
        mask="full",
        tile_m=threads // lanes,
        tile_n=lanes,
        warps=WARPS,
        query_stages=1,
        grad_output_stages=1,
        warps_scores=_NONE,
        warps_grad_v=_NONE,
        warps_grad_k=_NONE,
        warps_grad_q=_NONE,
        deterministic=False,
        register_usage_level=5,
        min_blocks_per_sm=0,
        component_gemm="",
        shared_memory=(),
        features=features,
        vector_bytes=vector * ITEM_BYTES[dtype],
    )


def row_plan(build: Build, rows: int, launched: int, params: tuple[tuple[str, int], ...], reason: str) -> Plan:
    """Returns the plan of a kernel that computes row by row. launched: rows to launch blocks for; 0 for no launch."""
    launch = Launch(f"{build.symbol}_0", (ceil_div(launched, build.tile_m), 1, 1), (build.threads, 1, 1), 0)
    text = f"{rows} rows, {build.tile_n} threads each, by {build.vector_bytes} bytes; {reason}"
    return Plan(build, (launch,) if launched else (), Workspace(), params, text)
