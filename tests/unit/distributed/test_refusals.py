"""Tests of calls that are refused, by exact text, and of ranks that make different calls or are lost."""

from __future__ import annotations

import re
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.distributed import (
    Group,
    PeerLost,
    attention,
    attention_backward,
    attention_forward,
    connect,
    rows_of_rank,
    simulated,
)
from cutlass_py_attn.distributed.host import Host
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import MaskFunction
from cutlass_py_attn.problem.masks import Causal, Full, Window
from cutlass_py_attn.refusals import Refusal
from cutlass_py_attn.score_terms.dropout import Dropout
from tests.support.refusals import expect_among

BOUNDS = np.array([0, 5, 16], np.int32)
SLOPES = np.ones(4, np.float32)
EDGE = np.zeros((1, 1, 16), np.int32)


def operands(rows: int = 4, heads: int = 4, heads_key: int = 4, keys: int | None = None) -> list[Any]:
    shapes = [(1, rows, heads, 8), *[(1, keys or rows, heads_key, 8)] * 2]
    return [np.zeros(shape, np.float32) for shape in shapes]


def errors_where_one_rank_differs(sizes: dict[str, Any], options: dict[str, Any], timeout: float) -> list[str]:
    """Returns the errors of three ranks whose second has other operands or options; each then makes a right call."""

    def of_rank(group: Group) -> str:
        fixed: dict[str, Any] = {"group": group, "backend": "reference", "mask": Causal()}
        try:
            differs = group.rank == 1
            attention_forward(*operands(**(sizes if differs else {})), **{**fixed, **(options if differs else {})})
        except NotSupported as error:
            attention_forward(*operands(), **fixed)
            return str(error)
        return ""

    return simulated.run(3, of_rank, timeout=timeout)


PACKED = {"sequences": VariableLength(BOUNDS, BOUNDS, 11, 11)}
RING, ULYSSES = {"context_strategy": "ring"}, {"context_strategy": "ulysses"}
REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"context_strategy": "rings"}, "context_strategy: one of all_gather, ulysses, ring"),
    ({}, {"load_balance": True}, "load_balance: 'zigzag', or None for the natural order"),
    ({}, {"out": 1}, "option: must be one of"),
    (
        {"rows": 5},
        {"load_balance": "zigzag"},
        "rows of query: an even number on each device with load_balance='zigzag'",
    ),
    ({"keys": 8}, {}, "rows of query: that of key on each device, 8, with mask Causal(window_size=None)"),
    ({"heads": 6, "heads_key": 6}, ULYSSES, "heads of query: divided by the 4 ranks"),
    ({"heads": 12, "heads_key": 3}, ULYSSES | {"mask": Full()}, ""),
    ({}, RING | {"alibi_slopes": SLOPES}, "context_strategy: ulysses or all_gather with alibi_slopes"),
    ({}, {"alibi_slopes": SLOPES, "mask": Full()}, "mask: a causal mask with alibi_slopes and all_gather"),
    ({}, RING | {"mask": Window(1, 1)}, "mask: causal or Full() with ring"),
    ({}, RING | {"mask": Causal(3), "load_balance": "zigzag"}, "mask: no window with ring and load_balance='zigzag'"),
    ({}, {"dropout": Dropout(0.5, 1)}, "dropout_p: 0 with all_gather"),
    ({}, ULYSSES | {"dropout": Dropout(0.5, 1)} | PACKED, "dropout_p: 0 with 2 sequences"),
    ({}, RING | PACKED, "context_strategy: ulysses or all_gather with sequences"),
    ({}, {"sequences": VariableLength(memoryview(b"1234"), BOUNDS, 11, 11)}, "cu_seqlens_q: a NumPy array"),
    ({}, {"bias": np.zeros((1, 4, 4, 8), np.float32)}, "bias.shape: must broadcast to (1, 4, 4, 16)"),
    ({}, {"mask": KeyRanges(EDGE, EDGE, Causal())}, "key_start: None where the rows are split over devices"),
    ({}, RING | {"mask": KeyRanges(EDGE, EDGE)}, "key_start: None where the rows are split over devices"),
    ({}, ULYSSES | {"mask": KeyRanges(EDGE, None)}, "key_end: an int32 array"),
    ({}, {"mask": MaskFunction(lambda *place: place[2] >= place[3])}, "mask_program: None where the rows are split"),
]


