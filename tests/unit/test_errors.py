"""Every exception of the package passes between processes and copies: its type, text and attributes stay."""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import cutlass_py_attn
from cutlass_py_attn import attention_forward
from cutlass_py_attn.errors import AttentionError, DoesNotFit, DriverError, NotSupported
from cutlass_py_attn.refusals import refuse
from cutlass_py_attn.runtime import driver

ROOT = Path(cutlass_py_attn.__file__).parent
FORK = multiprocessing.get_context("fork")


def classes() -> Iterator[tuple[str, str]]:
    """Yields module and name of every exception class that the package's sources define."""
    known = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    found: set[tuple[str, str]] = set()
    defined = [
        (".".join(path.relative_to(ROOT.parent).with_suffix("").parts), node)
        for path in sorted(ROOT.rglob("*.py"))
        if "Error" in (text := path.read_text()) or "Exception" in text or "NoDevice" in text or "NotSupported" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]
    while True:
        more = {
            (module, node.name)
            for module, node in defined
            if any(getattr(base, "id", getattr(base, "attr", "")) in known for base in node.bases)
        }
        if more == found:
            yield from sorted(found)
            return
        found = more
        known |= {name for _, name in found}


CLASSES = list(classes())
ARGUMENTS: dict[str, list[tuple[object, ...]]] = {
    "NotSupported": [("one reason",), (["one", "two\nlines"],), ((),)],
    "DoesNotFit": [("one",), (["one", "two"],)],
    "DriverError": [("cuInit(0) failed", 999), ("unknown",)],
    "ForkedChild": [()],
    "CallsDiffer": [("one reason",), (["one", "two"],)],
    "CapturedStream": [("one reason",)],
}


def instances(module: str, name: str) -> Iterator[Exception]:
    kind = getattr(pytest.importorskip(module, reason="a library is not installed"), name)
    for arguments in ARGUMENTS.get(name, [("the text",)]):
        yield kind(*arguments)


def test_every_class_is_found() -> None:
    names = {name for _, name in CLASSES}
    assert names >= {
        "AttentionError",
        "NotSupported",
        "ForkedChild",
        "OldDriver",
        "NoPermission",
        "PeerLost",
        "_NotBuilt",
    }
    for module, name in CLASSES:
        if name[0] != "_":
            assert issubclass(getattr(importlib.import_module(module), name), AttentionError)


@pytest.mark.parametrize(("module", "name"), CLASSES)
@pytest.mark.parametrize(
    "again",
    [
        *(lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol)) for protocol in (0, 2, 5)),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_an_error_is_the_same_again(module: str, name: str, again: Callable[[Exception], Exception]) -> None:
    for error in instances(module, name):
        error.add_note("a note")
        found = again(error)
        assert type(found) is type(error)
        assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


def test_attributes_are_those_that_were_given() -> None:
    assert pickle.loads(pickle.dumps(NotSupported(["a", "b"]))).reasons == ("a", "b")
    assert pickle.loads(pickle.dumps(DoesNotFit(["a", "b"]))).reasons == ("a", "b")
    refused = NotSupported([refuse("scale", "x", "must be a number", "pass one"), "a sentence"])
    again = pickle.loads(pickle.dumps(refused))
    assert (again.refusals, again.reasons, str(again)) == (refused.refusals, refused.reasons, str(refused))
    assert pickle.loads(pickle.dumps(DriverError("text", 2))).code == 2
    assert "multiprocessing.get_context('spawn')" in str(pickle.loads(pickle.dumps(driver.ForkedChild())))


def _raise(number: int) -> None:
    raise [error for module, name in CLASSES if "jax" not in module for error in instances(module, name)][number]


def test_a_pool_gets_every_error() -> None:
    """A worker whose error cannot be read again leaves the pool waiting for ever."""
    errors = [error for module, name in CLASSES if "jax" not in module for error in instances(module, name)]
    with FORK.Pool(1) as pool:
        for number, error in enumerate(errors):
            with pytest.raises(type(error)) as caught:
                pool.apply_async(_raise, (number,)).get(timeout=30)
            assert str(caught.value) == str(error)


def _call(_: int) -> object:
    driver.initialise.cache_clear()
    operand = np.ones((1, 4, 2, 8), np.float32)
    return attention_forward(operand, operand, operand)


def test_a_pool_that_was_forked_after_cuda_was_used_gets_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "is_forked_child", True)  # as the child finds itself
    with FORK.Pool(1) as pool, pytest.raises(driver.ForkedChild, match="this process was forked"):
        pool.apply_async(_call, (1,)).get(timeout=30)
