"""Gemm: one product in numbers, before any code is made: shape, operand majors, instruction, count, registers."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_py_attn.plan import Warps

WARP_THREADS = 32
WARPGROUP_THREADS = 128
WARPGROUP_WARPS = WARPGROUP_THREADS // WARP_THREADS


@dataclass(frozen=True, slots=True)
class Gemm:
    """C (m, n) = or += A B over k. A tile is stored (m, k), or (k, m) when `a_transposed`; B is stored (n, k), or
    (k, n) when `b_transposed`. `warps` spreads C over (rows, columns) of warps."""

    name: str
    equation: str
    m: int
    n: int
    k: int
    a_transposed: bool
    b_transposed: bool
    accumulate: bool
    item_bytes: int
    family: str
    warps: Warps

    @property
    def threads(self) -> int:
        """Threads that share the product."""
        return self.warps[0] * self.warps[1] * WARP_THREADS

    @property
    def instruction(self) -> tuple[int, int, int]:
        """(m, n, k) of one matrix instruction: m16n8 by 32 bytes of k, or m64 by the whole width for wgmma."""
        depth = 32 // self.item_bytes
        if self.family == "hopper":
            return 64, self.n, depth
        return 16, 8, depth

    @property
    def instructions(self) -> int:
        """Matrix instructions that one warp (generic) or warpgroup (hopper) issues; three each for float32."""
        m, n, k = self.instruction
        rows = self.m // (self.threads // WARPGROUP_THREADS) if self.family == "hopper" else self.m // self.warps[0]
        columns = self.n if self.family == "hopper" else self.n // self.warps[1]
        return (rows // m) * (columns // n) * (self.k // k) * (3 if self.item_bytes == 4 else 1)

    @property
    def accumulator_registers(self) -> int:
        """float32 registers a thread holds for C."""
        return self.m * self.n // self.threads

    @property
    def a_shape(self) -> tuple[int, int]:
        """Rows and columns of A as stored."""
        return (self.k, self.m) if self.a_transposed else (self.m, self.k)

    @property
    def b_shape(self) -> tuple[int, int]:
        """Rows and columns of B as stored."""
        return (self.k, self.n) if self.b_transposed else (self.n, self.k)

    def objections(self) -> list[str]:
        """What this product cannot divide; the DSL would compile a wrong kernel without a word."""
        m, n, k = self.instruction
        found = []
        if self.family == "hopper":
            groups = self.threads // WARPGROUP_THREADS
            if self.threads % WARPGROUP_THREADS or self.m % (groups * m):
                found.append(f"{self.name}: m = {self.m}: must be a multiple of 64 for each of {groups} warpgroups")
            if self.n % 8 or self.n > 256:
                found.append(f"{self.name}: n = {self.n}: wgmma takes multiples of 8 up to 256")
        else:
            rows, columns = self.warps
            wide = n if self.item_bytes == 4 else 2 * n  # one ldmatrix.x4 feeds two 16-bit instructions
            if self.m % (rows * m) or self.n % (columns * wide):
                found.append(
                    f"{self.name}: {self.m} x {self.n}: not divisible by {rows} x {columns} warps of {m} x {wide}"
                )
        if self.k % k:
            found.append(f"{self.name}: k = {self.k}: must be a multiple of {k}")
        return found
