"""Catalogue: every kernel."""

from __future__ import annotations

from itertools import chain
from typing import Final

from cutlass_py_attn.kernels.component_gemms import kernel as component_gemms
from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.kernels.kernel import FusedKernel, Kernel
from cutlass_py_attn.kernels.rows import kernel as rows
from cutlass_py_attn.kernels.sm80 import kernel as sm80
from cutlass_py_attn.kernels.sm80_split_d import kernel as sm80_split_d
from cutlass_py_attn.kernels.sm90_backward import kernel as sm90_backward
from cutlass_py_attn.kernels.sm90_backward_2cta import kernel as sm90_backward_2cta
from cutlass_py_attn.kernels.sm90_e4m3 import kernel as sm90_e4m3
from cutlass_py_attn.kernels.sm90_e4m3_cache import kernel as sm90_e4m3_cache
from cutlass_py_attn.kernels.sm90_forward import kernel as sm90_forward
from cutlass_py_attn.kernels.sm90_mla import kernel as sm90_mla
from cutlass_py_attn.kernels.sm90_wide import kernel as sm90_wide
from cutlass_py_attn.launch.build import Build

_FOLDERS: Final = (
    *(sm80, sm80_split_d),
    *(sm90_forward, sm90_backward, sm90_wide, sm90_e4m3, sm90_e4m3_cache, sm90_backward_2cta, sm90_mla),
    *(decode, rows, component_gemms),
)
KERNELS: Final[dict[tuple[str, str, str], Kernel]] = {
    (kernel.kind, kernel.family, kernel.variant): kernel
    for kernel in chain.from_iterable(folder.KERNELS for folder in _FOLDERS)
}


def kernel_of(build: Build) -> Kernel:
    """Returns the kernel of a Build."""
    return KERNELS[build.kind, build.family, build.variant]


def fused_kernel_of(build: Build) -> FusedKernel:
    """Returns the kernel of a Build of attention."""
    kernel = kernel_of(build)
    assert isinstance(kernel, FusedKernel)
    return kernel
