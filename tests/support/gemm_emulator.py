"""Emulator of standalone component GEMMs: NumPy executes their PTX for all threads of one block.

The emulator follows the PTX ISA (cp.async, ldmatrix, mma.sync, TMA, wgmma, their swizzles and descriptors). It does not
use the package's layouts, so it reads from a tile what a GPU would read. It ignores barriers and waits, because it
executes instructions in program order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.kernels.component_gemms.kernel import spec_of
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan.plan import Plan

Array = np.ndarray[Any, Any]

SHARED = 4096  # start of the emulated shared memory; any multiple of 1024
MAP_A, MAP_B = 1, 2  # fake addresses of the tensor maps
TILES, TILE = 2, 1  # tiles in memory, and the one that is computed
NOT_A_NUMBER = 0x7FC00000
SWIZZLE_MASKS = {128: 0x70, 64: 0x30, 32: 0x10}  # address bits of the 16-byte chunk, XORed with the row bits above them
DESCRIPTOR_WIDTHS = {1: 128, 2: 64, 3: 32}  # bits 62-63 of a wgmma descriptor


def swizzle(address: Array, width: int) -> Array:
    """Returns the hardware address of a byte in a tile with a swizzle of `width` bytes."""
    return address ^ (address >> 3 & SWIZZLE_MASKS[width])


def compiled(plan: Plan) -> Artifact:
    """Returns the kernels of a plan, compiled once or from the cache."""
    pytest.importorskip("cutlass.cute")
    from cutlass_py_attn.compilation.compiler import artifact_for

    return artifact_for(plan.build)


class Block:
    """One thread block: registers are arrays over the threads, shared and global memory are bytes."""

    def __init__(self, plan: Plan, memory: Array, parameters: Array) -> None:
        self.plan, self.memory, self.parameters = plan, memory, parameters.view(np.uint8)
        self.threads = np.arange(plan.build.threads)
        self.shared = np.zeros(plan.build.shared_memory_bytes + SHARED, np.uint8)
        self.registers: dict[str, Array] = {}
        self.float_bytes = plan.build.item_bytes

    def run(self, ptx: str) -> None:
        """Executes every statement once: the kernel has no loop, and its branches only elect threads for TMA."""
        body = ptx[ptx.index("{", ptx.index(".reqntid")) + 1 :]
        for text in re.sub(r"//[^\n]*", "", body).split(";"):
            bare = re.sub(r"^(\s*(\$?\w+:|[{}]))*\s*", "", text)  # labels and braces of blocks
            if match := re.match(r"([a-z][\w.:]*)\s+(.+)$", bare, re.DOTALL):
                self.execute(match[1], re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", match[2]))

    def execute(self, op: str, operands: list[str]) -> None:
        """Executes one statement."""
        for prefix, method in self.special().items():
            if op.startswith(prefix):
                return method(op, operands)
        if op.startswith(("bra", "elect", "not", "mbarrier", "ret", "bar", "wgmma", "cp.async")):
            return None  # control and synchronisation: the result of one block does not depend on them
        name, *sources = operands
        self.registers[name] = self.arithmetic(op, [self.value(source) for source in sources])
        return None

    def special(self) -> dict[str, Callable[[str, list[str]], None]]:
        """Returns the methods of statements other than register arithmetic, by the prefix of their opcodes."""
        return {
            "ld.param": self.load_parameter,
            "ld.shared": self.load_shared,
            "mov.b64": self.move_64,
            "st.global.v2.b32": self.store,
            "cp.async.cg": self.cp_async,
            "cp.async.bulk.tensor": self.tma,
            "ldmatrix": self.ldmatrix,
            "mma.sync": self.mma,
            "wgmma.mma_async": self.wgmma,
        }

    def value(self, text: str) -> Array:
        """Returns a register, a special register or a constant, for each thread."""
        if text in self.registers:
            return self.registers[text]
        constants = {"%tid.x": self.threads, "%ctaid.x": TILE, "__dynamic_shmem__0": SHARED}
        if text in constants:
            return np.zeros_like(self.threads) + constants[text]
        if found := re.match(r".*_param_(\d)$", text):
            return np.full_like(self.threads, (MAP_A, MAP_B)[int(found[1])])
        if text.startswith("%"):
            return np.full_like(self.threads, NOT_A_NUMBER)  # uninitialised, as wgmma's first C
        return np.full_like(self.threads, int(text[2:], 16) if text.startswith("0f") else int(text))

    def address(self, text: str) -> Array:
        """Returns the address [register + constant]."""
        return sum((self.value(part) for part in text.strip("[]").split("+")), np.zeros_like(self.threads))

    def arithmetic(self, op: str, v: list[Array]) -> Array:
        """Returns the bits of the result of an integer, select or float32 operation."""
        if op in ("add.f32", "sub.f32"):
            a, b = (x.astype(np.uint32).view(np.float32) for x in v)
            return (a - b if op == "sub.f32" else a + b).view(np.uint32).astype(np.int64)
        kind = op.split(".")[0]
        actions: dict[str, Callable[[], Array]] = {
            "mov": lambda: v[0],
            "cvt": lambda: v[0],
            "cvta": lambda: v[0],
            "add": lambda: v[0] + v[1],
            "sub": lambda: v[0] - v[1],
            "mul": lambda: v[0] * v[1],
            "mad": lambda: v[0] * v[1] + v[2],
            "and": lambda: v[0] & v[1],
            "or": lambda: v[0] | v[1],
            "xor": lambda: v[0] ^ v[1],
            "shl": lambda: v[0] << v[1],
            "shr": lambda: (v[0].astype(np.int32) if op == "shr.s32" else v[0]) >> v[1],
            "setp": lambda: (v[0] == v[1]) ^ (".ne" in op),
            "selp": lambda: np.where(v[2], v[0], v[1]),
            "shfl": lambda: v[0].reshape(-1, 32)[:, v[1][0]].repeat(32),
        }
        result = actions[kind]().astype(np.int64)
        return result & 0xFFFFFFFF if op.endswith("32") and ".wide" not in op else result

    def load_parameter(self, _: str, operands: list[str]) -> None:
        """Loads a 64-bit field of the struct parameter."""
        offset = int((re.search(r"\+(\d+)", operands[1]) or ["", "0"])[1])
        self.registers[operands[0]] = np.full_like(self.threads, self.parameters[offset : offset + 8].view("<i8")[0])

    def words(self, addresses: Array, dtype: str) -> Array:
        """Returns elements of shared memory at byte addresses."""
        size = np.dtype(dtype).itemsize
        assert (addresses % size == 0).all()
        return self.shared[:].view(dtype)[addresses // size]

    def load_shared(self, _: str, operands: list[str]) -> None:
        """Loads one or two float32 for each thread."""
        names, addresses = re.findall(r"%\w+", operands[0]), self.address(operands[1])
        assert (addresses % (4 * len(names)) == 0).all()
        for i, name in enumerate(names):
            self.registers[name] = self.words(addresses + 4 * i, "<u4").astype(np.int64)

    def move_64(self, _: str, operands: list[str]) -> None:
        """Copies a register, joins two 32-bit registers, or splits a 64-bit one."""
        target, source = (re.findall(r"[%\w.]+", x) for x in operands)
        value = self.value(source[0])
        if len(source) == 2:
            value = value | self.value(source[1]) << 32
        for i, name in enumerate(target):
            self.registers[name] = value if len(target) == 1 else value >> 32 * i & 0xFFFFFFFF

    def store(self, _: str, operands: list[str]) -> None:
        """Stores two float32 for each thread."""
        addresses = self.address(operands[0])
        assert (addresses % 8 == 0).all()
        for i, name in enumerate(re.findall(r"%\w+", operands[1])):
            self.memory.view("<u4")[addresses // 4 + i] = self.value(name)

    def cp_async(self, _: str, operands: list[str]) -> None:
        """Copies 16 bytes for each thread."""
        target, source = self.address(operands[0]), self.address(operands[1])
        assert (target % 16 == 0).all()
        assert (source % 16 == 0).all()
        assert operands[2:] == ["16", "16"]
        step = np.arange(16)
        self.shared[target[:, None] + step] = self.memory[source[:, None] + step]

    def tma(self, _: str, operands: list[str]) -> None:
        """Copies one box of the plan's tensor map into shared memory, with its swizzle."""
        target = self.address(operands[0])[0]
        which, column, row = (self.value(x)[0] for x in re.findall(r"%\w+", operands[1]))
        recipe = self.plan.launches[0].tensor_maps[which - MAP_A]
        start = int(self.parameters.view("<i8")[which - MAP_A])
        (columns, rows), (box_columns, box_rows) = recipe.sizes, recipe.box
        assert recipe.strides == (columns,)
        whole = self.memory[start : start + rows * columns * 2].view("<u2")
        box = whole.reshape(rows, columns)[row : row + box_rows, column:][:, :box_columns]
        assert target % 128 == 0
        assert box.shape == (box_rows, box_columns)
        assert box_columns * 2 == recipe.swizzle_bytes
        linear = target + np.arange(box.size) * 2
        self.shared[:].view("<u2")[swizzle(linear, recipe.swizzle_bytes) // 2] = box.ravel()

    def floats(self, bits: Array) -> Array:
        """Returns 16-bit patterns, or float32 patterns truncated to TF32 as in the tensor cores, as numbers."""
        if self.plan.build.dtype == "float16":
            return bits.astype(np.uint16).view(np.float16).astype(np.float64)
        bits = bits.astype(np.int64)
        cut = bits << 16 if self.float_bytes == 2 else bits & 0xFFFFE000
        return cut.astype(np.uint32).view(np.float32).astype(np.float64)

    def ldmatrix(self, op: str, operands: list[str]) -> None:
        """Loads four 8 x 8 matrices for each warp; lanes 8i to 8i + 7 have the addresses of the rows of matrix i."""
        rows = self.address(operands[1]).reshape(-1, 4, 8)
        assert (rows % 16 == 0).all()
        values = self.words(rows[..., None] + 2 * np.arange(8), "<u2").astype(np.int64)
        values = values.swapaxes(-1, -2) if ".trans" in op else values
        lane = np.arange(32)
        for i, name in enumerate(re.findall(r"%\w+", operands[0])):
            low, high = (values[:, i, lane // 4, lane % 4 * 2 + j] for j in (0, 1))
            self.registers[name] = (low | high << 16).ravel()

    def fragment(self, text: str, rows: int, depth: int) -> Array:
        """Returns (warps, rows, depth) of an A or B operand; the rows of B are n."""
        words = np.stack([self.value(name).reshape(-1, 8, 4) for name in re.findall(r"%\w+", text)], -1)
        if self.float_bytes == 2:
            words = np.stack([words & 0xFFFF, words >> 16], -1)
        # (warps, g, t, (row half, k half)[, pair]) -> (row half, g), (k half, t, pair)
        words = words.reshape(*words.shape[:3], 2, rows // 8, -1)
        order = words.transpose(0, 4, 1, 3, 2, 5)
        return self.floats(order.reshape(len(words), rows, depth))

    def mma(self, op: str, operands: list[str]) -> None:
        """Computes m16n8k16 or m16n8k8 for each warp."""
        depth = 16 if self.float_bytes == 2 else 8
        product = np.einsum(
            "wmk,wnk->wmn",
            self.fragment(operands[1], 16, depth),
            self.fragment(operands[2], 8, depth),
        )
        # (warps, (half, g), (t, pair)) -> register (half, pair) of lane (g, t)
        parts = product.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        self.accumulate(operands[0], operands[3], parts)

    def accumulate(self, target: str, source: str, product: Array) -> None:
        """Sets the float32 registers `target` to `source` + product."""
        for out, before, values in zip(*(re.findall(r"%\w+", x) for x in (target, source)), product, strict=True):
            addend = self.value(before).astype(np.uint32).view(np.float32)
            self.registers[out] = (addend + values).astype(np.float32).view(np.uint32).astype(np.int64)

    def tile(self, descriptor: int, rows: int, is_mn_major: bool) -> Array:
        """Returns (rows, 16) of the operand of a descriptor, by the canonical layouts of the PTX ISA."""
        start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        width = DESCRIPTOR_WIDTHS[descriptor >> 62 & 3]
        assert descriptor >> 49 & 7 == 0
        row, k = np.arange(rows)[:, None], np.arange(16)[None, :]
        if is_mn_major:
            columns = width // 2
            offset = row % columns * 2 + row // columns * leading + k % 8 * width + k // 8 * stride
        else:
            offset = row % 8 * width + row // 8 * stride + k * 2
        return self.floats(self.words(swizzle(start + offset, width), "<u2"))

    def wgmma(self, op: str, operands: list[str]) -> None:
        """Computes m64nNk16 for each warpgroup."""
        n = int((re.search(r"n(\d+)k16", op) or [])[1])
        c, a, b, adds, *signs, a_major, b_major = operands
        assert signs == ["1", "1"]
        groups = np.arange(0, len(self.threads), 128)
        unsigned = [int(x) & (1 << 64) - 1 for x in self.value(a)[groups]]
        a_tiles = np.stack([self.tile(x, 64, a_major == "1") for x in unsigned])
        b_tile = self.tile(int(self.value(b)[0]) & (1 << 64) - 1, n, b_major == "1")
        product = np.einsum("wmk,nk->wmn", a_tiles, b_tile)
        # (groups, (warp, half, g), (eight, t, pair)) -> register (eight, half, pair) of thread (warp, g, t)
        parts = product.reshape(-1, 4, 2, 8, n // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5).reshape(n // 2, -1)
        if not self.value(adds)[0]:
            self.registers |= {name: np.zeros_like(self.threads) for name in re.findall(r"%\w+", c)}
        self.accumulate(c, c, parts)


def stored(values: Array, dtype: str) -> Array:
    """Returns the bytes of small integers or float32 numbers in a dtype."""
    if dtype == "bfloat16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8).ravel()
    return values.astype({"float16": "<f2", "float32": "<f4"}[dtype]).view(np.uint8).ravel()


def emulate(plan: Plan) -> tuple[Array, Array, Array]:
    """Returns A, B and C of one block with random tiles."""
    spec, dtype = spec_of(plan.build), plan.build.dtype
    random = np.random.default_rng(7)
    shapes = [(TILES, *spec.a_shape), (TILES, *spec.b_shape)]
    if dtype == "float32":
        a, b = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    else:  # small integers are exact in every dtype, so C must be exact
        a, b = (random.integers(-3, 4, shape).astype(np.float32) for shape in shapes)
    a_bytes, b_bytes = stored(a, dtype), stored(b, dtype)
    c_bytes = np.full(TILES * spec.m * spec.n * 4, 255, np.uint8)
    memory = np.concatenate([a_bytes, b_bytes, c_bytes])
    parameters = np.array([(0, len(a_bytes), len(a_bytes) + len(b_bytes), TILES)], abi.numpy_struct(abi.COMPONENT_GEMM))
    Block(plan, memory, parameters).run(compiled(plan).ptx)
    c = memory[len(a_bytes) + len(b_bytes) :].view("<f4").reshape(TILES, spec.m, spec.n)
    assert np.isnan(np.delete(c, TILE, axis=0)).all()
    return a[TILE].astype(np.float64), b[TILE].astype(np.float64), c[TILE]
