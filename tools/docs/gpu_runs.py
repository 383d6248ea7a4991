"""GPU runs: runs the documentation's `python gpu` blocks on a GPU and records those that pass in docs/gpu_runs.json.

The record has the hash of each block's code and expected output. `--check` compares it with the pages on any machine.
The GPU machine needs numpy, ml_dtypes, cuda-python and the folder that `--build` writes elsewhere; it needs neither the
compiler nor Sybil. A comment `<!-- kernels: A B -->` on a page names the kernels that the page's GPU blocks launch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.docs.code_block import CodeBlock

ROOT = Path(__file__).resolve().parents[2]
RECORD = "docs/gpu_runs.json"
BLOCKS = "code_blocks.json"  # in the folder that --build writes
KERNELS = re.compile(r"<!-- kernels: ([\w ]+) -->")

Json = dict[str, Any]
Programs = list[list[CodeBlock]]


def programs(root: Path = ROOT) -> Programs:
    """Returns, for each page with GPU blocks, the Python blocks to run: those up to the last one that needs a GPU."""
    from tools.docs import pages

    found = []
    for page in pages.pages(root):
        blocks = [block for block in pages.code_blocks(page) if block.info in ("python", "python gpu")]
        last = max((number for number, block in enumerate(blocks) if block.needs_gpu), default=-1)
        found.append(blocks[: last + 1])
    return [blocks for blocks in found if blocks]


def unrecorded(root: Path = ROOT) -> list[str]:
    """Returns the names of the GPU blocks that have not passed on a GPU as they are."""
    path = root / RECORD
    recorded: dict[str, Json] = json.loads(path.read_text()) if path.is_file() else {}
    blocks = [block for program in programs(root) for block in program if block.needs_gpu]
    return [block.name for block in blocks if block.sha256 not in recorded]


def kernels_of(page: Path) -> list[str]:
    """Returns the symbols of the kernels that the GPU blocks of a page launch."""
    return [name for listed in KERNELS.findall(page.read_text()) for name in listed.split()]


def build(folder: Path) -> None:
    """Compiles the kernels that the pages name into `folder`, and writes the blocks beside them."""
    from cutlass_py_attn.artifact import Folder
    from cutlass_py_attn.cli.symbols import parse_symbol
    from cutlass_py_attn.compilation.compiler import artifact_for
    from cutlass_py_attn.errors import NotSupported
    from tools.docs import pages

    for name in dict.fromkeys(name for page in pages.pages() for name in kernels_of(page)):
        try:
            plan = parse_symbol(name, "sm_90")
        except NotSupported:  # a kernel of wgmma and TMA
            plan = parse_symbol(name, "sm_90a")
        Folder(folder).put(artifact_for(plan.build))
    blocks = [[dataclasses.asdict(block) for block in program] for program in programs()]
    (folder / BLOCKS).write_text(json.dumps(blocks, indent=1) + "\n")


def read_programs(folder: Path) -> Programs:
    """Returns the programs that `build` wrote into `folder`."""
    return [[CodeBlock(**block) for block in program] for program in json.loads((folder / BLOCKS).read_text())]


def use_kernels(folder: Path) -> None:
    """Makes every later call launch kernels from `folder` and never compile."""
    from cutlass_py_attn.artifact import Folder
    from cutlass_py_attn.compilation import compiler

    compiler.artifact_for = Folder(folder.resolve())  # type: ignore[assignment]


def run_programs(listed: Programs) -> Iterator[tuple[CodeBlock, str]]:
    """Runs each program in an empty folder; yields (GPU block, failure), where failure is "" if the program passed."""
    for program in listed:
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                run_program(program)
            failure = ""
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        yield from ((block, failure) for block in program if block.needs_gpu)


def run_program(program: Sequence[CodeBlock]) -> None:
    """Runs the blocks of one page in one namespace; raises AssertionError if a block prints something unexpected."""
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for block in program:
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if message := block.unexpected_output(printed.getvalue()):
            raise AssertionError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the record, prepares a folder for a GPU machine, or runs the GPU blocks; exit code 1 on failure."""
    parser = argparse.ArgumentParser(
        prog="gpu_runs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="list the GPU blocks that the record lacks; needs no GPU")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="write kernels and blocks for a GPU machine")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="run what --build wrote; without it, compile")
    parser.add_argument("--record", type=Path, metavar="FILE", help=f"write what passed to FILE, such as {RECORD}")
    given = parser.parse_args(arguments)
    if given.check:
        missing = unrecorded()
        print("\n".join(f"{name}: has not passed on a GPU as it is" for name in missing) or f"{RECORD}: complete")
        return 1 if missing else 0
    if given.build:
        build(given.build)
        return 0
    from cutlass_py_attn.runtime import driver

    if given.kernels:
        use_kernels(given.kernels)
    about = {"gpu": driver.device(0).name, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    results = list(run_programs(read_programs(given.kernels) if given.kernels else programs()))
    for block, failure in results:
        print(f"{block.name}: {failure or 'passed'}")
    if given.record:
        passed = {block.sha256: {"page": block.page, **about} for block, failure in results if not failure}
        given.record.write_text(json.dumps(passed, indent=1, sort_keys=True) + "\n")
    return 1 if any(failure for _, failure in results) else 0


if __name__ == "__main__":
    sys.exit(main())
