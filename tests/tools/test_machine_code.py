"""The digests of tests of machine code: what they cover, and that a changed part runs the test again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from cutlass_py_attn.compilation import compiler
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem.spec import parse
from tests.support import fakes, machine_code
from tests.support.machine_code import MachineCode, digests_of
from tools.release import digests, record

TEST = machine_code.ROOT / "tests/compile/test_decode.py"
NODE = "tests/compile/test_decode.py::test_machine_code[case]"
PLAN = plan(parse("bf16_d64_s128_b1_h1_full").problem("forward"), "sm_90")


ARTIFACT = fakes.artifact(PLAN.build)


@pytest.fixture(autouse=True)
def one_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that compiles nothing."""
    monkeypatch.setattr(compiler, "toolchain", lambda: "compiler 1")
    monkeypatch.setattr(compiler, "artifact_for", lambda build: ARTIFACT)


def fixture_of(writes: bool = False) -> MachineCode:
    """The fixture in a test."""
    node = SimpleNamespace(path=TEST, nodeid=NODE, stash=pytest.Stash())
    request: Any = SimpleNamespace(node=node, config=SimpleNamespace(getoption=lambda name: writes))
    made: MachineCode = machine_code.machine_code.__wrapped__(request)  # type: ignore[attr-defined]
    return made


