"""Target: the first GPU of this machine, if there is one, and the architecture to compile for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutlass_py_attn.bundle import rules
from cutlass_py_attn.bundle.rules import AnyProblem
from cutlass_py_attn.errors import DriverError, NoDevice, NotSupported
from cutlass_py_attn.launch.arch import ARCHITECTURES
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.binding import portable_arch

DEFAULT_ARCH = "sm_90"  # without a GPU


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first of `count` visible GPUs. arch: the newest portable target that it runs."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    count: int
    arch: str


def first_gpu() -> Gpu | None:
    """Returns the first visible GPU; None if nothing can be launched."""
    try:
        found, count = driver.device(0), driver.device_count()
    except (NoDevice, DriverError):
        return None
    arch = portable_arch(found.compute_capability)
    return Gpu(found.name, found.compute_capability, found.num_sms, count, arch)


def default_arch() -> str:
    """Returns the GPU's target; DEFAULT_ARCH without a GPU that kernels can be built for."""
    gpu = _supported_gpu()
    return gpu.arch if gpu else DEFAULT_ARCH


def best_plans(problem: AnyProblem, archs: Sequence[str]) -> list[Plan]:
    """Returns the best plan of a problem on each target; without targets the one that the first GPU runs.

    Without a GPU that is the plan for the GPUs of DEFAULT_ARCH.
    """
    if archs:
        return [plans_for(problem, arch)[0] for arch in archs]
    return plans_here(problem)[:1]


def plans_for(problem: AnyProblem, arch: str) -> list[Plan]:
    """Returns the plans of a problem on a target, the best first.

    Appends and merges have kernels for portable targets alone: those of sm_90 for sm_90a.
    """
    return planner.plans(problem, arch) if isinstance(problem, Problem) else rules.exported_plans(problem, arch)


def plans_here(problem: AnyProblem) -> list[Plan]:
    """Returns the plans of a problem on the first GPU, the best first; on a GPU of DEFAULT_ARCH if there is none."""
    if not isinstance(problem, Problem):
        return plans_for(problem, default_arch())
    gpu = _supported_gpu()
    if gpu is None:
        return planner.plans_on(problem, ARCHITECTURES[DEFAULT_ARCH].compute_capability)
    return planner.plans_on(problem, gpu.compute_capability, gpu.num_sms)


def _supported_gpu() -> Gpu | None:
    try:
        return first_gpu()
    except NotSupported:  # a GPU that is too old
        return None


def wgmma_arch(arch: str) -> str | None:
    """Returns the target with wgmma of the GPUs of `arch`: sm_90a for sm_90, None for most."""
    if ARCHITECTURES[arch].has_wgmma:
        return arch
    featured = ARCHITECTURES.get(f"{arch}a")
    return featured.name if featured and featured.has_wgmma else None
