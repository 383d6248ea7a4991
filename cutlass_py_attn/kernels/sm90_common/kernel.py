"""What the sm90 kernels say of themselves with the same words: threads, persistent blocks, reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cutlass_py_attn.launch.arch import Architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import Expr, maximum, minimum
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.launch.names import NUM_SMS
from cutlass_py_attn.problem.problem import Problem

Reason = Callable[[Problem, Build, Mapping[str, int]], str]

WITHOUT_DROPOUT: Final = ("softcap", "bias", "alibi", "sinks")


def limited_by(registers: Callable[[Build], tuple[int, ...]]) -> Callable[[Build, Architecture], int]:
    """Returns `accumulator_limit` of a kernel: the registers of a thread of the warpgroups that compute."""
    return lambda build, limits: registers(build)[-1]


def consumer_threads(build: Build) -> int:
    """Returns the threads that have accumulators of scores."""
    return build.warps_scores[0] * WARP_THREADS


def persistent_blocks(work_tiles: Expr, cluster: int = 1) -> Expr:
    """Returns the persistent blocks that compute so many work tiles: at least a cluster, at most one for each SM."""
    if cluster == 1:
        return maximum(minimum(NUM_SMS, work_tiles), 1)
    return cluster * maximum(minimum(NUM_SMS // cluster, work_tiles), 1)


def reason(roles: Callable[[Build], str]) -> Reason:
    """Returns `reason` of a kernel, from what the warpgroups of a block do."""

    def of_plan(problem: Problem, build: Build, values: Mapping[str, int]) -> str:
        return f"sm90 family (wgmma, TMA): {roles(build)}"

    return of_plan


def computing(build: Build) -> str:
    """Returns how many warpgroups compute, as the words in front of what they compute."""
    consumers = build.warps_scores[0] // WARPGROUP_WARPS
    return "one warpgroup computes" if consumers == 1 else f"{consumers} warpgroups compute"
