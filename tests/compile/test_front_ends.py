"""Every front end makes every call as the planner plans it: the same kernels, with every byte of their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import front_ends
from tests.support.bundle_hosts import (
    HeaderHost,
    RustHost,
    bound_calls,
    exported,
    header_calls,
    manifest_calls,
    rust_calls,
)
from tests.support.fake_driver import FakeDriver
from tests.support.front_ends import Row
from tests.support.library_launches import library_calls

ROWS = front_ends.rows()
CALLS = [(row, direction) for row in ROWS for direction in row.directions]


def table(calls: list[tuple[Row, str]]) -> pytest.MarkDecorator:
    """A cell for each of these calls."""
    names = [f"{row.exported}-{direction}" for row, direction in calls]
    return pytest.mark.parametrize(("row", "direction"), calls, ids=names)


every_call = table(CALLS)
# Hosts of an export make one launch for each kernel: others call once for each slice.
HOSTED = [(row, direction) for row, direction in CALLS if not row.has_split_grids(direction)]
hosted_calls = table(HOSTED)
calls_of_library = hosted_calls
# No option of JAX asks for another dtype of the output.
calls_of_jax = table([(row, direction) for row, direction in CALLS if "f16out" not in row.exported])


@pytest.fixture
def log(driver_log: FakeDriver) -> Iterator[FakeDriver]:
    """The fake driver for addresses without memory."""
    driver_log.without_memory(True)
    yield driver_log
    driver_log.without_memory(False)


@every_call
def test_python(log: FakeDriver, row: Row, direction: str) -> None:
    for problem in row.problems(direction):
        found, wanted = front_ends.by_python(log, problem)
        assert found
        assert found == wanted


@calls_of_library
def test_library(log: FakeDriver, row: Row, direction: str) -> None:
    for problem in row.problems(direction):
        found, wanted = library_calls(log, problem)
        assert found
        assert found == wanted


@hosted_calls
def test_bundle(log: FakeDriver, tmp_path: Path, row: Row, direction: str) -> None:
    """The header and a reader of the manifest; a bundle has the plan of the kernels that serve every length."""
    problems = row.problems(direction)
    bundle = exported(tmp_path / "bundle", problems[:1])
    header = HeaderHost(tmp_path, bundle, direction, "c")
    for problem in problems:
        wanted = bound_calls(log, bundle, problem)
        assert header_calls(log, header, bundle, problem) == wanted
        assert manifest_calls(log, bundle, problem) == wanted


@pytest.fixture(scope="module")
def rust(tmp_path_factory: pytest.TempPathFactory) -> RustHost:
    return RustHost(tmp_path_factory.mktemp("rust"))


@hosted_calls
def test_rust(log: FakeDriver, rust: RustHost, tmp_path: Path, row: Row, direction: str) -> None:
    problems = row.problems(direction)
    bundle = exported(tmp_path / "bundle", problems[:1])
    for problem in problems:
        assert rust_calls(log, rust, bundle, problem) == bound_calls(log, bundle, problem)


@calls_of_jax
def test_jax(log: FakeDriver, row: Row, direction: str) -> None:
    """The custom call has the planner's plan, and both handlers launch it: the first launch is Python's, then C's."""
    pytest.importorskip("jax", reason="jax is not installed")
    from tests.support import jax_calls, native_frames

    native_frames.native_handler()
    for problem in map(jax_calls.as_in_jax, row.problems(direction)):
        payload = jax_calls.payload_of(problem)
        assert (payload.problem, payload.plan) == (problem, front_ends.planned(problem))
        call = native_frames.Call(payload)
        found, wanted = jax_calls.by_handler(log, call, problem)
        assert found == wanted
        assert native_frames.launches_of_both(log, call)
