"""GemmSpec: one matrix product in numbers: shape, operand majors, instruction, instruction count, registers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cutlass_py_attn.launch.build import Warps

MMA_ROWS = 16
MMA_COLUMNS = {2: 16, 4: 8}  # columns that one warp computes at once, by bytes per element
WARP_THREADS = 32
WARPGROUP_THREADS = 128
WARPGROUP_WARPS = WARPGROUP_THREADS // WARP_THREADS
WARPGROUP_ROWS = 64  # of the result of one wgmma


@dataclass(frozen=True, slots=True)
class GemmSpec:
    """One product C = A B or C += A B.

    name, equation: name of the product, and its equation as text
    m, n, k: C has shape (m, n); the product sums over k
    a_transposed: whether A is stored (k, m) rather than (m, k)
    b_transposed: whether B is stored (k, n) rather than (n, k)
    accumulate: whether C is added to
    item_bytes: bytes of one element of A and B
    family: "sm80" (mma.sync) or "sm90" (wgmma)
    warps: warps over (rows, columns) of C
    """

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
    is_swapped: bool = False  # computes C transposed, see `swap_ab`

    def swap_ab(self, equation: str) -> GemmSpec:
        """Returns the GEMM that computes C transposed: A and B change places."""
        return replace(
            self,
            equation=equation,
            m=self.n,
            n=self.m,
            a_transposed=self.b_transposed,
            b_transposed=self.a_transposed,
            is_swapped=not self.is_swapped,
        )

    @property
    def threads(self) -> int:
        """Threads that share the product."""
        return self.warps[0] * self.warps[1] * WARP_THREADS

    @property
    def instruction(self) -> tuple[int, int, int]:
        """(m, n, k) of one matrix instruction: m16n8 with 32 bytes of k, or m64 with all n columns for wgmma."""
        depth = 32 // self.item_bytes
        if self.family == "sm90":
            return 64, self.n, depth
        return 16, 8, depth

    @property
    def instructions(self) -> int:
        """Matrix instructions that one warp (sm80) or warpgroup (sm90) issues; three each for float32."""
        m, n, k = self.instruction
        rows = self.m // (self.threads // WARPGROUP_THREADS) if self.family == "sm90" else self.m // self.warps[0]
        columns = self.n if self.family == "sm90" else self.n // self.warps[1]
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
        """Returns why the instruction or the warps do not divide this product; the DSL would compile a wrong kernel."""
        m, n, k = self.instruction
        found = []
        if self.family == "sm90":
            groups = self.threads // WARPGROUP_THREADS
            if self.threads % WARPGROUP_THREADS or self.m % (groups * m):
                found.append(
                    f"{self.name}: m = {self.m}: each of {groups} warpgroups has a multiple of 64 rows; use one"
                )
            if self.n % 8 or self.n > 256:
                found.append(f"{self.name}: n = {self.n}: wgmma has multiples of 8 up to 256 columns; use one")
        else:
            rows, columns = self.warps
            wide = n if self.item_bytes == 4 else 2 * n  # one ldmatrix.x4 feeds two 16-bit instructions
            if self.m % (rows * m) or self.n % (columns * wide):
                found.append(
                    f"{self.name}: {self.m} x {self.n}: not divisible by {rows} x {columns} warps of {m} x {wide}; "
                    "use other warps"
                )
        if self.k % k:
            found.append(f"{self.name}: k = {self.k}: must be a multiple of {k}; use one")
        return found
