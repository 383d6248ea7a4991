"""Tests of split rows: the ranks together compute what one device does, forward and gradients, for every strategy.

Ranks are threads, and the NumPy reference, in float64, stands in for the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.distributed import attention, simulated
from cutlass_py_attn.distributed.host import Host
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.score_terms.dropout import Dropout
from tests.support.split_cases import BATCH, HEADS, ROWS, Case

STRATEGIES = ("all_gather", "ulysses", "ring")
NOT_RING = ("all_gather", "ulysses")
RNG = np.random.default_rng(3)
SLOPES = np.abs(RNG.standard_normal(HEADS)).astype(np.float32)
OF_BATCH = np.abs(RNG.standard_normal((BATCH, HEADS))).astype(np.float32)
DROPOUT = {"dropout": Dropout(0.4, 7, 11)}

# Case, the strategies that compute it, and those that do in zigzag order too.
CASES: dict[str, tuple[Case, tuple[str, ...], tuple[str, ...]]] = {
    "causal": (Case(), STRATEGIES, STRATEGIES),
    "full, softcap, sinks, scale": (
        Case(Full(), {"sinks": (HEADS,)}, {"softcap": 2.0, "scale": 0.4}),
        STRATEGIES,
        STRATEGIES,
    ),
    "causal_br, sinks": (Case(CausalBottomRight(), {"sinks": (HEADS,)}), STRATEGIES, STRATEGIES),
    "causal, bias": (Case(Causal(), {"bias": (BATCH, HEADS, ROWS, ROWS)}), STRATEGIES, STRATEGIES),
    "full, bias of a head": (Case(Full(), {"bias": (1, 1, ROWS, ROWS)}), STRATEGIES, STRATEGIES),
    "causal, bias of keys": (Case(Causal(), {"bias": (BATCH, 1, 1, ROWS)}), STRATEGIES, STRATEGIES),
    "causal, bias of heads and keys": (Case(Causal(), {"bias": (1, HEADS, 1, ROWS)}), STRATEGIES, STRATEGIES),
    "causal, bias of rows": (Case(Causal(), {"bias": (1, HEADS, ROWS, 1)}), STRATEGIES, STRATEGIES),
    "window 5": (Case(Causal(5), {"sinks": (HEADS,)}), STRATEGIES, NOT_RING),
    "window 12, bias": (Case(CausalBottomRight(12), {"bias": (1, HEADS, ROWS, ROWS)}), STRATEGIES, NOT_RING),
    "window 1": (Case(Causal(1)), STRATEGIES, NOT_RING),
    "window both sides": (Case(Window(3, 2), {"sinks": (HEADS,)}), NOT_RING, NOT_RING),
    "window right, bias": (Case(Window(None, 6), {"bias": (1, HEADS, ROWS, ROWS)}), NOT_RING, NOT_RING),
    "ALiBi": (Case(Causal(), {}, {"alibi_slopes": SLOPES}), NOT_RING, NOT_RING),
    "ALiBi, window": (Case(Causal(6), {}, {"alibi_slopes": OF_BATCH}), NOT_RING, NOT_RING),
    "ALiBi, full": (Case(Full(), {}, {"alibi_slopes": SLOPES}), ("ulysses",), ("ulysses",)),
    "dropout": (
        Case(Causal(), {"sinks": (HEADS,), "bias": (1, HEADS, ROWS, ROWS)}, DROPOUT),
        ("ulysses",),
        ("ulysses",),
    ),
    "dropout, ALiBi": (Case(Full(), {}, {**DROPOUT, "alibi_slopes": OF_BATCH}), ("ulysses",), ()),
    "two key heads": (Case(heads_key=2), STRATEGIES, STRATEGIES),
    "one key head": (Case(heads_key=1), STRATEGIES, STRATEGIES),
    "as many key heads": (Case(Full(), heads_key=8), STRATEGIES, STRATEGIES),
}


IN_NATURAL_ORDER = ("causal", "causal, bias", "window 12, bias")  # beside what zigzag order does not compute


def parameters() -> Iterator[Any]:
    for name, (_, strategies, balanced) in CASES.items():
        for strategy in strategies:
            orders = ["zigzag"] if strategy in balanced else [None]
            for order in [None, "zigzag"] if name in IN_NATURAL_ORDER and strategy in balanced else orders:
                yield pytest.param(name, strategy, order, id=f"{name}-{strategy}-{order}")


@pytest.mark.parametrize(("name", "strategy", "order"), [*parameters()])
def test_split_rows_are_exact(name: str, strategy: str, order: str | None) -> None:
    case = CASES[name][0]
    case.expect(case.split(strategy, order, 4 if strategy == "ring" or "head" in name else 2), order)


@pytest.mark.parametrize("order", [None, "zigzag"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("size", "name"), [(1, "causal"), (2, "two key heads"), (8, "causal_br, sinks")])
def test_other_numbers_of_ranks(size: int, name: str, strategy: str, order: str | None) -> None:
    case = CASES[name][0]
    case.expect(case.split(strategy, order, size), order)


DOCUMENTS = np.array([0, 5, 5, 6, 23, 30], np.int32)
ACROSS = VariableLength(
    DOCUMENTS, np.array([0, 9, 11, 12, 20, 31], np.int32), 17, 11, np.array([7, 2, 1, 8, 9], np.int32)
)
ALIKE = VariableLength(DOCUMENTS, DOCUMENTS, 17, 17)


@pytest.mark.parametrize("order", [None, "zigzag"])
@pytest.mark.parametrize("strategy", NOT_RING)
@pytest.mark.parametrize(
    ("mask", "sequences"),
    [
        (Causal(), ALIKE),
        (Causal(4), ALIKE),
        (CausalBottomRight(6), ACROSS),
        (CausalBottomRight(), ACROSS),
        (Full(), ACROSS),
    ],
    ids=str,
)
def test_packed_sequences(mask: Mask, sequences: VariableLength, strategy: str, order: str | None) -> None:
    """Sequences that end in the middle of a rank's rows, an empty one, and tokens behind the last."""
    options: dict[str, Any] = {"sequences": sequences}
    options |= {} if isinstance(mask, Full) else {"alibi_slopes": SLOPES}
    case = Case(mask, {"sinks": (HEADS,)}, options, batch=1)
    case.expect(case.split(strategy, order, 4), order)


