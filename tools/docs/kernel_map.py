"""Kernel map of docs/architecture.md: the file of every kernel, its length, and what it serves."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from cutlass_py_attn.kernels.catalogue import KERNELS as CATALOGUE
from cutlass_py_attn.kernels.kernel import Kernel

KERNELS: Final = "cutlass_py_attn/kernels"
HEADS: Final = ("file", "lines", "kernels: direction, family, variants", "what it computes")
ROUNDED: Final = 10  # lines are rounded to this, so that few edits change the map


def table(root: Path) -> str:
    """Returns a row for each module that traces kernels."""
    modules: dict[str, list[Kernel]] = {}
    for kernel in CATALOGUE.values():
        modules.setdefault(kernel.module, []).append(kernel)
    rows = [_row(root, module, kernels) for module, kernels in modules.items()]
    return "\n".join([f"| {' | '.join(HEADS)} |", f"|{' --- |' * len(HEADS)}", *rows])


def _row(root: Path, module: str, kernels: list[Kernel]) -> str:
    name = f"{module.replace('.', '/')}.py"
    text = (root / KERNELS / name).read_text()
    lines = round(len(text.splitlines()) / ROUNDED) * ROUNDED
    summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].rstrip(".")
    named = ", ".join(kernel.variant or "standard" for kernel in kernels)
    served = f"{kernels[0].kind}, {kernels[0].family}: {named}"
    return f"| [`{name}`](../{KERNELS}/{name}) | {lines} | {served} | {summary} |"
