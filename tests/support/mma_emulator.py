"""Emulator of sm80 and decode kernels: NumPy executes the PTX of whole forwards with cp.async, ldmatrix and mma.sync.

It is the emulator of a block with warp roles (block_emulator.py) and of cp.async (async_copies.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np

from cutlass_py_attn.plan.plan import Launch
from tests.support.async_copies import AsyncCopies
from tests.support.ptx_threads import WARP, Array

_NUMBERS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


class MmaBlock(AsyncCopies):
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

    def synchronising(self) -> dict[str, Callable[[str, list[str], Array], None]]:
        return {
            "mma.sync": self.mma,
            **super().synchronising(),
        }

    def execute(self, op: str, operands: list[str], active: Array) -> None:
        if not op.startswith(("griddepcontrol", "prefetch")):  # launches execute one after another
            super().execute(op, operands, active)

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
