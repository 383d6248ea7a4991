"""SASS: a cubin's machine instructions and how often each occurs, through nvdisasm's JSON."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from cuda.pathfinder import find_nvidia_binary_utility

from cutlass_py_attn.errors import NotSupported

Instruction = tuple[str, str]

TIMEOUT_SECONDS = 120


def tool() -> str | None:
    """Path of nvdisasm, from its wheel, a conda environment or a CUDA toolkit; None when there is none."""
    return find_nvidia_binary_utility("nvdisasm")


def disassemble(cubin: bytes) -> dict[str, list[Instruction]]:
    """(opcode, operands) of every instruction, by entry symbol."""
    program = tool()
    if program is None:
        raise NotSupported("SASS needs nvdisasm, which was not found: pip install 'cutlass-py-attn[inspect]'")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [program, "-json", path], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    if done.returncode:
        raise NotSupported(f"nvdisasm refused the cubin (exit {done.returncode}): {done.stderr.strip()}")
    _, functions = json.loads(done.stdout)
    return {
        function["function-name"]: [
            (item["opcode"], item.get("operands", "")) for item in function["sass-instructions"]
        ]
        for function in functions
    }


def histogram(instructions: list[Instruction]) -> dict[str, int]:
    """How often each opcode occurs, without its modifiers, most frequent first."""
    counts = Counter(opcode.partition(".")[0] for opcode, _ in instructions)
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
