"""Lifetimes: operands live until a launch on another stream than that of their allocator is complete.

Allocators reuse freed memory at once for the next array on the stream that the memory was allocated on, and do not
wait for other streams. What protects an operand that the caller drops after the call:

- torch array, torch stream: `record_stream`. torch waits for that stream before it reuses the memory.
- CuPy array: CuPy's pool has one arena per stream. A freed block returns to the arena of the stream on which it was
  allocated, and CuPy has nothing like `record_stream`. The array is kept here until an event after the launch has
  passed; later calls look at the events.
- torch array, other stream: kept here too. torch would record an event on the stream when the array is freed, and fail
  if the stream is destroyed by then.
- array of an unknown library, or JAX array beside others: kept here too.

Nothing is kept for a stream that is captured: every launch of the graph reads the operands, and only the caller knows
the last one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.runtime import driver


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """The operands of launches before an event."""

    event: int
    device: driver.Device
    operands: tuple[Any, ...]


kept: list[_Kept] = []
_lock = threading.Lock()


def keep(operands: Iterable[tuple[str, Any]], stream: int, given_stream: object, device: driver.Device) -> None:
    """Makes operands outlive the work that is on `stream` now. Call it with the context of `device` current.

    operands: library and array of each operand whose allocator does not follow `stream`.
    given_stream: the stream as the caller passed it.
    """
    others = []
    for library, array in operands:
        if library == "torch" and _is_torch_stream(given_stream):
            array.record_stream(given_stream)
        else:
            others.append(array)
    if others and not driver.is_capturing(stream):
        entry = _Kept(driver.record_event(stream), device, tuple(others))
        with _lock:
            kept.append(entry)


def release() -> None:
    """Drops the operands of every launch that is complete."""
    complete: list[_Kept] = []
    running: list[_Kept] = []
    with _lock:
        for entry in kept:
            (complete if _is_complete(entry) else running).append(entry)
        kept[:] = running
    # `complete` dies here, outside of the lock: an allocator may run other code.


def _is_complete(entry: _Kept) -> bool:
    """Returns whether the event has passed, or the device has failed; destroys the event then."""
    try:
        with entry.device.current():
            if not driver.has_passed(entry.event):
                return False
            driver.destroy_event(entry.event)
    except DriverError:  # the device has failed, which the next launch reports
        pass
    return True


def _is_torch_stream(stream: object) -> bool:
    """Returns whether torch created the stream; it destroys none."""
    cuda = sys.modules["torch"].cuda
    return isinstance(stream, cuda.Stream) and not isinstance(stream, cuda.ExternalStream)
