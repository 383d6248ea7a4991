"""Digests: hashes of the code that decides what a record on a GPU means: kernels, launches and checks.

Python code counts as its statements, each as its syntax tree without docstrings: comments, docstrings and formatting do
not change a hash, nor does the Python version. Where a statement stands does not count either: neither the name of its
file, nor its place there, nor imports of this repository's modules. What is imported from elsewhere counts. Any other
file counts with all its bytes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.compilation import registry

PACKAGE: Final = "cutlass_py_attn"
OWN: Final = (PACKAGE, "tools", "tests")  # modules of this repository
# What a launch on a GPU runs on the host; errors, explanations and warnings decide no launch.
LAUNCH_ENTRIES: Final = tuple(
    f"{PACKAGE}/{name}.py" for name in ("runtime/binding", "runtime/fill", "plan/append", "plan/merge")
)
NOT_LAUNCHING: Final = tuple(
    f"{PACKAGE}/{name}.py" for name in ("errors", "plan/explain", "plan/performance", "plan/tile_shares")
)
# What decides whether a result on a GPU passes: the tools, lists of cases, and the package's references and checks.
CHECK_ENTRIES: Final = ("tools/release/verify_gpu.py", "tools/release/fuzz.py")
CHECK_FOLDERS: Final = (
    *(f"{PACKAGE}/{folder}/" for folder in ("testing", "reference", "score_terms")),
    "tests/cases/",
    "tools/release/fuzz",
    "tools/release/verify_gpu",
)
_MASKS: Final = ("masks", "key_ranges", "block_sparse", "mask_function", "mask_program", "mask_tracing")
CHECK_FILES: Final = tuple(
    f"{PACKAGE}/problem/{name}.py" for name in (*_MASKS, "drawn_ranges", "drawn_functions", "spec")
)


def of(root: Path) -> dict[str, str]:
    """Returns the digests of a checkout: of the code of the kernels, of the launch and of the checks."""
    return {
        "kernels": files_sha256(root, kernel_files()),
        "launch": files_sha256(root, launch_files(root)),
        "checks": files_sha256(root, check_files(root)),
    }


def kernel_files() -> tuple[str, ...]:
    """Returns every file that decides the kernels' machine code."""
    return tuple(f"{PACKAGE}/{name}" for name in registry.source_modules())


def launch_files(root: Path) -> tuple[str, ...]:
    """Returns every file that decides which kernels are launched, and with which parameters."""
    return tuple(sorted(imported(root, LAUNCH_ENTRIES, (f"{PACKAGE}/",)) - set(NOT_LAUNCHING)))


def check_files(root: Path) -> tuple[str, ...]:
    """Returns every file that decides which cases run on a GPU and whether they pass."""
    return tuple(sorted(imported(root, CHECK_ENTRIES, CHECK_FOLDERS) | set(CHECK_FILES)))


def imported(root: Path, entries: Iterable[str], folders: tuple[str, ...]) -> set[str]:
    """Returns these files and those below `folders` that they import, directly or through one another."""
    found: set[str] = set()
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += (each for each in imports(root, name) if each.startswith(folders))
    return found


def imports(root: Path, name: str) -> Iterator[str]:
    """Yields the files below the root that a file imports itself, without the package, which lists what users call."""
    for module in _modules((root / name).read_text()):
        files = (f"{module}.py", f"{module}/__init__.py")
        yield from (file for file in files if file != f"{PACKAGE}/__init__.py" and (root / file).is_file())


@functools.cache
def _modules(text: str) -> tuple[str, ...]:
    """Returns the paths of what a text imports from modules, and of the modules themselves, without a suffix."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module)
    names = ((node.module, *(f"{node.module}.{each.name}" for each in node.names)) for node in nodes)
    return tuple(dict.fromkeys(str(name).replace(".", "/") for found in names for name in found))


def files_sha256(root: Path, names: Iterable[str]) -> str:
    """Returns the hash of the code of these files, which is the same wherever in them a statement stands."""
    statements: list[str] = []
    imported_names: set[str] = set()
    for name in names:
        code = _code_of(root / name)
        statements += code.statements
        imported_names |= code.imported
    return _sha256("\n".join([*sorted(imported_names), *sorted(statements)]))


def code_sha256(path: Path) -> str:
    """Returns the hash of a file's code."""
    return files_sha256(path.parent, [path.name])


@dataclass(frozen=True, slots=True)
class _Code:
    """A file's code: the hash of each statement, and what its imports name."""

    statements: tuple[str, ...]
    imported: frozenset[str] = frozenset()


def _code_of(path: Path) -> _Code:
    if path.suffix == ".py":
        return _python_code(path.read_text())
    return _Code((hashlib.sha256(path.read_bytes()).hexdigest(),))


@functools.cache
def _python_code(text: str) -> _Code:
    statements, imported_names = [], set[str]()
    for node in _without_docstring(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported_names.update(_imported_names(node))
        elif not _is_for_types(node):
            statements.append(_sha256("".join(_code(node))))
    return _Code(tuple(statements), frozenset(imported_names))


def _imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yields what an import from elsewhere names, and other names that an import of this repository gives."""
    parent = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for each in node.names:
        name = f"{parent}{each.name}"
        is_own = name.partition(".")[0] in OWN
        if not is_own or each.asname:
            yield f"{each.name if is_own else name} as {each.asname or each.name}"


def _is_for_types(node: ast.AST) -> bool:
    """Whether a statement is for type checkers alone."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _code(node: object) -> Iterator[str]:
    """Yields the text of a syntax tree. Fields without a value are left out: Python versions differ in them."""
    if isinstance(node, list):
        yield "["
        for each in node:
            yield from _code(each)
            yield ","
        yield "]"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from _imported_names(node)
    elif isinstance(node, ast.AST):
        yield f"{type(node).__name__}("
        for name, value in ast.iter_fields(node):
            value = _without_docstring(node) if name == "body" else value
            if isinstance(node, ast.Constant) or value not in (None, []):
                yield f"{name}="
                yield from _code(value)
        yield ")"
    else:
        yield repr(node)


def _without_docstring(node: ast.AST) -> Any:
    body = getattr(node, "body")  # noqa: B009
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = body[0] if body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return body[1:]
    return body


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
