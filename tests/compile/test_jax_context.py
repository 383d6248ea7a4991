"""Tests of calls whose rows are split over devices: exact to one device, forward and gradients, for every strategy.

Host devices run the custom call of each device's part: the NumPy reference, in float64, stands in for the kernels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from tests.support import fakes

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)  # as in test_jax.py, which may share the process
jax.config.update("jax_disable_most_optimizations", True)
jnp = jax.numpy

from cutlass_py_attn.jax import (  # noqa: E402
    attention,
    context,
    context_parallel_attention,
    packed_sequences,
    primitive,
    reorder,
    restore,
)
from tests.cases.distance_squared import distance_squared  # noqa: E402
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
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32))


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
BOTH_ORDERS = 4  # the first cases, which run with both orders of the rows
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
    "window 1, bias of keys": Case(Causal(1), {"bias": (B, 1, 1, ROWS)}, balanced=("all_gather", "ulysses")),
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
    """Every strategy of every case, with each order of the rows in turns, and the plain cases with both."""
    for number, (name, case) in enumerate(CASES.items()):
        for place, strategy in enumerate(case.only):
            orders = (None, "zigzag") if strategy in case.balanced else (None,)
            chosen = orders if number < BOTH_ORDERS else orders[(number + place) % len(orders) :][:1]
            for order in chosen:
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


MASKS = st.sampled_from([Full(), Causal(), CausalBottomRight()]) | st.builds(Causal, st.integers(1, 20))
WINDOWS = st.builds(Window, st.none() | st.integers(0, 9), st.none() | st.integers(0, 9))


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """Any mask with any terms, whether or not a strategy computes it."""
    terms: dict[str, tuple[int, ...]] = {"sinks": (H,)} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        terms["bias"] = tuple(draw(st.sampled_from([1, size])) for size in (B, H, ROWS, ROWS))
    fixed: dict[str, Any] = {"softcap": draw(st.sampled_from([0.0, 2.0])), "deterministic": draw(st.booleans())}
    fixed |= draw(st.sampled_from([{}, {}, ALIBI, DROPOUT]))
    return Case(draw(MASKS | WINDOWS), terms, fixed, draw(st.sampled_from([1, 2, 4, 8])))


def is_refused(case: Case, strategy: str, order: str | None) -> bool:
    """Whether docs/several_gpus.md says so."""
    causal = isinstance(case.mask, (Causal, CausalBottomRight))
    window = causal and case.mask.window_size is not None
    if strategy == "all_gather":
        return "dropout_p" in case.fixed or ("alibi_slopes" in case.fixed and not causal)
    is_term = "dropout_p" in case.fixed or "alibi_slopes" in case.fixed
    is_window = isinstance(case.mask, Window) and not case.mask.form.sees_all
    return strategy == "ring" and (is_term or is_window or bool(window and order))


@given(case=any_case(), size=st.sampled_from([2, 4]), order=st.sampled_from([None, "zigzag"]))
@settings(max_examples=8, deadline=None)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_case_is_exact_or_refused(strategy: str, case: Case, size: int, order: str | None) -> None:
    if is_refused(case, strategy, order):
        with pytest.raises(NotSupported):
            run_split(case, strategy, order, size)
        return
    found, _ = run_split(case, strategy, order, size)
    expect_close(found, jax.jit(case.both)(case.operands(), gradients_of(case)))


@pytest.mark.parametrize("order", [None, "zigzag"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("size", "name"), [(1, "causal"), (2, "two key heads"), (8, "causal_br, sinks, softcap")])
def test_other_numbers_of_devices(size: int, name: str, strategy: str, order: str | None) -> None:
    found, _ = run_split(CASES[name], strategy, order, size, check_vma=size > 1)
    expect_close(found, one_device(name))


def test_a_window_ends_the_ring() -> None:
    """Four devices with four rows each: with a window of 3 keys one turn suffices, and its tile is 2 by 2."""
    _, collectives = run_split(CASES["window 3, bias"], "ring", None, 4)
    turns = {"forward": 1, "backward": 2}  # keys; keys, and the sums that go home
    assert len(collectives) <= 2 * sum(turns.values())
    shapes = {(problem.shape.num_queries, problem.shape.num_keys) for problem in xla_reference.computed}
    assert shapes == {(4, 4), (2, 2)}


@pytest.mark.parametrize(
    ("name", "order"), [("causal", "zigzag"), ("full, softcap, sinks, scale", None), ("full, bias of a head", "zigzag")]
)
def test_many_turns_are_a_loop(name: str, order: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of a long ring has the kernels of three forwards and three backwards, whatever its length."""
    monkeypatch.setattr(context, "_MOST_UNROLLED", 1)
    # Kernels of its own: JAX keeps what it traced, and a test above has the same case unrolled.
    case = replace(CASES[name], fixed={**CASES[name].fixed, "kernels": lambda build: fakes.artifact(build)})
    found, collectives = run_split(case, "ring", order, 4)
    expect_close(found, one_device(name))
    longer, more = run_split(case, "ring", order, 8)
    expect_close(longer, one_device(name))
    turns = {"first": 2, "in the loop": 2, "backward, first": 2, "backward, in the loop": 4, "home": 2}
    assert len(collectives) == len(more) <= sum(turns.values())