@pytest.mark.parametrize(("sizes", "options", "text"), REFUSALS, ids=lambda value: str(value)[:40])
def test_refusals(sizes: dict[str, Any], options: dict[str, Any], text: str) -> None:
    """Every rank refuses the call before anything is exchanged, so that none waits; the empty text is accepted."""

    def of_rank(group: Group) -> tuple[Refusal, ...]:
        try:
            attention_forward(*operands(**sizes), group=group, **{"mask": Causal(), "backend": "reference", **options})
        except NotSupported as error:
            return error.refusals
        return ()

    for found in simulated.run(4, of_rank, timeout=10.0):
        if text:
            expect_among(found, text)
        else:
            assert found == ()


def test_a_call_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape, option or length of a sequence is another call; a refused one is refused again."""
    checked: list[str] = []
    problem_of = attention.problem_of
    monkeypatch.setattr(attention, "problem_of", lambda *args: (checked.append(args[0]), problem_of(*args)))
    (group,) = simulated.groups(1)
    options: dict[str, Any] = {"group": group, "backend": "reference", "scale": 0.123}
    sequences = {"sequences": VariableLength(BOUNDS[:2], BOUNDS[:2], 5, 5)}
    for rows, more, count in (
        (6, {}, 1),
        (6, {}, 1),
        (8, {}, 2),
        (6, {"softcap": 3.0}, 3),
        (6, sequences, 4),
        (6, sequences, 5),
    ):
        attention_forward(*operands(rows), **options, **more)
        assert len(checked) == count
    for count in (6, 7):
        with pytest.raises(NotSupported, match="softcap"):
            attention_forward(*operands(6), **options, softcap=-3.0)
        assert len(checked) == count


def test_every_objection_is_named() -> None:
    with pytest.raises(NotSupported) as refusal:
        attention_forward(*operands(), group=None, context_strategy="all", load_balance="zig", softcap="1")  # type: ignore[typeddict-item]
    text = str(refusal.value)
    assert "group = None: must be a Group; pass one that connect returns" in text
    assert all(name in text for name in ("context_strategy", "load_balance"))


CALLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"rows": 8}, {}, "float32 (1, 8, 4, 8)"),
    ({}, {"mask": Causal(2)}, "Causal(window_size=2)"),
    ({}, {"load_balance": "zigzag"}, "load_balance zigzag"),
    ({}, {"softcap": 3.0}, '"softcap": 3.0'),
    ({}, {"context_strategy": "ring"}, "forward by ring"),
]


@pytest.mark.parametrize(("sizes", "options", "text"), CALLS, ids=lambda value: str(value)[:30])
def test_ranks_that_make_different_calls(sizes: dict[str, Any], options: dict[str, Any], text: str) -> None:
    """All ranks get one error that shows two of the calls, and the group still works."""

    found = errors_where_one_rank_differs(sizes, options, timeout=10.0)
    assert len(set(found)) == 1
    assert found[0].startswith("the ranks make different calls, rank 0: forward by all_gather, 3 ranks")
    assert text in found[0].partition("rank 1: ")[2]
    assert found[0].endswith("must be the same on all ranks; correct one")


@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        (
            {"rows": 5},
            {"load_balance": "zigzag"},
            "NotSupported: rows of query = 5 (int): must be an even number",
        ),
        ({}, {"context_strategy": "rings"}, "NotSupported: context_strategy = 'rings' (str)"),
        ({}, {"softcap": -1.0}, "NotSupported: on the rows of 3 ranks: softcap = -1.0"),
        ({}, {"bias": [1.0]}, "NotSupported: bias = [1.0] (list): must be a NumPy array for backend='reference'"),
    ],
    ids=["shape", "strategy", "number", "array"],
)
def test_a_refusal_of_one_rank_is_one_of_all(sizes: dict[str, Any], options: dict[str, Any], text: str) -> None:
    """No rank waits for it, and the group still works."""

    found = errors_where_one_rank_differs(sizes, options, timeout=30.0)
    assert text.partition(": ")[2] in found[1]
    assert found[0] == found[2]
    assert found[0].startswith(f"a call that not all ranks make, rank 1 refuses it, {text}")
    assert found[0].endswith(": must be one for all; correct it")


def test_a_refusal_that_nobody_hears() -> None:
    """The other ranks do not come: this rank's own error is raised, and the group is aborted."""

    def of_rank(group: Group) -> str:
        if group.rank:
            return ""
        with pytest.raises(NotSupported, match=r"rows of query = 5 .* on each device"):
            attention_forward(*operands(5), group=group, backend="reference", load_balance="zigzag")
        with pytest.raises(PeerLost, match=r"the group was aborted"):
            attention_forward(*operands(), group=group, backend="reference")
        return "refused"

    assert simulated.run(2, of_rank, timeout=0.2) == ["refused", ""]


