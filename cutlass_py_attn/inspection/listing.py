"""Listing: PTX and SASS with the numbered steps marked, and how many instructions each step has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.inspection import sass
from cutlass_py_attn.inspection.line_info import Lined, text_of
from cutlass_py_attn.inspection.steps import Step, order, titles

UNKNOWN = "no step"  # instructions that the compiler made for nobody, or for several lines at once
Stepped = tuple[sass.Instruction, Step | None]

_ENTRY = re.compile(r"\.entry (\w+)\(")
_WGMMA = re.compile(r"\s*wgmma\.mma_async\.\S*\.m(\d+)n(\d+)k(\d+)\.")
_HGMMA = re.compile(r"HGMMA\.(\d+x\d+x\d+)\b")
_OPCODE = re.compile(r"\s*(?:@!?%p\d+\s+)?\{?\s*([a-z][\w.:]*)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a listing and the step it belongs to, None where that is not known."""

    text: str
    step: Step | None = None


def entry_text(ptx: str, symbol: str) -> str:
    """The PTX of one entry: from its .entry line to the next."""
    for part in ptx.split(".entry ")[1:]:
        if part.startswith(f"{symbol}("):
            return part
    return ""


def ptx_lines(artifact: Artifact, lined: Lined | None) -> list[Line]:
    """The artifact's PTX, line by line and unchanged."""
    if lined is None:
        return [Line(text) for text in artifact.ptx.splitlines()]
    labels = iter(lined.labels())
    return [Line(text, next(labels)[1] if text_of(text) else None) for text in artifact.ptx.splitlines()]


def sass_lines(artifact: Artifact, lined: Lined | None) -> dict[str, list[Stepped]]:
    """Every instruction and its step, by entry in the order of the artifact's kernels; NotSupported without nvdisasm.

    A line holds until the next one is named. ptxas names none for wgmma: those products are taken in the order in which
    the PTX has them, if their shapes are the same one by one.
    """
    found = sass.disassemble(lined.cubin if lined else artifact.cubin)
    listed = {kernel.symbol: found[kernel.symbol] for kernel in artifact.kernels}
    if lined is None:
        return {symbol: [(item, None) for item in items] for symbol, items in listed.items()}
    products = _products(lined)
    return {symbol: _stepped(items, lined, products.get(symbol, [])) for symbol, items in listed.items()}


def _stepped(items: list[sass.Instruction], lined: Lined, products: list[tuple[str, Step | None]]) -> list[Stepped]:
    shapes = [shape[1] for shape in (_HGMMA.match(item.opcode) for item in items) if shape]
    ordered = iter(
        [step for _, step in products] if shapes == [shape for shape, _ in products] else [None] * len(shapes)
    )
    found: list[Stepped] = []
    step: Step | None = None
    for item in items:
        step = lined.step(*item.place) if item.place else step
        found.append((item, next(ordered) if _HGMMA.match(item.opcode) else step))
    return found


def _products(lined: Lined) -> dict[str, list[tuple[str, Step | None]]]:
    """(shape, step) of each wgmma of each entry, in the order of the PTX."""
    found: dict[str, list[tuple[str, Step | None]]] = {}
    entry = ""
    for text, step in lined.labels():
        if named := _ENTRY.search(text):
            entry = named[1]
        if shape := _WGMMA.match(text):
            found.setdefault(entry, []).append(("x".join(shape.groups()), step))
    return found


def marked(lines: Iterable[Line], comment: str = "//") -> Iterator[str]:
    """The lines, a comment before each that begins another step than the one before it.

    A mark holds until the next. Lines of no known step stay where they are.
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
    """What is written before a step."""
    what = f"step {step.name}" if step.is_numbered else step.name
    return f"{comment} ---- {what}{'  ' if step.title else ''}{step.title}  [{step.file}:{step.line}]"


def ptx_opcode(text: str) -> str:
    """The opcode of a line of PTX; nothing for labels, directives and braces."""
    found = _OPCODE.match(text)
    return found[1] if found and not found[1].endswith(":") and text.rstrip().endswith(";") else ""


def steps_table(instructions: Iterable[Stepped]) -> list[dict[str, object]]:
    """A row for each step of an entry: its name and title, where it stands, and its instructions by group."""
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