def test_work_in_zigzag_order_is_equal() -> None:
    """Every device computes its own rows, then for each turn two tiles of a quarter, in one call."""
    run_split(CASES["causal"], "ring", "zigzag", 4)
    forwards = [problem for problem in xla_reference.computed if problem.direction == "forward"]
    shapes = [(problem.shape.batch, problem.shape.num_queries, problem.shape.num_keys) for problem in forwards]
    assert sorted(shapes) == sorted([(B, 4, 4)] * 4 + [(2 * B, 2, 2)] * 12)


DOCUMENTS = np.array([0, 5, 5, 6, 23, 30], np.int32)


def cross(mask: Mask) -> VariableLength:
    """Sequences with keys of other lengths, some of them unused; those of self-attention for Causal."""
    if isinstance(mask, Causal) and not isinstance(mask, CausalBottomRight):
        return VariableLength(DOCUMENTS, DOCUMENTS, 17, 17)
    keys, used = np.array([0, 9, 11, 12, 20, 31], np.int32), np.array([7, 2, 1, 8, 9], np.int32)
    return VariableLength(DOCUMENTS, keys, 17, 11, used)


@pytest.mark.parametrize("order", [None, "zigzag"])
@pytest.mark.parametrize("strategy", ["all_gather", "ulysses"])
@pytest.mark.parametrize("mask", [Causal(), Causal(4), CausalBottomRight(6), Full()], ids=str)
def test_packed_sequences(mask: Mask, strategy: str, order: str | None) -> None:
    """Sequences that end in the middle of a device's rows, an empty one, and tokens behind the last."""
    tokens = 32
    arrays = [draw(number, 1, tokens, heads, D) for number, heads in enumerate((H, 4, 4))]
    grad_output, sinks = draw(7, 1, tokens, H, D), draw(8, H)
    fixed = {"mask": mask, "sequences": cross(mask), "return_logsumexp": False}
    fixed |= {} if isinstance(mask, Full) else ALIBI

    def both(arrays: Any, sinks: Any, grad_output: Any, **options: Any) -> Any:
        output, pull = jax.vjp(lambda arrays, sinks: ours(*arrays, sinks=sinks, **fixed, **options), arrays, sinks)
        return output, pull(grad_output)

    expected = both(arrays, sinks, grad_output)
    change, back = (reorder, restore) if order else (lambda array, size: array,) * 2
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    options = {"context_axis": "x", "context_strategy": strategy, "load_balance": order}
    rows = P(None, "x")
    sharded = jax.shard_map(
        functools.partial(both, **options), mesh=mesh, in_specs=(rows, P(), rows), out_specs=(rows, (rows, P()))
    )
    output, (gradients, grad_sinks) = jax.jit(sharded)(
        [change(array, 4) for array in arrays], sinks, change(grad_output, 4)
    )
    found = back(output, 4), ([back(array, 4) for array in gradients], grad_sinks)
    expect_close(found, expected)


