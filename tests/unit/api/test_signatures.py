"""Tests of what help() and editors show of the public functions: it is what the functions accept."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest

import cutlass_py_attn
from cutlass_py_attn import distributed
from cutlass_py_attn.api import attention, calls, options
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal

FUNCTIONS = {"attention_forward": options.ForwardOptions, "attention_backward": options.BackwardOptions}
DEFAULTS = {
    field.name: field.default_factory() if field.default is MISSING else field.default
    for field in fields(options.Options)
} | {"stream": None}


def keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the keyword-only parameters of a function by name."""
    parameters = inspect.signature(function).parameters
    return {name: item for name, item in parameters.items() if item.kind is item.KEYWORD_ONLY}


def annotations_of(declared: type) -> dict[str, str]:
    """Returns the options of a TypedDict and of those that it extends, with their types as text."""
    return {name: kind.__forward_arg__ for name, kind in declared.__annotations__.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_is_a_keyword_with_its_type_and_default(name: str) -> None:
    function = getattr(cutlass_py_attn, name)
    shown = keywords(function)
    assert {key: item.annotation for key, item in shown.items()} == annotations_of(FUNCTIONS[name])
    assert {key: item.default for key, item in shown.items()} == {key: DEFAULTS[key] for key in shown}
    assert not any(item.kind is item.VAR_KEYWORD for item in inspect.signature(function).parameters.values())


NARROWER = {
    ("BackwardOptions", "sequences"),
    ("BackwardOptions", "out"),
    ("MlaOptions", "head_dim_value"),
    ("MlaOptions", "mask"),
}


@pytest.mark.parametrize("declared", [options.ForwardOptions, options.BackwardOptions, options.MlaOptions])
def test_every_declared_option_is_one_of_the_table(declared: type) -> None:
    """With its type, unless the function takes fewer values; stream, which decides no result, is in no table.

    A mask of ranges is a band and two arrays there.
    """
    table = {field.name: field.type for field in fields(options.Options)}
    table |= {"stream": "object", "mask": "Mask | KeyRanges | BlockSparse | MaskFunction"}
    differ = {name for name, kind in annotations_of(declared).items() if table[name] != kind}
    assert differ == {name for kind, name in NARROWER if kind == declared.__name__}


def test_help_shows_the_options() -> None:
    lines = pydoc.plain(pydoc.render_doc(cutlass_py_attn.attention_forward))
    # From Python 3.13 on each parameter has its line, and from 3.14 on types have no quotes.
    text = " ".join(lines.split()).replace("( ", "(").replace("'", "")
    masks = "Mask | KeyRanges | BlockSparse | MaskFunction"
    assert f"attention_forward(query: Any, key: Any, value: Any, *, mask: {masks} = Full()" in text
    assert "softcap: float = 0.0" in text
    assert "Computes softmax(scale Q K^T + bias, masked) V" in text


def test_options_of_jax_are_keywords() -> None:
    pytest.importorskip("jax")
    from cutlass_py_attn import jax as package

    shown = keywords(package.attention)
    assert {key: item.annotation for key, item in shown.items()} == annotations_of(package.Options)
    mine = {"dropout_p": 0.0, "dropout_key": None, "arch": None, "return_logsumexp": False}
    mine |= {"context_axis": None, "context_strategy": "all_gather", "load_balance": None}
    mine |= {"checkpoint_name": "cutlass_py_attn"}
    assert {key: item.default for key, item in shown.items()} == {
        key: mine[key] if key in mine else DEFAULTS[key] for key in shown
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_of_split_rows_are_keywords(name: str) -> None:
    """All that the options have but score_terms, which calls refuse; every call names its group."""
    declared = {
        "attention_forward": distributed.ContextOptions,
        "attention_backward": distributed.ContextBackwardOptions,
    }
    shown = keywords(getattr(distributed, name))
    assert {key: item.annotation for key, item in shown.items()} == {
        key: kind for key, kind in annotations_of(declared[name]).items() if key != "score_terms"
    }
    mine = {"group": inspect.Parameter.empty, "context_strategy": "all_gather", "load_balance": None}
    assert {key: item.default for key, item in shown.items()} == {
        key: mine[key] if key in mine else DEFAULTS[key] for key in shown
    }


def test_a_call_gets_the_options_that_were_given_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached call must not pay for options that it does not use."""
    seen: list[Any] = []
    monkeypatch.setattr(calls, "repeat", lambda *arguments: (seen.append(arguments[2]), ("key", [1, 2]))[1])
    array = np.ones((1, 2, 1, 8), "f4")
    assert cutlass_py_attn.attention_forward(array, array, array, mask=Causal(), stream=7) == (1, 2)
    assert seen == [{"mask": Causal()}]
    assert attention.attention_forward is cutlass_py_attn.attention_forward


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    array = np.ones((1, 2, 1, 8), "f4")
    with pytest.raises(NotSupported) as caught:
        cutlass_py_attn.attention_forward(array, array, array, sofcap=3.0, mask=5, backend="reference")
    assert [refusal.field for refusal in caught.value.refusals] == ["option", "mask"]
    assert caught.value.refusals[0].remedy == "did you mean softcap?"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("causal", "mask=Causal()"), ("softmax_scale", "scale="), ("dropout_p", "dropout=Dropout("), ("xyz", "spelling")],
)
def test_an_option_of_another_library_is_refused_with_its_name_here(name: str, remedy: str) -> None:
    array, options = np.ones((1, 2, 1, 8), "f4"), {"backend": "reference", name: 0.5}
    call: Any = cutlass_py_attn.attention_forward
    with pytest.raises(NotSupported) as caught:
        call(array, array, array, **options)
    assert remedy in caught.value.refusals[0].remedy
