"""Comparison of refusals by what is refused and by words of the rule, not by their sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import cutlass_py_attn
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.refusals import Refusal


def expect(refusals: Iterable[Refusal], expected: Sequence[str]) -> None:
    """Asserts which values are refused, in order. expected: "field: words of the rule" of each."""
    given = [*refusals]
    parts = [text.partition(": ") for text in expected]
    said = [
        text if (refusal.field, words in refusal.rule) == (field, True) else str(refusal)
        for refusal, text, (field, _, words) in zip(given, expected, parts, strict=False)
    ]
    assert [*said, *map(str, given[len(said) :])] == [*expected]


def expect_raised(call: Callable[[], Any], expected: Sequence[str]) -> None:
    """Asserts that a call raises NotSupported with these refusals, as for `expect`."""
    with pytest.raises(NotSupported) as caught:
        call()
    expect(caught.value.refusals, expected)


def expect_among(refusals: Iterable[Refusal], expected: str) -> None:
    """Asserts that one of the refusals is "field: words of the rule"."""
    given = [*refusals]
    field, _, words = expected.partition(": ")
    assert any(refusal.field == field and words in refusal.rule for refusal in given), [*map(str, given)]


def expect_all_of_module(module: str, calls: Iterable[Callable[[], Any]]) -> None:
    """Asserts that these calls raise every refusal that the source of `module` creates."""
    refused: list[Refusal] = []
    for call in calls:
        with pytest.raises(NotSupported) as caught:
            call()
        refused += caught.value.refusals
    sources = [*_refusals_of(ast.parse((Path(cutlass_py_attn.__file__).parent / module).read_text()))]
    assert sources
    for line, patterns in sources:
        assert any(
            all(re.fullmatch(pattern, text, re.DOTALL) for pattern, text in zip(patterns, _texts(one), strict=True))
            for one in refused
        ), f"{module}:{line}"


def _texts(refusal: Refusal) -> tuple[str, str, str]:
    return refusal.field, refusal.rule, refusal.remedy


def _refusals_of(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Yields the line of every call of `refuse`, and patterns of field, rule and remedy: names may be anything."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        rules: dict[str, list[tuple[int, ast.expr]]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                rules.setdefault(node.targets[0].id, []).append((node.lineno, node.value))
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refuse":
                field, _, *texts = node.args
                named = [_assigned(text, rules, node.lineno) for text in texts]
                yield node.lineno, [_pattern(text) for text in (field, *named)]


def _assigned(node: ast.expr, assigned: dict[str, list[tuple[int, ast.expr]]], line: int) -> ast.expr:
    """Returns the last value that a name had above a line; another node as it is."""
    above = [value for number, value in assigned.get(getattr(node, "id", ""), []) if number <= line]
    return above[-1] if above else node


def _pattern(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".*" for p in parts) or ".*"
