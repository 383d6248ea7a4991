"""cp.async of an emulated block: copies of single threads from global to shared memory.

With `is_eager` a copy ends when it is issued; else it ends when its thread waits for its group, and until then its
bytes in shared memory are NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.block_emulator import EmulatedBlock
from tests.support.ptx_threads import Array

POISON = 0xFF


class AsyncCopies(EmulatedBlock):
    """One thread block of a launch, whose threads copy."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        # Groups by thread; the last is open.
        self.pending = [deque[list[Callable[[], None]]]([[]]) for _ in range(len(self.counters))]

    def synchronising(self) -> dict[str, Callable[[str, list[str], Array], None]]:
        return {
            "cp.async.commit_group": self.commit_copies,
            "cp.async.wait_group": self.wait_copies,
            "cp.async.c": self.copy_async,
            **super().synchronising(),
        }

    def copy_async(self, _: str, operands: list[str], active: Array) -> None:
        targets, sources = self.address(operands[0]), self.address(operands[1])
        size = int(operands[2])
        counts = self.value(operands[3]) if len(operands) > 3 else np.full(len(active), size)
        for thread in np.flatnonzero(active):
            target, source, count = int(targets[thread]), int(sources[thread]), int(counts[thread])
            assert target % size == 0, "a copy is misaligned"
            assert count == 0 or source % size == 0, "a copy is misaligned"

            def copy(target: int = target, source: int = source, count: int = count) -> None:
                self.memory[target : target + size] = 0
                self.memory[target : target + count] = self.memory[source : source + count]

            if self.is_eager:
                copy()
            else:
                self.memory[target : target + size] = POISON
                self.pending[thread][-1].append(copy)

    def commit_copies(self, _: str, __: list[str], active: Array) -> None:
        for thread in np.flatnonzero(active):
            self.pending[thread].append([])

    def wait_copies(self, _: str, operands: list[str], active: Array) -> None:
        for thread in np.flatnonzero(active):
            while len(self.pending[thread]) - 1 > int(operands[0]):
                for copy in self.pending[thread].popleft():
                    copy()
