"""Tests of machine code are skipped while neither they nor the machine code can have changed since they passed.

machine_code.json has a digest of what decides the result of each such test that passed. Here is how to write it anew:

    python -m pytest tests/compile -n 2 --write-digests
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.plan import Plan
from tests.support.machine_code import MachineCode, digest

DIGESTS = Path(__file__).with_name("machine_code.json")
OPTION = "--write-digests"
PROPERTY = "machine code"
_CALLED = pytest.StashKey[str]()
_passed: dict[str, str] = {}  # of this session, in the process that hears of every test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, action="store_true", help=f"run every test of machine code, and write tests/compile/{DIGESTS.name}"
    )


@pytest.fixture(scope="session")
def digests() -> dict[str, str]:
    """The committed digests, by test."""
    found: dict[str, str] = json.loads(DIGESTS.read_text()) if DIGESTS.is_file() else {}
    return found


@pytest.fixture
def machine_code(request: pytest.FixtureRequest, digests: dict[str, str]) -> MachineCode:
    """Compiles the one kernel that the test reads, or skips the test if it passed with this very machine code."""

    def compiled(kernel: Plan | Build) -> Artifact:
        from cutlass_py_attn.compilation.compiler import artifact_for

        item = request.node
        assert _CALLED not in item.stash, "the digest is of one kernel"
        item.stash[_CALLED] = found = digest(item.path, kernel)
        if digests.get(item.nodeid) == found and not request.config.getoption(OPTION, default=False):
            pytest.skip("passed with this machine code")
        return artifact_for(kernel.build if isinstance(kernel, Plan) else kernel)

    return compiled


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
    """Sends the digest of a test that passed to the process that writes them."""
    report = yield
    if call.when == "call" and call.excinfo is None and _CALLED in item.stash:
        report.user_properties.append((PROPERTY, item.stash[_CALLED]))  # type: ignore[attr-defined]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and PROPERTY in dict(report.user_properties):
        _passed[report.nodeid] = str(dict(report.user_properties)[PROPERTY])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the digests of what passed. Those of other tests stay, unless all of tests/compile ran."""
    config = session.config
    if config.getoption(OPTION, default=False) and not hasattr(config, "workerinput"):
        is_whole = config.args == ["tests/compile"] and not config.option.keyword
        kept = {} if is_whole or not DIGESTS.is_file() else json.loads(DIGESTS.read_text())
        DIGESTS.write_text(json.dumps(kept | _passed, indent=1, sort_keys=True) + "\n")
