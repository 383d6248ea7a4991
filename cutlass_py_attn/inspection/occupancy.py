"""Occupancy: how many thread blocks of a kernel are resident on one multiprocessor, and which limit is reached.

The limits are from the table of technical specifications in NVIDIA's CUDA programming guide. The driver computes the
same number by cuOccupancyMaxActiveBlocksPerMultiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.integers import ceil_div, round_up
from cutlass_py_attn.launch.arch import architecture

_KIB: Final = 1024
WARP_THREADS: Final = 32
REGISTER_ALLOCATION_UNIT: Final = 256  # registers; a warp gets a multiple
PARTITIONS: Final = 4  # of a multiprocessor; each has a quarter of the registers and warps
SHARED_MEMORY_ALLOCATION_UNIT: Final = 128  # bytes


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of one multiprocessor: resident warps and blocks, shared memory (bytes) including the driver's share."""

    warps: int
    blocks: int
    shared_memory: int


MULTIPROCESSORS: Final[dict[tuple[int, int], Multiprocessor]] = {
    (8, 0): Multiprocessor(64, 32, 164 * _KIB),
    (8, 6): Multiprocessor(48, 16, 100 * _KIB),
    (8, 7): Multiprocessor(48, 16, 164 * _KIB),
    (8, 9): Multiprocessor(48, 24, 100 * _KIB),
    (9, 0): Multiprocessor(64, 32, 228 * _KIB),
    (10, 0): Multiprocessor(64, 32, 228 * _KIB),
    (12, 0): Multiprocessor(48, 24, 100 * _KIB),
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Resident blocks and warps of one kernel on a multiprocessor.

    max_warps: the limit of the hardware. limited_by: every limit that is reached.
    """

    blocks: int
    warps: int
    max_warps: int
    limited_by: tuple[str, ...]


def occupancy(arch: str, threads: int, registers: int, dynamic_shared_memory: int, static: int = 0) -> Occupancy:
    """Returns the occupancy of a kernel. Raises NotSupported if `arch` is unknown.

    - threads: threads per block
    - registers: registers per thread
    - dynamic_shared_memory: bytes per block
    - static: static shared memory that the cubin states (bytes); from sm_90 on it includes the driver's share
    """
    limits = architecture(arch)
    multiprocessor = MULTIPROCESSORS[limits.compute_capability]
    warps = ceil_div(threads, WARP_THREADS)
    registers_per_warp = round_up(max(registers, 1) * WARP_THREADS, REGISTER_ALLOCATION_UNIT)
    warps_by_registers = limits.registers_per_sm // PARTITIONS // registers_per_warp * PARTITIONS
    memory = round_up(dynamic_shared_memory + max(static, limits.reserved_shared_memory), SHARED_MEMORY_ALLOCATION_UNIT)
    allowed = {
        "registers": warps_by_registers // warps,
        "shared memory": multiprocessor.shared_memory // memory,
        "warps": multiprocessor.warps // warps,
        "blocks": multiprocessor.blocks,
    }
    blocks = min(allowed.values())
    reached = tuple(name for name, count in allowed.items() if count == blocks)
    return Occupancy(blocks, blocks * warps, multiprocessor.warps, reached)
