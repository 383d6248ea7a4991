"""Cases: the microbenchmarks as data: contents of a kernel, its launch, and the work of one round."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final

from cutlass_py_attn.launch.abi import Fields
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS, WARPGROUP_WARPS, GemmSpec

ARCH: Final = "sm_90a"
FIELDS: Final[Fields] = (("out", "i64"), ("data", "i64"), ("rounds", "i32"), ("blocks", "i32"))

ITEM_BYTES: Final = 2
DEPTH: Final = 64  # k of one wgmma group: four instructions
MMA_WARPGROUPS: Final = 2
ROWS: Final = 64 * MMA_WARPGROUPS
LOADED_BYTES: Final = 64 * 1024  # of shared memory that another warpgroup reads repeatedly
FOOTPRINT: Final = 32 * 1024 * 1024  # bytes of global memory that reductions address; fits L2
DATA_BYTES: Final = FOOTPRINT
CHAINS: Final = 8  # independent dependency chains of a thread
FUNCTION_THREADS: Final = 512
VECTOR_BYTES: Final = 16
LOADS: Final = 8  # vectors in flight per thread of the reading warpgroup
READ_ROUND_BYTES: Final = LOADS * WARPGROUP_THREADS * VECTOR_BYTES  # read between two loads of the flag
FUNCTIONS: Final = {"ex2": 1, "ex2_f16x2": 2, "ex2_bf16x2": 2, "tanh": 1, "polynomial": 1}  # results of one call
MIXED: Final = (1, 2, 3, 4)  # of a thread's eight exponentials, how many a polynomial computes
REDUCED_BYTES: Final = 16 * 1024
IN_FLIGHT: Final = 3  # bulk reductions that may still read shared memory when the next one starts
COPIES: Final = (1, 4)  # in flight to the other block of a cluster: one measures latency, four throughput
COPY_BYTES: Final = (8 * 1024, 16 * 1024)


@dataclass(frozen=True, slots=True)
class Micro:
    """One microbenchmark.

    - kind: wgmma, red, copy or function
    - work: of one thread block in one round (unit)
    - blocks: thread blocks; 0 for one on each SM
    - zeros: operands are zeros instead of normal random numbers
    - columns, in_registers, beside: n of wgmma; A is in registers; another warpgroup reads shared memory meanwhile
    - variant: "v4" or "bulk" of red, the name of a function
    - copies, copy_bytes: concurrent copies between the two blocks of a cluster, and bytes of each
    - polynomials: of a thread's exponentials, how many a polynomial computes instead of the MUFU unit
    """

    name: str
    kind: str
    threads: int
    work: int
    unit: str
    rounds: int
    blocks: int = 0
    zeros: bool = False
    columns: int = 0
    in_registers: bool = False
    beside: bool = False
    variant: str = ""
    copies: int = 0
    copy_bytes: int = 0
    polynomials: int = 0

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return 2 if self.copies else 1

    @property
    def symbol(self) -> str:
        """Symbol of the kernel, equal for cases that differ only in launch or operands."""
        columns = f"n{self.columns}" if self.columns else ""
        words = [self.kind, self.variant, columns, "rs" if self.in_registers else "", "beside" if self.beside else ""]
        words += [f"{self.copies}x{self.copy_bytes}"] if self.copies else []
        return "_".join(["micro", *filter(None, words)])

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offsets in shared memory: A, B, the data of the reading warpgroup, 64 bytes of flags and barriers."""
        if self.kind == "wgmma":
            a, b = ROWS * DEPTH * ITEM_BYTES, self.columns * DEPTH * ITEM_BYTES
            return {"a": 0, "b": a, "loaded": a + b, "flags": a + b + LOADED_BYTES}
        if self.kind == "red":
            return {"a": 0, "flags": REDUCED_BYTES}
        if self.kind == "copy":
            return {"a": 0, "b": self.work, "flags": 2 * self.work}
        return {"flags": 0}

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of one block (bytes)."""
        return self.offsets["flags"] + 64

    @property
    def product(self) -> GemmSpec:
        """C (128, columns) += A (128, 64) B, by two warpgroups."""
        warps = MMA_WARPGROUPS * WARPGROUP_WARPS, 1
        return GemmSpec("micro", "C += A B", ROWS, self.columns, DEPTH, False, False, True, ITEM_BYTES, "sm90", warps)


def wgmma(columns: int, in_registers: bool, beside: bool, zeros: bool = False) -> Micro:
    """Returns a case of two MMA warpgroups, with a third warpgroup that reads shared memory if `beside`."""
    words = [
        "RS" if in_registers else "SS",
        f"n {columns}",
        "ld.shared beside" if beside else "",
        "zeros" if zeros else "",
    ]
    return Micro(
        "wgmma " + ", ".join(filter(None, words)),
        "wgmma",
        (MMA_WARPGROUPS + beside) * WARPGROUP_THREADS,
        2 * ROWS * columns * DEPTH,
        "flop",
        rounds=1 << 24 >> columns.bit_length(),
        zeros=zeros,
        columns=columns,
        in_registers=in_registers,
        beside=beside,
    )


def _reductions() -> list[Micro]:
    found = []
    for variant, threads, work in (("v4", 256, 256 * VECTOR_BYTES), ("bulk", 128, REDUCED_BYTES)):
        for blocks in (1, 0):
            name = f"red.{variant} f32, {'one SM' if blocks else 'all SMs'}"
            rounds = (1 << 26) // work
            found.append(Micro(name, "red", threads, work, "B", rounds, blocks, variant=variant))
    return found


def all_cases() -> list[Micro]:
    """Returns every microbenchmark in the order of the table."""
    found = [wgmma(n, rs, beside) for rs in (False, True) for n in (32, 64, 128, 256) for beside in (False, True)]
    found.append(wgmma(256, False, False, zeros=True))
    found += _reductions()
    for copies, size in product(COPIES, COPY_BYTES):
        name, work = f"to the cluster's other SM, {copies} x {size // 1024} KiB", copies * size
        found.append(Micro(name, "copy", 128, work, "B", 1 << 14, copies=copies, copy_bytes=size))
    for variant, results in FUNCTIONS.items():
        work = FUNCTION_THREADS * CHAINS * results
        found.append(Micro(variant, "function", FUNCTION_THREADS, work, "op", 1 << 15, variant=variant))
    for count in MIXED:
        name = f"ex2, {count} of {CHAINS} by polynomial"
        work, variant = FUNCTION_THREADS * CHAINS, f"mixed{count}"
        found.append(Micro(name, "function", FUNCTION_THREADS, work, "op", 1 << 15, variant=variant, polynomials=count))
    return found