def test_dropout_of_one_sequence() -> None:
    bounds = np.array([0, 29], np.int32)
    case = Case(Causal(), {}, {**DROPOUT, "sequences": VariableLength(bounds, bounds, 29, 29)}, batch=1)
    case.expect(case.split("ulysses", "zigzag", 4), "zigzag")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_keys_of_another_length(strategy: str) -> None:
    for mask in (Full(), CausalBottomRight()) if strategy == "ulysses" else (Full(),):
        case = Case(mask, keys=16)
        case.expect(case.split(strategy, None, 4), None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_of_logsumexp(strategy: str) -> None:
    """Of each rank's own rows; its padding is not read."""
    case, size = Case(), 4
    whole = case.arrays()
    lines = np.full((BATCH, HEADS, ROWS), np.inf, np.float32)
    lines[...] = np.random.default_rng(8).standard_normal(lines.shape)
    expected = Case(options={"grad_logsumexp": lines}).backward_of(whole)

    def of_rank(group: Any) -> Any:
        own = {name: case.of_rank(name, array, group.rank, size, "zigzag") for name, array in whole.items()}
        padded = np.full((BATCH, HEADS, 32), np.nan, np.float32)
        padded[..., : ROWS // size] = case.of_rank("logsumexp", lines, group.rank, size, "zigzag")
        context = {"group": group, "context_strategy": strategy, "load_balance": "zigzag", **case.fixed}
        operands = [own[name] for name in ("query", "key", "value")]
        results = attention.attention_forward(*operands, **context)
        found = attention.attention_backward(own["grad_output"], *operands, *results, grad_logsumexp=padded, **context)
        return {name: getattr(found, name) for name in case.gradients}

    for rank, found in enumerate(simulated.run(size, of_rank)):
        for name, array in found.items():
            part = case.of_rank(name, expected[name], rank, size, "zigzag")
            np.testing.assert_allclose(array, part, rtol=2e-5, atol=2e-5)


MASKS = st.sampled_from([Full(), Causal(), CausalBottomRight()]) | st.builds(Causal, st.integers(1, 40))
WINDOWS = st.builds(Window, st.none() | st.integers(0, 20), st.none() | st.integers(0, 20))


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """Any mask with any terms, whether or not a strategy computes it."""
    terms: dict[str, tuple[int, ...]] = {"sinks": (HEADS,)} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        terms["bias"] = tuple(draw(st.sampled_from([1, size])) for size in (BATCH, HEADS, ROWS, ROWS))
    options: dict[str, Any] = {"softcap": draw(st.sampled_from([0.0, 2.0]))}
    options |= draw(st.sampled_from([{}, {}, {"alibi_slopes": SLOPES}, DROPOUT]))
    return Case(draw(MASKS | WINDOWS), terms, options, draw(st.sampled_from([1, 2, 4, 8])))


def is_refused(case: Case, strategy: str, order: str | None) -> bool:
    """Whether docs/several_gpus.md says so."""
    causal = isinstance(case.mask, Causal)
    if strategy == "all_gather":
        return "dropout" in case.options or ("alibi_slopes" in case.options and not causal)
    is_term = "dropout" in case.options or "alibi_slopes" in case.options
    has_window = isinstance(case.mask, Causal) and case.mask.window_size is not None
    is_window = isinstance(case.mask, Window) and not case.mask.form.sees_all
    return strategy == "ring" and (is_term or is_window or bool(has_window and order))


@given(case=any_case(), size=st.sampled_from([2, 4]), order=st.sampled_from([None, "zigzag"]))
@settings(max_examples=6, deadline=None)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_case_is_exact_or_refused(strategy: str, case: Case, size: int, order: str | None) -> None:
    if is_refused(case, strategy, order):
        with pytest.raises(NotSupported):
            case.split(strategy, order, size)
        return
    case.expect(case.split(strategy, order, size), order)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_repeated_runs_give_the_same_bits(strategy: str) -> None:
    """Parts are added in a fixed order, whatever the order in which threads run."""
    case = Case(terms={"sinks": (HEADS,)}, heads_key=1)
    runs = [case.split(strategy, "zigzag", 4) for _ in range(3)]
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            for name, array in one.items():
                assert array.tobytes() == two[name].tobytes(), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_is_rounded_once(strategy: str) -> None:
    """Sums of eight parts are rounded at the end: the error is that of a few roundings, not of a chain of eight."""
    case = Case(Full(), heads_key=1)
    expected = case.one_device

    def narrow(array: Any) -> Any:
        return array.astype(ml_dtypes.bfloat16)

    found = simulated.run(8, lambda group: case.rank(group, strategy, None, narrow))
    for name in ("output", "query", "key", "value"):
        parts = [results[name].astype(np.float32) for results in found]
        assert all(results[name].dtype == ml_dtypes.bfloat16 for results in found)
        whole = np.concatenate(parts, 1)
        error = np.linalg.norm(whole - expected[name]) / np.linalg.norm(expected[name])
        assert error < 8e-3, (name, error)


@pytest.mark.parametrize("bias", [(1, HEADS, ROWS, ROWS), (1, 1, ROWS, ROWS), (1, HEADS, 1, ROWS)], ids=str)
def test_a_bias_of_16_bits_with_dropout(bias: tuple[int, ...]) -> None:
    """Items of the batch are calls of their own, whose gradients are summed in float32 and sent in the bias's dtype."""
    case = Case(Causal(), {"bias": bias}, DROPOUT)
    found = simulated.run(2, lambda group: case.rank(group, "ulysses", None, lambda it: it.astype(ml_dtypes.bfloat16)))
    for rank, results in enumerate(found):
        expected = case.of_rank("bias", case.one_device["bias"], rank, 2, None)
        assert results["bias"].dtype == ml_dtypes.bfloat16
        error = np.linalg.norm(results["bias"].astype(np.float32) - expected) / np.linalg.norm(expected)
        assert error < 1e-2


def test_a_window_ends_the_ring() -> None:
    """Eight ranks of four rows: a window of 3 keys reaches one rank back, so that keys move once and sums home."""
    case = Case(Causal(3))
    sent: list[int] = []

    def of_rank(group: Any) -> Any:
        exchange = group.communicator.exchange
        group.communicator.exchange = lambda sends, *rest: (sent.append(len(sends)), exchange(sends, *rest))
        return case.rank(group, "ring", None)

    case.expect(simulated.run(8, of_rank), None)
    messages = sum(sent) - 2 * 8 * 7  # without the comparison of the calls
    assert messages == 8 * (2 + 2 + 2)  # keys and values of both passes, and the sums of their gradients


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_that_a_rank_receives(strategy: str) -> None:
    """Those of the table in docs/several_gpus.md, for bfloat16 operands; rows of logsumexp are beside it."""
    case, size, received = Case(Full(), batch=1), 4, [0] * 4
    per_pass: dict[str, int] = {}

    def of_rank(group: Any) -> None:
        exchange = group.communicator.exchange

        def counted(sends: Any, receives: Any, *rest: Any) -> None:
            received[group.rank] += sum(array.nbytes for _, array in receives if array.ndim == 4)
            exchange(sends, receives, *rest)

        group.check_calls, group.communicator.exchange = False, counted
        arrays = {
            name: case.of_rank(name, array, group.rank, size, None).astype(ml_dtypes.bfloat16)
            for name, array in case.arrays().items()
        }
        options = {**case.fixed, "group": group, "context_strategy": strategy}
        operands = [arrays[name] for name in ("query", "key", "value")]
        results = attention.attention_forward(*operands, **options)
        forward = received[group.rank]
        attention.attention_backward(arrays["grad_output"], *operands, *results, **options)
        if group.rank == 0:
            per_pass.update(forward=forward, backward=received[0] - forward)

    simulated.run(size, of_rank)
    rows, kv, qo = ROWS // size, 2 * 4 * 8 * 2, 2 * HEADS * 8 * 2
    moved = (size - 1) * rows
    expected = {
        "all_gather": (moved * kv, 3 * moved * kv),
        "ring": (moved * kv, 3 * moved * kv),
        "ulysses": (moved * (qo + kv) // size, moved * (2 * qo + 2 * kv) // size),
    }
    assert (per_pass["forward"], per_pass["backward"]) == expected[strategy]


@pytest.mark.parametrize(("strategy", "size"), [("all_gather", 1), ("ring", 2)])
def test_the_padding_of_a_part_is_infinite(strategy: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get the logsumexp of a part's rows alone, padded as a forward pads it, and not with other rows."""
    compute, checked = Host.backward, []

    def backward(self: Host, options: Any, operands: Any, gradients: Any) -> Any:
        rows, lines = operands["query"].shape[1], operands["logsumexp"]
        assert lines.shape[2] == 32
        assert np.isposinf(lines[..., rows:]).all()
        checked.append(rows)
        return compute(self, options, operands, gradients)

    monkeypatch.setattr(Host, "backward", backward)
    case = CASES["causal"][0]
    case.expect(case.split(strategy, "zigzag", size), "zigzag")
    assert min(checked) < max(32 // size, 17)