def test_an_error_in_the_middle_of_a_call_aborts_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for what the failed rank does not send: they learn of it, whether or not they leave the group."""
    compute = Host.forward

    def fails(self: Host, *arguments: Any) -> Any:
        if self.group.rank == 1:
            raise MemoryError
        return compute(self, *arguments)

    monkeypatch.setattr(Host, "forward", fails)

    def of_rank(group: Group) -> str:
        try:
            attention_forward(*operands(), group=group, backend="reference", context_strategy="ring", mask=Causal())
        except (MemoryError, PeerLost) as error:
            assert not group.is_open
            return type(error).__name__
        return ""

    start = time.monotonic()
    found = simulated.run(3, of_rank, timeout=60.0)
    assert time.monotonic() - start < 30
    assert found[1] == "MemoryError"
    assert "PeerLost" in found


ROWS_OF_RANK = (1, 4, 4, 8)
ON_RANKS = "on the rows of 2 ranks: "
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"output": (1, 3, 4, 8)}, {}, f"{ON_RANKS}output.shape = (1, 6, 4, 8)"),
    ({"output": (4, 4, 8)}, {}, "output has shape (4, 4, 8): must be (batch, rows, heads, head_dim), a rank's rows"),
    ({"grad_output": (1, 4, 4, 16)}, {}, f"{ON_RANKS}grad_output.shape = (1, 8, 4, 16)"),
    ({"value": (1, 8, 4, 8)}, {}, f"{ON_RANKS}value.shape = (1, 16, 4, 8)"),
    ({"logsumexp": (1, 4, 4)}, {}, "must be (1, 4, 32) float32; pass"),
    ({}, {"grad_logsumexp": np.zeros((1, 4, 4), np.float32)}, "must be (1, 4, 32) float32; pad it like logsumexp"),
    ({}, {"sinks": np.zeros(3, np.float32)}, f"{ON_RANKS}sinks = array of shape (3,)"),
    ({}, {"mask": Causal(-2)}, "window_size = -2"),
    ({}, {"mask": Window(-5, 0)}, ON_RANKS),
    (
        {},
        {
            "sequences": VariableLength(BOUNDS[:2] + 3, BOUNDS[:2] + 3, 5, 5),
            "grad_logsumexp": np.zeros((1, 4, 4), np.float32),
        },
        "must be None with sequences, for the logsumexp of split sequences is of no use but for",
    ),
    (
        {},
        {"sequences": VariableLength(np.array([0, 9], np.int32), np.array([0, 9], np.int32), 9, 9)},
        "cu_seqlens_q",
    ),
]


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring"])
@pytest.mark.parametrize(("shapes", "options", "text"), WRONG, ids=lambda value: str(value)[:30])
def test_arrays_that_do_not_fit(
    shapes: dict[str, Any], options: dict[str, Any], text: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused before anything is exchanged: a GPU would read beyond their ends."""
    monkeypatch.setattr(Host, "start", lambda *_: pytest.fail("an exchange"))
    names = ("grad_output", "query", "key", "value", "output")
    arrays = [np.zeros(shapes.get(name, ROWS_OF_RANK), np.float32) for name in names]
    logsumexp = np.zeros(shapes.get("logsumexp", (1, 4, 32)), np.float32)

    def of_rank(group: Group) -> None:
        context: dict[str, Any] = {"group": group, "context_strategy": strategy, "mask": Full(), "backend": "reference"}
        attention_backward(*arrays, logsumexp, **{**context, **options})

    with pytest.raises(NotSupported) as refusal:
        simulated.run(2, of_rank, timeout=10.0)
    assert text in str(refusal.value) or (strategy == "ring" and "sequences" in options)


