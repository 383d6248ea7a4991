"""Block of an sm90 backward: the instructions beside those of the forward, of loads by rows, sums and stores of tiles.

A bulk reduction, or a store of TMA, is done when it is issued if copies end at once, else when its warp waits for it.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cutlass_py_attn.plan.plan import TensorMap
from tests.support.async_copies import AsyncCopies
from tests.support.gemm_emulator import swizzle
from tests.support.mma_emulator import MmaBlock
from tests.support.ptx_threads import WARP, Array, as_type


class BackwardBlock(AsyncCopies):
    """One thread block of a launch."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.sums: dict[int, deque[Callable[[], None]]] = defaultdict(deque)  # by warp: reductions and stores to do

    def run(self) -> None:
        super().run()
        for pending in self.sums.values():
            while pending:
                pending.popleft()()

    def synchronising(self) -> dict[str, Callable[[str, list[str], Array], None]]:
        return {
            "griddepcontrol": lambda op, operands, active: None,
            "cp.async.bulk.tensor": self.tma,
            "cp.async.bulk.commit_group": lambda op, operands, active: None,
            "cp.async.bulk.wait_group": self.wait_for_sums,
            "cp.async.bulk.shared": self.load_rows,
            "cp.reduce.async.bulk": self.reduce,
            "atom": self.count,
            "red.release": self.add,
            "red.relaxed": self.add_vector,
            **super().synchronising(),
        }

    def tma(self, op: str, operands: list[str], active: Array) -> None:
        if ".global.shared::cta" not in op:
            super().tma(op, operands, active)
            return
        (thread,) = np.flatnonzero(active)
        names = re.findall(r"%\w+", operands[0])
        which, *coordinates = (int(as_type(self.value(name), "s32")[thread]) for name in names)
        store = partial(self.store_box, *self.maps[which], coordinates, int(self.address(operands[1])[thread]))
        if self.is_eager:
            store()
        else:
            self.sums[int(thread) // WARP].append(store)

    def store_box(self, spec: TensorMap, start: int, coordinates: list[int], source: int) -> None:
        """Stores a box from shared memory with its swizzle, except what is outside of the array."""
        inside, addresses = self.box_addresses(spec, start, coordinates)
        box = self.memory[swizzle(source + np.arange(addresses.size), spec.swizzle_bytes)].reshape(addresses.shape)
        self.memory[addresses[inside]] = box[inside]

    def load_rows(self, op: str, operands: list[str], active: Array) -> None:
        """Loads bytes to shared memory, and counts them at an mbarrier."""
        (thread,) = np.flatnonzero(active)
        target, source, barrier = (int(self.address(operands[place])[thread]) for place in (0, 1, 3))
        size = int(self.value(operands[2])[thread])

        def copy() -> None:
            self.memory[target : target + size] = self.memory[source : source + size]
            found = self.mbarriers[barrier]
            found.bytes -= size
            self.end_phase(found)

        self.copies.append(copy)

    def reduce(self, op: str, operands: list[str], active: Array) -> None:
        """Adds float32 of shared memory to global memory; each reduction is a group of its own."""
        assert ".add" in op
        assert "f32" in op
        (thread,) = np.flatnonzero(active)
        target, source = (int(self.address(operands[place])[thread]) for place in (0, 1))
        size = int(self.value(operands[2])[thread])

        def add() -> None:
            total = self.memory[target : target + size].view(np.float32)
            total += self.memory[source : source + size].view(np.float32)

        if self.is_eager:
            add()
        else:
            self.sums[int(thread) // WARP].append(add)

    def wait_for_sums(self, _: str, operands: list[str], active: Array) -> None:
        for warp in self.warps_of(active):
            while len(self.sums[int(warp)]) > int(operands[0]):
                self.sums[int(warp)].popleft()()

    def count(self, op: str, operands: list[str], active: Array) -> None:
        """Adds to an int32 in global memory and returns what it was."""
        assert ".add" in op
        before = self.value(operands[0]).copy()
        for thread in np.flatnonzero(active):
            place = int(self.address(operands[1])[thread])
            word = self.memory[place : place + 4].view(np.uint32)
            before[thread] = int(word[0])
            word += np.uint32(self.value(operands[2])[thread])
        self.registers[operands[0]] = before

    def add(self, op: str, operands: list[str], active: Array) -> None:
        """Adds to an int32 in global memory."""
        assert ".add" in op
        for thread in np.flatnonzero(active):
            place = int(self.address(operands[0])[thread])
            word = self.memory[place : place + 4].view(np.uint32)
            word += np.uint32(self.value(operands[1])[thread])

    def add_vector(self, op: str, operands: list[str], active: Array) -> None:
        """Adds four float32 to global memory."""
        assert op.endswith(".add.v4.f32")
        parts = [self.value(name).astype(np.uint32).view(np.float32) for name in re.findall(r"%\w+", operands[1])]
        values, places = np.stack(parts, axis=1), self.address(operands[0])
        for thread in np.flatnonzero(active):
            place = int(places[thread])
            total = self.memory[place : place + 16].view(np.float32)
            total += values[thread]

    def stmatrix(self, op: str, operands: list[str], active: Array) -> None:
        if ".trans" not in op:
            super().stmatrix(op, operands, active)
            return
        warps, rows = self.rows_of_matrices(operands[0], active)
        lane = np.arange(WARP)
        for i, name in enumerate(re.findall(r"%\w+", operands[1])):
            words = self.value(name).reshape(-1, WARP)[warps].astype(np.uint32)
            matrix = np.zeros((len(warps), 8, 8), np.uint16)
            for j in (0, 1):  # element (row g, column 2t + j) of the fragment becomes (row 2t + j, column g)
                matrix[:, lane % 4 * 2 + j, lane // 4] = (words >> np.uint32(16 * j)).astype(np.uint16)
            self.memory[rows[:, i, :, None] + np.arange(16)] = matrix.view(np.uint8).reshape(len(warps), 8, 16)

    def result(self, op: str, v: list[Array]) -> Array:
        kind, *modifiers = op.split(".")
        if kind == "cvt" and modifiers[-2:] == ["f32", "bf16"]:
            return (v[0] & np.uint64(0xFFFF)) << np.uint64(16)
        if kind == "cvt" and modifiers[-2:] == ["f32", "f16"]:
            halves = (v[0] & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16)
            return halves.astype(np.float32).view(np.uint32).astype(np.uint64)
        return super().result(op, v)


class BiasBackwardBlock(BackwardBlock, MmaBlock):
    """One thread block of a launch of one batch, which may be one of the grad_bias kernel of mma.sync."""
