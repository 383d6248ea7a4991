"""Line info: compiles a kernel once more with line info that maps every instruction to a step of its source.

The DSL's `loc_transform` sets the source location of each traced operation. Here that location encodes a step: the
numbered step of the innermost traced line in this package's kernels, else the function that the kernel calls directly.
Step i (from 1) gets the lines from LINES * i on of a fictitious file STEPS: LLVM increments the line number within
inline assembly, so steps need distance. The result is accepted only if PTX and machine code equal the artifact's,
apart from line info.
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

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import compiler, cubin
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.inspection.steps import PACKAGE, Step, step_of

_KERNEL_FILES: Final = tuple(
    str(PACKAGE / "kernels" / "_").removesuffix("_") + name
    for name in (
        *("component_gemms/standalone", "common/dynamic_tiles.py", "sm80/", "decode/"),
        *("sm80_split_d/forward.py", "sm80_split_d/backward.py"),
        *("sm90_forward/forward.py", "sm90_backward/backward.py", "sm90_backward/main_kernel.py"),
        *("sm90_backward/grad_query", "sm90_backward_2cta/", "backward_parts/"),
        *("sm90_wide/forward.py", "sm90_wide/gradient.py", "sm90_mla/decode.py"),
    )
)
_DIRECTIVE: Final = re.compile(r"\s*\.(?:loc|file)\b")
_LOC: Final = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s")
_FILE: Final = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_COMMENT: Final = re.compile(r"\s*//.*")

STEPS: Final = "steps"
LINES: Final = 1000


@dataclass(frozen=True, slots=True)
class LineInfo:
    """PTX and cubin with line info, and the steps that the line numbers encode."""

    ptx: str
    cubin: bytes
    steps: tuple[Step, ...]

    def step(self, file: str, line: int) -> Step | None:
        """Returns the step that a line number encodes; None for a line of another file."""
        number = line // LINES - 1
        return self.steps[number] if Path(file).name == STEPS and 0 <= number < len(self.steps) else None

    def labels(self) -> list[tuple[str, Step | None]]:
        """Returns (PTX line without comment, step) for each line that is neither empty nor a line directive."""
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
    """Returns a line of PTX without its comment; "" for a line directive."""
    return "" if _DIRECTIVE.match(line) else _COMMENT.sub("", line).rstrip()


def compile_with_line_info(artifact: Artifact) -> LineInfo:
    """Compiles the artifact's kernels once more, with line info.

    Raises Stale if this source or this compiler produces other PTX or machine code than the artifact has, and
    CompileError if the compiler is not installed.
    """
    build = artifact.build
    chosen = [
        attempt for attempt in compiler.allocations(build) if compiler.allocation_of(attempt) == artifact.allocation
    ]
    if not chosen:
        raise Stale(
            f"{build.symbol} for {build.arch}: {artifact.allocation!r} is none of this compiler's allocations; "
            "build it again"
        )
    steps: dict[Step, int] = {}
    output = compiler.compile_unchecked(chosen[0], lines=_steps_as_lines(steps))
    found = LineInfo(output.ptx, output.cubin, tuple(steps))
    same_ptx = [text for text, _ in found.labels()] == [
        text for text in map(text_of, artifact.ptx.splitlines()) if text
    ]
    if not same_ptx or cubin.code(found.cubin) != cubin.code(artifact.cubin):
        raise Stale(
            f"{build.symbol} for {build.arch}: this source and compiler ({compiler.toolchain()}) produce other "
            f"{'machine code' if same_ptx else 'PTX'} than the artifact has ({artifact.toolchain}); build it again"
        )
    return found


@contextmanager
def _steps_as_lines(steps: dict[Step, int]) -> Iterator[None]:
    """In this context each traced operation has a location that encodes its step; `steps` collects the numbers."""
    operations = importlib.import_module("cutlass._mlir_helpers.op")
    location = importlib.import_module("cutlass._mlir.ir").Location

    def of_step(given: Any) -> Any:
        step = _step_here(sys._getframe(1))
        return given if step is None else location.file(STEPS, LINES * steps.setdefault(step, len(steps) + 1), 0)

    with operations.loc_transform(of_step):
        yield


def _step_here(frame: FrameType | None) -> Step | None:
    """Returns the step of an operation that is traced under this frame; None outside of kernels."""
    found: Step | None = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_KERNEL_FILES):
            step = step_of(frame.f_code.co_filename, frame.f_lineno)
            if step is not None and step.is_numbered:
                return step
            if step is not None and step.name.endswith("kernel"):  # @cute.kernel: its callers are host code
                return found or step
            found = step
        frame = frame.f_back
    return None
