"""Tests of calls that are split over devices: exact to one device, sharded as their operands, nothing gathered.

Four host devices run the custom call of each device's part: the NumPy reference stands in for the kernels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Window
from cutlass_py_attn.testing.distance_squared import distance_squared
from tests.support import fakes

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 4)  # as in test_jax.py, which may share the process
jax.config.update("jax_disable_most_optimizations", True)
jnp = jax.numpy

import cutlass_py_attn.jax as attention_module  # noqa: E402
from cutlass_py_attn.jax import attention, auto, export_checks, handler, partition, primitive  # noqa: E402
from tests.support import xla_reference  # noqa: E402

P, NamedSharding, AxisType = jax.sharding.PartitionSpec, jax.sharding.NamedSharding, jax.sharding.AxisType
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
B, M, H, D = 4, 10, 8, 8
KEY = jax.random.key(0)
COLLECTIVES = re.compile(r"= (?:\(.*?\)|\S+) (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def kernels(build: Any) -> Any:
    """Kernels that no other module's programs share."""
    return fakes.artifact(build)


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The NumPy reference behind the custom call."""
    xla_reference.register()
    monkeypatch.setattr(primitive, "TARGET", xla_reference.TARGET)
    yield
    xla_reference.computed.clear()


def draw(number: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.fold_in(KEY, number), shape, jnp.float32)


def operands(heads_key: int = 4, batch: int = B) -> tuple[Any, Any, Any]:
    return draw(1, batch, M, H, D), draw(2, batch, M, heads_key, D), draw(3, batch, M, heads_key, D)


def ours(*arrays: Any, **options: Any) -> Any:
    """Attention by the custom call, planned for an H200."""
    return attention(*arrays, **{"mask": Causal(), "kernels": kernels, "arch": "sm_90", **options})


def mesh_of(kind: Any, *sizes: int) -> Any:
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(kind,) * len(sizes))


def put(array: Any, mesh: Any, spec: Any) -> Any:
    return jax.device_put(array, NamedSharding(mesh, spec))


def weights(shape: tuple[int, ...]) -> Any:
    return jnp.sin(jnp.arange(np.prod(shape))).reshape(shape)


@dataclass(frozen=True)
class Case:
    """terms: differentiable arrays. fixed: other options."""

    terms: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    heads_key: int = 4

    def both(self, query: Any, key: Any, value: Any, terms: Any, grad_output: Any) -> Any:
        """Returns the output and the gradients."""
        output, pull = jax.vjp(lambda q, k, v, t: ours(q, k, v, **t, **self.fixed), query, key, value, terms)
        return output, pull(grad_output)


DROPOUT: dict[str, Any] = {"dropout_p": 0.4, "dropout_key": KEY}
CASES = {
    "terms": Case({"bias": draw(4, 1, H, M, M), "sinks": draw(5, H)}, {"alibi_slopes": draw(6, H), "softcap": 3.0}),
    "terms of the batch": Case(
        {"bias": draw(4, B, 1, 1, M)}, {"alibi_slopes": draw(6, B, H), "scale": 0.3, "mask": Window(4, 2)}
    ),
    "dropout": Case({"bias": draw(4, 1, 1, M, M), "sinks": draw(5, H)}, {**DROPOUT, "mask": Full()}, H),
    "dropout, whole bias": Case({"bias": draw(4, B, H, M, M)}, {**DROPOUT, "deterministic": True}),
    "two key heads": Case({}, {"mask": CausalBottomRight()}, 2),
    "one key head": Case({}, DROPOUT, 1),
}
SPLITS = {"batch": (P("x"), (4,)), "heads": (P(None, None, "x"), (4,)), "both": (P("x", None, "y"), (2, 2))}
GRAD_OUTPUT = jnp.sin(jnp.arange(B * M * H * D)).reshape(B, M, H, D)


@functools.cache
def one_device(name: str) -> Any:
    case = CASES[name]
    return jax.jit(case.both)(*operands(case.heads_key), case.terms, GRAD_OUTPUT)


def expect_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


def expect_sharding(array: Any, mesh: Any, spec: Any) -> None:
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), array.sharding


def collectives(compiled: Any) -> list[str]:
    return COLLECTIVES.findall(compiled.as_text())


def parts_computed() -> set[tuple[int, int]]:
    """Returns (batch, query heads) of the calls that devices ran."""
    return {(problem.shape.batch, problem.shape.num_heads) for problem in xla_reference.computed}


def test_the_stand_in_is_the_reference() -> None:
    for case in CASES.values():
        arrays = operands(case.heads_key)
        expected = attention(*arrays, **{"mask": Causal(), **case.terms, **case.fixed}, backend="reference")
        expect_close(ours(*arrays, **case.terms, **case.fixed), expected)


@KINDS
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_split_calls_are_exact_and_gather_nothing(name: str, how: str, kind: Any) -> None:
    """Output and gradients are one device's, sharded as the operands; each device computes its part only."""
    case, (spec, sizes) = CASES[name], SPLITS[how]
    expected = one_device(name)
    mesh = mesh_of(kind, *sizes)
    parts_of_heads = sizes[-1] if how != "batch" else 1
    spec_key = spec if case.heads_key % parts_of_heads == 0 else P(spec[0])
    batches, heads = (*spec, None, None)[0], (*spec, None, None)[2]
    of_terms = {"bias": lambda array: P(*(at if size > 1 else None for at, size in zip((batches, heads), array.shape)))}
    of_terms["sinks"] = lambda array: P(heads)
    specs = spec, spec_key, spec_key, {name: of_terms[name](array) for name, array in case.terms.items()}, spec
    given = (*operands(case.heads_key), case.terms, GRAD_OUTPUT)
    arrays = jax.tree.map(lambda array, spec: put(array, mesh, spec), given, specs)
    with jax.set_mesh(mesh):
        compiled = jax.jit(case.both).lower(*arrays).compile()
        xla_reference.computed.clear()
        found = jax.block_until_ready(compiled(*arrays))
    expect_close(found, expected)
    if spec_key == spec or kind == EXPLICIT:  # else XLA chooses the sharding of the shared key heads' gradients
        assert collectives(compiled) == []
        jax.tree.map(lambda array, spec: expect_sharding(array, mesh, spec), found, (spec, specs[:4]))
    else:
        expect_sharding(found[1][0], mesh, spec)
    batch = B // (sizes[0] if how != "heads" else 1)
    one_by_one = parts_of_heads > 1 and "dropout_p" in case.fixed
    assert parts_computed() == {(1 if one_by_one else batch, H // parts_of_heads)}