def test_a_registered_term_over_ulysses() -> None:
    """It counts positions among all rows."""
    with distance_squared() as term:
        case = Case(Causal(7), {"sinks": (H,)}, {"score_terms": {term.name: jnp.abs(draw(92, H)) / 20}})
        found, _ = run_split(case, "ulysses", "zigzag", 4)
        expect_close(found, one_device_of(case))


def test_dropout_of_one_packed_sequence() -> None:
    """The random numbers are those of the sequence's rows, not of all tokens."""
    bounds = np.array([0, 13], np.int32)
    arrays = [reorder(draw(number, 1, ROWS, heads, D), 4) for number, heads in enumerate((H, 4, 4))]
    options = {"mask": Causal(), "sequences": VariableLength(bounds, bounds, 13, 13), **DROPOUT, **FIXED}
    split = functools.partial(
        context_parallel_attention,
        mesh=mesh_of(4),
        context_axis="x",
        context_strategy="ulysses",
        load_balance="zigzag",
        **options,
    )

    def loss(arrays: Any, attend: Any) -> Any:
        return jnp.sum(jnp.sin(attend(*arrays)))

    found = jax.jit(jax.grad(functools.partial(loss, attend=split)))(arrays)
    plain = [restore(array, 4) for array in arrays]
    expected = jax.jit(jax.grad(functools.partial(loss, attend=functools.partial(attention, **options))))(plain)
    expect_close([restore(array, 4) for array in found], expected)


def test_segment_ids_of_global_arrays() -> None:
    """A data pipeline's ids, in natural order, beside tokens in zigzag order: a traced step, and its gradients."""
    ids = jnp.asarray(np.repeat([4, 7, 0, 9], (5, 1, 7, 3))[None])
    arrays = [draw(number, 1, ROWS, heads, D) for number, heads in enumerate((H, 4, 4))]

    def loss(arrays: Any, ids: Any, size: int) -> Any:
        options: dict[str, Any] = {"mask": Causal(), "sequences": packed_sequences(ids, 5), **FIXED}
        if size == 1:
            return jnp.sum(jnp.sin(attention(*arrays, **options)))
        options |= {"mesh": mesh_of(size), "context_axis": "x", "load_balance": "zigzag"}
        found = context_parallel_attention(*(reorder(array, size) for array in arrays), **options)
        return jnp.sum(jnp.sin(restore(found, size)))

    found, expected = (jax.jit(jax.grad(loss), static_argnums=2)(arrays, ids, size) for size in (4, 1))
    expect_close(found, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_precision_is_rounded_once(strategy: str) -> None:
    """Partial results are merged and summed in float32: the error is that of a few roundings, not of a chain."""
    case = Case(heads_key=1)
    narrow = functools.partial(jax.tree.map, lambda array: array.astype(jnp.bfloat16))
    operands, (grad_output, grad_logsumexp) = narrow(case.operands()), gradients_of(case)
    split = jax.shard_map(
        functools.partial(case.both, context_axis="x", context_strategy=strategy),
        mesh=mesh_of(4),
        in_specs=(P(None, "x"), ((P(None, "x"), P(None, None, "x")))),
        out_specs=((P(None, "x"), P(None, None, "x")), P(None, "x")),
    )
    (output, _), gradients = jax.jit(split)(operands, (narrow(grad_output), grad_logsumexp))
    (expected, _), others = one_device_of(case)
    for one, other in ((output, expected), *((gradients[name], others[name]) for name in operands)):
        assert one.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(one, np.float32) - other) / np.linalg.norm(other)
        assert error < 8e-3


def one_device_of(case: Case) -> Any:
    return jax.jit(case.both)(case.operands(), gradients_of(case))


def test_parts_without_keys_are_merged() -> None:
    """A row that sees no key of either part has output 0 and logsumexp -inf, and no NaN."""
    rows = jnp.array([[[0.5, -jnp.inf, -jnp.inf, 3e38]]], jnp.float32)
    others = jnp.array([[[-jnp.inf, 0.25, -jnp.inf, 3e38]]], jnp.float32)
    ones = jnp.ones((1, 4, 1, 2), jnp.float32).at[:, 2].set(0)
    found = context._Part(ones, rows).merged(context._Part(2 * ones, others))
    np.testing.assert_allclose(found.output[0, :, 0, 0], [1, 2, 0, 1.5])
    np.testing.assert_allclose(found.logsumexp[0, 0], [0.5, 0.25, -np.inf, 3e38])


