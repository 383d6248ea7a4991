"""Emulator of sm80 and decode kernels: NumPy executes the PTX of whole forwards with cp.async, ldmatrix and mma.sync.

It is the emulator of a block with warp roles (block_emulator.py). cp.async is asynchronous: with `is_eager` a copy ends
when it is issued; else it ends when its thread waits for its group, and until then its bytes in shared memory are NaN.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np

from cutlass_py_attn.plan.plan import Launch
from tests.support.block_emulator import EmulatedBlock
from tests.support.ptx_threads import WARP, Array

_NUMBERS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
POISON = 0xFF


class MmaBlock(EmulatedBlock):
    """One thread block of a launch without tensor maps."""

    def __init__(
        self, ptx: str, block: int, launch: Launch, memory: Array, parameters: Array, addresses: dict[str, int],
        dtype: str, *, is_eager: bool, seed: int,
    ) -> None:  # fmt: skip
        x, y, z = launch.grid
        flat = replace(launch, grid=(x, y * z, 1))
        super().__init__(ptx, block, flat, memory, parameters, addresses, dtype, is_eager=is_eager, seed=seed)
        position = {"%ctaid.x": block % x, "%ctaid.y": block // x % y, "%ctaid.z": block // (x * y)}
        sizes = {"%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": z}
        for name, number in (position | sizes).items():
            self.special[name] = np.full(launch.block[0], number, np.uint64)
        threads = launch.block[0]
        self.pending = [deque[list[Callable[[], None]]]([[]]) for _ in range(threads)]  # groups; the last is open

    def synchronising(self) -> dict[str, Callable[[str, list[str], Array], None]]:
        return {
            "cp.async.commit_group": self.commit_copies,
            "cp.async.wait_group": self.wait_copies,
            "cp.async.c": self.copy_async,
            "mma.sync": self.mma,
            **super().synchronising(),
        }

    def execute(self, op: str, operands: list[str], active: Array) -> None:
        if not op.startswith(("griddepcontrol", "prefetch")):  # launches execute one after another
            super().execute(op, operands, active)

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

    def fragment(self, text: str, rows: int, warps: Array, dtype: str) -> Array:
        """Returns (warps, rows, 16) of an A or B operand; the rows of B are n."""
        words = np.stack([self.value(name).reshape(-1, 8, 4)[warps] for name in re.findall(r"%\w+", text)], -1)
        halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], -1).astype(np.uint16)
        with np.errstate(invalid="ignore"):
            numbers = halves.view(_NUMBERS[dtype]).astype(np.float64)
        # (warps, g, t, (row half, k half), pair) -> (row half, g), (k half, t, pair); registers: k half, then row half
        parts = numbers.reshape(*numbers.shape[:3], 2, rows // 8, 2)
        return parts.transpose(0, 4, 1, 3, 2, 5).reshape(len(warps), rows, 16)

    def mma(self, op: str, operands: list[str], active: Array) -> None:
        """Computes m16n8k16 of 16-bit numbers for each active warp."""
        assert ".m16n8k16." in op, f"{op}: not emulated"
        warps, dtype = self.warps_of(active), op.split(".")[-2]
        assert active.reshape(-1, WARP)[warps].all(), "only some threads of a warp reach a product"
        a, b = (self.fragment(text, rows, warps, dtype) for text, rows in zip(operands[1:3], (16, 8), strict=True))
        with np.errstate(invalid="ignore"):
            product = np.einsum("wmk,wnk->wmn", a, b)
        # (warps, (half, g), (t, pair)) -> register (half, pair) of lane (g, t)
        parts = product.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, len(warps), WARP)
        for out, before, values in zip(*(re.findall(r"%\w+", operands[i]) for i in (0, 3)), parts, strict=True):
            addend = self.value(before).reshape(-1, WARP)[warps].astype(np.uint32).view(np.float32)
            found = self.value(out).reshape(-1, WARP).copy()
            found[warps] = (addend + values).astype(np.float32).view(np.uint32)
            self.registers[out] = found.reshape(-1)

    def result(self, op: str, v: list[Array]) -> Array:
        kind, *modifiers = op.split(".")
        if kind == "cvt" and modifiers[-2:] in (["f16", "f32"], ["bf16", "f32"]):
            with np.errstate(over="ignore"):
                rounded = v[0].astype(np.uint32).view(np.float32).astype(_NUMBERS[modifiers[-2]])
            return rounded.view(np.uint16).astype(np.uint64)
        if kind == "setp" and modifiers[0] == "nan":
            a, b = (x.astype(np.uint32).view(np.float32) for x in v)
            return np.isnan(a) | np.isnan(b)
        if kind == "shfl" and modifiers[1] == "up":
            thread = np.arange(len(v[0]))
            distance = v[1].astype(np.int64)
            return v[0][np.where(thread % WARP >= distance, thread - distance, thread)]
        return super().result(op, v)
