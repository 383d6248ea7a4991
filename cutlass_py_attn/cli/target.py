"""Target: the first GPU of this machine, if there is one, and the architectures to compile for."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_py_attn import driver
from cutlass_py_attn.device import ARCHITECTURES
from cutlass_py_attn.errors import DriverError, NoDevice
from cutlass_py_attn.launch import generic_arch

DEFAULT_ARCH = "sm_90"  # where there is no GPU to ask


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first visible GPU, of `count`; `arch` is the newest portable target that it runs."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    count: int
    arch: str


def first_gpu() -> Gpu | None:
    """The first visible GPU, or None where nothing can be launched."""
    try:
        found, count = driver.device(0), driver.device_count()
    except (NoDevice, DriverError):
        return None
    arch = generic_arch(found.compute_capability)
    return Gpu(found.name, found.compute_capability, found.num_sms, count, arch)


def default_arch() -> str:
    """The GPU's target, or DEFAULT_ARCH without one."""
    gpu = first_gpu()
    return gpu.arch if gpu else DEFAULT_ARCH


def hopper_arch(arch: str) -> str | None:
    """The target of the Hopper family that runs where `arch` does: sm_90a for sm_90, None for most."""
    if ARCHITECTURES[arch].has_wgmma:
        return arch
    featured = ARCHITECTURES.get(f"{arch}a")
    return featured.name if featured and featured.has_wgmma else None