def test_keys_of_another_length() -> None:
    """With a full mask no position counts, and Ulysses has all rows."""
    query, key, value = draw(1, B, 8, H, D), draw(2, B, 16, 4, D), draw(3, B, 16, 4, D)
    for strategy in STRATEGIES:
        for mask in (Full(), CausalBottomRight()) if strategy == "ulysses" else (Full(),):
            found = context_parallel_attention(
                query, key, value, mask=mask, mesh=mesh_of(4), context_axis="x", context_strategy=strategy, **FIXED
            )
            expect_close(found, ours(query, key, value, mask=mask, return_logsumexp=False))


# Global arrays

FIXED: dict[str, Any] = {"kernels": kernels, "arch": "sm_90"}


def mesh_of(*sizes: int, kind: Any = None) -> Any:
    kinds = (kind or jax.sharding.AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, ("x", "y", "z")[: len(sizes)], axis_types=kinds, devices=devices)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_global_arrays_split_by_rows_batch_and_heads(strategy: str, kind: str) -> None:
    """A training step: the loss of global arrays, with every array where it is needed."""
    query, key, value = (draw(number, B, ROWS, heads, D) for number, heads in enumerate((H, 4, 4)))
    terms = {"bias": draw(4, 1, H, ROWS, ROWS), "sinks": draw(5, H)}

    def loss(arrays: Any, terms: Any, attend: Callable[..., Any], order: Any) -> Any:
        given = {**terms, "bias": order(terms["bias"], 2, 2)}
        output, logsumexp = attend(*(order(array, 2) for array in arrays), mask=Causal(), **given)
        weights = order(draw(6, B, ROWS, H, D), 2), order(draw(7, B, H, ROWS), 2, 2)
        return jnp.sum(jnp.sin(output) * weights[0]) + jnp.sum(logsumexp * weights[1])

    arrays = query, key, value
    expected = jax.grad(loss, (0, 1))(arrays, terms, ours, lambda array, *_: array)
    split = functools.partial(
        context_parallel_attention,
        context_axis="y",
        batch_axis="x",
        heads_axis="z",
        context_strategy=strategy,
        load_balance="zigzag",
        return_logsumexp=True,
        **FIXED,
    )
    with jax.set_mesh(mesh_of(2, 2, 2, kind=getattr(jax.sharding.AxisType, kind))):
        found = jax.jit(jax.grad(functools.partial(loss, attend=split, order=reorder), (0, 1)))(arrays, terms)
    expect_close(found, expected)


def test_dropout_repeats_and_ulysses_has_one_devices() -> None:
    arrays = [draw(number, B, ROWS, H, D) for number in range(3)]
    options = {"mask": Causal(), **DROPOUT, **FIXED}
    for sizes in ((2,), (8,)):
        found = context_parallel_attention(
            *arrays, mesh=mesh_of(*sizes), context_axis="x", context_strategy="ulysses", **options
        )
        expect_close(found, attention(*arrays, **options))


