"""Emulator of sm90 kernels: NumPy executes the PTX of a block with its warp roles, mbarriers, TMA and wgmma.

Every warp has its own program counter, and a random generator chooses which warps execute next. What is asynchronous on
a GPU ends at the moment that the emulation chooses: with `is_eager`, a wgmma reads its operands and writes its
accumulator when it is issued, and TMA when it is issued too; else both do so as late as the program allows, and an
accumulator is NaN until then. A tile that is overwritten too early, or read too late or too early, changes the result
in one of the two. Memory fences and the order of proxies are not checked.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import ml_dtypes
import numpy as np

from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.plan.plan import Launch, Plan, TensorMap
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import FLOAT8, ITEM_BYTES, OPERAND_BYTES, Tensor
from cutlass_py_attn.runtime import params
from cutlass_py_attn.runtime.arrays import numpy_dtype
from cutlass_py_attn.testing.cases import Case
from tests.support.gemm_emulator import DESCRIPTOR_WIDTHS, swizzle
from tests.support.ptx_floats import FloatThreads
from tests.support.ptx_threads import WARP, Array, as_type, bits_of

# Start of the emulated shared memory, before the global arrays: some kernels have this address as a number.
SHARED = architecture("sm_90a").reserved_shared_memory
WARPGROUP = 128
GUARD = 512  # elements of NaN before and after every array
NAN = 0x7FC00000
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
_INLINE = re.compile(r"// begin inline asm(.*?)// end inline asm", re.DOTALL)
_STATEMENT = re.compile(
    r"(?:@(?P<negated>!?)(?P<predicate>%\w+)\s+)?(?P<op>[a-z][\w.:]*)\s*(?P<operands>.*)$", re.DOTALL
)
_IGNORED = ("griddepcontrol", "fence", "setmaxnreg", "cvta", "wgmma.fence", "bar.warp.sync", "cp.async.bulk.prefetch")


class Deadlock(Exception):
    """No warp can execute."""


@dataclass
class _Mbarrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0


@dataclass
class _NamedBarrier:
    arrived: int = 0
    waiting: list[int] = field(default_factory=list)
    any_holds: bool = False  # of a barrier that reduces


class EmulatedBlock(FloatThreads):
    """One thread block of a launch.

    memory: bytes of shared and of global memory; addresses are its indices.
    maps: tensor maps of the launch with the address of each one's array.
    """

    def __init__(
        self, ptx: str, block: int, launch: Launch, memory: Array, parameters: Array, addresses: dict[str, int],
        dtype: str, *, is_eager: bool, seed: int,
    ) -> None:  # fmt: skip
        self.maps = [(it, addresses[it.field]) for it in launch.tensor_maps]
        self.item_bytes, self.dtype = OPERAND_BYTES[dtype], DTYPES[dtype]
        self.is_eager, self.random = is_eager, np.random.default_rng(seed)
        super().__init__(ptx, launch.grid[:2], launch.block[0], memory, parameters)
        threads = launch.block[0]
        grid = launch.grid[0] * launch.grid[1]
        layer, block = divmod(block, grid)
        # The base class numbers the threads of a whole grid; here they are those of one block.
        self.special = {name: values[block * threads : (block + 1) * threads] for name, values in self.special.items()}
        self.special["%ctaid.z"] = np.full(threads, layer, np.uint64)
        self.special["%nctaid.y"] = np.full(threads, launch.grid[1], np.uint64)
        self.special["%warpid"] = np.arange(threads, dtype=np.uint64) // np.uint64(WARP)
        assert layer < launch.grid[2]
        self.counters = np.zeros(threads, np.int64)
        self.collective = np.array([op.startswith("wgmma") for _, _, op, _ in self.statements])
        self.waiting = np.zeros(threads // WARP, np.bool_)  # warps that sleep until a barrier changes
        self.mbarriers: dict[int, _Mbarrier] = {}
        self.named: dict[int, _NamedBarrier] = defaultdict(_NamedBarrier)
        self.reductions: list[bool] = []  # results of the barriers that reduce
        self.copies: deque[Callable[[], None]] = deque()
        self.groups: dict[int, deque[list[Callable[[], None]]]] = defaultdict(deque)  # by warpgroup; the last is open

    def _parse(self, ptx: str) -> None:
        """Gives the registers and labels of every inline block names of their own."""
        number = 0

        def renamed(found: re.Match[str]) -> str:
            nonlocal number
            number += 1
            declared = [
                name for names in re.findall(r"\.reg\s+\.\w+\s+([^;]+);", found[1]) for name in names.split(",")
            ]
            names = "|".join(["P1", "p", *(name.strip().lstrip("%") for name in declared)])
            text = re.sub(rf"(?<![.%\w$])%?({names})\b", rf"%inline{number}_\1", found[1])
            text = re.sub(r"\b(LAB_WAIT|DONE)\b", rf"$inline{number}_\1", text)
            return re.sub(r"\.reg[^;]*;", "", text.strip().removeprefix("{").removesuffix("}"))

        body = _INLINE.sub(renamed, ptx[ptx.index("{", ptx.index(".entry")) + 1 :])
        for text in re.split(r";|(?<=:)\s", re.sub(r"//[^\n]*", "", body)):
            bare = re.sub(r"^[\s{}]+", "", text).strip()
            while label := re.match(r"(\$\w+):\s*", bare):
                self.labels[label[1]] = len(self.statements)
                bare = bare[label.end() :]
            if bare.startswith(("}", ".")) or not bare:
                continue
            if found := _STATEMENT.match(bare):
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", found["operands"])
                self.statements.append((found["negated"] or "", found["predicate"] or "", found["op"], operands))

    def run(self) -> None:
        """Executes until every thread has returned."""
        while (self.counters < len(self.statements)).any():
            lowest = self.counters.reshape(-1, WARP).min(axis=1)
            ready = np.flatnonzero(~self.waiting & (lowest < len(self.statements)) & self.together(lowest))
            if self.copies and (self.is_eager or not ready.size):
                self.copies.popleft()()
                continue
            if not ready.size:
                places = sorted({int(c) for c in lowest if c < len(self.statements)})
                raise Deadlock([self.statements[place] for place in places])
            chosen = lowest[ready[self.random.integers(ready.size)]]
            for _ in range(64):  # a stretch of statements for the warps at one place
                warps = ~self.waiting & (lowest == chosen) & self.together(lowest)
                active = np.repeat(warps, WARP) & (self.counters == chosen)
                if chosen >= len(self.statements) or not active.any():
                    break
                self.step(int(chosen), active)
                lowest = self.counters.reshape(-1, WARP).min(axis=1)
                chosen = lowest[np.flatnonzero(warps)[0]]

    def together(self, lowest: Array) -> Array:
        """Returns which warps may execute their statement: at a wgmma statement, when the whole warpgroup is there."""
        places = np.minimum(lowest, len(self.statements) - 1)
        collective = self.collective[places] & (lowest < len(self.statements))
        groups = lowest.reshape(-1, WARPGROUP // WARP)
        are_there = (groups == groups[:, :1]).all(axis=1) & ~self.waiting.reshape(groups.shape).any(axis=1)
        return ~collective | np.repeat(are_there, WARPGROUP // WARP)

    def step(self, place: int, active: Array) -> None:
        """Executes one statement for the active threads."""
        negated, predicate, op, operands = self.statements[place]
        self.counters[active] += 1
        if predicate:
            condition = self.value(predicate) != 0
            active = active & (~condition if negated else condition)
        if op == "ret":
            self.counters[active] = len(self.statements)
        elif op.startswith("bra"):
            self.counters[active] = self.labels[operands[0]]
        elif active.any():
            self.execute(op, operands, active)

    def execute(self, op: str, operands: list[str], active: Array) -> None:
        for prefix, method in self.synchronising().items():
            if op.startswith(prefix):
                method(op, operands, active)
                return
        if op.startswith("cvta"):
            self.write(operands[0], self.value(operands[1]), 64, active)
        elif not op.startswith(_IGNORED):
            super().execute(op, operands, active)

    def synchronising(self) -> dict[str, Callable[[str, list[str], Array], None]]:
        return {
            "mbarrier.init": self.mbarrier_init,
            "mbarrier.try_wait": self.mbarrier_wait,
            "mbarrier.arrive": self.mbarrier_arrive,
            "bar.sync": self.named_barrier,
            "barrier.sync": self.named_barrier,
            "bar.red.or": self.reducing_barrier,
            "bar.arrive": self.named_barrier,
            "elect": self.elect,
            "cp.async.bulk.tensor": self.tma,
            "ldmatrix": self.ldmatrix,
            "stmatrix": self.stmatrix,
            "wgmma.mma_async": self.wgmma,
            "wgmma.commit_group": self.commit,
            "wgmma.wait_group": self.wait_group,
        }

    def value(self, text: str) -> Array:
        if text == "__dynamic_shmem__0":
            return np.full(len(self.counters), SHARED, np.uint64)
        if found := re.match(r"[a-z]\w*_param_(\d+)$", text):
            return np.full(len(self.counters), int(found[1]), np.uint64)
        return super().value(text)

    def move(self, op: str, operands: list[str], active: Array) -> None:
        """Executes a load or a store. The address of a parameter is its number; the struct is the last."""
        if not op.startswith("ld.param"):
            super().move(op, operands, active)
            return
        size, first = bits_of(op) // 8, int(self.address(operands[1])[active][0]) - len(self.maps)
        for i, name in enumerate(re.findall(r"%\w+", operands[0])):
            start = first + i * size
            word = int.from_bytes(self.parameters[start : start + size].tobytes(), "little")
            self.write(name, np.full(len(active), word, np.uint64), 8 * size, active)

    def warps_of(self, active: Array) -> Array:
        return np.flatnonzero(active.reshape(-1, WARP).any(axis=1))

    def mbarrier_init(self, _: str, operands: list[str], active: Array) -> None:
        counts = self.value(operands[1])
        for thread in np.flatnonzero(active):
            count = int(counts[thread])
            self.mbarriers[int(self.address(operands[0])[thread])] = _Mbarrier(count, count)

    def mbarrier_wait(self, _: str, operands: list[str], active: Array) -> None:
        """Waits in place: a warp whose phase has not ended executes the statement again when a barrier changes."""
        name, place, parity = operands[:3]
        places, parities = self.address(place), self.value(parity)
        for warp in self.warps_of(active):
            threads = np.flatnonzero(active[warp * WARP : (warp + 1) * WARP]) + warp * WARP
            barrier = self.mbarriers[int(places[threads[0]])]
            assert len(set(places[threads])) == 1, "threads of a warp wait at different barriers"
            if barrier.phase == int(parities[threads[0]]):
                self.counters[threads] -= 1
                self.waiting[warp] = True
            else:
                self.registers[name] = self.value(name).copy()
                self.registers[name][threads] = 1

    def mbarrier_arrive(self, op: str, operands: list[str], active: Array) -> None:
        place = next(operand for operand in operands if operand.startswith("["))
        places = self.address(place)
        expected = self.value(operands[-1]) if "expect_tx" in op else None
        counts = operands[operands.index(place) + 1 :] if expected is None else []
        assert all((self.value(count)[active] == 1).all() for count in counts), "more arrivals at once: not emulated"
        for thread in np.flatnonzero(active):
            barrier = self.mbarriers[int(places[thread])]
            barrier.pending -= 1
            assert barrier.pending >= 0, "more arrivals than the barrier expects"
            if expected is not None:
                barrier.bytes += int(expected[thread])
            self.end_phase(barrier)

    def end_phase(self, barrier: _Mbarrier) -> None:
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase, barrier.pending = barrier.phase ^ 1, barrier.count
            self.waiting[self.sleepers()] = False

    def sleepers(self) -> Array:
        """Returns the warps that wait at mbarriers, not at named barriers."""
        named = {warp for barrier in self.named.values() for warp in barrier.waiting}
        return np.array([warp for warp in np.flatnonzero(self.waiting) if warp not in named], np.int64)

    def named_barrier(self, op: str, operands: list[str], active: Array) -> None:
        number = self.value(operands[0])
        threads = self.value(operands[1]) if len(operands) > 1 else np.full(len(number), len(number))
        for warp in self.warps_of(active):
            barrier = self.named[int(number[warp * WARP])]
            barrier.arrived += WARP
            if ".sync" in op:
                barrier.waiting.append(int(warp))
                self.waiting[warp] = True
            assert barrier.arrived <= threads[warp * WARP], "more threads than the barrier has"
            if barrier.arrived == threads[warp * WARP]:
                self.waiting[barrier.waiting] = False
                barrier.arrived, barrier.waiting = 0, []

    def reducing_barrier(self, _: str, operands: list[str], active: Array) -> None:
        """Waits like a named barrier, and returns to every thread whether its value holds in any."""
        name, number, threads, value = operands
        numbers, counts, values = self.value(number), self.value(threads), self.value(value)
        for warp in self.warps_of(active):
            barrier = self.named[int(numbers[warp * WARP])]
            barrier.arrived += WARP
            barrier.waiting.append(int(warp))
            barrier.any_holds |= bool(values[warp * WARP : (warp + 1) * WARP].any())
            self.waiting[warp] = True
            if barrier.arrived == counts[warp * WARP]:
                of_barrier = np.isin(np.arange(len(active)) // WARP, barrier.waiting)
                self.write(name, np.full(len(active), barrier.any_holds, np.uint64), 1, of_barrier)
                self.waiting[barrier.waiting] = False
                self.reductions.append(barrier.any_holds)
                barrier.arrived, barrier.waiting, barrier.any_holds = 0, [], False

    def elect(self, _: str, operands: list[str], active: Array) -> None:
        """Elects the first active thread of each warp."""
        chosen = np.zeros(len(active), np.uint64)
        for warp in self.warps_of(active):
            chosen[np.flatnonzero(active[warp * WARP : (warp + 1) * WARP])[0] + warp * WARP] = 1
        self.write(operands[0].split("|")[1], chosen, 1, active)

    def tma(self, op: str, operands: list[str], active: Array) -> None:
        assert ".shared::cta" in op, f"{op}: not emulated"
        for thread in np.flatnonzero(active):
            target, barrier = (int(self.address(operands[place])[thread]) for place in (0, 2))
            which, *coordinates = (
                int(as_type(self.value(name), "s32")[thread]) for name in re.findall(r"%\w+", operands[1])
            )
            self.copies.append(partial(self.copy, which, coordinates, target, barrier))

    def copy(self, which: int, coordinates: list[int], target: int, barrier: int) -> None:
        """Ends a copy of TMA: writes the box, and counts its bytes at the barrier."""
        size = self.copy_box(*self.maps[which], coordinates, target)
        found = self.mbarriers[barrier]
        found.bytes -= size
        self.end_phase(found)

    def copy_box(self, spec: TensorMap, start: int, coordinates: list[int], target: int) -> int:
        """Copies a box with its swizzle, zeros where it is outside of the array; returns its bytes."""
        inside, addresses = self.box_addresses(spec, start, coordinates)
        box = np.where(inside[..., None], self.memory[addresses], np.uint8(0)).reshape(-1)
        assert target % 128 == 0
        self.memory[swizzle(target + np.arange(box.size), spec.swizzle_bytes)] = box
        return int(box.size)

    def box_addresses(self, spec: TensorMap, start: int, coordinates: list[int]) -> tuple[Array, Array]:
        """Returns which elements of a box are inside of the array, and the addresses of their bytes; else address 0."""
        columns, rows = spec.box[:2]
        assert all(size == 1 for size in spec.box[2:])
        assert columns * self.item_bytes == spec.swizzle_bytes
        column, row = coordinates[0] + np.arange(columns), coordinates[1] + np.arange(rows)[:, None]
        inside = (column >= 0) & (column < spec.sizes[0]) & (row >= 0) & (row < spec.sizes[1])
        inside &= all(0 <= at < size for at, size in zip(coordinates[2:], spec.sizes[2:], strict=True))
        outer = sum(at * stride for at, stride in zip(coordinates[2:], spec.strides[1:], strict=True))
        # The strides of variable lengths wrap around the address space.
        first = (start + outer * self.item_bytes + coordinates[1] * spec.strides[0] * self.item_bytes) % 2**64
        if first >= 2**63:
            first -= 2**64
        offsets = first + (row - coordinates[1]) * (spec.strides[0] * self.item_bytes) + column * self.item_bytes
        return inside, np.where(inside, offsets, 0)[..., None] + np.arange(self.item_bytes)

    def rows_of_matrices(self, text: str, active: Array) -> tuple[Array, Array]:
        """Returns the active warps and the addresses (warp, matrix, row) of the rows of four matrices."""
        warps = self.warps_of(active)
        rows = self.address(text).reshape(-1, 4, 8)[warps]
        assert (rows % 16 == 0).all()
        return warps, rows

    def ldmatrix(self, op: str, operands: list[str], active: Array) -> None:
        warps, rows = self.rows_of_matrices(operands[1], active)
        values = self.memory[rows[..., None] + np.arange(16)].view("<u2").astype(np.uint64)
        values = values.swapaxes(-1, -2) if ".trans" in op else values
        lane = np.arange(WARP)
        for i, name in enumerate(re.findall(r"%\w+", operands[0])):
            low, high = (values[:, i, lane // 4, lane % 4 * 2 + j] for j in (0, 1))
            found = self.value(name).reshape(-1, WARP).copy()
            found[warps] = low | high << np.uint64(16)
            self.registers[name] = found.reshape(-1)

    def stmatrix(self, op: str, operands: list[str], active: Array) -> None:
        assert ".trans" not in op
        warps, rows = self.rows_of_matrices(operands[0], active)
        for i, name in enumerate(re.findall(r"%\w+", operands[1])):
            words = np.ascontiguousarray(self.value(name).reshape(-1, WARP)[warps].astype("<u4"))
            self.memory[rows[:, i, :, None] + np.arange(16)] = words.view(np.uint8).reshape(len(warps), 8, 16)

    def wgmma(self, op: str, operands: list[str], active: Array) -> None:
        n = int((re.search(r"m64n(\d+)k", op) or [])[1])
        c, a, b, adds, *signs = operands
        assert signs[:2] == ["1", "1"]
        a_major, b_major = [*(sign == "1" for sign in signs[2:]), False, False][:2]
        if len(signs) == 3:  # A in registers
            a_major, b_major = False, signs[2] == "1"
        names, adding = re.findall(r"%\w+", c), self.value(adds)
        for group in sorted({int(thread) // WARPGROUP for thread in np.flatnonzero(active)}):
            threads = slice(group * WARPGROUP, (group + 1) * WARPGROUP)
            assert active[threads].all(), "a warpgroup issues a wgmma together"
            b_descriptor = int(self.value(b)[threads][0])
            a_descriptor = None if a.startswith("{") else int(self.value(a)[threads][0])
            is_adding = bool(adding[threads][0])
            if not is_adding:
                for name in names:
                    self.registers[name] = self.value(name).copy()
                    self.registers[name][threads] = NAN

            def multiply(
                threads: slice = threads, a_descriptor: int | None = a_descriptor, b_descriptor: int = b_descriptor,
                is_adding: bool = is_adding,
            ) -> None:  # fmt: skip
                if a_descriptor is None:
                    left = self.register_operand(a, threads)
                else:
                    left = self.tile(a_descriptor, 64, a_major)
                product = left @ self.tile(b_descriptor, n, b_major).T
                # ((warp, half, g), (eight, t, pair)) -> register (eight, half, pair) of thread (warp, g, t)
                parts = product.reshape(4, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, -1)
                for name, values in zip(names, parts, strict=True):
                    found = self.value(name).copy()
                    before = found[threads].astype(np.uint32).view(np.float32) if is_adding else np.float32(0)
                    found[threads] = (before + values).astype(np.float32).view(np.uint32)
                    self.registers[name] = found

            if self.is_eager:
                multiply()
            else:
                self.groups[group].append([]) if not self.groups[group] else None
                self.groups[group][-1].append(multiply)

    def commit(self, _: str, operands: list[str], active: Array) -> None:
        for group in {int(thread) // WARPGROUP for thread in np.flatnonzero(active)}:
            self.groups[group].append([])

    def wait_group(self, _: str, operands: list[str], active: Array) -> None:
        pending = int(operands[0])
        for group in {int(thread) // WARPGROUP for thread in np.flatnonzero(active)}:
            while len(self.groups[group]) > pending + 1:
                for multiply in self.groups[group].popleft():
                    multiply()

    def floats(self, data: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return np.ascontiguousarray(data).view(self.dtype).astype(np.float64)

    def register_operand(self, text: str, threads: slice) -> Array:
        """Returns (64, 32 bytes) of A: register (k half, row half) of thread (warp, g, t) has bytes 4 t to 4 t + 3."""
        words = np.stack([self.value(name)[threads].astype("<u4") for name in re.findall(r"%\w+", text)], -1)
        parts = words.view(np.uint8).reshape(4, 8, 4, 2, 2, 4)  # warp, g, t, k half, row half, byte
        return self.floats(parts.transpose(0, 4, 1, 3, 2, 5).reshape(64, 32))

    def tile(self, descriptor: int, rows: int, is_mn_major: bool) -> Array:
        """Returns (rows, 32 bytes) of an operand in shared memory, by the canonical layouts of the PTX ISA."""
        start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        width = DESCRIPTOR_WIDTHS[descriptor >> 62 & 3]
        assert descriptor >> 49 & 7 == 0
        row = np.arange(rows)[:, None]
        if is_mn_major:
            k, columns = np.arange(16)[None, :], width // 2
            offset = row % columns * 2 + row // columns * leading + k % 8 * width + k // 8 * stride
            offset = (offset[..., None] + np.arange(2)).reshape(rows, 32)
        else:
            offset = row % 8 * width + row // 8 * stride + np.arange(32)[None, :]
        return self.floats(self.memory[swizzle(start + offset, width)])

    def result(self, op: str, v: list[Array]) -> Array:
        kind, *modifiers = op.split(".")
        if kind == "cvt" and "e4m3x2" in modifiers[:-1]:
            with np.errstate(invalid="ignore"):
                numbers = [np.clip(x.astype(np.uint32).view(np.float32), -448, 448) for x in v]
            high, low = (x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint64) for x in numbers)
            return high << np.uint64(8) | low
        if kind in ("div", "rem") and modifiers[-1] != "f32":
            a, b = (as_type(x, modifiers[-1]).astype(np.int64) for x in v)
            quotient = np.where(b == 0, 0, np.abs(a) // np.maximum(np.abs(b), 1)) * np.sign(a) * np.sign(b)
            return (quotient if kind == "div" else a - quotient * b).view(np.uint64)
        if kind == "min" and modifiers[0] == "relu":
            return np.maximum(np.minimum(*(as_type(x, modifiers[-1]) for x in v)), 0).astype(np.uint64)
        if kind == "mul" and modifiers[0] == "hi":
            a, b = (as_type(x, modifiers[-1]).astype(np.int64) for x in v)
            return (a * b >> bits_of(op)).view(np.uint64)
        if kind == "redux":
            of_warp = as_type(v[0], modifiers[-1]).reshape(-1, WARP)
            reduced = {"add": of_warp.sum, "max": of_warp.max, "min": of_warp.min}[modifiers[1]](axis=1)
            return reduced.astype(np.int64).view(np.uint64).repeat(WARP)
        return super().result(op, v)


def emulate(
    case: Case | Problem,
    plan: Plan,
    ptx: str,
    arrays: dict[str, Array],
    *,
    is_eager: bool,
    seed: int,
    block: type[EmulatedBlock] = EmulatedBlock,
    outputs: tuple[str, ...] = ("output", "logsumexp"),
) -> dict[str, Array]:
    """Executes the launches of a plan, and returns its outputs; NaN where nothing was written.

    arrays: the inputs of the case. block: executes one thread block. outputs: their names, and those of workspace
    buffers, which are returned as int32. AssertionError if a byte outside of the outputs and the workspace changed.
    """
    problem = case if isinstance(case, Problem) else case.problem()
    logsumexp = Tensor.contiguous(problem.shape.logsumexp, "float32")
    tensors = {**problem.tensors(), **problem.vectors(), "logsumexp": logsumexp}
    random = np.random.default_rng(seed)
    of_launches = max(launch.shared_memory_bytes for launch in plan.launches)
    shared = random.integers(0, 256, SHARED + of_launches, np.uint8)
    parts, addresses, end = [shared], dict[str, int](), shared.size
    for name, tensor in tensors.items():
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True) if size)
        filler = np.nan if tensor.dtype in (*ITEM_BYTES, FLOAT8) else -1
        host = np.full(extent + 2 * GUARD, filler, numpy_dtype(tensor.dtype))
        if name in arrays:
            strided(host[GUARD:], tensor)[...] = arrays[name]
        padding = np.zeros(-end % 256, np.uint8)
        addresses[name] = end + padding.size + GUARD * host.itemsize
        parts += [padding, host.view(np.uint8)]
        end += padding.size + host.nbytes
    cleared = plan.workspace.zero_bytes
    parts += [np.zeros(-end % 256 + cleared, np.uint8), np.full(plan.workspace.bytes - cleared, 0xFF, np.uint8)]
    workspace = end + -end % 256
    memory = np.concatenate(parts)
    before = memory.copy()
    values = np.zeros(1, abi.numpy_struct(abi.fields_of(plan.build)))
    buffers = {buffer.name: workspace + buffer.offset for buffer in plan.workspace.buffers}
    for name, value in {
        **params.numbers(problem, problem.operands()),
        **dict(plan.params),
        **addresses,
        **buffers,
    }.items():
        values[name] = value
    for launch in plan.launches:
        assert launch.cluster == 1
        entry = re.search(rf"\.entry {launch.symbol}(?:_\d+)?\(.*", ptx, re.DOTALL)
        assert entry is not None, f"{launch.symbol}: the PTX has no such entry"
        for number in range(launch.grid[0] * launch.grid[1] * launch.grid[2]):
            memory[SHARED : shared.size] = before[SHARED : shared.size]
            block(
                entry[0], number, launch, memory, values.view(np.uint8), addresses, plan.build.dtype, is_eager=is_eager,
                seed=seed,
            ).run()  # fmt: skip
    sizes = {buffer.name: buffer.bytes for buffer in plan.workspace.buffers}
    found = {
        name: memory[buffers[name] : buffers[name] + size].view(np.int32).copy()
        for name, size in sizes.items()
        if name in outputs
    }
    for name in outputs:
        if name in found:
            continue
        tensor = tensors[name]
        views = [strided(data[addresses[name] :].view(numpy_dtype(tensor.dtype)), tensor) for data in (memory, before)]
        found[name] = views[0].copy()
        views[1][...] = views[0]
    same = memory[shared.size : workspace] == before[shared.size : workspace]
    assert same.all(), "bytes outside of the outputs and the workspace changed"
    return found


def strided(data: Array, tensor: Tensor) -> Array:
    """Returns the view of a tensor whose first element is that of `data`."""
    strides = [step * data.itemsize for step in tensor.strides]
    return np.lib.stride_tricks.as_strided(data, tensor.shape, strides)
