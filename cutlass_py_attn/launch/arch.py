"""Architectures: limits of each compile target, as constants; the driver is not queried."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.refusals import one_of, refuse


@dataclass(frozen=True, slots=True)
class Architecture:
    """Limits of one compile target.

    name: target, such as "sm_90a"
    shared_memory_per_block: bytes that a block can use
    num_sms: multiprocessors of the usual data-centre part
    vector_red: whether it has red.global.add.v4.f32 (from sm_90 on)
    registers_per_sm, registers_per_thread, threads_per_block: as the hardware has them
    reserved_shared_memory: bytes that the driver reserves in each block
    """

    name: str
    shared_memory_per_block: int
    num_sms: int
    vector_red: bool
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    threads_per_block: int = 1024
    reserved_shared_memory: int = 1024

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor) of the first devices that run this target's cubins."""
        digits = self.name.removeprefix("sm_").rstrip("af")
        return int(digits[:-1]), int(digits[-1])

    @property
    def is_portable(self) -> bool:
        """Whether its cubins run on later minor versions too; a target with a suffix ("sm_90a") has one version."""
        return self.name[-1].isdigit()

    @property
    def has_wgmma(self) -> bool:
        """Whether the sm90 family (wgmma, TMA, setmaxnreg) can be built for this target."""
        return self.name == "sm_90a"

    def register_limit(self, threads: int) -> int:
        """Returns the registers that each of so many threads of a block may use: what an SM has, up to the most."""
        return min(self.registers_per_thread, self.registers_per_sm // threads // 8 * 8)


_KIB = 1024
ARCHITECTURES: dict[str, Architecture] = {
    arch.name: arch
    for arch in (
        Architecture("sm_80", 163 * _KIB, 108, False),
        Architecture("sm_86", 99 * _KIB, 84, False),
        Architecture("sm_87", 163 * _KIB, 16, False),
        Architecture("sm_89", 99 * _KIB, 142, False),
        Architecture("sm_90", 227 * _KIB, 132, True),
        Architecture("sm_90a", 227 * _KIB, 132, True),
        Architecture("sm_100", 227 * _KIB, 148, True),
        Architecture("sm_120", 99 * _KIB, 188, True),
    )
}


def runs_on(arch: Architecture, compute_capability: tuple[int, int]) -> bool:
    """Returns whether cubins of `arch` run on a device: a target without a suffix runs on later minor versions too."""
    if not arch.is_portable:
        return arch.compute_capability == compute_capability
    major, minor = arch.compute_capability
    return major == compute_capability[0] and minor <= compute_capability[1]


def targets(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    """Returns the targets to plan for on a device: its own, if any, then the newest portable one, if any."""
    fitting = [arch for arch in ARCHITECTURES.values() if runs_on(arch, compute_capability)]
    portable = sorted((arch for arch in fitting if arch.is_portable), key=lambda arch: arch.compute_capability)
    return tuple(arch.name for arch in (*(arch for arch in fitting if not arch.is_portable), *portable[-1:]))


def architecture(name: object) -> Architecture:
    """Returns the limits of target `name`; NotSupported lists the known targets."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        remedy = "pass the compute capability of the GPU that will run the kernel, e.g. sm_90a for an H100 or H200"
        raise NotSupported(refuse("arch", name, one_of(ARCHITECTURES), remedy))
    return ARCHITECTURES[name]