def test_vmap_and_checkpoint() -> None:
    arrays = [draw(number, 3, 1, ROWS, heads, D) for number, heads in enumerate((H, 4, 4))]
    mesh = mesh_of(2)
    for strategy in STRATEGIES:
        options = {"context_axis": "x", "context_strategy": strategy, "load_balance": "zigzag"}
        attend = functools.partial(attention, mask=Causal(), **FIXED, **options)
        rows = P(None, None, "x")
        sharded = jax.shard_map(jax.checkpoint(jax.vmap(attend)), mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)

        def total(*arrays: Any, sharded: Any = sharded) -> Any:
            return jnp.sum(jnp.sin(restore(sharded(*(reorder(array, 2, 2) for array in arrays)), 2, 2)))

        found = jax.jit(jax.grad(total, (0, 1, 2)))(*arrays)
        expected = jax.grad(
            lambda *given: jnp.sum(jnp.sin(jax.vmap(functools.partial(attention, mask=Causal(), **FIXED))(*given))),
            (0, 1, 2),
        )(*arrays)
        expect_close(found, expected)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_the_axis_of_a_vmap(strategy: str) -> None:
    """It stands for a mesh axis, so that one device runs what several would."""
    case = CASES["window 5"]
    operands, (grad_output, grad_logsumexp) = case.operands(), gradients_of(case)
    parts = {name: array if name == "sinks" else split_in_four(array, 1) for name, array in operands.items()}
    axes = {name: None if name == "sinks" else 0 for name in operands}
    function = functools.partial(case.both, context_axis="x", context_strategy=strategy)
    mapped = jax.jit(jax.vmap(function, (axes, 0), axis_name="x"))
    (output, logsumexp), gradients = mapped(parts, (split_in_four(grad_output, 1), split_in_four(grad_logsumexp, 2)))
    found = (
        (jnp.concatenate([*output], 1), jnp.concatenate([*logsumexp], 2)),
        {name: array.sum(0) if name == "sinks" else jnp.concatenate([*array], 1) for name, array in gradients.items()},
    )
    expect_close(found, one_device("window 5"))


def split_in_four(array: Any, axis: int) -> Any:
    return jnp.stack(jnp.split(array, 4, axis))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_shard_map_that_does_not_check(strategy: str) -> None:
    """With check_vma=False JAX sums the gradients of whole operands where they leave the shard_map."""
    query, key, value = (draw(number, B, ROWS, heads, D) for number, heads in enumerate((H, 4, 4)))
    terms = {"bias": draw(4, 1, H, 1, ROWS), "sinks": draw(5, H)}

    def total(arrays: Any, terms: Any, split: bool) -> Any:
        options = {"context_axis": "x", "context_strategy": strategy} if split else {}

        def attend(arrays: Any, terms: Any) -> Any:
            return attention(*arrays, mask=Causal(), **terms, **FIXED, **options)

        if split:
            rows = P(None, "x")
            specs = (rows,) * 3, {"bias": P(), "sinks": P()}
            attend = jax.shard_map(attend, mesh=mesh_of(4), in_specs=specs, out_specs=rows, check_vma=False)
        return jnp.sum(jnp.sin(attend(arrays, terms)))

    found, expected = (jax.grad(total, (0, 1))((query, key, value), terms, split) for split in (True, False))
    expect_close(found, expected)


# The zigzag order


def test_reorder_and_restore() -> None:
    rows = np.arange(24).reshape(2, 12)
    assert reorder(rows[0], 3, 0).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    for size in (1, 2, 3):
        assert (np.asarray(restore(reorder(rows, size, -1), size, -1)) == rows).all()
    assert (np.asarray(reorder(rows, np.int64(3), np.int32(1))) == np.asarray(reorder(rows, 3, 1))).all()
    wrong: list[tuple[Any, Any, str]] = [
        (5, 1, "a multiple of 10 rows"),
        (1, 2, "a multiple of 2 rows"),
        (0, 1, "_devices = 0"),
        (2, "1", r"axis = '1' \(str\): must be an int"),
        (2.0, None, r"num_devices = 2.0 \(float\): must be an int"),
    ]
    for size, axis, text in wrong:
        with pytest.raises(NotSupported, match=text):
            reorder(rows, size, axis)


# Refused calls


def refusals(operands: Any = None, **options: Any) -> list[str]:
    """Returns why a call inside shard_map over two devices is refused when it is traced."""
    arrays = operands or [draw(number, B, 8, heads, D) for number, heads in enumerate((H, 4, 4))]
    given = {"context_axis": "x", "mask": Causal(), **options}
    call = jax.shard_map(
        lambda *own: ours(*own, **given), mesh=mesh_of(2), in_specs=P(None, "x"), out_specs=P(None, "x")
    )
    with pytest.raises(NotSupported) as caught:
        jax.jit(call).trace(*arrays)
    reasons = list(caught.value.reasons)
    assert all(re.fullmatch(r"(?s).+: .*must .+; .+", reason) for reason in reasons), reasons
    return reasons


