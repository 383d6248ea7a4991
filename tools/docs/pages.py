"""Pages of the documentation, parsed and run by Sybil: README.md and docs/*.md.

The info string of a block says how the block is run:

    python          In order, in the page's namespace. A `text` block right after the block is its expected output.
    python host     Like `python`, but skipped on a GPU machine, because the block reads files written by commands.
    python gpu      On a GPU only. Elsewhere a test checks that the block has passed on one as it is (gpu_runs.py).
    sh              By bash, in the page's folder, which links to the checkout's `examples` and `tests`.
    sh setup        Never: the block installs something. A test checks that the extras exist.
    python signature, text, c, ...    Never.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from tools.docs.code_block import CodeBlock

ROOT = Path(__file__).resolve().parents[2]
SHELL_TIMEOUT_SECONDS = 300
LINKED_FOLDERS = ("examples", "tests")  # shell blocks read them by their paths in the checkout
NOT_RUN = ("python gpu", "python signature", "sh setup", "text", "svg", "json", "c", "cpp", "mermaid", "")


def pages(root: Path = ROOT) -> list[Path]:
    """Returns README.md and every page of docs/."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def linked(root: Path = ROOT) -> list[Path]:
    """Returns the pages, and the other texts that link to each other: data, notes beside the code, and the gallery."""
    others = ("docs/data/*.md", "cutlass_py_attn/**/NOTES*.md", "ptx/README.md", "CHANGELOG.md")
    return [*pages(root), *sorted(path for pattern in others for path in root.glob(pattern))]


def code_blocks(page: Path) -> list[CodeBlock]:
    """Returns the code blocks of a page in order, without the `text` blocks that are expected outputs."""
    return [_block_of(example) for example in Document.parse(str(page), parse_blocks)]


def run_on_cpu(page: Path, folder: Path) -> list[CodeBlock]:
    """Runs the blocks of a page that need no GPU, in `folder`; returns them. Raises on the first that fails."""
    document = Document.parse(str(page), parse_blocks)
    document.namespace["__name__"] = "__docs__"
    link_checkout(folder)
    run = []
    with contextlib.chdir(folder):
        for example in document:
            if example.region.evaluator is not None:
                example.evaluate()
                run.append(_block_of(example))
    return run


def link_checkout(folder: Path) -> None:
    """Links the checkout's folders that blocks read into the folder of a page."""
    for name in LINKED_FOLDERS:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)


def parse_blocks(document: Document) -> Iterator[Region]:
    """Sybil parser of one page: a region for each code block, with its info string and expected output as lexemes.

    Raises ValueError for an info string that is not listed above.
    """
    block: Region | None = None
    for region in RawFencedCodeBlockLexer(re.compile(r"(?P<info>[^\n]*)\n"))(document):
        info = region.lexemes["info"] = " ".join(str(region.lexemes["info"]).split())
        region.parsed = region.lexemes["source"]
        region.lexemes["expected"] = None
        if info == "text" and block is not None and not document.text[block.end : region.start].strip():
            block.lexemes["expected"] = str(region.parsed)
            continue
        if info in EVALUATORS:
            region.evaluator = EVALUATORS[info]
        elif info not in NOT_RUN:
            allowed = ", ".join(name for name in (*EVALUATORS, *NOT_RUN) if name)
            place = f"{Path(document.path).name}:{document.text.count(chr(10), 0, region.start) + 1}"
            raise ValueError(f"{place}: code block with info string {info!r}: must be one of {allowed}")
        if block is not None:
            yield block
        block = region
    if block is not None:
        yield block


def evaluate_python(example: Example) -> str | None:
    """Runs a Python block in the page's namespace; returns a message if its output is unexpected."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        PythonEvaluator()(example)
    return _block_of(example).unexpected_output(printed.getvalue())


def evaluate_shell(example: Example) -> str | None:
    """Runs a shell block with this interpreter's commands first on PATH; returns a message if the block fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    completed = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", str(example.parsed)],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SHELL_TIMEOUT_SECONDS,
        check=False,
    )
    block = _block_of(example)
    if completed.returncode:
        return f"{block.name}: exit code {completed.returncode}\n{completed.stdout}{completed.stderr}"
    return block.unexpected_output(completed.stdout)


EVALUATORS: dict[str, Callable[[Example], str | None]] = {
    "python": evaluate_python,
    "python host": evaluate_python,
    "sh": evaluate_shell,
}


def _block_of(example: Example) -> CodeBlock:
    lexemes = example.region.lexemes
    expected = None if lexemes["expected"] is None else str(lexemes["expected"])
    code = str(example.parsed).removesuffix("\n")
    return CodeBlock(Path(example.path).name, example.line + 1, str(lexemes["info"]), code, expected)
