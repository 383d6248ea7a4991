"""Machine code: a digest of all that decides the result of a test that reads one compiled kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import compiler
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.plan import Plan
from tools.release import digests, record

MachineCode = Callable[[Plan | Build], Artifact]  # the fixture of tests/compile that compiles a kernel, or skips

ROOT = Path(__file__).resolve().parents[2]
# Followed from the test file on: what it shares with other tests, and what reads a compiled kernel.
FOLLOWED = ("tests/", *(f"{digests.PACKAGE}/{name}" for name in ("artifact.py", "compilation/", "inspection/")))
PLANNER = f"{digests.PACKAGE}/plan/planner.py"  # of what it does, the digest has the result


def digest(test: Path, kernel: Plan | Build) -> str:
    """Returns the digest of a test's code, of a plan or build, its sources and the compiler."""
    build = kernel.build if isinstance(kernel, Plan) else kernel
    parts = code_of_test(test), repr(kernel), record.sources_sha256(build), compiler.toolchain()
    return record.sha256("\n".join(parts))


@functools.cache
def code_of_test(test: Path) -> str:
    """Returns the digest of the code of a test file and of what it imports: numbers that kernels must have, readers."""
    return digests.files_sha256(ROOT, files_of_test(test))


def files_of_test(test: Path) -> list[str]:
    """Returns a test file, what is followed from it, and the modules of the package that these import themselves."""
    entries = [test.relative_to(ROOT).as_posix(), "tests/compile/conftest.py"]
    found = digests.imported(ROOT, entries, FOLLOWED)
    direct = {name for each in found for name in digests.imports(ROOT, each) if name.startswith(f"{digests.PACKAGE}/")}
    return sorted((found | direct) - {PLANNER})
