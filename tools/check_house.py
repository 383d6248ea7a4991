"""Check house: the rules of this repository that no linter knows, one printed line for each objection."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

PACKAGE = "cutlass_py_attn"
FILE_LINES = 450
FUNCTION_LINES = 60
KERNEL_LINES = 150
PARAMETERS = 8
NESTING = 3

PYTHON_ROOTS = (PACKAGE, "tools", "tests")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".ptx", ".sh", ".cfg", ".txt", ""}
SKIPPED_FOLDERS = {".git", ".venv", ".carry", "build", "dist", "shared"}
KERNEL_DECORATORS = {"cute.kernel", "cute.jit"}
FORBIDDEN_NAMES = {"blk", "hdim", "nheads"}
FORBIDDEN_CAMEL = {"kBlockM", "kBlockN"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\s*\(#\d+\))")
# A path that begins at one of these roots exists on one machine only.
MACHINE_PATH = re.compile(rf"(?<![\w.~-])/({'|'.join(('work', 'home'))})/")

BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Objection:
    """One broken rule: where, what, what was found and what is allowed."""

    file: str
    line: int
    what: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}, found {self.found}, allowed {self.allowed}"


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: its name relative to the root, its text and its tree."""

    name: str
    text: str
    tree: ast.Module

    def objection(self, line: int, what: str, found: object, allowed: object) -> Objection:
        """An objection against this file."""
        return Objection(self.name, line, what, str(found), str(allowed))


def file_length(source: Source) -> Iterator[Objection]:
    """At most FILE_LINES lines."""
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        yield source.objection(FILE_LINES + 1, "file length", f"{lines} lines", FILE_LINES)


def opening_docstring(source: Source) -> Iterator[Objection]:
    """A docstring that starts in line 1 with a whole sentence."""
    first = source.tree.body[0] if source.tree.body else None
    text = ast.get_docstring(source.tree, clean=False)
    if text is None or first is None or first.lineno != 1:
        yield source.objection(1, "first line", "no docstring", "a docstring with one sentence")
    elif not text.splitlines()[0].rstrip().endswith("."):
        yield source.objection(1, "first line", repr(text.splitlines()[0]), "a sentence that ends with a full stop")


def functions(source: Source) -> Iterator[Objection]:
    """Length, parameters and nesting of every function."""
    for node in ast.walk(source.tree):
        if not isinstance(node, FUNCTIONS):
            continue
        is_kernel = _is_kernel(node)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        ceiling = KERNEL_LINES if is_kernel else FUNCTION_LINES
        if lines > ceiling:
            yield source.objection(node.lineno, f"length of {node.name}", f"{lines} lines", ceiling)
        yield from _parameters(source, node)
        depth = _depth(node.body)
        if depth > NESTING and not is_kernel:
            yield source.objection(node.lineno, f"nesting of {node.name}", depth, NESTING)


def pipeline_states(source: Source) -> Iterator[Objection]:
    """A state that a kernel advances has one name: a traced loop carries each name's value by itself, and a second one
    stays behind."""
    for node in ast.walk(source.tree):
        if not isinstance(node, FUNCTIONS) or not _is_kernel(node):
            continue
        inside = list(ast.walk(node))
        advanced = {_dotted(it.func.value) for it in inside if isinstance(it, ast.Call) and _is_advance(it.func)}
        for assigned in (it for it in inside if isinstance(it, ast.Assign)):
            for name in sorted(advanced & set(_names_given(assigned.value))):
                yield source.objection(assigned.lineno, "second name of a pipeline state", name, "one")


def star_imports(source: Source) -> Iterator[Objection]:
    """Every imported name is written out."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield source.objection(node.lineno, "import", f"from {node.module} import *", "names")


def names_and_comments(source: Source) -> Iterator[Objection]:
    """No name from other projects' jargon, no commented-out code, no unfinished mark without its issue."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        line = token.start[0]
        if token.type == tokenize.NAME and _is_forbidden(token.string):
            yield source.objection(line, "name", token.string, "the words of gemm/__init__.py")
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string.lstrip("#!").strip()
        unfinished = UNFINISHED.search(comment)
        if unfinished:
            yield source.objection(line, "unfinished mark", unfinished[1], f"{unfinished[1]} (#issue number)")
        if is_code(comment):
            yield source.objection(line, "commented-out code", repr(comment), "prose")


def is_code(comment: str) -> bool:
    """Whether a comment is a statement that was switched off.

    Equations (`ds = p * (dp - delta)`) and shapes (`(rows, columns)`) parse as Python too and are welcome, so
    an assignment counts only with an attribute, an index, a text or a keyword in it.
    """
    text = f"{comment} pass" if comment.endswith(":") else comment
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    if len(body) != 1:
        return len(body) > 1
    statement = body[0]
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.If | ast.While):
        return not isinstance(statement.test, ast.Name)
    if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
        marks = (ast.Attribute, ast.Subscript, ast.keyword)
        inside = list(ast.walk(statement))
        has_text = any(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in inside)
        return statement.value is not None and (has_text or any(isinstance(node, marks) for node in inside))
    return True


