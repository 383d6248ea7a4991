"""Cluster ring model: the chunk ring of the wide sm90 kernels, its producers and warpgroups, on the CPU."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Chunk = tuple[str, int, int]  # operand, number of the tile, first column
Action = tuple[Any, ...]


class Barrier:
    """An mbarrier: a phase ends when `arrivals` have come and all copies that were announced; waits see its parity."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.pending, self.copies, self.ended = arrivals, arrivals, 0, 0

    def arrive(self, copies: int = 0) -> None:
        self.pending -= 1
        self.copy(copies)

    def copy(self, count: int) -> None:
        self.copies += count
        if self.pending == 0 and self.copies == 0:
            self.pending, self.ended = self.arrivals, self.ended + 1

    def has_passed(self, parity: int) -> bool:
        return self.ended % 2 != parity


class ClusterModel:
    """The producers and warpgroups of both blocks of a cluster. A producer copies half of every chunk to both blocks.

    Anything that can go on may be the next to do so. Copies arrive in any order, some of them late.

    stages: of the ring
    loads: (warpgroup that reads it, chunk) in the order of the loads
    reads: yields what a warpgroup waits for, ("full", number, chunk), what it signals, ("release", number), and its
        named barriers, ("wait" or "arrive", name, number)
    full_barriers: of a stage: one for each warpgroup, or one for both
    """

    def __init__(
        self,
        stages: int,
        loads: Sequence[tuple[int, Chunk]],
        reads: Callable[[int], Iterator[Action]],
        seed: int,
        full_barriers: int = 2,
    ) -> None:
        self.rng, self.stages, self.full_barriers = random.Random(seed), stages, full_barriers
        self.queues = [deque(enumerate(loads)) for _ in range(2)]
        self.readers = {chunk: reader for reader, chunk in loads}
        self.programs = [[reads(warpgroup) for warpgroup in range(2)] for _ in range(2)]
        self.pending = [[next(program, None) for program in programs] for programs in self.programs]
        places = [(block, stage) for block in range(2) for stage in range(self.stages)]
        self.full = {(*place, index): Barrier(1) for place in places for index in range(full_barriers)}
        self.empty = {place: Barrier(2) for place in places}
        self.memory: dict[tuple[int, int], dict[int, Chunk]] = {place: {} for place in places}
        self.copies: list[tuple[tuple[int, int], int, Chunk]] = []
        self.phases = [[[0] * self.stages for _ in range(2)] for _ in range(2)]
        self.named = [dict[Action, int]() for _ in range(2)]

    def barrier(self, place: tuple[int, int], chunk: Chunk) -> Barrier:
        """The full barrier of a chunk."""
        return self.full[(*place, self.readers[chunk] % self.full_barriers)]

    def load(self, block: int) -> bool:
        """One chunk of a producer, if its stage is empty in both blocks."""
        if not self.queues[block]:
            return False
        number, (_, chunk) = self.queues[block][0]
        stage, turn = number % self.stages, number // self.stages
        if not self.empty[block, stage].has_passed(turn % 2 ^ 1):
            return False
        self.queues[block].popleft()
        self.barrier((block, stage), chunk).arrive(2)
        self.copies += [((target, stage), block, chunk) for target in range(2)]
        return True

    def copy(self) -> bool:
        """The arrival of a copy; those that were issued first are likely to be late ones."""
        if not self.copies or self.rng.random() < 0.5:
            return False
        index = self.rng.choice((-1, -1, -1, self.rng.randrange(len(self.copies))))
        place, half, chunk = self.copies.pop(index)
        self.memory[place][half] = chunk
        self.barrier(place, chunk).copy(-1)
        return True

    def read(self, block: int, warpgroup: int) -> bool:
        """One action of a warpgroup, if what it waits for is there."""
        action = self.pending[block][warpgroup]
        if action is None:
            return False
        kind, *rest = action
        if kind in ("full", "release"):
            stage = rest[0] % self.stages
            if kind == "release":
                for target in range(2):
                    self.empty[target, stage].arrive()
            else:
                phases = self.phases[block][warpgroup]
                parity = phases[stage] if self.full_barriers == 2 else rest[0] // self.stages % 2
                if not self.barrier((block, stage), rest[1]).has_passed(parity):
                    return False
                phases[stage] ^= 1
                assert self.memory[block, stage] == dict.fromkeys(range(2), rest[1]), "another chunk"
        elif kind == "wait" and not self.named[block].get(tuple(rest)):
            return False
        else:
            change = 1 if kind == "arrive" else -1
            self.named[block][tuple(rest)] = self.named[block].get(tuple(rest), 0) + change
        self.pending[block][warpgroup] = next(self.programs[block][warpgroup], None)
        return True

    def run(self) -> None:
        """Runs to the end; AssertionError if a warpgroup reads another chunk than its own, or nothing can go on."""
        agents: list[Callable[[], bool]] = [functools.partial(self.load, block) for block in range(2)]
        agents += [functools.partial(self.read, block, warpgroup) for block in range(2) for warpgroup in range(2)]
        agents += [self.copy] * 2
        waits = 0
        while any(action is not None for actions in self.pending for action in actions):
            moved = self.rng.choice(agents)()
            waits = 0 if moved else waits + 1
            assert waits < 1000, f"nothing can go on: {self.pending}"
        assert not any(self.queues)
        assert not self.copies
        assert not any(count for named in self.named for count in named.values()), "every arrival has its wait"
