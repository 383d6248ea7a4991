"""The digests of tests of machine code: what they cover, and that a changed part runs the test again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cutlass_py_attn.compilation import compiler
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem.spec import parse
from tests.support import machine_code
from tests.support.machine_code import MachineCode, digest
from tools.release import digests, record

TEST = machine_code.ROOT / "tests/compile/test_decode.py"
NODE = "tests/compile/test_decode.py::test_machine_code[case]"
PLAN = plan(parse("bf16_d64_s128_b1_h1_full").problem("forward"), "sm_90")


@pytest.fixture(autouse=True)
def one_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that compiles nothing."""
    monkeypatch.setattr(compiler, "toolchain", lambda: "compiler 1")
    monkeypatch.setattr(compiler, "artifact_for", lambda build: build)


def fixture_of(writes: bool = False) -> MachineCode:
    """The fixture in a test."""
    node = SimpleNamespace(path=TEST, nodeid=NODE, stash=pytest.Stash())
    request: Any = SimpleNamespace(node=node, config=SimpleNamespace(getoption=lambda name: writes))
    made: MachineCode = machine_code.machine_code.__wrapped__(request)  # type: ignore[attr-defined]
    return made


def test_a_test_is_skipped_for_its_own_digest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass.cute")
    found = digest(TEST, PLAN)
    monkeypatch.setattr(machine_code, "committed", lambda: {NODE: found})
    with pytest.raises(pytest.skip.Exception, match="passed with this machine code"):
        fixture_of()(PLAN)
    assert fixture_of(writes=True)(PLAN) == PLAN.build
    others: list[dict[str, str]] = [{}, {NODE: digest(TEST, PLAN.build)}, {NODE.replace("case", "other"): found}]
    for committed in others:
        monkeypatch.setattr(machine_code, "committed", lambda committed=committed: committed)
        assert fixture_of()(PLAN) == PLAN.build


def test_what_changes_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(TEST, PLAN)
    assert first == digest(TEST, replace(PLAN))
    changed = replace(PLAN, build=replace(PLAN.build, key_stages=PLAN.build.key_stages + 1))
    assert digest(TEST, changed) != first
    assert digest(TEST.with_name("test_split_d.py"), PLAN) != first
    for owner, name in ((record, "sources_sha256"), (compiler, "toolchain"), (machine_code, "code_of_test")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_: "edited")
            assert digest(TEST, PLAN) != first, name


def test_the_code_of_a_test() -> None:
    """What it shares with other tests, what it reads kernels with, and where it has numbers from."""
    found = machine_code.files_of_test(TEST)
    assert {"tests/compile/test_decode.py", "tests/support/machine_code.py", "tests/support/fakes.py"} <= {*found}
    package = (f"cutlass_py_attn/{name}.py" for name in ("compilation/cubin", "runtime/params", "plan/decode_smem"))
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

    for node, when, value in (("a", "call", "1"), ("b", "setup", "2")):
        report: Any = SimpleNamespace(nodeid=node, when=when, user_properties=[(machine_code.PROPERTY, value)])
        machine_code.pytest_runtest_logreport(report)
    finish(*machine_code.FOLDERS, workerinput={})
    assert not path.exists(), "a worker sends what it has"
    finish("tests/compile/test_decode.py")
    assert json.loads(path.read_text()) == {"a": "1"}
    path.write_text('{"a": "0", "c": "3"}')
    finish(*machine_code.FOLDERS, keyword="decode")
    assert json.loads(path.read_text()) == {"a": "1", "c": "3"}
    finish(*machine_code.FOLDERS)
    assert json.loads(path.read_text()) == {"a": "1"}


def test_new_digests_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    reporter: Any = SimpleNamespace(write_line=lines.append)
    for passed, writes in (({}, False), ({"a": "1", "b": "2"}, True), ({"a": "1", "b": "2"}, False)):
        monkeypatch.setattr(machine_code, "_passed", passed)
        config: Any = SimpleNamespace(getoption=lambda name, writes=writes: writes)
        machine_code.pytest_terminal_summary(reporter, config)
    command = "python -m pytest tests/compile tests/emulation -n 2 --write-digests"
    assert lines == [f"2 tests of machine code passed with a new digest; {command}"]
