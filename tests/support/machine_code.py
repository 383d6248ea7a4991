"""Machine code: tests of one kernel are skipped while neither they nor its machine code have changed.

machine_code.json has the digests of each such test that passed: of the test, of the kernel's sources and of its machine
code. Nothing is compiled while the sources are the same. Other sources that give the same machine code need no run of
the test either. WRITE writes the digests anew.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import compiler
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.plan import Plan
from tools.release import digests, record

MachineCode = Callable[[Plan | Build], Artifact]

ROOT = Path(__file__).resolve().parents[2]
DIGESTS = ROOT / "tests/machine_code.json"
FOLDERS = ("tests/compile", "tests/emulation")
OPTION = "--write-digests"
WRITE = f"python -m pytest {' '.join(FOLDERS)} -n 2 {OPTION}"
PROPERTY = "machine code"
# Followed from a test file on: what it shares with other tests, what reads a kernel, launches it or knows its results.
_PACKAGE = ("artifact.py", "compilation/", "inspection/", "reference/", "runtime/", "score_terms/", "testing/")
FOLLOWED = ("tests/", *(f"{digests.PACKAGE}/{name}" for name in _PACKAGE))
PLANNER = f"{digests.PACKAGE}/plan/planner.py"  # of what it does, the digest has the result
Digests = dict[str, str]

_CALLED = pytest.StashKey[Digests]()
_IS_SAME = pytest.StashKey[bool]()  # whether the test passed with this machine code, from other sources
_passed: dict[str, Digests] = {}  # in this run of pytest, in the process that hears of every test


def digests_of(test: Path, kernel: Plan | Build) -> Digests:
    """Returns the digest of a test's code with its plan or build, and that of the kernel's sources and the compiler."""
    build = kernel.build if isinstance(kernel, Plan) else kernel
    return {
        "test": record.sha256("\n".join((code_of_test(test), repr(kernel)))),
        "sources": record.sha256("\n".join((record.sources_sha256(build), compiler.toolchain()))),
    }


def machine_code_sha256(artifact: Artifact) -> str:
    """Returns the digest of what a test reads of a kernel: PTX without comments, cubin and resources."""
    parts = record.body(artifact.ptx), record.sha256(artifact.cubin), repr(artifact.kernels), artifact.allocation
    return record.sha256("\n".join(parts))


@functools.cache
def code_of_test(test: Path) -> str:
    """Returns the digest of the code of a test file and of what it imports."""
    return digests.files_sha256(ROOT, files_of_test(test))


def files_of_test(test: Path) -> list[str]:
    """Returns a test file, what is followed from it, and the modules of the package that these import themselves."""
    found = digests.imported(ROOT, [test.relative_to(ROOT).as_posix()], FOLLOWED)
    direct = {name for each in found for name in digests.imports(ROOT, each) if name.startswith(f"{digests.PACKAGE}/")}
    return sorted((found | direct) - {PLANNER})


@functools.cache
def committed() -> dict[str, Digests]:
    """Returns the committed digests, by test."""
    found: dict[str, Digests] = json.loads(DIGESTS.read_text()) if DIGESTS.is_file() else {}
    return found


@pytest.fixture
def machine_code(request: pytest.FixtureRequest) -> MachineCode:
    """Compiles the one kernel of the test, or skips the test if it passed with this very machine code."""

    def compiled(kernel: Plan | Build) -> Artifact:
        item = request.node
        assert _CALLED not in item.stash, "the digests are of one kernel"
        pytest.importorskip("cutlass.cute")
        today, before = digests_of(item.path, kernel), committed().get(item.nodeid, {})
        if today.items() <= before.items() and not request.config.getoption(OPTION):
            pytest.skip(f"passed with these sources; {OPTION} compares the machine code")
        artifact = compiler.artifact_for(kernel.build if isinstance(kernel, Plan) else kernel)
        item.stash[_CALLED] = today = today | {"machine_code": machine_code_sha256(artifact)}
        if all(before.get(name) == today[name] for name in ("test", "machine_code")):
            item.stash[_IS_SAME] = True
            pytest.skip("passed with this machine code")
        return artifact

    return compiled


def pytest_addoption(parser: pytest.Parser) -> None:
    what = f"run the tests of machine code that changed, and no other, and write tests/{DIGESTS.name}"
    parser.addoption(OPTION, action="store_true", help=what)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where digests are written, no other test runs."""
    if config.getoption(OPTION):
        items[:] = [item for item in items if "machine_code" in getattr(item, "fixturenames", ())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Sends the digests of a test that passed, now or with this machine code, to the process that writes them."""
    report = yield
    has_passed = call.when == "call" and call.excinfo is None
    if _CALLED in item.stash and (has_passed or (report.skipped and _IS_SAME in item.stash)):
        report.user_properties.append((PROPERTY, item.stash[_CALLED]))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == PROPERTY and isinstance(value, dict):
            _passed[report.nodeid] = value


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says that tests have new digests, with which they need neither run nor compile again."""
    if _passed and not config.getoption(OPTION):
        terminalreporter.write_line(f"{len(_passed)} tests of machine code passed with new digests; {WRITE}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the digests of what passed. Those of other tests stay, unless both folders ran whole."""
    config = session.config
    if config.getoption(OPTION) and not hasattr(config, "workerinput"):
        is_whole = tuple(config.args) == FOLDERS and not config.option.keyword
        kept = {} if is_whole else committed()
        DIGESTS.write_text(json.dumps(kept | _passed, indent=1, sort_keys=True) + "\n")
