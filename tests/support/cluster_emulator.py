"""Cluster emulator: NumPy executes the PTX of a warp-specialised sm90 kernel for the two blocks of a cluster.

A warp runs until it waits for an mbarrier, a named barrier or the cluster; then another one runs, in random order. What
is asynchronous is late: a copy of TMA arrives after a random time, and a wgmma group executes when the warp waits for
it. So a tile that is read before it arrives, or released before it is read, gives wrong results.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutlass_py_attn.plan.plan import Launch, TensorMap
from tests.support.gemm_emulator import DESCRIPTOR_WIDTHS, swizzle
from tests.support.ptx_floats import FloatThreads
from tests.support.ptx_threads import WARP, Array, as_type

BLOCKS = 2
SHARED = 1024  # start of the emulated shared memory
RANK_SHIFT = 24  # of an address in the shared memory of a block of the cluster
MAP_SHIFT = 32  # fake address of a parameter: its number, counted from 1
CANARY = 0xFF  # of memory that nothing has written: NaN in every type
SKIPPED = ("fence", "griddepcontrol", "setmaxnreg", "wgmma.fence")
WAITING = (".sync", "bar.", "barrier.cluster", "mbarrier_wait")
_TRY_WAIT = re.compile(
    r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\.try_wait\.parity\.shared\.b64 P1, \[([^\]]+)\], (\S+), \d+;"
    r".*?DONE:\s*\}",
    re.DOTALL,
)


class Mbarrier:
    """An mbarrier: a phase ends when all arrivals and all bytes have come."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.ended = 0

    def add(self, arrivals: int, announced: int = 0) -> None:
        """Counts arrivals, and bytes that were announced or, below 0, have come."""
        self.pending -= arrivals
        self.bytes += announced
        assert self.pending >= 0
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.ended = self.count, self.ended + 1


class Block:
    """Shared memory, mbarriers by address and named barriers, (threads that have arrived, times passed), of a block."""

    def __init__(self, rank: int, shared_memory_bytes: int) -> None:
        self.rank = rank
        self.shared = np.full(SHARED + shared_memory_bytes, CANARY, np.uint8)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, tuple[int, int]] = {}


