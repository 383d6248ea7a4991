"""Machine code: tests of one kernel are skipped while neither they nor its machine code can have changed.

machine_code.json has a digest of what decides the result of each such test that passed. WRITE writes it anew.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import compiler
from cutlass_py_attn.plan.build import Build
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
_CALLED = pytest.StashKey[str]()
_passed: dict[str, str] = {}  # in this run of pytest, in the process that hears of every test


def digest(test: Path, kernel: Plan | Build) -> str:
    """Returns the digest of a test's code, of a plan or build, its sources and the compiler."""
    build = kernel.build if isinstance(kernel, Plan) else kernel
    parts = code_of_test(test), repr(kernel), record.sources_sha256(build), compiler.toolchain()
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
def committed() -> dict[str, str]:
    """Returns the committed digests, by test."""
    found: dict[str, str] = json.loads(DIGESTS.read_text()) if DIGESTS.is_file() else {}
    return found


@pytest.fixture
def machine_code(request: pytest.FixtureRequest) -> MachineCode:
    """Compiles the one kernel of the test, or skips the test if it passed with this very machine code."""

    def compiled(kernel: Plan | Build) -> Artifact:
        item = request.node
        assert _CALLED not in item.stash, "the digest is of one kernel"
        pytest.importorskip("cutlass.cute")
        item.stash[_CALLED] = found = digest(item.path, kernel)
        if committed().get(item.nodeid) == found and not request.config.getoption(OPTION):
            pytest.skip(f"passed with this machine code; {OPTION} runs it again")
        return compiler.artifact_for(kernel.build if isinstance(kernel, Plan) else kernel)

    return compiled


def pytest_addoption(parser: pytest.Parser) -> None:
    what = f"run every test of machine code and no other, and write tests/{DIGESTS.name}"
    parser.addoption(OPTION, action="store_true", help=what)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where digests are written, no other test runs."""
    if config.getoption(OPTION):
        items[:] = [item for item in items if "machine_code" in getattr(item, "fixturenames", ())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Sends the digest of a test that passed to the process that writes them."""
    report = yield
    if call.when == "call" and call.excinfo is None and _CALLED in item.stash:
        report.user_properties.append((PROPERTY, item.stash[_CALLED]))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and PROPERTY in dict(report.user_properties):
        _passed[report.nodeid] = str(dict(report.user_properties)[PROPERTY])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says that tests ran which need not run again."""
    if _passed and not config.getoption(OPTION):
        terminalreporter.write_line(f"{len(_passed)} tests of machine code passed with a new digest; {WRITE}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the digests of what passed. Those of other tests stay, unless both folders ran whole."""
    config = session.config
    if config.getoption(OPTION) and not hasattr(config, "workerinput"):
        is_whole = tuple(config.args) == FOLDERS and not config.option.keyword
        kept = {} if is_whole else committed()
        DIGESTS.write_text(json.dumps(kept | _passed, indent=1, sort_keys=True) + "\n")
