"""PTX emulator: NumPy executes integer PTX with branches for all threads of a grid.

Each thread has its own program counter. The threads with the lowest one execute first. A thread that reaches a shuffle
or another `.sync` instruction waits for the rest of its warp, so that warps diverge and reconverge as on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WARP = 32
UNINITIALISED = 0xDEADBEEFDEADBEEF
_STATEMENT = re.compile(
    r"(?:@(?P<negated>!?)(?P<predicate>%\w+)\s+)?(?P<op>[a-z][\w.:]*)\s*(?P<operands>.*)$", re.DOTALL
)
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def bits_of(op: str) -> int:
    """Returns the width of an instruction's type (bits)."""
    return 1 if op.endswith(".pred") else int((re.search(r"\.[bsuf](\d+)$", op) or ["", "64"])[1])


def as_type(values: Array, kind: str) -> Array:
    """Returns uint64 registers as numbers of a type such as s32, in 64 bits."""
    width = int(kind[1:])
    wrapped = values & np.uint64(2**width - 1)
    if kind[0] != "s":
        return wrapped
    sign = np.uint64(1 << (width - 1))
    return ((wrapped ^ sign) - sign).view(np.int64)


class Threads:
    """A grid of threads: registers are uint64 arrays over all threads, global memory is bytes from address 0."""

    def __init__(self, ptx: str, grid: tuple[int, int], block: int, memory: Array, parameters: Array) -> None:
        self.memory, self.parameters = memory, parameters.view(np.uint8)
        number = np.arange(grid[0] * grid[1] * block, dtype=np.uint64)
        column = number // np.uint64(block)
        self.special = {
            "%tid.x": number % np.uint64(block),
            "%ctaid.x": column % np.uint64(grid[0]),
            "%ctaid.y": column // np.uint64(grid[0]),
            "%nctaid.x": np.full_like(number, grid[0]),
            "%laneid": number % np.uint64(block) % np.uint64(WARP),
        }
        self.registers: dict[str, Array] = {}
        self.counters = np.zeros(len(number), np.int64)
        self.statements: list[tuple[str, str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        self._parse(ptx)

    def _parse(self, ptx: str) -> None:
        body = ptx[ptx.index("{", ptx.index(".entry")) + 1 :]
        for text in re.split(r";|(?<=:)\s*\n", re.sub(r"//[^\n]*", "", body)):
            bare = text.strip()
            if label := re.fullmatch(r"(\$\w+):", bare):
                self.labels[label[1]] = len(self.statements)
            elif found := _STATEMENT.match(bare):
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", found["operands"])
                self.statements.append((found["negated"] or "", found["predicate"] or "", found["op"], operands))

    def run(self) -> None:
        """Executes until every thread has returned."""
        while (counter := self._next()) is not None:
            active = self.counters == counter
            negated, predicate, op, operands = self.statements[counter]
            self.counters[active] += 1
            if predicate:
                condition = self.value(predicate) != 0
                active = active & (~condition if negated else condition)
            if op == "ret":
                self.counters[active] = len(self.statements)
            elif op.startswith("bra"):
                self.counters[active] = self.labels[operands[0]]
            else:
                self.execute(op, operands, active)

    def _next(self) -> int | None:
        counters = np.unique(self.counters)
        running = [int(counter) for counter in counters if counter < len(self.statements)]
        free = [counter for counter in running if ".sync" not in self.statements[counter][2]]
        if free or not running:
            return free[0] if free else None
        warps = (self.counters == running[0]).reshape(-1, WARP)
        assert (warps.all(axis=1) == warps.any(axis=1)).all(), "only some threads of a warp reach a .sync instruction"
        return running[0]

    def value(self, text: str) -> Array:
        """Returns a register, a special register or a constant, for each thread."""
        if text in self.special:
            return self.special[text]
        if text.startswith("%"):
            return self.registers.setdefault(text, np.full(len(self.counters), UNINITIALISED, np.uint64))
        return np.full(len(self.counters), int(text.removesuffix("U"), 0) % 2**64, np.uint64)

    def write(self, name: str, values: Array, bits: int, active: Array) -> None:
        """Sets a register of the active threads."""
        if name != "_":
            truncated = values.astype(np.uint64) & np.uint64(2**bits - 1)
            self.registers[name] = np.where(active, truncated, self.value(name))

    def address(self, text: str) -> Array:
        """Returns the address [register + constant]."""
        parts = [self.value(part) for part in text.strip("[]").split("+")]
        return np.add.reduce(parts).astype(np.int64)

    def execute(self, op: str, operands: list[str], active: Array) -> None:
        """Executes one instruction for the active threads."""
        if op.startswith(("ld.", "st.")):
            self.move(op, operands, active)
        elif op in ("bar.warp.sync", "bar.sync"):  # `_next` has waited for the warp, and for those behind it
            return
        elif op.startswith("mov.b") and "{" in "".join(operands):
            self.split_or_join(bits_of(op), operands, active)
        else:
            name, *sources = operands
            bits = bits_of(op) * (2 if ".wide" in op else 1)
            result = self.result(op, [self.value(source) for source in sources])
            self.write(name, result, bits_of(".".join(op.split(".")[:2])) if op.startswith("cvt") else bits, active)

    def move(self, op: str, operands: list[str], active: Array) -> None:
        """Executes a load or a store; ld.param reads the struct parameter."""
        size = bits_of(op) // 8
        is_store = op.startswith("st")
        names, place = re.findall(r"%\w+|\b0f[0-9A-Fa-f]{8}\b|-?\b\d+\b", operands[is_store]), operands[not is_store]
        if op.startswith("ld.param"):
            start = int((re.search(r"\+(\d+)", place) or ["", "0"])[1])
            memory, addresses = self.parameters, np.full(len(self.counters), start)
        else:
            memory, addresses = self.memory, self.address(place)
        for i, name in enumerate(names):
            at = addresses + i * size
            if is_store:
                values = self.value(name)[active]
                for byte in range(size):
                    memory[at[active] + byte] = values >> np.uint64(8 * byte) & np.uint64(255)
            else:
                loaded = np.zeros(len(at), np.uint64)
                for byte in range(size):
                    loaded[active] |= memory[at[active] + byte].astype(np.uint64) << np.uint64(8 * byte)
                self.write(name, loaded, 8 * size, active)

    def split_or_join(self, bits: int, operands: list[str], active: Array) -> None:
        """Joins two registers into one of `bits` bits, or splits one."""
        targets, sources = (re.findall(r"%\w+|\b\d+\b|\b_\b", operand) for operand in operands)
        value = self.value(sources[0])
        if len(sources) == 2:
            value = value | self.value(sources[1]) << np.uint64(bits // 2)
        for i, name in enumerate(targets):
            self.write(name, value >> np.uint64(bits // 2 * i), bits // len(targets), active)

    def result(self, op: str, v: list[Array]) -> Array:
        """Returns the result of a register operation as uint64, of which only the instruction's width is defined."""
        kind, *modifiers = op.split(".")
        if kind == "setp":
            a, b = (as_type(x, modifiers[-1].replace("b", "u")) for x in v)
            return COMPARISONS[modifiers[0]](a, b)
        if kind in ("mul", "mad") and modifiers[0] == "wide":
            a, b = (as_type(x, modifiers[1]) for x in v[:2])
            return (a * b).astype(np.uint64)
        bits = np.uint64(bits_of(op))
        actions: dict[str, Callable[[], Array]] = {
            "mov": lambda: v[0],
            "cvt": lambda: as_type(v[0], modifiers[-1]).astype(np.uint64),
            "add": lambda: v[0] + v[1],
            "sub": lambda: v[0] - v[1],
            "neg": lambda: np.uint64(0) - v[0],
            "abs": lambda: np.abs(as_type(v[0], modifiers[-1])).astype(np.uint64),
            "mul": lambda: v[0] * v[1],
            "mad": lambda: v[0] * v[1] + v[2],
            "and": lambda: v[0] & v[1],
            "or": lambda: v[0] | v[1],
            "xor": lambda: v[0] ^ v[1],
            "not": lambda: ~v[0],
            "shl": lambda: np.where(v[1] < bits, v[0] << np.minimum(v[1], bits - np.uint64(1)), np.uint64(0)),
            "shr": lambda: _shifted_right(modifiers[0], v[0], v[1]),
            "shf": lambda: _funnel(modifiers[0], *v),
            "min": lambda: np.minimum(*(as_type(x, modifiers[-1]) for x in v)).astype(np.uint64),
            "max": lambda: np.maximum(*(as_type(x, modifiers[-1]) for x in v)).astype(np.uint64),
            "selp": lambda: np.where(v[2] != 0, v[0], v[1]),
            "shfl": lambda: v[0][_partner(modifiers[1], v[1])],
            "prmt": lambda: _permuted(*v),
            "clz": lambda: bits - np.frexp(as_type(v[0], "u32").astype(np.float64))[1].astype(np.uint64),
            "popc": lambda: np.bitwise_count(v[0].astype(np.uint32)).astype(np.uint64),
            "redux": lambda: np.bitwise_or.reduce(v[0].reshape(-1, WARP), axis=1).repeat(WARP),
        }
        return actions[kind]()


def _shifted_right(kind: str, values: Array, count: Array) -> Array:
    """Shifts right; signed numbers are filled with their sign, others with zeros."""
    width = int(kind[1:])
    if kind[0] == "s":
        return (as_type(values, kind) >> np.minimum(count, np.uint64(width - 1)).astype(np.int64)).view(np.uint64)
    return np.where(count < width, values >> np.minimum(count, np.uint64(width - 1)), np.uint64(0))


def _partner(way: str, lanes: Array) -> Array:
    """Returns the thread that each thread reads in a shuffle, by XOR, by lane or by distance."""
    threads = np.arange(len(lanes))
    if way == "bfly":
        return threads ^ lanes.astype(np.int64)
    if way == "up":
        lane = threads % WARP - lanes.astype(np.int64)
        return np.where(lane < 0, threads, threads // WARP * WARP + lane)
    assert way == "idx", f"{way}: not emulated"
    return threads // WARP * WARP + lanes.astype(np.int64) % WARP


def _funnel(way: str, low: Array, high: Array, count: Array) -> Array:
    """Returns 32 bits of two words, shifted left or right by less than a word."""
    both, count = high << np.uint64(32) | low, count & np.uint64(31)
    return both << count >> np.uint64(32) if way == "l" else both >> count


def _permuted(low: Array, high: Array, selector: Array) -> Array:
    """Selects four bytes of two words, each as it is or as eight copies of its sign bit."""
    both, result = high << np.uint64(32) | low & np.uint64(2**32 - 1), np.zeros_like(low)
    for place in range(4):
        chosen = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (chosen % np.uint64(8) * np.uint64(8)) & np.uint64(255)
        signs = byte // np.uint64(128) * np.uint64(255)
        result |= np.where(chosen < 8, byte, signs) << np.uint64(8 * place)
    return result
