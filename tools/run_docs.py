"""Run docs: executes the code blocks of docs/ and README.md, those that need a GPU on one, and records these.

A block says what it is behind its three back quotes:

    python          run in order, the blocks of a page share their names; it prints what the `text` block behind says
    python host     the same, but not in a run on a GPU: it reads what commands have written
    python gpu      the same where there is a GPU; on any machine it must have passed on one as it stands (RECORD)
    sh              run by bash in the folder that all blocks of a page share, beside the checkout's examples and tests
    sh setup        installs something; its extras must exist, and nothing is run
    text, svg, ...  not run

A line `<!-- kernels: A B -->` names the kernels that a page's GPU blocks launch, for machines without the compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import doctest
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = "docs/gpu_runs.json"
SHELL_SECONDS = 300
CHECKOUT = ("examples", "tests")  # what commands read of it
FENCE = re.compile(r"^( *)```(.*)$")
KERNELS = re.compile(r"<!-- kernels: ([\w ]+) -->")
EXTRAS = re.compile(r"\[([\w,-]+)\]")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code: its page, its first line there, what it is, and what it must print (None: anything)."""

    page: str
    line: int
    words: tuple[str, ...]
    code: str
    output: str | None = None

    @property
    def name(self) -> str:
        """Where it stands."""
        return f"{self.page}:{self.line}"

    @property
    def sha256(self) -> str:
        """Of the code and of what it must print."""
        return hashlib.sha256(f"{self.code}\0{self.output}".encode()).hexdigest()

    @property
    def is_python(self) -> bool:
        """Whether it is Python, on whatever machine."""
        return self.words[:1] == ("python",)

    @property
    def needs_gpu(self) -> bool:
        """Whether it runs on a GPU only."""
        return "gpu" in self.words


KINDS = (("python",), ("python", "host"), ("python", "gpu"), ("sh",), ("sh", "setup"))
NOT_RUN = ("text", "svg", "json", "c", "cpp", "")


def pages(root: Path = ROOT) -> list[Path]:
    """README and every page of docs/."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def blocks(path: Path) -> list[Block]:
    """The blocks of a page in order; ValueError for one that says something else than the list above."""
    found: list[Block] = []
    lines = path.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        end = next(i for i in range(number, len(lines)) if lines[i].strip() == "```")
        words, code = tuple(fence[2].split()), "\n".join(line[len(fence[1]) :] for line in lines[number:end])
        if words == ("text",) and found and found[-1].line + found[-1].code.count("\n") + 4 >= number:
            last = found.pop()
            found.append(Block(last.page, last.line, last.words, last.code, code + "\n"))
        elif words in KINDS:
            found.append(Block(path.name, number + 1, words, code))
        elif " ".join(words) not in NOT_RUN:
            raise ValueError(
                f"{path.name}:{number}: a block of {' '.join(words)!r}: must be one of {KINDS} or {NOT_RUN}"
            )
        number = end + 1
    return found


def run_page(path: Path, folder: Path, *, on_gpu: bool) -> list[Block]:
    """Run a page's blocks in `folder`, and give those that ran; the first that fails raises.

    On a GPU the Python blocks run that do not say `host`, to the last that needs one; elsewhere those that need none,
    and the commands.
    """
    listed = blocks(path)
    last = max((number for number, block in enumerate(listed) if block.needs_gpu), default=-1)
    names: dict[str, Any] = {"__name__": "__docs__"}
    ran = []
    for name in CHECKOUT:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    with contextlib.chdir(folder):
        for number, block in enumerate(listed):
            wanted = number <= last and "host" not in block.words if on_gpu else not block.needs_gpu
            if block.is_python and wanted:
                run_python(block, names)
            elif block.words == ("sh",) and not on_gpu:
                run_shell(block)
            else:
                continue
            ran.append(block)
    return ran


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run one block with the page's names; AssertionError where it prints something else."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    check_output(block, printed.getvalue())


def run_shell(block: Block) -> None:
    """Run one block of commands with this interpreter's own first on the path."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code], env=environment, capture_output=True, text=True,
        timeout=SHELL_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"{block.name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    check_output(block, done.stdout)


def check_output(block: Block, printed: str) -> None:
    """AssertionError where a block has printed something else than it must; `...` stands for anything."""
    if block.output is not None and not doctest.OutputChecker().check_output(block.output, printed, FLAGS):
        raise AssertionError(f"{block.name}: printed\n{printed}\nbut the page has\n{block.output}")


def kernels_of(path: Path) -> list[str]:
    """The kernels that a page's GPU blocks launch."""
    return [name for listed in KERNELS.findall(path.read_text()) for name in listed.split()]


def recorded(root: Path = ROOT) -> dict[str, Json]:
    """What passed on a GPU, by the hash of the block."""
    path = root / RECORD
    found: dict[str, Json] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def unrecorded(root: Path = ROOT) -> list[str]:
    """The GPU blocks that have not passed on a GPU as they stand."""
    known = recorded(root)
    return [
        block.name for path in pages(root) for block in blocks(path) if block.needs_gpu and block.sha256 not in known
    ]


def build(folder: Path) -> None:
    """Compile the kernels that the pages name into a folder."""
    from cutlass_py_attn.artifact import Folder
    from cutlass_py_attn.cli.symbols import parse_symbol
    from cutlass_py_attn.compiler import artifact_for

    for name in dict.fromkeys(name for path in pages() for name in kernels_of(path)):
        arch = "sm_90a" if "_hopper_" in name else "sm_90"
        Folder(folder).put(artifact_for(parse_symbol(name, arch).build))


def run_on_gpu(kernels: Path | None) -> Iterator[tuple[Block, str]]:
    """Each GPU block that ran and its failure, if any; with `kernels`, from that folder instead of the compiler."""
    if kernels is not None:
        from cutlass_py_attn import compiler
        from cutlass_py_attn.artifact import Folder

        compiler.artifact_for = Folder(kernels.resolve())  # type: ignore[assignment]
    for path in pages():
        listed = [block for block in blocks(path) if block.needs_gpu]
        if not listed:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_page(path, Path(folder), on_gpu=True)
                failure = ""
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        yield from ((block, failure) for block in listed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pages here, build kernels for a GPU machine, or run and record the GPU blocks; exit code 1 on failure."""
    parser = argparse.ArgumentParser(prog="run_docs", description="Run the code blocks of the documentation.")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile what the GPU blocks launch into FOLDER")
    parser.add_argument("--gpu", action="store_true", help="run the pages with GPU blocks, here")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="with --gpu: launch from this folder")
    parser.add_argument("--record", type=Path, metavar="FILE", help="with --gpu: write what passed to FILE")
    given = parser.parse_args(arguments)
    if given.build:
        build(given.build)
        return 0
    if not given.gpu:
        for path in pages():
            with tempfile.TemporaryDirectory() as folder:
                print(f"{path.name}: {len(run_page(path, Path(folder), on_gpu=False))} blocks ran")
        print("\n".join(f"{name}: has not passed on a GPU as it stands" for name in unrecorded()))
        return 1 if unrecorded() else 0
    from cutlass_py_attn import driver

    about = {"gpu": driver.device(0).name, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    results = list(run_on_gpu(given.kernels))
    for block, failure in results:
        print(f"{block.name}: {failure or 'passed'}")
    if given.record:
        passed = {block.sha256: {"page": block.page, **about} for block, failure in results if not failure}
        given.record.write_text(json.dumps(passed, indent=1, sort_keys=True) + "\n")
    return 1 if any(failure for _, failure in results) else 0


if __name__ == "__main__":
    sys.exit(main())