def test_dtypes_that_differ() -> None:
    def of_rank(group: Group) -> None:
        dtype = np.float16 if group.rank else np.float32
        arrays = [array.astype(dtype) for array in operands()]
        attention_forward(*arrays, group=group, backend="reference")

    with pytest.raises(NotSupported, match=r"the ranks make different calls, rank 0: .*float32.*rank 1: .*float16"):
        simulated.run(2, of_rank, timeout=10.0)


@pytest.mark.parametrize("checks", [True, False])
def test_a_rank_that_dies(checks: bool) -> None:
    """Every other rank gets an error within the time limit, whether or not calls are compared first."""
    found: dict[int, str] = {}

    def of_rank(group: Group) -> None:
        group.check_calls = checks
        if group.rank == 2:
            return  # without a call
        try:
            attention_forward(*operands(), group=group, context_strategy="ring", mask=Causal(), backend="reference")
        except PeerLost as error:
            found[group.rank] = str(error)

    simulated.run(4, of_rank, timeout=0.6)
    assert sorted(found) == [0, 1, 3]
    # Without the comparison, a rank may give up first that waits for a rank that waits for rank 2.
    lost = "2" if checks else "[0-3]"
    text = rf"rank {lost} sent nothing for 0.6 s: the group is aborted; restart all ranks"
    assert any(re.fullmatch(text, each) for each in found.values()), found


def test_an_error_of_one_rank_ends_the_others() -> None:
    """The first error that is no consequence of another is raised."""

    def of_rank(group: Group) -> None:
        if group.rank == 1:
            raise ZeroDivisionError
        attention_forward(*operands(), group=group, backend="reference")

    with pytest.raises(ZeroDivisionError):
        simulated.run(3, of_rank, timeout=20.0)


def test_groups() -> None:
    with pytest.raises(NotSupported) as refusal:
        Group(object(), timeout=0, check_calls=1)  # type: ignore[arg-type]
    assert [text.split(" = ")[0] for text in refusal.value.reasons] == ["communicator", "timeout", "check_calls"]
    (group,) = simulated.groups(1)
    with group:
        assert group.stream == 0
    with pytest.raises(PeerLost, match=r"the group was closed: create a new one on all ranks"):
        attention_forward(*operands(), group=group, backend="reference")


def test_an_error_inside_of_a_group_aborts_it() -> None:
    """To close it, a rank would wait for the others."""
    (group,) = simulated.groups(1)
    with pytest.raises(NotSupported), group:
        attention_forward(*operands(), group=group, backend="reference", softcap=-1.0)
    with pytest.raises(PeerLost, match=r"the group was aborted: create a new one on all ranks"):
        attention_forward(*operands(), group=group, backend="reference")


def test_codes_have_no_scales() -> None:
    (group,) = simulated.groups(1)
    query, *cache = operands()
    given = [query, *(array.astype(ml_dtypes.float8_e4m3fn) for array in cache)]
    with pytest.raises(NotSupported, match=r"key, value of e4m3 with a group: must have 16 or 32 bits, .*; dequantise"):
        attention_forward(*given, group=group, backend="reference")


def test_rows_of_rank() -> None:
    assert rows_of_rank(1, 4, 32) == (slice(8, 16),)
    assert rows_of_rank(1, 4, 32, "zigzag") == (slice(4, 8), slice(24, 28))
    parts = [part for rank in range(4) for part in rows_of_rank(rank, 4, 32, "zigzag")]
    everything = [index for part in parts for index in range(32)[part]]
    assert sorted(everything) == list(range(32))
    with pytest.raises(NotSupported, match=r"num_rows = 36 \(int\): must be a multiple of 8; pad the rows"):
        rows_of_rank(0, 4, 36, "zigzag")
    with pytest.raises(NotSupported, match=r"rank = 4 \(int\): must be an int from 0 to 3"):
        rows_of_rank(4, 4, 32)
    with pytest.raises(NotSupported, match=r"size = 0 \(int\): must be an int from 1 to 2147483647"):
        connect(0, 0, "host:1")
    with pytest.raises(NotSupported, match=r"timeout = True: must be a number of seconds greater than 0"):
        connect(0, 1, "host:1", timeout=True)
