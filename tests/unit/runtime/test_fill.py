"""Tests of runtime/fill.py: which memory is set for problems without keys."""

from __future__ import annotations

import pytest

from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.runtime import driver, fill
from tests.support.fakes import addresses


def filled(monkeypatch: pytest.MonkeyPatch, direction: str, name: str) -> tuple[list[str], list[str]]:
    """Returns the tensors that are set to zero and to an infinity."""
    zeros, infinities = list[str](), list[str]()
    problem = parse(name).problem(direction)
    pointers = addresses((*problem.tensors(), *problem.vectors(), "logsumexp"))
    names = {address: name for name, address in pointers.items()}
    monkeypatch.setattr(driver, "memset_zero_rows", lambda address, *_: zeros.append(names[address]))
    monkeypatch.setattr(driver, "memset_words", lambda address, *_: infinities.append(names[address]))
    fill.fill(problem, pointers, 0x77)
    return zeros, infinities


def test_a_forward_sets_output_and_logsumexp(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, infinities = filled(monkeypatch, "forward", "f16_d64_q5_s0_b2_h2_full")
    assert (zeros, infinities) == (["output"], ["logsumexp", "logsumexp"])


def test_a_backward_sets_the_gradients_and_leaves_the_logsumexp(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, infinities = filled(monkeypatch, "backward", "f16_d64_q5_s7_b2_h2_full")
    assert (zeros, infinities) == (["grad_query", "grad_key", "grad_value"], [])


@pytest.mark.parametrize("name", ["f16_d64_q0_s7_b2_h2_full", "f16_d64_q5_s7_b0_h2_full"])
def test_nothing_is_set_where_there_is_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert filled(monkeypatch, "forward", name) == ([], [])
