"""Tests of the serving examples in C and Rust: built as they say, and right on a driver whose launches compute.

The driver runs each launch in plain loops, from the struct that the library wrote. So the tests find wrong calls,
structs and results; the kernels themselves run on a GPU alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cutlass_py_attn.bundle import row_spec
from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.problem import spec
from tests.support import fake_driver, serving_kernels
from tests.support.bundle_hosts import ROOT, cuda_headers
from tests.support.c_compiler import WARNINGS, build, compiler
from tests.support.library_host import exported

EXAMPLES = ROOT / "examples"
SOURCE = EXAMPLES / "serving_c" / "main.c"
PROBLEM = re.compile(r"--problem (\w+(?:,\w+)*)")
SIZES = (("2", "40", "4", "2", "16"), ("3", "50", "4", "1", "64"))  # conversations, prompt, heads, heads_key, page_size
RESULTS = ("prefill", "64 decodes", "speculative", "prefix")


def names() -> list[str]:
    """The problems that the example exports."""
    return PROBLEM.findall(SOURCE.read_text().partition("*/")[0])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The library of the example, for the two devices of the fake driver."""
    fake_driver.need_compiler("the library")
    rows = [name for name in names() if name.startswith(("append", "merge"))]
    problems = [spec.parse(name).problem("forward") for name in names() if name not in rows]
    folder = tmp_path_factory.mktemp("serving")
    return exported(folder / "library", (*problems, *map(row_spec.parse, rows)), "sm_86,sm_90a")


@pytest.fixture(scope="module")
def kernels(bundle: Bundle) -> Path:
    return serving_kernels.compiled(bundle, bundle.path.parent)


@pytest.fixture(scope="module")
def library(bundle: Bundle) -> Path:
    made = bundle.path.parent / "attention.o"
    build([compiler("c"), "-std=c11", "-c", str(bundle.path / "attention.c"), "-o", str(made)])
    return made


def built(bundle: Bundle, library: Path, made: Path, *others: str) -> Path:
    """The example in C. others: further options."""
    folders = ("-I", str(bundle.path), "-isystem", cuda_headers())
    files = (str(SOURCE), str(library), *others, str(fake_driver.library()), "-ldl", "-lpthread", "-lm")
    build([compiler("c"), "-std=c11", "-O1", *WARNINGS, *folders, *files, "-o", str(made)])
    return made


def run(made: Path, *sizes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver.library().parent)}
    return subprocess.run([str(made), *sizes], capture_output=True, check=False, text=True, env=environment)


def expect_passed(made: Path, sizes: tuple[str, ...]) -> None:
    """Every phase is right on both devices."""
    done = run(made, *sizes)
    assert (done.stderr, done.returncode) == ("", 0), done.stdout
    *lines, last = done.stdout.splitlines()
    assert last == "passed"
    found = [line for line in lines if "worst error" in line]
    wanted = {f"device {device}: {result}" for device in (0, 1) for result in RESULTS}
    assert {line.partition("  ")[0].strip() for line in found} == wanted
    assert all(line.endswith(": ok") for line in found)
    assert "fwd_sm90_bf16_d128_causal_grouped_paged_varlen_128x128" in done.stdout


def test_c_example_serves(bundle: Bundle, library: Path, kernels: Path, tmp_path: Path) -> None:
    """Prefill, 64 steps of one graph, several rows and a shared prefix; unused rows of the pools are NaN."""
    made = built(bundle, library, tmp_path / "serving_c", str(kernels), "-rdynamic")
    for sizes in SIZES:
        expect_passed(made, sizes)


def test_c_example_finds_out_kernels_that_do_nothing(bundle: Bundle, library: Path, tmp_path: Path) -> None:
    made = built(bundle, library, tmp_path / "serving_c")
    done = run(made, *SIZES[0])
    found = [line for line in done.stdout.splitlines() if "worst error" in line]
    assert [line.rpartition(" ")[2] for line in found] == ["WRONG"] * 8
    assert (done.stdout.splitlines()[-1], done.returncode) == ("FAILED", 1)
    assert run(made, "1").stderr.startswith("usage: serving_c")


def test_rust_example_serves(bundle: Bundle, kernels: Path, tmp_path: Path) -> None:
    """Its package as it is, beside the folder of the export; without network and without other crates."""
    if shutil.which("cargo") is None:
        pytest.skip("no cargo")
    package = tmp_path / "serving_rust"
    shutil.copytree(EXAMPLES / "serving_rust", package)
    (tmp_path / "library").symlink_to(bundle.path)
    environment = {**os.environ, "CARGO_TARGET_DIR": str(tmp_path / "target")}
    options = ("-D", "warnings", "-C", f"link-arg={kernels}", "-C", "link-arg=-rdynamic", "-C", "link-arg=-lm")
    done = subprocess.run(
        ["cargo", "rustc", "--offline", "--quiet", "--", *options],
        cwd=package, env=environment, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expect_passed(tmp_path / "target" / "debug" / "serving", SIZES[0])


def test_both_examples_have_the_same_kernel() -> None:
    """Of the engine: PTX in a file for Rust, and as a string for C."""
    text = SOURCE.read_text()
    strings = text.partition("advance_ptx[] =")[2].partition(";\n\n")[0]
    lines = re.findall(r'"((?:[^"\\]|\\.)*)"', re.sub(r"/\*.*?\*/", "", strings))
    ptx = "".join(lines).encode().decode("unicode_escape")
    assert ptx == (EXAMPLES / "serving_rust" / "src" / "advance.ptx").read_text()
