"""Tests of score_terms/registry.py: what the built-in terms say of tiles and struct fields."""

from __future__ import annotations

import pytest

from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.term import ScoreTerm

ALL = {"alibi", "bias", "dropout", "sinks", "softcap"}
SHAPE = Shape(2, 128, 128, 4, 64, 64)


def with_term(term: ScoreTerm) -> Problem:
    """A forward problem with one built-in term."""
    changes = {}
    for name, value in term.example(SHAPE).items():
        dtype = "float32" if term.vector is not None else "bfloat16"
        changes[name] = Tensor.contiguous(value, dtype) if isinstance(value, tuple) else value
    return Problem.dense("forward", SHAPE, "bfloat16", Causal()).replace(**changes)


@pytest.mark.parametrize("term", registry.BUILT_IN, ids=lambda term: term.name)
def test_example_has_the_term_alone(term: ScoreTerm) -> None:
    problem = with_term(term)
    assert problem.reasons() == []
    assert registry.present(problem) == (term,)
    assert problem.features == (term.name,)
    assert set(term.sizes(problem)) == set(term.struct.sizes)
    assert set(term.numbers(problem)) >= set(term.struct.factors)
    assert {name for name, _ in term.meanings} <= {name for name, _ in term.struct.kinds}


def test_names_are_those_of_the_features() -> None:
    assert set(registry.names()) == ALL
    assert registry.gradients() == ("bias", "sinks")
    assert registry.array_options() == ("bias", "alibi_slopes", "sinks")


@pytest.mark.parametrize(
    ("features", "tables", "table"),
    [
        (("grouped", "sinks"), ("", "score_mod"), ""),
        (("alibi",), ("", "score_mod"), "score_mod"),
        (("softcap",), ("", "score_mod"), "score_mod"),
        (("bias", "softcap"), ("", "score_mod", "bias"), "bias"),
        (("bias", "softcap"), ("", "score_mod", "bias", "softcap"), "softcap"),
        (("dropout",), ("", "score_mod", "bias"), "score_mod"),
    ],
)
def test_tile_table(features: tuple[str, ...], tables: tuple[str, ...], table: str) -> None:
    assert registry.tile_table(features, tables) == table


def test_no_struct_field_belongs_to_two_terms() -> None:
    names = [name for term in registry.BUILT_IN for name, _ in term.struct.kinds]
    assert len(names) == len(set(names))
    assert registry.in_struct(()) == registry.BUILT_IN
