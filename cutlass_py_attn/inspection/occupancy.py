"""Occupancy: how many blocks of a kernel one multiprocessor holds at a time, and what stops it from holding more.

The limits are those of the tables of technical specifications in NVIDIA's CUDA programming guide; the driver's own
answer is cuOccupancyMaxActiveBlocksPerMultiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.device import architecture
from cutlass_py_attn.parts.integers import ceil_div, round_up

_KIB: Final = 1024
WARP_THREADS: Final = 32
REGISTERS_AT_ONCE: Final = 256  # of a warp, which gets a multiple
PARTITIONS: Final = 4  # of a multiprocessor: each has a quarter of its registers and warps
SHARED_MEMORY_AT_ONCE: Final = 128


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor holds at most; shared memory in bytes, the driver's share of each block included."""

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
    """Blocks and warps of one kernel that a multiprocessor holds; `limited_by` names every limit that is reached."""

    blocks: int
    warps: int
    warps_allowed: int
    limited_by: tuple[str, ...]


def occupancy(arch: str, threads: int, registers: int, dynamic_shared_memory: int, static: int = 0) -> Occupancy:
    """Of a kernel with these threads and shared memory (bytes) a block and registers a thread.

    static: as the cubin states it, which from sm_90 on includes the driver's share. NotSupported: unknown `arch`.
    """
    limits = architecture(arch)
    holds = MULTIPROCESSORS[limits.compute_capability]
    warps = ceil_div(threads, WARP_THREADS)
    of_warp = round_up(max(registers, 1) * WARP_THREADS, REGISTERS_AT_ONCE)
    warps_with_registers = limits.registers_per_sm // PARTITIONS // of_warp * PARTITIONS
    memory = round_up(dynamic_shared_memory + max(static, limits.reserved_shared_memory), SHARED_MEMORY_AT_ONCE)
    allowed = {
        "registers": warps_with_registers // warps,
        "shared memory": holds.shared_memory // memory,
        "warps": holds.warps // warps,
        "blocks": holds.blocks,
    }
    blocks = min(allowed.values())
    reached = tuple(name for name, count in allowed.items() if count == blocks)
    return Occupancy(blocks, blocks * warps, holds.warps, reached)
