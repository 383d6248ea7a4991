"""Catalogue: every kernel, and the families in the order in which the planner tries them."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import decode, row_kernels, sm80, sm90, sm90_choice, sm90_mla_kernel
from cutlass_py_attn.plan.kernel import Family, FusedKernel, Kernel

KERNELS: Final[dict[tuple[str, str, str], Kernel]] = {
    (kernel.kind, kernel.family, kernel.variant): kernel
    for kernel in (
        *sm80.KERNELS,
        *sm90.KERNELS,
        sm90_mla_kernel.FORWARD,
        *decode.KERNELS,
        *row_kernels.KERNELS,
        sm80.COMPONENT_GEMM,
        sm90.COMPONENT_GEMM,
    )
}
FAMILIES: Final[dict[str, Family]] = {
    family.name: family for family in (decode.FAMILY, sm90_choice.FAMILY, sm80.FAMILY)
}


def kernel_of(build: Build) -> Kernel:
    """Returns the kernel of a Build."""
    return KERNELS[build.kind, build.family, build.variant]


def fused_kernel_of(build: Build) -> FusedKernel:
    """Returns the kernel of a Build of attention."""
    kernel = kernel_of(build)
    assert isinstance(kernel, FusedKernel)
    return kernel
