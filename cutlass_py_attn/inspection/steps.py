"""Steps: which numbered step of a fused kernel a line of its source belongs to, from the comments that number them.

A comment `# 5  dV += P^T dO` opens step 5; it ends at the next numbered comment, or where a line stands further to the
left. A function whose docstring holds such a number is that step as a whole. Where one comment opens two products
("1 ..., behind it 3 ..."), a line that issues or waits for a product belongs to that product. Lines of no numbered
step belong to the function they stand in.
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
_OPENED: Final = re.compile(r"(\d)  (\S.*?)(?:,? behind it (?=\d  )|$)")
_IN_DOCSTRING: Final = re.compile(r"(?:^|: )(\d)  (\S[^.\n]*)")
_PRODUCT: Final = re.compile(r"self\.(\w+)\.(?:issue|wait|add)\(")
_NUMBERS: Final = {"scores": 1, "output": 3, "dp": 3, "dv": 5, "dk": 6, "dq": 7}  # by the product's name in the kernels
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_DANGLING: Final = {"of", "the", "this", "one", "a", "next", "first", "last"}


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of a kernel: `name` is the step's number, or the function where lines have none; `title` says what it
    does. `file` is relative to the package; `line` is the one that opens it."""

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
    """The step of a line of one of this package's sources; None outside of every function."""
    found = _source(str(path))
    if line in found.steps:
        return found.steps[line]
    holding = [item for item in found.functions if item.lineno <= line <= (item.end_lineno or line)]
    if not holding:
        return None
    # The DSL writes functions of its own around loops and branches, but lines stay: the innermost that is written down.
    inner = max(holding, key=lambda item: item.lineno)
    return Step(inner.name, _first_sentence(inner), found.file, inner.lineno)


def titles(steps: Iterable[Step]) -> dict[str, str]:
    """One title for each name: what the titles of its places begin with."""
    grouped: dict[str, list[str]] = {}
    for step in steps:
        grouped.setdefault(step.name, []).append(step.title)
    return {name: _shared(grouped[name]) for name in sorted(grouped, key=order)}


def order(name: str) -> tuple[bool, str]:
    """Sort key: numbered steps first, in order."""
    return not name.isdigit(), name


@dataclass(frozen=True, slots=True)
class _Source:
    file: str
    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
    steps: dict[int, Step]  # numbered ones only, by line


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
    """The lines of a function that is one step as a whole."""
    found = _IN_DOCSTRING.search(ast.get_docstring(function) or "")
    if found is None:
        return {}
    step = Step(found[1], found[2].strip(), file, function.lineno)
    return dict.fromkeys(range(function.lineno, (function.end_lineno or function.lineno) + 1), step)


def _of_comments(
    function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], file: str
) -> dict[int, tuple[Step, ...]]:
    """The lines below each numbered comment of a function, with the steps that it opens."""
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
    """Lines that issue or wait for a product: of the step that a comment above opens, else of the one so numbered."""
    places: dict[str, list[Step]] = {}
    for several in dict.fromkeys(commented.values()):
        for step in several:
            places.setdefault(step.name, []).append(step)
    found = {}
    for number, line in enumerate(lines, 1):
        product = _PRODUCT.search(line)
        name = str(_NUMBERS.get(product[1], "")) if product else ""
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
    """What all the titles begin with, cut behind a word that ends something."""
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