def machine_paths(root: Path) -> Iterator[Objection]:
    """No text file names a path of the machine it was written on."""
    for path in _text_files(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found = MACHINE_PATH.search(line)
            if found:
                yield Objection(_relative(path, root), number, "machine path", found[0], "relative paths")


def file_map(root: Path) -> Iterator[Objection]:
    """README's map names exactly the package's Python files, each with a sentence."""
    readme = root / "README.md"
    text = readme.read_text() if readme.is_file() else ""
    mapped = dict(_mapped_files(text))
    actual = {_relative(path, root) for path in (root / PACKAGE).rglob("*.py")}
    for name in sorted(actual - mapped.keys()):
        yield Objection("README.md", 1, "file map", f"no line for {name}", "one line for each file")
    for name, (line, sentence) in mapped.items():
        if name not in actual:
            yield Objection("README.md", line, "file map", f"{name}, which does not exist", "files of the tree")
        elif not sentence:
            yield Objection("README.md", line, "file map", f"{name} without a sentence", "a sentence for each file")


def test_command(root: Path) -> Iterator[Objection]:
    """What README tells a user to run for the tests is, line for line, what continuous integration runs."""
    readme, script = root / "README.md", root / ".ci" / "run"
    lines = readme.read_text().splitlines() if readme.is_file() else []
    ran = {line.strip() for line in script.read_text().splitlines()} if script.is_file() else set()
    commands = [(number, line) for number, line in enumerate(lines, 1) if "-m pytest tests/cpu" in line]
    if not commands:
        yield Objection("README.md", 1, "test command", "none", "the command of .ci/run")
    for number, line in commands:
        for part in (part.strip() for part in line.split("&&")):
            if part not in ran:
                yield Objection("README.md", number, "test command", repr(part), "a line of .ci/run")


SOURCE_RULES = (file_length, opening_docstring, functions, pipeline_states, star_imports, names_and_comments)
TREE_RULES = (machine_paths, file_map, test_command)


def check(root: Path) -> list[Objection]:
    """Every objection to the tree at `root`, sorted by file and line."""
    found: list[Objection] = []
    for folder in PYTHON_ROOTS:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text()
            source = Source(_relative(path, root), text, ast.parse(text, str(path)))
            found += [objection for rule in SOURCE_RULES for objection in rule(source)]
    found += [objection for tree_rule in TREE_RULES for objection in tree_rule(root)]
    return sorted(found, key=lambda objection: (objection.file, objection.line))


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(_dotted(decorator) in KERNEL_DECORATORS for decorator in node.decorator_list)


def _is_advance(called: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(called, ast.Attribute) and called.attr == "advance"


def _names_given(value: ast.expr) -> Iterator[str]:
    """The names whose very value an assignment hands on."""
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.IfExp):
        yield from (*_names_given(value.body), *_names_given(value.orelse))
    elif isinstance(value, ast.Tuple):
        for element in value.elts:
            yield from _names_given(element)


def _parameters(source: Source, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Objection]:
    """Positional and keyword-only parameters have the ceiling each: a keyword names itself in the call."""
    positional = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
    if positional[:1] in (["self"], ["cls"]):
        positional = positional[1:]
    for kind, count in (("positional", len(positional)), ("keyword-only", len(node.args.kwonlyargs))):
        if count > PARAMETERS:
            yield source.objection(node.lineno, f"{kind} parameters of {node.name}", count, PARAMETERS)


def _depth(body: list[ast.stmt]) -> int:
    """Deepest nesting of blocks in `body`; an elif stands beside its if, a nested function starts anew."""
    return max((_depth_of(statement) for statement in body), default=0)


def _depth_of(statement: ast.stmt) -> int:
    if not isinstance(statement, BLOCKS):
        return 0
    if isinstance(statement, ast.If) and len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If):
        return max(1 + _depth(statement.body), _depth_of(statement.orelse[0]))
    bodies = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    if isinstance(statement, ast.Match):
        bodies = [case.body for case in statement.cases]
    if isinstance(statement, ast.Try):
        bodies += [handler.body for handler in statement.handlers]
    return 1 + max(_depth(body) for body in bodies)


def _is_forbidden(name: str) -> bool:
    return name in FORBIDDEN_CAMEL or not FORBIDDEN_NAMES.isdisjoint(name.lower().split("_"))


def _text_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        skipped = path.name in SKIPPED_FOLDERS or path.name.endswith((".egg-info", "cache", "__pycache__"))
        if path.is_dir() and not skipped and path.name != ".hypothesis":
            yield from _text_files(path)
        elif path.is_file() and path.suffix in TEXT_SUFFIXES:
            yield path


def _mapped_files(readme: str) -> Iterator[tuple[str, tuple[int, str]]]:
    """(file, (line, sentence)) of the fenced block whose first line is the package's folder."""
    folders: list[tuple[int, str]] = []
    inside = False
    for number, line in enumerate(readme.splitlines(), 1):
        if line.strip() == f"{PACKAGE}/":
            inside = True
        elif line.startswith("```"):
            inside = False
        if not inside or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        name, _, sentence = line.strip().partition(" ")
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        if name.endswith("/"):
            folders.append((indent, name))
        else:
            yield "".join(folder for _, folder in folders) + name, (number, sentence.strip())


def main() -> int:
    """Check the tree above this file, or the folder that is named."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = check(root)
    for objection in found:
        print(objection)
    print(f"check_house: {len(found)} objections")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
