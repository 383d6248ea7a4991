"""Tests of calls whose rows are split over devices: exact to one device, forward and gradients, for every strategy.

Host devices run the custom call of each device's part: the NumPy reference, in float64, stands in for the kernels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from tests.support import fakes

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)  # as in test_jax.py, which may share the process
jax.config.update("jax_disable_most_optimizations", True)
jnp = jax.numpy

from cutlass_py_attn.jax import attention, primitive, reorder, restore  # noqa: E402
from tests.support import xla_reference  # noqa: E402

P = jax.sharding.PartitionSpec
KEY = jax.random.key(0)
B, H, D = 2, 8, 8
STRATEGIES = ("all_gather", "ulysses", "ring")
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


def ours(*arrays: Any, **options: Any) -> Any:
    """Output and logsumexp by the custom call, planned for an H200."""
    return attention(*arrays, **{"kernels": kernels, "arch": "sm_90", "return_logsumexp": True, **options})


@dataclass(frozen=True)
class Case:
    """One call on all rows.

    terms: differentiable arrays, by name. fixed: other options. only: the strategies that compute it; balanced: the
    ones that do in zigzag order too.
    """

    mask: Mask = Causal()  # noqa: RUF009
    terms: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    heads_key: int = 4
    rows: int = 16
    only: tuple[str, ...] = STRATEGIES
    balanced: tuple[str, ...] = STRATEGIES

    def operands(self) -> dict[str, Any]:
        shapes = {"query": (B, self.rows, H, D), "key": (B, self.rows, self.heads_key, D)}
        shapes |= {"value": (B, self.rows, self.heads_key, D), **self.terms}
        return {name: draw(number, *shape) for number, (name, shape) in enumerate(shapes.items())}

    def both(self, operands: dict[str, Any], gradients: Any, **options: Any) -> Any:
        """Returns the output, logsumexp and the gradients of all operands."""

        def attend(operands: dict[str, Any]) -> Any:
            arrays = (operands[name] for name in ("query", "key", "value"))
            terms = {name: operands[name] for name in self.terms}
            return ours(*arrays, mask=self.mask, **terms, **self.fixed, **options)

        found, pull = jax.vjp(attend, operands)
        return found, pull(gradients)[0]


ROWS = 16
ALIBI = {"alibi_slopes": jnp.abs(draw(90, H))}
DROPOUT = {"dropout_p": 0.4, "dropout_key": KEY}
CASES = {
    "causal": Case(),
    "full": Case(Full()),
    "full, softcap, sinks, scale": Case(Full(), {"sinks": (H,)}, {"softcap": 2.0, "scale": 0.4}),
    "causal_br, sinks, softcap": Case(CausalBottomRight(), {"sinks": (H,)}, {"softcap": 2.0}),
    "causal, bias": Case(Causal(), {"bias": (B, H, ROWS, ROWS)}),
    "full, bias of a head": Case(Full(), {"bias": (1, 1, ROWS, ROWS)}),
    "causal, bias of keys": Case(Causal(), {"bias": (B, 1, 1, ROWS)}),
    "causal, bias of rows": Case(Causal(), {"bias": (1, H, ROWS, 1)}),
    "window 5": Case(Causal(5), {"sinks": (H,)}, balanced=("all_gather", "ulysses")),
    "window 3, bias": Case(CausalBottomRight(3), {"bias": (1, H, ROWS, ROWS)}, balanced=("all_gather", "ulysses")),
    "window 1": Case(Causal(1), balanced=("all_gather", "ulysses")),
    "window both sides": Case(Window(3, 2), {"sinks": (H,)}, only=("all_gather", "ulysses"), balanced=("all_gather",)),
    "window right, bias": Case(Window(None, 6), {"bias": (1, H, ROWS, ROWS)}, only=("all_gather", "ulysses")),
    "ALiBi": Case(Causal(), {}, ALIBI, only=("all_gather", "ulysses")),
    "ALiBi, window": Case(Causal(6), {}, {"alibi_slopes": jnp.abs(draw(91, B, H))}, only=("all_gather", "ulysses")),
    "ALiBi, full": Case(Full(), {}, ALIBI, only=("ulysses",)),
    "dropout": Case(Causal(), {"sinks": (H,)}, DROPOUT, only=("ulysses",)),
    "two key heads": Case(heads_key=2),
    "one key head, deterministic": Case(heads_key=1, fixed={"deterministic": True}),
    "as many key heads": Case(Full(), heads_key=8),
}


def parameters() -> Iterator[Any]:
    for name, case in CASES.items():
        for strategy in case.only:
            for order in (None, "zigzag"):
                if order is None or strategy in case.balanced:
                    yield pytest.param(name, strategy, order, id=f"{name}-{strategy}-{order}")


def gradients_of(case: Case) -> Any:
    return draw(80, B, case.rows, H, D), draw(81, B, H, case.rows)


@functools.cache
def one_device(name: str) -> Any:
    case = CASES[name]
    return jax.jit(case.both)(case.operands(), gradients_of(case))


def in_order(arrays: Any, size: int, change: Callable[..., Any]) -> Any:
    """Returns output, logsumexp and gradients, or operands, with their rows in another order."""
    axes = {"bias": 2}

    def of(name: str, array: Any) -> Any:
        if name in ("sinks", "alibi_slopes") or (name == "bias" and array.shape[2] == 1):
            return array
        return change(array, size, axes.get(name, 1))

    return {name: of(name, array) for name, array in arrays.items()}


def run_split(case: Case, strategy: str, order: str | None, size: int, check_vma: bool = True) -> tuple[Any, list[str]]:
    """Returns the results in natural order, and the collectives of the compiled program."""
    mesh = jax.make_mesh((size,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])
    operands, (grad_output, grad_logsumexp) = case.operands(), gradients_of(case)
    if order:
        operands = in_order(operands, size, reorder)
        grad_output, grad_logsumexp = reorder(grad_output, size), reorder(grad_logsumexp, size, 2)
    specs = dict.fromkeys(("query", "key", "value"), P(None, "x"))
    specs |= {"bias": P(None, None, "x" if case.terms.get("bias", (1,) * 3)[2] > 1 else None)}
    specs = {name: specs.get(name, P()) for name in operands}
    of_results = P(None, "x"), P(None, None, "x")
    options = {"context_axis": "x", "context_strategy": strategy, "load_balance": order}
    sharded = jax.shard_map(
        functools.partial(case.both, **options),
        mesh=mesh,
        in_specs=(specs, of_results),
        out_specs=(of_results, specs),
        check_vma=check_vma,
    )
    compiled = jax.jit(sharded).lower(operands, (grad_output, grad_logsumexp)).compile()
    (output, logsumexp), gradients = jax.block_until_ready(compiled(operands, (grad_output, grad_logsumexp)))
    if order:
        output, logsumexp = restore(output, size), restore(logsumexp, size, 2)
        gradients = in_order(gradients, size, restore)
    return ((output, logsumexp), gradients), COLLECTIVES.findall(compiled.as_text())


def expect_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("name", "strategy", "order"), [*parameters()])
def test_split_rows_are_exact(name: str, strategy: str, order: str | None) -> None:
    """Output, logsumexp and every gradient are one device's; ring and Ulysses never gather keys."""
    found, collectives = run_split(CASES[name], strategy, order, 4)
    expect_close(found, one_device(name))
    if strategy == "ring":
        assert set(collectives) <= {"collective-permute"}
    elif strategy == "ulysses" and "bias" not in CASES[name].terms:
        assert set(collectives) == {"all-to-all"}
    elif strategy == "all_gather":
        assert set(collectives) == {"all-gather", "reduce-scatter"}
