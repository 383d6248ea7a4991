"""SASS: the machine instructions of a cubin with their source lines, from nvdisasm's JSON, and their groups."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cuda.pathfinder import find_nvidia_binary_utility

from cutlass_py_attn import extras
from cutlass_py_attn.errors import NotSupported

TIMEOUT_SECONDS = 120

# Opcodes without their modifiers; all others are in the group "other". UTMALDG and UBLKCP are TMA copies, LDGSTS is
# cp.async, UBLKRED a bulk reduction; WARPGROUP and DEPBAR wait for wgmma or copies; STL and LDL are spills.
GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "products": ("HGMMA", "HMMA", "IMMA", "UTCHMMA"),
    "MUFU": ("MUFU",),
    "shared loads": ("LDS", "LDSM"),
    "shared stores": ("STS", "STSM"),
    "async copies": ("LDGSTS", "UTMALDG", "UTMASTG", "UBLKCP", "UTMAPF"),
    "reductions": ("RED", "REDG", "ATOM", "ATOMG", "ATOMS", "UBLKRED", "UTMAREDG"),
    "global": ("LDG", "STG", "LD", "ST"),
    "barriers": ("BAR", "SYNCS", "WARPSYNC", "WARPGROUP", "DEPBAR", "LDGDEPBAR", "ARRIVES", "UTMACMDFLUSH", "MEMBAR",
                 "FENCE", "WARPGROUPSET", "UTMACCTL", "NANOSLEEP", "ERRBAR", "CCTL"),
    "local": ("LDL", "STL"),
    "float": ("FFMA", "FMUL", "FADD", "FMNMX", "FSEL", "FSETP", "HFMA2", "HADD2", "HMUL2", "FCHK", "FSET",
              "FMNMX3", "FFMA2", "FMUL2", "FADD2", "FHFMA", "FHADD"),
    "conversions": ("F2FP", "F2F", "F2I", "I2F", "F2IP", "I2FP", "PRMT"),
    "integer": ("IADD3", "UIADD3", "IMAD", "UIMAD", "LOP3", "ULOP3", "SHF", "USHF", "LEA", "ULEA", "ISETP", "UISETP",
                "SEL", "USEL", "IABS", "IMNMX", "VIMNMX", "VIADD", "VIADDMNMX", "PLOP3", "UPLOP3", "SGXT", "USGXT",
                "POPC", "FLO", "IADD", "BREV"),
    "moves": ("MOV", "UMOV", "S2R", "S2UR", "R2UR", "CS2R", "LDC", "ULDC", "P2R", "R2P", "SHFL", "UR2R", "UP2UR",
              "R2UP", "VOTE", "VOTEU", "ELECT", "CS2UR", "MOVM", "LDCU", "REDUX"),
    "control": ("BRA", "EXIT", "BSSY", "BSYNC", "CALL", "RET", "YIELD", "BREAK", "BRX", "NOP", "USETMAXREG", "UBRA"),
}  # fmt: skip
_GROUP_OF: Final = {opcode: group for group, opcodes in GROUPS.items() for opcode in opcodes}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction. place: (file, line) if line info starts a new source line here, else None."""

    opcode: str
    operands: str = ""
    predicate: str = ""
    place: tuple[str, int] | None = None

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def group(self) -> str:
        """Its group in GROUPS, else "other"."""
        return _GROUP_OF.get(self.base, "other")

    def __str__(self) -> str:
        return f"{self.predicate:6s}{self.opcode:32s}{self.operands}".rstrip()


def tool() -> str | None:
    """Returns the path of nvdisasm from its wheel, a conda environment or a CUDA toolkit; None if not installed."""
    return find_nvidia_binary_utility("nvdisasm")


def disassemble(cubin: bytes) -> dict[str, list[Instruction]]:
    """Returns the instructions of each entry in order. Raises NotSupported if nvdisasm is missing or fails."""
    program = tool()
    if program is None:
        raise NotSupported(f"SASS needs nvdisasm, which was not found: {extras.remedy('inspect')}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [program, "-g", "-json", path], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    if done.returncode:
        raise NotSupported(f"nvdisasm refused the cubin (exit {done.returncode}): {done.stderr.strip()}")
    return read(json.loads(done.stdout))


def read(document: list[Any]) -> dict[str, list[Instruction]]:
    """Returns the instructions by entry of nvdisasm's JSON: header, functions and, with line info, the file table."""
    _, functions, *tables = document
    table = tables[0] if tables else {"directories": [], "files": []}
    files = [str(Path(table["directories"][item["dir-idx"]], item["file"])) for item in table["files"]]
    return {item["function-name"]: _instructions(item["sass-instructions"], files) for item in functions}


def _instructions(items: Iterable[dict[str, Any]], files: list[str]) -> list[Instruction]:
    found = []
    for item in items:
        place = (files[item["source-file-id"]], item["source-line"]) if "source-line" in item else None
        found.append(Instruction(item["opcode"], item.get("operands", ""), item.get("predicate", ""), place))
    return found


def histogram(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Returns the count of each opcode without modifiers, most frequent first."""
    counts = Counter(instruction.base for instruction in instructions)
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def groups(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Returns the instruction count of each group that occurs, in the order of GROUPS."""
    counts = Counter(instruction.group for instruction in instructions)
    return {group: counts[group] for group in (*GROUPS, "other") if counts[group]}
