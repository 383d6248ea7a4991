"""Listing: PTX and SASS with a comment before each numbered step, and instruction counts of each step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.inspection import sass
from cutlass_py_attn.inspection.line_info import LineInfo, text_of
from cutlass_py_attn.inspection.steps import Step, order, titles

UNKNOWN = "no step"  # instructions that the compiler created for no source line, or for several lines
Stepped = tuple[sass.Instruction, Step | None]

_ENTRY = re.compile(r"\.entry (\w+)\(")
_WGMMA = re.compile(r"\s*wgmma\.mma_async\.\S*\.m(\d+)n(\d+)k(\d+)\.")
_HGMMA = re.compile(r"HGMMA\.(\d+x\d+x\d+)\b")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a listing and its step; None if the step is not known."""

    text: str
    step: Step | None = None


def entry_text(ptx: str, symbol: str) -> str:
    """Returns the PTX of one entry: from its .entry line to the next .entry line."""
    for part in ptx.split(".entry ")[1:]:
        if part.startswith(f"{symbol}("):
            return part
    return ""


def ptx_lines(artifact: Artifact, line_info: LineInfo | None) -> list[Line]:
    """Returns the lines of the artifact's PTX, unchanged, with their steps."""
    if line_info is None:
        return [Line(text) for text in artifact.ptx.splitlines()]
    labels = iter(line_info.labels())
    return [Line(text, next(labels)[1] if text_of(text) else None) for text in artifact.ptx.splitlines()]


def sass_lines(artifact: Artifact, line_info: LineInfo | None) -> dict[str, list[Stepped]]:
    """Returns each instruction with its step, by entry in the order of the artifact's kernels.

    A source line applies to all instructions up to the next source line. ptxas emits no line for wgmma: wgmma
    instructions get the steps of those in the PTX, in order, if their shapes agree one by one. Raises NotSupported
    if nvdisasm is not installed.
    """
    found = sass.disassemble(line_info.cubin if line_info else artifact.cubin)
    listed = {kernel.symbol: found[kernel.symbol] for kernel in artifact.kernels}
    if line_info is None:
        return {symbol: [(item, None) for item in items] for symbol, items in listed.items()}
    products = _products(line_info)
    return {symbol: _stepped(items, line_info, products.get(symbol, [])) for symbol, items in listed.items()}


def _stepped(
    items: list[sass.Instruction], line_info: LineInfo, products: list[tuple[str, Step | None]]
) -> list[Stepped]:
    shapes = [shape[1] for shape in (_HGMMA.match(item.opcode) for item in items) if shape]
    ordered = iter(
        [step for _, step in products] if shapes == [shape for shape, _ in products] else [None] * len(shapes)
    )
    found: list[Stepped] = []
    step: Step | None = None
    for item in items:
        step = line_info.step(*item.place) if item.place else step
        found.append((item, next(ordered) if _HGMMA.match(item.opcode) else step))
    return found


def _products(line_info: LineInfo) -> dict[str, list[tuple[str, Step | None]]]:
    """Returns (shape, step) of each wgmma instruction by entry, in the order of the PTX."""
    found: dict[str, list[tuple[str, Step | None]]] = {}
    entry = ""
    for text, step in line_info.labels():
        if named := _ENTRY.search(text):
            entry = named[1]
        if shape := _WGMMA.match(text):
            found.setdefault(entry, []).append(("x".join(shape.groups()), step))
    return found


def marked(lines: Iterable[Line], comment: str = "//") -> Iterator[str]:
    """Yields the lines, with a comment before each line whose step differs from the step of the lines before it.

    A mark applies up to the next mark. Lines without a known step get no mark.
    """
    current = None
    for line in lines:
        if line.step is not None and (line.step.name, line.step.title) != current:
            current = line.step.name, line.step.title
            yield mark(line.step, comment)
        yield line.text
        if line.text.startswith("}"):
            current = None


def mark(step: Step, comment: str = "//") -> str:
    """Returns the comment that marks a step."""
    what = f"step {step.name}" if step.is_numbered else step.name
    return f"{comment} ---- {what}{'  ' if step.title else ''}{step.title}  [{step.file}:{step.line}]"


def steps_table(instructions: Iterable[Stepped]) -> list[dict[str, object]]:
    """Returns a row for each step of an entry: name, title, source locations, and instruction counts by group."""
    grouped: dict[str, list[sass.Instruction]] = {}
    steps: dict[str, list[Step]] = {}
    for instruction, step in instructions:
        grouped.setdefault(step.name if step else UNKNOWN, []).append(instruction)
        if step:
            steps.setdefault(step.name, []).append(step)
    named = titles(dict.fromkeys(step for several in steps.values() for step in several))
    names = sorted(grouped, key=lambda name: (name == UNKNOWN, order(name)))
    return [
        {
            "step": name,
            "title": named.get(name, ""),
            "places": sorted({f"{step.file}:{step.line}" for step in steps.get(name, [])}),
            "instructions": len(grouped[name]),
            "groups": sass.groups(grouped[name]),
        }
        for name in names
    ]
