"""Line info: a kernel compiled once more with the source line of every instruction, beside unchanged machine code.

The DSL offers `loc_transform`, which says where an operation comes from. Here an operation comes from a step: the one
of the innermost line of the package's kernels that belongs to a numbered step, else the function that the kernel itself
calls. The lines are made up: of a file of that name, step number i has the lines from LINES * i on, for LLVM counts on
within a piece of inline assembly. The result is taken only if PTX and machine code are, but for the lines, those of
the artifact.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from cutlass_py_attn import compiler, cubin
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.inspection.steps import PACKAGE, Step, step_of

_KERNEL_FILES: Final = (f"{PACKAGE / 'fused'}/", str(PACKAGE / "gemm" / "alone"))
_DIRECTIVE: Final = re.compile(r"\s*\.(?:loc|file)\b")
_LOC: Final = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s")
_FILE: Final = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_COMMENT: Final = re.compile(r"\s*//.*")

STEPS: Final = "steps"
LINES: Final = 1000


@dataclass(frozen=True, slots=True)
class Lined:
    """PTX and cubin with line info, and the steps that their lines stand for."""

    ptx: str
    cubin: bytes
    steps: tuple[Step, ...]

    def step(self, file: str, line: int) -> Step | None:
        """The step that a line of these texts stands for; None for any other line."""
        number = line // LINES - 1
        return self.steps[number] if Path(file).name == STEPS and 0 <= number < len(self.steps) else None

    def labels(self) -> list[tuple[str, Step | None]]:
        """(line of PTX without its comment, step) of every line that is not empty or about lines."""
        files = dict(_FILE.findall(self.ptx))
        found: list[tuple[str, Step | None]] = []
        step: Step | None = None
        for line in self.ptx.splitlines():
            place = _LOC.match(line)
            if place:
                step = self.step(files.get(place[1], ""), int(place[2]))
            elif ".entry " in line:
                step = None
            if text := text_of(line):
                found.append((text, step))
        return found


def text_of(line: str) -> str:
    """A line of PTX without its comment; nothing for one that tells of lines."""
    return "" if _DIRECTIVE.match(line) else _COMMENT.sub("", line).rstrip()


def lined(artifact: Artifact) -> Lined:
    """The artifact's kernels with line info.

    Raises Stale where this source, or this compiler, gives other PTX or machine code than the artifact has, and
    CompileError where there is no compiler.
    """
    build = artifact.build
    chosen = [
        attempt for attempt in compiler.allocations(build) if compiler.allocation_of(attempt) == artifact.allocation
    ]
    if not chosen:
        raise Stale(f"{build.symbol} for {build.arch}: {artifact.allocation!r} is none of this compiler's allocations")
    steps: dict[Step, int] = {}
    output = compiler.run(chosen[0], lines=_steps_as_lines(steps))
    found = Lined(output.ptx, output.cubin, tuple(steps))
    same_ptx = [text for text, _ in found.labels()] == [
        text for text in map(text_of, artifact.ptx.splitlines()) if text
    ]
    if not same_ptx or cubin.code(found.cubin) != cubin.code(artifact.cubin):
        raise Stale(
            f"{build.symbol} for {build.arch}: this source and compiler ({compiler.toolchain()}) give other "
            f"{'machine code' if same_ptx else 'PTX'} than the artifact has ({artifact.toolchain}); build it again"
        )
    return found


@contextmanager
def _steps_as_lines(steps: dict[Step, int]) -> Iterator[None]:
    """Operations traced in this context come from their steps, which are numbered in `steps`."""
    operations = importlib.import_module("cutlass._mlir_helpers.op")
    location = importlib.import_module("cutlass._mlir.ir").Location

    def of_step(given: Any) -> Any:
        step = _step_here(sys._getframe(1))
        return given if step is None else location.file(STEPS, LINES * steps.setdefault(step, len(steps) + 1), 0)

    with operations.loc_transform(of_step):
        yield


def _step_here(frame: FrameType | None) -> Step | None:
    """The step that an operation traced under this frame belongs to; none outside of every kernel."""
    found: Step | None = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_KERNEL_FILES):
            step = step_of(frame.f_code.co_filename, frame.f_lineno)
            if step is not None and step.is_numbered:
                return step
            if step is not None and step.name.endswith("kernel"):  # @cute.kernel: what calls it belongs to no entry
                return found or step
            found = step
        frame = frame.f_back
    return None
