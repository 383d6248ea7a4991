"""Tests of the ring over NCCL in C: built as it says, and right on a driver whose launches compute.

The ranks exchange rows by a fake of NCCL, between threads. The driver runs each launch in plain loops, from the struct
that the library wrote. So the tests find wrong calls, tiles and results; kernels and NCCL itself run on GPUs alone.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from cutlass_py_attn.bundle import row_spec
from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.tensors import DIRECTIONS
from tests.support import fake_driver, serving_kernels
from tests.support.bundle_hosts import ROOT, cuda_headers
from tests.support.c_compiler import WARNINGS, build, compiler
from tests.support.library_host import exported

SOURCE = ROOT / "examples" / "context_parallel_c" / "main.c"
NCCL = ROOT / "tests" / "support" / "fake_nccl_library"
PROBLEM = re.compile(r"--problem (\w+)")
RESULTS = ("output", "grad_query", "grad_key", "grad_value")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fake_driver.need_compiler("the library")
    return tmp_path_factory.mktemp("context_parallel_c")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    """The library of the example, for the two devices of the fake driver. sm80 kernels get all addresses as numbers."""
    names = PROBLEM.findall(SOURCE.read_text().partition("*/")[0])
    rows = [name for name in names if name.startswith("merge")]
    problems = [spec.parse(name).problem(direction) for name in names if name not in rows for direction in DIRECTIONS]
    return exported(folder / "library", (*problems, *map(row_spec.parse, rows)), "sm_86,sm_90")


def built(bundle: Bundle, made: Path, *others: str) -> Path:
    """The example. others: further options."""
    folders = ("-I", str(bundle.path), "-I", str(NCCL), "-isystem", cuda_headers())
    files = (str(SOURCE), str(bundle.path / "attention.c"), str(NCCL / "nccl.c"), *others, str(fake_driver.library()))
    options = (*WARNINGS, "-pthread", "-rdynamic")
    build([compiler("c"), "-std=c11", "-O1", *options, *folders, *files, "-ldl", "-lm", "-o", str(made)])
    return made


def run(made: Path, *sizes: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver.library().parent)}
    command = [str(made), *map(str, sizes)]
    return subprocess.run(command, capture_output=True, check=False, text=True, env=environment, timeout=100)


def results(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What the example says of each result, by name."""
    lines = [line for line in done.stdout.splitlines() if "worst error" in line]
    return {line.split()[0]: line.rpartition(" ")[2] for line in lines}


def test_every_rank_has_the_results_of_one(bundle: Bundle, folder: Path) -> None:
    """One to five ranks, chunks that fill no tile, groups of heads."""
    made = built(bundle, folder / "example", str(serving_kernels.compiled(bundle, folder, own="add")))
    for sizes in ((1, 9, 2, 1), (2, 33, 4, 2), (5, 7, 2, 2)):
        done = run(made, *sizes)
        assert (done.stderr, done.returncode) == ("", 0), (sizes, done.stdout)
        assert results(done) == dict.fromkeys(RESULTS, "ok")
        assert done.stdout.splitlines()[-1] == "passed"


def test_kernels_that_do_nothing_are_found_out(bundle: Bundle, folder: Path) -> None:
    done = run(built(bundle, folder / "idle"), 2, 5, 2, 1)
    assert results(done) == dict.fromkeys(RESULTS, "WRONG")
    assert (done.stdout.splitlines()[-1], done.returncode) == ("FAILED", 1)
    assert run(folder / "idle", 1).stderr.startswith("usage: context_parallel_c")
    assert run(folder / "idle", 2, 5, 3, 2).stderr.startswith("ranks: 1 to 16")