RING, GATHER, ULYSSES = ({"context_strategy": name} for name in ("ring", "all_gather", "ulysses"))
ZIGZAG = {"load_balance": "zigzag"}
TWO_DOCUMENTS = VariableLength(np.array([0, 3, 8]), np.array([0, 3, 8]), 5, 5)
ONE_ROW = [draw(number, 1, 8, heads, D) for number, heads in enumerate((H, 4, 4))]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"operands": [array[0] for array in ONE_ROW]}, "value.shape = (8, 2, 8): must be 4-D"),
    "strategy": (
        {"context_strategy": "rign"},
        "context_strategy = 'rign' (str): must be one of all_gather, ulysses, ring",
    ),
    "load_balance": ({"load_balance": True}, "load_balance = True: must be 'zigzag', or None"),
    "axis": (
        {"context_axis": "y"},
        "context_axis = 'y' (str): must be the name of a mesh axis of the jax.shard_map around the call, 'x'; call",
    ),
    "logsumexp": ({"return_logsumexp": 1}, "return_logsumexp = 1 (int): must be True or False"),
    "ring, ALiBi": ({**RING, **ALIBI}, "must be ulysses or all_gather with alibi_slopes"),
    "ring, dropout": ({**RING, **DROPOUT}, "dropout_p = 0.4 (float): must be 0 with ring"),
    "gather, dropout": ({**GATHER, **DROPOUT}, "dropout_p = 0.4 (float): must be 0 with all_gather"),
    "ring, window": ({**RING, "mask": Window(3, 3)}, "must be causal or Full() with ring"),
    "ring, zigzag window": (
        {**RING, **ZIGZAG, "mask": Causal(3)},
        "must have no window with ring and load_balance='zigzag'",
    ),
    "gather, ALiBi": ({**GATHER, **ALIBI, "mask": Full()}, "must be a causal mask with alibi_slopes and all_gather"),
    "ring, sequences": (
        {**RING, "sequences": TWO_DOCUMENTS, "operands": ONE_ROW},
        "must be ulysses or all_gather with sequences",
    ),
    "logsumexp of sequences": (
        {"sequences": TWO_DOCUMENTS, "operands": ONE_ROW},
        "return_logsumexp = True: must be False with sequences and context_axis",
    ),
    "window of sequences": (
        {"sequences": TWO_DOCUMENTS, "operands": ONE_ROW, "mask": Window(2, 2)},
        "must be causal or Full() with sequences and all_gather",
    ),
    "other keys": (
        {"sequences": VariableLength(np.array([0, 3, 8]), np.array([0, 4, 8]), 5, 5), "operands": ONE_ROW},
        "must have cu_seqlens_q equal to cu_seqlens_k with sequences and all_gather, and no seqused_k",
    ),
    "lengths": (
        {"operands": [ONE_ROW[0][:, :4], *ONE_ROW[1:]]},
        "rows of query = 2 (int): must be that of key on each device, 4, with mask",
    ),
    "odd rows": (
        {**ZIGZAG, "operands": [array[:, :6] for array in ONE_ROW]},
        "rows of query = 3 (int): must be an even number on each device",
    ),
    "bias": ({"bias": jnp.zeros((1, 1, 8, 8))}, "bias.shape = (1, 1, 8, 8): must broadcast to (2, 8, 4, 8)"),
    "heads": (
        {**ULYSSES, "operands": [array[:, :, :3] for array in (ONE_ROW[0], *ONE_ROW[1:])]},
        "heads of query = 3 (int): must be divided by the 2 devices of axis x",
    ),
    "dropout of sequences": (
        {**ULYSSES, **DROPOUT, "return_logsumexp": False, "sequences": TWO_DOCUMENTS, "operands": ONE_ROW},
        "with dropout and 2 sequences of variable length: must be one sequence",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_traced(name: str) -> None:
    options, text = REFUSED[name]
    assert any(text in reason for reason in refusals(**options)), refusals(**options)


def test_options_without_an_axis_are_refused() -> None:
    arrays = [draw(number, B, 8, heads, D) for number, heads in enumerate((H, 4, 4))]
    with pytest.raises(NotSupported) as caught:
        attention(*arrays, context_strategy="ring", load_balance="zigzag")
    assert [reason.split(": ")[0] for reason in caught.value.reasons] == [
        "context_strategy = 'ring' (str)",
        "load_balance = 'zigzag' (str)",
    ]
    with pytest.raises(NotSupported, match=r"the jax\.shard_map around the call, of which there is none here; call"):
        attention(*arrays, context_axis="x")
    plain = {"context_axis": None, "context_strategy": "all_gather", "load_balance": None}
    expect_close(attention(*arrays, **FIXED, **plain), attention(*arrays, **FIXED))


def test_sequences_of_global_arrays() -> None:
    arrays = [draw(number, 1, 32, heads, D) for number, heads in enumerate((H, 4, 4))]
    sequences = VariableLength(jnp.asarray(DOCUMENTS), jnp.asarray(DOCUMENTS), 17, 17)
    expected = attention(*arrays, mask=Causal(), sequences=sequences, **FIXED)
    for strategy in ("all_gather", "ulysses"):

        @jax.jit
        def run(arrays: Any, sequences: VariableLength, strategy: str = strategy) -> Any:
            options = {"context_axis": "x", "context_strategy": strategy, "sequences": sequences, **FIXED}
            return context_parallel_attention(*arrays, mesh=mesh_of(4), mask=Causal(), **options)

        expect_close(run(arrays, sequences), expected)


def test_key_heads_are_repeated_or_refused() -> None:
    """Three key heads of six query heads over two devices: each is read by one device's query heads alone."""
    query, key, value = ONE_ROW[0][:, :, :6], *(array[:, :, :3] for array in ONE_ROW[1:])
    found = context_parallel_attention(
        query, key, value, mesh=mesh_of(2), context_axis="x", context_strategy="ulysses", mask=Causal(), **FIXED
    )
    expect_close(found, ours(query, key, value, mask=Causal(), return_logsumexp=False))
    heads = [draw(number, 1, 8, count, D) for number, count in enumerate((4, 4, 4))]
    arrays = [jnp.repeat(heads[0], 3, axis=2), heads[1][:, :, :3], heads[2][:, :, :3]]
    mesh = mesh_of(8)
    call = jax.shard_map(
        lambda *own: ours(*own, mask=Full(), context_axis="x", **ULYSSES),
        mesh=mesh,
        in_specs=P(None, "x"),
        out_specs=P(),
    )
    with pytest.raises(NotSupported, match="must be divided by the 8 devices of axis x"):
        jax.jit(call).trace(*arrays)


def test_every_wrong_argument_of_global_arrays_is_named() -> None:
    arrays = [draw(number, 3, 10, heads, D) for number, heads in enumerate((H, 4, 4))]

    def reasons(**options: Any) -> list[str]:
        with pytest.raises(NotSupported) as caught:
            context_parallel_attention(*arrays, **FIXED, **options)
        return list(caught.value.reasons)

    assert reasons(context_axis="x")[0].startswith("mesh = ")
    found = reasons(context_axis="q", batch_axis="x", heads_axis=("y", "x"), mesh=mesh_of(2, 2))
    assert found == [
        "context_axis = 'q' (str): must be of the mesh's axes, x, y; choose one",
        "heads_axis = ('y', 'x') (tuple): must be another axis than batch_axis; choose one",
    ]
    found = reasons(context_axis="y", batch_axis="x", mesh=mesh_of(2, 2), load_balance="zigzag", **DROPOUT)
    assert found[0] == (
        "rows of query = 10 (int): must be a multiple of 4, split over y (2 devices, two chunks each); pad the rows"
    )
    assert found[1].startswith("batch of query = 3 (int): must be a multiple of 2, split over x (2 devices)")
    assert found[-1].startswith("dropout_p = 0.4 (float): must be absent with batch_axis or heads_axis")
    terms = {"bias": jnp.zeros((1, H, 7, 10)), "alibi_slopes": jnp.zeros((2, H)), "sinks": jnp.zeros(7)}
    found = reasons(context_axis="y", mesh=mesh_of(2, 2), heads_axis="x", **terms)
    assert [reason.split(": must be")[0] for reason in found] == [
        "bias.shape = (1, 8, 7, 10)",
        "alibi_slopes.shape = (2, 8)",
        "sinks.shape = (7,)",
    ]
