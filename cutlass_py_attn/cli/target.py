"""Target: the first GPU of this machine, if there is one, and the architecture to compile for."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_py_attn.errors import DriverError, NoDevice
from cutlass_py_attn.plan.arch import ARCHITECTURES
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.launch import portable_arch

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
    """Returns the GPU's target; DEFAULT_ARCH without a GPU."""
    gpu = first_gpu()
    return gpu.arch if gpu else DEFAULT_ARCH


def sm90_arch(arch: str) -> str | None:
    """Returns the target of the sm90 family on the GPUs of `arch`: sm_90a for sm_90, None for most."""
    if ARCHITECTURES[arch].has_wgmma:
        return arch
    featured = ARCHITECTURES.get(f"{arch}a")
    return featured.name if featured and featured.has_wgmma else None
