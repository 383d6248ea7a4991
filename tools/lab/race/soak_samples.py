"""Soak samples: the memory of a long run over time, and whether it grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

WARM_UP_SHARE: Final = 1 / 3  # of the run: kernels are loaded, references computed, caches filled
WARM_UP_SECONDS: Final = 300.0  # at most
LEAST_SAMPLES: Final = 8  # after the warm-up
MIB: Final = 1 << 20
# Growth after the warm-up that is allowed. A call that keeps 1 KiB grows by far more in half an hour.
BOUNDS_MIB: Final = {"device": 64.0, "arrays": 64.0, "pool": 64.0, "host": 64.0}


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory in MiB at a time (seconds since the start), and the calls until then.

    device: used on the whole GPU, by all processes. arrays: of this process by cuMemAlloc. pool: reserved by this
    process's memory pool. host: resident.
    """

    seconds: float
    calls: int
    device: float
    arrays: float
    pool: float
    host: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Growth in MiB of each number that is compared, after the warm-up; objections are empty if memory is steady."""

    warm_up_seconds: float
    samples: int
    growth: dict[str, float]
    bounds: dict[str, float]
    objections: tuple[str, ...]

    @property
    def is_steady(self) -> bool:
        """Whether no number grew beyond its bound."""
        return not self.objections

    def line(self) -> dict[str, Any]:
        """Returns the fields for the record."""
        return {**asdict(self), "objections": list(self.objections), "is_steady": self.is_steady}


def memory_of(samples: Sequence[Sample], *, is_shared: bool, prepared: float = 0.0) -> Memory:
    """Compares the median of the last quarter of the samples after the warm-up with that of the first quarter.

    is_shared: other processes use the GPU too, so that its used memory says nothing about this one.
    prepared: seconds until every problem was called once, before which the warm-up does not end.
    """
    seconds = samples[-1].seconds if samples else 0.0
    warm_up = max(prepared, min(WARM_UP_SECONDS, seconds * WARM_UP_SHARE))
    later = [sample for sample in samples if sample.seconds >= warm_up]
    bounds = {name: bound for name, bound in BOUNDS_MIB.items() if not (is_shared and name == "device")}
    if len(later) < LEAST_SAMPLES:
        missing = f"{len(later)} samples after the warm-up of {warm_up:.0f} s: must be {LEAST_SAMPLES} or more"
        return Memory(warm_up, len(later), {}, bounds, (missing,))
    quarter = len(later) // 4
    growth = {name: _median(later[-quarter:], name) - _median(later[:quarter], name) for name in bounds}
    grown = tuple(
        f"{name} memory grew by {growth[name]:.1f} MiB after a warm-up of {warm_up:.0f} s: must be {bound} MiB or less"
        for name, bound in bounds.items()
        if growth[name] > bound
    )
    return Memory(warm_up, len(later), {name: round(value, 2) for name, value in growth.items()}, bounds, grown)


def _median(samples: Sequence[Sample], name: str) -> float:
    return statistics.median(getattr(sample, name) for sample in samples)


def resident_mib() -> float:
    """Returns the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def rounded(sample: Sample) -> Mapping[str, float]:
    """Returns the fields of a sample for the record."""
    return {field.name: round(getattr(sample, field.name), 2) for field in fields(sample)}
