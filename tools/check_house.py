"""Lint: rules of this repository that ruff, mypy and import-linter do not have; prints one line for each finding."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeGuard

PYTHON_FOLDERS: Final = ("cutlass_py_attn", "tools", "tests", "examples")
TEXT_SUFFIXES: Final = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".ptx", ".sh", ".cfg", ".txt", ""}
SKIPPED: Final = {".git", ".venv", ".carry", ".hypothesis", "build", "dist", "shared"}
KERNEL_DECORATORS: Final = {"cute.kernel", "cute.jit"}
# A path below one of these roots exists on one machine only.
MACHINE_PATH: Final = re.compile(rf"(?<![\w.~-])/({'|'.join(('work', 'home'))})/")

FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that breaks a rule: what the rule is about, what was found there and what is allowed."""

    file: str
    line: int
    what: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}, found {self.found}, allowed {self.allowed}"


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: its name relative to the root, its text and its syntax tree."""

    name: str
    text: str
    tree: ast.Module


def pipeline_states(source: Source) -> Iterator[Finding]:
    """A pipeline state that a kernel advances has one name.

    A traced loop carries the value of each name separately, so a second name of the same state is not advanced.
    """
    for node in ast.walk(source.tree):
        if not isinstance(node, FUNCTIONS) or not _is_kernel(node):
            continue
        inside = list(ast.walk(node))
        advanced = {
            _dotted(each.func.value) for each in inside if isinstance(each, ast.Call) and _is_advance(each.func)
        }
        for assigned in (each for each in inside if isinstance(each, ast.Assign)):
            for name in sorted(advanced & set(_aliased(assigned.value))):
                yield Finding(source.name, assigned.lineno, "second name of a pipeline state", name, "one")


def machine_paths(root: Path) -> Iterator[Finding]:
    """No text file names a path of the machine on which it was written."""
    for path in _text_files(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found = MACHINE_PATH.search(line)
            if found:
                yield Finding(_relative(path, root), number, "machine path", found[0], "relative paths")


def test_command(root: Path) -> Iterator[Finding]:
    """The test command of README consists of lines of .ci/run, the script of continuous integration."""
    readme, script = root / "README.md", root / ".ci" / "run"
    lines = readme.read_text().splitlines() if readme.is_file() else []
    allowed = {line.strip() for line in script.read_text().splitlines()} if script.is_file() else set()
    commands = [(number, line) for number, line in enumerate(lines, 1) if "-m pytest" in line]
    if not commands:
        yield Finding("README.md", 1, "test command", "none", "the command of .ci/run")
    for number, line in commands:
        for part in (part.strip() for part in line.split("&&")):
            if part not in allowed:
                yield Finding("README.md", number, "test command", repr(part), "a line of .ci/run")


TREE_RULES: Final = (machine_paths, test_command)


def check(root: Path) -> list[Finding]:
    """Returns every finding in the tree at `root`, sorted by file and line."""
    findings: list[Finding] = []
    for folder in PYTHON_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text()
            source = Source(_relative(path, root), text, ast.parse(text, str(path)))
            findings += pipeline_states(source)
    findings += [finding for tree_rule in TREE_RULES for finding in tree_rule(root)]
    return sorted(findings, key=lambda finding: (finding.file, finding.line))


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(_dotted(decorator) in KERNEL_DECORATORS for decorator in node.decorator_list)


def _is_advance(called: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(called, ast.Attribute) and called.attr == "advance"


def _aliased(value: ast.expr) -> Iterator[str]:
    """Names to which an assignment of `value` may give a second name."""
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.IfExp):
        yield from (*_aliased(value.body), *_aliased(value.orelse))
    elif isinstance(value, ast.Tuple):
        for element in value.elts:
            yield from _aliased(element)


def _text_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        if path.name in SKIPPED or path.name.endswith((".egg-info", "cache", "__pycache__")):
            continue
        if path.is_dir():
            yield from _text_files(path)
        elif path.suffix in TEXT_SUFFIXES:
            yield path


def main() -> int:
    """Checks the tree above this file, or the folder that the command line names."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    findings = check(root)
    for finding in findings:
        print(finding)
    print(f"check_house: {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
