"""Tests of random JAX programs: some of fixed seeds, and that the tool notices faults of derivatives and of vmap."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

from cutlass_py_attn.errors import Stale  # noqa: E402
from cutlass_py_attn.jax import batching, derivatives  # noqa: E402
from tools.release import fuzz_jax  # noqa: E402
from tools.release.jax_programs import FORWARD, REVERSE, Layer, Program, draw  # noqa: E402

MODES = REVERSE + FORWARD
SETTINGS = fuzz_jax.Settings()
PARTS, PROGRAMS = 6, 4


@pytest.fixture(autouse=True)
def _own_caches() -> Iterator[None]:
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.expected_seconds(20)
@pytest.mark.parametrize("part", range(PARTS))
def test_programs_of_fixed_seeds(part: int) -> None:
    outcomes = fuzz_jax.run(range(part * PROGRAMS, (part + 1) * PROGRAMS), SETTINGS)
    assert [outcome for outcome in outcomes if outcome.result not in ("", "SKIPPED")] == []
    assert sum(outcome.result == "" for outcome in outcomes) >= PROGRAMS - 1


@pytest.mark.expected_seconds(20)
def test_programs_with_ranges_of_keys() -> None:
    """Those of kernels have only what kernels with ranges take."""
    settings = replace(SETTINGS, has_ranges=True)
    outcomes = fuzz_jax.run(range(60, 64), settings)
    assert [outcome for outcome in outcomes if outcome.result not in ("", "SKIPPED")] == []
    drawn = [settings.program(seed) for seed in range(100)]
    layers = [layer for program in drawn for layer in program.layers if layer.ranges != "none"]
    assert {layer.ranges for layer in layers} == {"all", "batch", "heads", "both"}
    assert any(layer.wrap == "vmap" and "ranges" in layer.mapped for layer in layers)
    of_kernels = replace(settings, of_kernels=True)
    assert {layer.dropout for layer in of_kernels.program(5).layers if layer.ranges != "none"} <= {"none"}
    assert {of_kernels.program(seed).dtype for seed in range(9)} == {"bfloat16"}


def test_a_missing_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = derivatives._bind

    def without_value(call: Any, gradients: tuple[str, ...], operands: Any) -> Any:
        results = real(call, gradients, operands)
        return {name: array * (name != "grad_value") for name, array in results.items()}

    monkeypatch.setattr(derivatives, "_bind", without_value)
    outcome = fuzz_jax.check(Program((Layer("query"),), ("key", "value"), "value_and_grad"), SETTINGS, 5)
    assert (outcome.seed, outcome.result) == (5, "GRADIENT")
    assert outcome.what.startswith("[1]['value'] is 0, off by")


def test_other_random_numbers_under_vmap_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program((Layer("query", dropout="shared", wrap="vmap", mapped=("query",)),), ("query",), is_jitted=True)
    assert fuzz_jax.check(program, SETTINGS, 0).result == ""
    jax.clear_caches()
    monkeypatch.setattr(batching.MappedCall, "_obstacle", lambda *_: "")
    assert fuzz_jax.check(program, SETTINGS, 0).result in ("VALUE", "GRADIENT")


def test_errors_of_rounding_are_no_fault_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program((Layer("query"),), ("query",), dtype="bfloat16")
    leaves = fuzz_jax.leaves_of(program)
    monkeypatch.setattr(fuzz_jax, "SPREADS", 1)
    exact = fuzz_jax.results(fuzz_jax.plain, replace(program, dtype="float32"), leaves, True)
    largest = float(abs(exact[1]["query"]).max())
    for error, is_right in ((0.01, True), (0.2, False)):
        found = exact[0], {"query": exact[1]["query"].at[0, 0, 0, 0].add(error * largest)}
        assert fuzz_jax.is_within_rounding(program, leaves, found) is is_right


def test_a_fault_that_needs_an_earlier_program_and_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([fuzz_jax.Outcome(1, "VALUE", "loss"), fuzz_jax.Outcome(1, "")])
    monkeypatch.setattr(fuzz_jax, "_attempt", lambda *_: next(outcomes))
    assert fuzz_jax.check(draw(1, MODES, 2), SETTINGS, 1) == fuzz_jax.Outcome(1, "CACHE", "loss")
    monkeypatch.undo()
    monkeypatch.setattr(derivatives, "_bind", lambda *_: 1 / 0)
    outcome = fuzz_jax.check(Program((Layer("query"),), ("query",)), SETTINGS, 1)
    assert (outcome.result, outcome.what) == ("RAISED", "ZeroDivisionError: division by zero")


def test_a_wrong_program_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(program: Program, settings: fuzz_jax.Settings, seed: int) -> fuzz_jax.Outcome:
        return fuzz_jax.Outcome(seed, "VALUE" if any(layer.sinks == "trained" for layer in program.layers) else "")

    monkeypatch.setattr(fuzz_jax, "_attempt", attempt)
    layers = (Layer("query", softcap=3.0, wrap="scan"), Layer(sinks="trained", bias="frozen", stopped=("key",)))
    program = Program(layers, ("query", "sinks"), "vjp_reuse", True, "bfloat16")
    reduced = fuzz_jax.shrunk(program, SETTINGS, "VALUE")
    assert reduced == Program((Layer("query", sinks="trained"),), ("sinks",), examples=(("sinks", 0),))
    assert fuzz_jax.described(reduced) == "grad of sinks, float32, mesh none\n    query=query, sinks=trained"


def test_the_kernels_of_programs_are_found_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that lowering asks for: one for each set of wanted gradients."""
    asked: list[str] = []

    def compiled(build: Any) -> Any:
        asked.append(build.symbol)
        raise Stale(f"{build.symbol}: nothing compiles here")

    monkeypatch.setattr(fuzz_jax, "artifact_for", compiled)
    programs = {
        0: Program((Layer("query"),), ("query",)),
        1: Program((Layer("query"),), ("key", "value")),
        2: Program((Layer("query"),), ("query",), "jvp"),
    }
    monkeypatch.setattr(fuzz_jax.Settings, "program", lambda _, seed: programs[seed])
    for seed, directions in ((0, {"fwd", "bwd"}), (1, {"fwd", "bwd"}), (2, {"fwd"})):
        asked.clear()
        with contextlib.suppress(Stale):
            fuzz_jax.builds(range(seed, seed + 1), SETTINGS)
        assert {symbol[:3] for symbol in asked} <= directions
        assert asked, seed


def test_the_command_prints_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {7: "", 8: "SKIPPED", 9: "GRADIENT"}
    monkeypatch.setattr(fuzz_jax, "check", lambda _, __, seed: fuzz_jax.Outcome(seed, results[seed], "[1]"))
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["fuzz_jax", "--first", "7", "--programs", "3", "--record", str(path)])
    assert fuzz_jax.main() == 1
    text = capsys.readouterr().out
    assert "GRADIENT seed 9: [1]\n" in text
    assert "3 programs in 0 s: {'right': 1, 'SKIPPED': 1, 'GRADIENT': 1}" in text
    record = json.loads(path.read_text())
    expected = {"count": 2, "wrong": 1, "first": 7, "gpu": "CPU"}
    assert {name: record[name] for name in expected} == expected