def body_of(ptx: str, symbol: str) -> str:
    """Returns the statements of an entry, with a statement of its own for each loop that waits for an mbarrier."""
    text = ptx[ptx.index(f".entry {symbol}(") :].split(".visible .entry")[0]
    body = re.sub(r"//[^\n]*", "", text[text.index("\n{") + 2 :])
    body = _TRY_WAIT.sub(r"mbarrier_wait [\1], \2;", body)
    return ".entry{" + re.sub(r"^\s*(?:[{}]|\.reg[^\n]*)\s*$", "", body, flags=re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Product:
    """One wgmma of a warp: its registers of C, the descriptors of A and B, and whether they are MN-major."""

    registers: list[str]
    descriptors: tuple[int, int]
    are_transposed: tuple[bool, bool]
    accumulates: bool


class Warp(FloatThreads):
    """One warp of a block. waiting: what it waits for; None if it can run."""

    def __init__(self, cluster: Cluster, block: Block, number: int, position: tuple[int, int, int]) -> None:
        self.cluster, self.block, self.number = cluster, block, number
        self.memory, self.parameters = cluster.memory, cluster.parameters
        lanes = np.arange(WARP, dtype=np.uint64)
        names = "%ctaid.x", "%ctaid.y", "%ctaid.z", "%cluster_ctarank"
        same = dict(zip(names, (*position, block.rank), strict=True))
        self.special = {"%tid.x": lanes + np.uint64(WARP * number), "%laneid": lanes}
        self.special |= {name: np.full(WARP, value, np.uint64) for name, value in same.items()}
        self.registers: dict[str, Array] = {}
        self.counters = np.zeros(WARP, np.int64)
        self.statements: list[tuple[str, str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        if cluster.statements:
            self.statements, self.labels = cluster.statements, cluster.labels
        else:
            self._parse(cluster.body)
            cluster.statements, cluster.labels = self.statements, self.labels
        self.waiting: tuple[Any, ...] | None = None
        self.cluster_arrivals = 0
        self.issued: list[Product] = []
        self.groups: deque[list[Product]] = deque()

    def value(self, text: str) -> Array:
        if text == "__dynamic_shmem__0":
            return np.full(WARP, SHARED, np.uint64)
        if found := re.fullmatch(r"\w+_param_(\d+)", text):
            return np.full(WARP, int(found[1]) + 1 << MAP_SHIFT, np.uint64)
        if text == "p":  # a predicate of inline assembly
            return self.registers.setdefault(text, np.zeros(WARP, np.uint64))
        return super().value(text)

    @property
    def has_ended(self) -> bool:
        """Whether all threads have returned."""
        return bool((self.counters >= len(self.statements)).all())

    @property
    def is_ready(self) -> bool:
        """Whether the warp can run."""
        if self.waiting is None:
            return not self.has_ended
        kind, *what = self.waiting
        if kind == "mbarrier":
            return self.block.mbarriers[what[0]].ended % 2 != what[1]
        if kind == "named":
            return self.block.named[what[0]][1] > what[1]
        return self.cluster.arrivals >= self.cluster_arrivals * self.cluster.warps

    def run(self) -> None:
        """Runs until it waits or ends."""
        self.waiting = None
        while not self.has_ended:
            counter = int(self.counters.min())
            active = self.counters == counter
            negated, predicate, op, operands = self.statements[counter]
            assert active.all() or not any(word in op for word in WAITING), f"{op}: only some threads reach it"
            self.counters[active] += 1
            if predicate:
                condition = self.value(predicate) & np.uint64(1) != 0
                active = active & (~condition if negated else condition)
            if op == "ret":
                self.counters[active] = len(self.statements)
            elif op.startswith("bra"):
                self.counters[active] = self.labels[operands[0]]
            elif active.any():
                self.execute(op, operands, active)
                if not self.is_ready:
                    return
                self.waiting = None
        assert not self.issued
        assert not self.groups

    def one(self, text: str, active: Array) -> int:
        """Returns a value that all active threads share."""
        (value,) = set(self.value(text)[active].tolist())
        return int(value)

    def place(self, text: str, active: Array) -> int:
        """Returns an address that all active threads share."""
        (address,) = set(self.address(text)[active].tolist())
        return int(address)

    def execute(self, op: str, operands: list[str], active: Array) -> None:
        if op.startswith(SKIPPED):
            return
        if op.startswith(("mbarrier", "bar.", "barrier.cluster")):
            self.synchronise(op, operands, active)
        elif op == "elect.sync":
            self.write(operands[0].split("|")[1], (np.arange(WARP) == 0).astype(np.uint64), 1, active)
        elif op.startswith("mapa"):
            rank = self.value(operands[2]) + np.uint64(1)
            self.write(operands[0], self.value(operands[1]) | rank << np.uint64(RANK_SHIFT), 32, active)
        elif op.startswith("cvta"):
            self.write(operands[0], self.value(operands[1]), 64, active)
        elif op.startswith("cp.async.bulk.tensor"):
            self.copy(op, operands, active)
        elif op.startswith("stmatrix"):
            self.stmatrix(operands)
        elif op.startswith("wgmma.mma_async"):
            accumulators, a, b, adds, *signs, a_major, b_major = operands
            assert signs == ["1", "1"]
            registers = re.findall(r"%\w+", accumulators)
            descriptors = self.one(a, active), self.one(b, active)
            transposed = a_major == "1", b_major == "1"
            self.issued.append(Product(registers, descriptors, transposed, bool(self.one(adds, active))))
        elif op.startswith("wgmma.commit"):
            self.groups.append(self.issued)
            self.issued = []
        elif op.startswith("wgmma.wait"):
            while len(self.groups) > int(operands[0]):
                for product in self.groups.popleft():
                    self.multiply(product)
        elif op in ("div.s32", "mul.hi.s32", "mul.hi.u32", "min.relu.s32"):
            a, b = (as_type(self.value(text), op[-3:]) for text in operands[1:])
            self.write(operands[0], _integer(op, a, b).astype(np.uint64), 32, active)
        else:
            super().execute(op, operands, active)

    def synchronise(self, op: str, operands: list[str], active: Array) -> None:
        """Executes an operation of an mbarrier, a named barrier or the cluster's barrier."""
        barriers = self.block.mbarriers
        if op == "mbarrier_wait":
            self.waiting = "mbarrier", self.place(operands[0], active), self.one(operands[1], active) & 1
        elif op.startswith("mbarrier.init"):
            barriers[self.place(operands[0], active)] = Mbarrier(self.one(operands[1], active))
        elif op.startswith("mbarrier.arrive.expect_tx"):
            assert active.sum() == 1
            barriers[self.place(operands[1], active)].add(1, self.one(operands[2], active))
        elif op.startswith("mbarrier.arrive"):
            assert active.sum() == 1
            address = self.place(operands[1], active)
            if "cluster" in op:
                barriers = self.cluster.blocks[(address >> RANK_SHIFT) - 1].mbarriers
            barriers[address & (1 << RANK_SHIFT) - 1].add(1)
        elif op.startswith("bar."):
            number, count = self.one(operands[0], active), self.one(operands[1], active)
            arrived, passed = self.block.named.get(number, (0, 0))
            self.waiting = ("named", number, passed) if op == "bar.sync" else None
            arrived += WARP
            assert arrived <= count
            self.block.named[number] = (0, passed + 1) if arrived == count else (arrived, passed)
        elif op.startswith("barrier.cluster.arrive"):
            self.cluster.arrivals, self.cluster_arrivals = self.cluster.arrivals + 1, self.cluster_arrivals + 1
        else:
            self.waiting = ("cluster",)

    def move(self, op: str, operands: list[str], active: Array) -> None:
        memory = self.memory
        self.memory = self.block.shared if ".shared" in op else memory
        super().move(op, operands, active)
        self.memory = memory

    def copy(self, op: str, operands: list[str], active: Array) -> None:
        """Issues a copy of one box to shared memory, of both blocks with multicast. It arrives later."""
        assert active.sum() == 1
        target, barrier = self.place(operands[0], active), self.place(operands[2], active)
        tensor_map, *coordinates = re.findall(r"%\w+", operands[1])
        at = [int(as_type(self.value(text), "s32")[active][0]) for text in coordinates]
        mask = self.one(operands[3], active) if "multicast" in op else 1 << self.block.rank
        number = (self.one(tensor_map, active) >> MAP_SHIFT) - 1
        for block in self.cluster.blocks:
            if mask >> block.rank & 1:
                self.cluster.copies.append((block, barrier, target, number, at))

    def stmatrix(self, operands: list[str]) -> None:
        """Stores four 8 x 8 matrices; lanes 8i to 8i + 7 have the addresses of the rows of matrix i."""
        rows = self.address(operands[0])
        assert (rows % 16 == 0).all()
        words = self.block.shared.view("<u4")
        for i, name in enumerate(re.findall(r"%\w+", operands[1])):
            places = rows[8 * i : 8 * i + 8, None] // 4 + np.arange(4)
            words[places] = self.value(name).astype(np.uint32).reshape(8, 4)

    def tile(self, descriptor: int, rows: Array, is_mn_major: bool) -> Array:
        """Returns (rows, 16) of the operand of a descriptor, by the canonical layouts of the PTX ISA."""
        start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        width = DESCRIPTOR_WIDTHS[descriptor >> 62 & 3]
        row, k = rows[:, None], np.arange(16)[None, :]
        if is_mn_major:
            columns = width // 2
            offset = row % columns * 2 + row // columns * leading + k % 8 * width + k // 8 * stride
        else:
            offset = row % 8 * width + row // 8 * stride + k * 2
        words = self.block.shared.view("<u2")[swizzle(start + offset, width) // 2]
        return words.view(self.cluster.dtype).astype(np.float64)

    def multiply(self, product: Product) -> None:
        """Computes this warp's 16 rows of m64nNk16: register (eight, half, pair) of lane (g, t)."""
        columns = 2 * len(product.registers)
        rows = np.arange(16) + 16 * (self.number % 4), np.arange(columns)
        a, b = map(self.tile, product.descriptors, rows, product.are_transposed)
        parts = (a @ b.T).reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(-1, WARP)
        for name, values in zip(product.registers, parts, strict=True):
            before = self.value(name).astype(np.uint32).view(np.float32) if product.accumulates else np.zeros(1)
            self.registers[name] = (before + values).astype(np.float32).view(np.uint32).astype(np.uint64)


def _integer(op: str, a: Array, b: Array) -> Array:
    if op == "div.s32":
        divisor = np.where(b == 0, 1, b)
        return np.sign(a) * np.sign(divisor) * (np.abs(a) // np.abs(divisor))
    if op == "min.relu.s32":
        return np.maximum(np.minimum(a, b), 0)
    return a * b >> b.dtype.type(32)


class Cluster:
    """The two blocks of one cluster of a launch.

    memory: global memory, bytes from address 0. parameters: the struct. starts: where each tensor map's field starts
    """

    def __init__(
        self,
        ptx: str,
        launch: Launch,
        memory: Array,
        parameters: Array,
        starts: Mapping[str, int],
        dtype: Any,
        seed: int,
    ) -> None:
        self.launch, self.memory, self.dtype = launch, memory, np.dtype(dtype)
        maps = len(launch.tensor_maps)
        self.parameters, self.starts = parameters.view(np.uint8), starts
        self.body = body_of(ptx, launch.symbol)
        assert f"_param_{maps}[" in ptx, "the struct follows the tensor maps"
        self.rng = np.random.default_rng(seed)
        self.statements: list[tuple[str, str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        self.blocks: list[Block] = []
        self.copies: list[tuple[Block, int, int, int, list[int]]] = []
        self.arrivals = self.warps = 0

    def run(self, number: int, head: int, batch: int) -> None:
        """Runs cluster `number` along x to its end; AssertionError if all of it waits."""
        self.blocks = [Block(rank, self.launch.shared_memory_bytes) for rank in range(BLOCKS)]
        self.arrivals, self.warps = 0, BLOCKS * self.launch.block[0] // WARP
        warps = [
            Warp(self, block, warp, (BLOCKS * number + block.rank, head, batch))
            for block in self.blocks
            for warp in range(self.launch.block[0] // WARP)
        ]
        while alive := [warp for warp in warps if warp.waiting or not warp.has_ended]:
            ready = [warp for warp in alive if warp.is_ready]
            assert ready or self.copies, f"all wait: {[(each.block.rank, each.number, each.waiting) for each in alive]}"
            for _ in range(len(self.copies) if not ready else int(self.rng.integers(len(self.copies) + 1))):
                self.deliver(self.copies.pop(int(self.rng.integers(len(self.copies)))))
            if ready:
                ready[int(self.rng.integers(len(ready)))].run()
        for block in self.blocks:
            assert not any(arrived for arrived, _ in block.named.values()), "every arrival has its wait"

    def deliver(self, copy: tuple[Block, int, int, int, list[int]]) -> None:
        """Writes a box to shared memory, with its swizzle, and counts its bytes."""
        block, barrier, target, number, at = copy
        tensor_map = self.launch.tensor_maps[number]
        box = self.box(tensor_map, at)
        assert target % 1024 == 0
        linear = target + np.arange(box.size) * 2
        block.shared.view("<u2")[swizzle(linear, tensor_map.swizzle_bytes) // 2] = box.ravel()
        block.mbarriers[barrier].add(0, -2 * box.size)

    def box(self, tensor_map: TensorMap, at: list[int]) -> Array:
        """Returns (rows, columns) of a box, zeros outside of the map; the axes are (columns, rows, ...)."""
        columns, rows, *others = tensor_map.box
        assert set(others) <= {1}
        found = np.zeros((rows, columns), np.uint16)
        words = self.memory.view("<u2")
        is_inside = all(0 <= place < size for place, size in zip(at[2:], tensor_map.sizes[2:], strict=True))
        start = sum(place * step for place, step in zip(at[2:], tensor_map.strides[1:], strict=True))
        count = min(columns, tensor_map.sizes[0] - at[0])
        for row in range(rows):
            if is_inside and count > 0 and 0 <= at[1] + row < tensor_map.sizes[1]:
                offset = start + (at[1] + row) * tensor_map.strides[0] + at[0]
                first = (self.starts[tensor_map.field] + 2 * offset) % 2**64 // 2  # 64-bit addresses wrap around
                found[row, :count] = words[first : first + count]
        return found