def commit(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    """Commits the digests of a test that passed, some of them changed."""
    found = {**digests_of(TEST, PLAN), "machine_code": machine_code.machine_code_sha256(ARTIFACT), **changes}
    monkeypatch.setattr(machine_code, "committed", lambda: {NODE: found})


def refuse(build: object) -> NoReturn:
    raise AssertionError("compiled")


def test_a_test_of_the_same_sources_is_skipped_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass.cute")
    commit(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "artifact_for", refuse)
        with pytest.raises(pytest.skip.Exception, match="passed with these sources"):
            fixture_of()(PLAN)
        with pytest.raises(AssertionError, match="compiled"):
            fixture_of(writes=True)(PLAN)


def test_a_test_of_the_same_machine_code_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sources: after a rename."""
    pytest.importorskip("cutlass.cute")
    commit(monkeypatch, sources="before a rename")
    for writes in (False, True):
        with pytest.raises(pytest.skip.Exception, match="passed with this machine code"):
            fixture_of(writes)(PLAN)


def test_a_test_runs_for_its_own_digests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass.cute")
    changes: dict[str, str]
    for changes in ({"test": "edited"}, {"sources": "edited", "machine_code": "other"}):
        commit(monkeypatch, **changes)
        assert fixture_of()(PLAN) == ARTIFACT
    for committed in ({}, {NODE.replace("case", "other"): digests_of(TEST, PLAN)}):
        monkeypatch.setattr(machine_code, "committed", lambda committed=committed: committed)
        assert fixture_of()(PLAN) == ARTIFACT


def test_what_changes_the_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    first = digests_of(TEST, PLAN)

    def changed(today: machine_code.Digests) -> set[str]:
        return {name for name, value in today.items() if value != first[name]}

    assert changed(digests_of(TEST, replace(PLAN))) == set()
    other = replace(PLAN, build=replace(PLAN.build, key_stages=PLAN.build.key_stages + 1))
    assert changed(digests_of(TEST, other)) == {"test"}
    assert changed(digests_of(TEST.with_name("test_split_d.py"), PLAN)) == {"test"}
    for owner, name, digest in (
        (record, "sources_sha256", "sources"),
        (compiler, "toolchain", "sources"),
        (machine_code, "code_of_test", "test"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_: "edited")
            assert changed(digests_of(TEST, PLAN)) == {digest}, name
    others = replace(ARTIFACT, ptx="mma"), replace(ARTIFACT, cubin=b"other"), replace(ARTIFACT, kernels=())
    assert len({machine_code.machine_code_sha256(each) for each in (ARTIFACT, *others)}) == 4
    commented = replace(ARTIFACT, ptx="// a comment\n")
    assert machine_code.machine_code_sha256(commented) == machine_code.machine_code_sha256(ARTIFACT)


def test_the_code_of_a_test() -> None:
    """What it shares with other tests, what it reads kernels with, and where it has numbers from."""
    found = machine_code.files_of_test(TEST)
    assert {"tests/compile/test_decode.py", "tests/support/machine_code.py", "tests/support/fakes.py"} <= {*found}
    package = (
        f"cutlass_py_attn/{name}.py" for name in ("compilation/cubin", "runtime/params", "kernels/decode/layout")
    )
    assert {*package} <= {*found}
    assert machine_code.PLANNER not in found
    assert machine_code.code_of_test(TEST) == digests.files_sha256(machine_code.ROOT, found)


def test_the_committed_digests_are_of_tests() -> None:
    """A test that was renamed or removed leaves a line behind unless the digests are written anew."""
    for node in json.loads(machine_code.DIGESTS.read_text()):
        file, _, rest = node.partition("::")
        assert f"def {rest.partition('[')[0]}(" in (machine_code.ROOT / file).read_text(), node


def test_writing_keeps_the_digests_of_other_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine_code.json"
    monkeypatch.setattr(machine_code, "DIGESTS", path)
    monkeypatch.setattr(machine_code, "_passed", {})
    monkeypatch.setattr(machine_code, "committed", lambda: json.loads(path.read_text()) if path.exists() else {})

    def finish(*args: str, keyword: str = "", **config: Any) -> None:
        option = SimpleNamespace(keyword=keyword)
        session: Any = SimpleNamespace(
            config=SimpleNamespace(args=[*args], option=option, getoption=lambda name: True, **config)
        )
        machine_code.pytest_sessionfinish(session)

    for node, properties in (("a", [(machine_code.PROPERTY, {"test": "1"})]), ("b", [("time", {"test": "2"})])):
        report: Any = SimpleNamespace(nodeid=node, user_properties=properties)
        machine_code.pytest_runtest_logreport(report)
    finish(*machine_code.FOLDERS, workerinput={})
    assert not path.exists(), "a worker sends what it has"
    finish("tests/compile/test_decode.py")
    passed = {"a": {"test": "1"}}
    assert json.loads(path.read_text()) == passed
    path.write_text('{"a": {"test": "0"}, "c": {"test": "3"}}')
    finish(*machine_code.FOLDERS, keyword="decode")
    assert json.loads(path.read_text()) == passed | {"c": {"test": "3"}}
    finish(*machine_code.FOLDERS)
    assert json.loads(path.read_text()) == passed


@pytest.mark.parametrize("when", ["setup", "call"])
@pytest.mark.parametrize(
    ("outcome", "is_same", "is_sent"),
    [("passed", False, True), ("failed", False, False), ("skipped", False, False), ("skipped", True, True)],
)
def test_what_a_run_sends(when: str, outcome: str, is_same: bool, is_sent: bool) -> None:
    """Digests of tests that passed, now or with this machine code."""
    stash = pytest.Stash()
    stash[machine_code._CALLED] = {"test": "1"}
    if is_same:
        stash[machine_code._IS_SAME] = True
    report: Any = SimpleNamespace(user_properties=[], skipped=outcome == "skipped")
    item: Any = SimpleNamespace(stash=stash)
    call: Any = SimpleNamespace(when=when, excinfo=None if outcome == "passed" else "error")
    making = machine_code.pytest_runtest_makereport(item, call)
    next(making)
    with pytest.raises(StopIteration):
        making.send(report)
    is_setup_alone = when == "setup" and outcome == "passed"
    assert bool(report.user_properties) == (is_sent and not is_setup_alone)


def test_new_digests_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    reporter: Any = SimpleNamespace(write_line=lines.append)
    two = {"a": {"test": "1"}, "b": {"test": "2"}}
    for passed, writes in (({}, False), (two, True), (two, False)):
        monkeypatch.setattr(machine_code, "_passed", passed)
        config: Any = SimpleNamespace(getoption=lambda name, writes=writes: writes)
        machine_code.pytest_terminal_summary(reporter, config)
    command = "python -m pytest tests/compile tests/emulation -n 2 --write-digests"
    assert lines == [f"2 tests of machine code passed with new digests; {command}"]
