"""Steps: maps each source line of a fused kernel to its numbered step, which a comment opens.

- A comment `# 5  dV += P^T dO` opens step 5. The step ends at the next numbered comment or at a smaller indentation.
- A function whose docstring contains such a numbered step belongs to that step as a whole.
- A comment can open two overlapping products: `# 1  S = Q K^T, then 3  O += P V`. A line that issues a product, or
  waits for it, then belongs to the step of that product.
- A line without a numbered step belongs to its function.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parent.parent

_COMMENT: Final = re.compile(r"^\s*# (\d  \S.*)$")
_OPENED: Final = re.compile(r"(\d)  (\S.*?)(?:,? (?:then|followed by) (?=\d  )|$)")
_IN_DOCSTRING: Final = re.compile(r"(?:^|^Computes |: )(\d)  (\S[^.\n]*)")
# `matmul_qk.issue(gemms.mma_qk, ...)`, `matmul_qk.wait(gemms.mma_qk)` or `self.mma_qk.wait()`
_GEMM: Final = re.compile(r"\.(?:issue|wait)\((?:\w+\.)*(mma_\w+)|self\.(\w+)\.(?:issue|wait|add)\(")
# The step of a GEMM, by its name in the kernels.
_NUMBERS: Final = {
    **{"mma_qk": 1, "mma_pv": 3, "mma_dov": 3, "mma_pdo": 5, "mma_dsq": 6, "mma_dsk": 7},
}
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_DANGLING: Final = {"of", "the", "this", "one", "a", "next", "first", "last"}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a kernel.

    - name: the number of the step, or the function's name for lines without a numbered step
    - title: text of the comment, or first sentence of the function's docstring
    - file, line: where the step opens; file is relative to the package
    """

    name: str
    title: str
    file: str
    line: int

    @property
    def is_numbered(self) -> bool:
        """Whether this is a numbered step."""
        return self.name.isdigit()


@functools.cache
def step_of(path: str | Path, line: int) -> Step | None:
    """Returns the step of a source line; None outside of functions."""
    found = _source(str(path))
    if line in found.steps:
        return found.steps[line]
    holding = [item for item in found.functions if item.lineno <= line <= (item.end_lineno or line)]
    if not holding:
        return None
    # The DSL generates functions for loops and branches but keeps line numbers: this is the innermost written function.
    inner = max(holding, key=lambda item: item.lineno)
    return Step(inner.name, _first_sentence(inner), found.file, inner.lineno)


def titles(steps: Iterable[Step]) -> dict[str, str]:
    """Returns one title for each step name: the common prefix of the titles under that name."""
    grouped: dict[str, list[str]] = {}
    for step in steps:
        grouped.setdefault(step.name, []).append(step.title)
    return {name: _shared(grouped[name]) for name in sorted(grouped, key=order)}


def order(name: str) -> tuple[bool, str]:
    """Returns a sort key: numbered steps first, in order."""
    return not name.isdigit(), name


@dataclass(frozen=True, slots=True)
class _Source:
    file: str
    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
    steps: dict[int, Step]  # numbered steps by line


@functools.cache
def _source(path: str) -> _Source:
    text = Path(path).read_text()
    file = Path(path).resolve()
    name = file.relative_to(PACKAGE).as_posix() if file.is_relative_to(PACKAGE) else file.name
    functions = tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, _FUNCTIONS))
    lines = text.splitlines()
    commented: dict[int, tuple[Step, ...]] = {}
    for function in functions:
        commented |= _of_comments(function, lines, name)
    steps = {line: several[0] for line, several in commented.items()}
    for function in functions:
        steps = _of_docstring(function, name) | steps
    return _Source(name, functions, steps | _of_products(lines, commented))


def _of_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> dict[int, Step]:
    """Returns the lines of a function whose docstring names one numbered step."""
    found = _IN_DOCSTRING.search(ast.get_docstring(function) or "")
    if found is None:
        return {}
    step = Step(found[1], found[2].strip(), file, function.lineno)
    return dict.fromkeys(range(function.lineno, (function.end_lineno or function.lineno) + 1), step)


def _of_comments(
    function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], file: str
) -> dict[int, tuple[Step, ...]]:
    """Returns the lines below each numbered comment of a function, with the steps that the comment opens."""
    found: dict[int, tuple[Step, ...]] = {}
    opened: tuple[Step, ...] = ()
    indent = 0
    for number in range(function.lineno, (function.end_lineno or function.lineno) + 1):
        line = lines[number - 1]
        comment = _COMMENT.match(line)
        if comment:
            indent = len(line) - len(line.lstrip())
            opened = tuple(Step(n, text.split(". ")[0], file, number) for n, text in _OPENED.findall(comment[1]))
        elif line.strip() and len(line) - len(line.lstrip()) < indent:
            opened = ()
        if opened:
            found[number] = opened
    return found


def _of_products(lines: list[str], commented: dict[int, tuple[Step, ...]]) -> dict[int, Step]:
    """Returns the lines that issue a product or wait for it, with its step.

    The step is one that the comment above opens, else any step of the file with the product's number.
    """
    places: dict[str, list[Step]] = {}
    for several in dict.fromkeys(commented.values()):
        for step in several:
            places.setdefault(step.name, []).append(step)
    found = {}
    for number, line in enumerate(lines, 1):
        gemm = _GEMM.search(line)
        name = str(_NUMBERS.get(gemm[1] or gemm[2], "")) if gemm else ""
        here = [step for step in commented.get(number, ()) if step.name == name]
        if here:
            found[number] = here[0]
        elif name in places:
            found[number] = replace(places[name][0], title=_shared([step.title for step in places[name]]))
    return found


def _first_sentence(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = " ".join((ast.get_docstring(function) or "").split())
    return re.split(r"(?<=\w)[.;](?:\s|$)", text)[0]


def _shared(found: list[str]) -> str:
    """Returns the common prefix of the titles, without a dangling word at its end."""
    if len(set(found)) == 1:
        return found[0]
    words: list[str] = []
    for several in zip(*(title.split() for title in found), strict=False):
        if len(set(several)) > 1:
            break
        words.append(several[0])
    while words and words[-1] in _DANGLING:
        words.pop()
    return " ".join(words).rstrip(",") or min(found, key=len)
