"""Tests of the GPU's part of split rows: views, copies, streams and memory, on the fake driver.

Its device memory is host memory: the NumPy reference computes there in place of the kernels. So the results are those
of one device, although no kernel runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.api.attention import AttentionRequest
from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.distributed import Group, attention_backward, attention_forward, gpu, rows_of_rank, simulated
from cutlass_py_attn.distributed.host import Host
from cutlass_py_attn.distributed.views import View
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.reference import serving
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import OutputArrays
from cutlass_py_attn.runtime.frameworks import numpy_dtype
from cutlass_py_attn.score_terms.dropout import Dropout
from tests.cases import context_cases
from tests.support import fake_libraries, fakes
from tests.support.fake_driver import FakeDriver
from tests.support.split_cases import BATCH, HEADS, ROWS, Case, cut


def numpy_of(view: View) -> Any:
    """Returns the memory of a view as a NumPy array."""
    dtype = numpy_dtype(view.dtype)
    memory = (ctypes.c_char * max(view.reach, 1)).from_address(view.pointer) if view.reach else b""
    strides = [stride * dtype.itemsize for stride in view.strides]
    return np.ndarray(view.shape, dtype, memory, 0, strides) if view.reach else np.empty(view.shape, dtype)


class Reference(gpu.Gpu):
    """The machine, with the reference in place of the kernels, which take the operands that it gets."""

    def _launch(self, direction: str, options: Any, operands: Any, outputs: dict[str, View]) -> Any:
        inputs = {name: view.array for name, view in {**operands, **outputs}.items()}
        AttentionRequest(direction, {}, options).validate(inputs, ())
        host, given = Host(self.group), {name: numpy_of(view) for name, view in operands.items()}
        if direction == "forward":
            results = host.forward(options, given)
        else:
            found = host.backward(options, given, tuple(options.gradients))
            results = {f"grad_{name}": array for name, array in found.items()}
        targets = {
            name: outputs.get(name) or self.empty(array.shape, array.dtype.name) for name, array in results.items()
        }
        for name, array in results.items():
            numpy_of(targets[name])[...] = array
        return targets

    def merge(self, total: View, logsumexp: View, part: View, logsumexp_part: View) -> View:
        arrays = [numpy_of(view) for view in (total, logsumexp, part, logsumexp_part)]
        output, merged = serving.merge(*arrays)
        arrays[0][...] = output
        found = self.empty(logsumexp.shape, "float32")
        numpy_of(found)[...] = merged
        return found

    def add(self, total: View, part: View, target: View | None = None) -> None:
        numpy_of(total if target is None else target)[...] = numpy_of(total) + numpy_of(part)


@pytest.fixture
def fake(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(gpu, "Gpu", Reference)
    driver.call("cuCtxSetCurrent", 0xC0)
    return driver_log


DOCUMENTS = np.array([0, 5, 5, 6, 23, 30], np.int32)
PACKED = {"sequences": VariableLength(DOCUMENTS, DOCUMENTS, 17, 17)}
CASES = {
    "causal": (Case(), ("all_gather", "ulysses", "ring")),
    "full, bias, sinks": (
        Case(Full(), {"bias": (1, HEADS, ROWS, ROWS), "sinks": (HEADS,)}, heads_key=1),
        ("all_gather", "ulysses", "ring"),
    ),
    "bias of keys": (Case(Causal(), {"bias": (BATCH, 1, 1, ROWS)}), ("all_gather", "ulysses", "ring")),
    "dropout": (Case(options={"dropout": Dropout(0.4, 7, 11)}), ("ulysses",)),
    "packed": (Case(CausalBottomRight(6), {"sinks": (HEADS,)}, PACKED, batch=1), ("all_gather", "ulysses")),
}


@pytest.mark.parametrize(
    ("name", "strategy"), [(name, strategy) for name, (_, strategies) in CASES.items() for strategy in strategies]
)
def test_ranks_of_one_gpu(name: str, strategy: str, fake: FakeDriver) -> None:
    """NumPy arrays are copied to the GPU; every other array comes from the stream's pool, and goes back."""
    case = CASES[name][0]
    found = simulated.run(4, lambda group: case.rank(group, strategy, "zigzag", backend="gpu"), device=0, timeout=30.0)
    case.expect(found, "zigzag")
    taken, freed = len(fake.of("cuMemAllocAsync")), len(fake.of("cuMemFreeAsync"))
    assert taken == freed > 0


def device_view(array: Any, strides: tuple[int, ...] | None = None) -> View:
    dense = Tensor.contiguous(array.shape, array.dtype.name).strides
    return View(array.ctypes.data, array.shape, strides or dense, array.dtype.name, 0, array)


@given(st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.usefixtures("driver_log")
def test_copies(data: st.DataObject) -> None:
    """Any cut of a 4-D array to any cut of another, by a driver whose memory is the host's."""
    sizes = [data.draw(st.integers(1, 5)) for _ in range(4)]
    arrays, parts = [], []
    for _ in range(2):
        larger = [size + data.draw(st.integers(0, 2)) for size in sizes]
        order = data.draw(st.permutations(range(3)))
        memory = np.arange(np.prod(larger), dtype=np.float32).reshape([*(larger[axis] for axis in order), larger[3]])
        array = memory.transpose([*(order.index(axis) for axis in range(3)), 3])
        view = View(memory.ctypes.data, array.shape, tuple(it // 4 for it in array.strides), "float32", 0, memory)
        starts = [data.draw(st.integers(0, whole - size)) for whole, size in zip(larger, sizes, strict=True)]
        index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        arrays.append((array, index))
        parts.append(view[index])
    (target, at), (source, origin) = arrays
    target *= -1
    expected = target.copy()
    expected[at] = source[origin]
    gpu.copy(parts[0], parts[1], 0)
    np.testing.assert_array_equal(target, expected)


def test_few_copies(driver_log: FakeDriver) -> None:
    """Rows of all batches are one copy of rows, and a cut that is dense is one copy."""
    driver.call("cuCtxSetCurrent", 0xC0)
    whole = device_view(np.arange(2 * 8 * 4 * 16, dtype=np.float32).reshape(2, 8, 4, 16))
    part = device_view(np.empty((2, 4, 4, 16), np.float32))
    gpu.copy(part, whole[:, 4:8], 0)
    gpu.copy(whole[:, :, :2], device_view(np.empty((2, 8, 2, 16), np.float32)), 0)
    gpu.copy(whole[:1, 2:5], part[1:, 1:], 0)
    copies = [(call.name, call.numbers[4:6]) for call in driver_log.calls if "Memcpy" in call.name]
    assert copies[:2] == [("cuMemcpy2DAsync", (4 * 4 * 16 * 4, 2)), ("cuMemcpy2DAsync", (2 * 16 * 4, 16))]
    assert [name for name, _ in copies[2:]] == ["cuMemcpyDtoDAsync"]


def test_rows_that_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two items of 2**20 tokens: the driver takes no pitch of 2 GiB or more."""
    copied: list[Any] = []
    monkeypatch.setattr(driver, "call_without_result", lambda _, name, *numbers: copied.append((name, numbers[:3])))
    monkeypatch.setattr(gpu, "_copy_rows", lambda *rows: copied.append(rows))
    tokens, elements = 2**20, 8 * 128
    whole = View(0, (2, tokens, 8, 128), (tokens * elements, elements, 128, 1), "bfloat16", 0, None)
    part = View(0, (2, tokens // 8, 8, 128), (tokens // 8 * elements, elements, 128, 1), "bfloat16", 0, None)
    gpu.copy(part, whole[:, : tokens // 8], 0)
    size = part.nbytes // 2
    assert copied == [("cuMemcpyDtoDAsync", (item * size, item * whole.nbytes // 2, size)) for item in range(2)]


class Recorder:
    """A communicator of two ranks that only notes what it is asked for."""

    rank, size, device = 0, 2, 0

    def __init__(self) -> None:
        self.streams: list[int] = []

    def exchange(self, sends: Any, receives: Any, stream: int, timeout: float) -> None:
        self.streams.append(stream)
        for (_, target), (_, source) in zip(receives, sends, strict=True):
            numpy_of(target)[...] = numpy_of(source)  # as if the other rank had the same arrays

    def failure(self) -> str:
        return ""

    def abort(self) -> None:
        self.streams.append(-1)

    close = abort


def test_exchanges_have_a_stream_of_their_own(fake: FakeDriver) -> None:
    """It waits for the caller's stream before an exchange, and the caller's waits for it afterwards."""
    communicator = Recorder()
    arrays = [np.zeros((1, 8, 2, 16), np.float32) for _ in range(3)]
    attention_forward(*arrays, group=Group(communicator, check_calls=False), mask=Causal(), stream=0x77)
    (stream,) = set(communicator.streams)
    assert stream not in (0, 0x77)
    recorded, waits = {}, []  # stream of each event; addresses of events come again
    for call in fake.calls:
        if call.name == "cuEventRecord":
            recorded[call.numbers[0]] = call.numbers[1]
        elif call.name == "cuStreamWaitEvent":
            waits.append((call.numbers[0], recorded[call.numbers[1]]))
    assert waits == [(stream, 0x77), (0x77, stream)]


def test_arrays_of_another_gpu(fake: FakeDriver) -> None:
    class OnAnother:
        shape, dtype = (1, 4, 2, 16), "float32"

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

        def __dlpack__(self, **_: object) -> Any:
            view = device_view(np.zeros(self.shape, np.float32))
            return dataclasses.replace(view, device=1).__dlpack__()

    with pytest.raises(
        NotSupported, match=r"query is on GPU 1, and the group's communicator on GPU 0: must be the same"
    ):
        attention_forward(*(OnAnother() for _ in range(3)), group=Group(Recorder()))


@pytest.mark.parametrize("library", ["cupy", "other"])
def test_a_captured_stream(library: str, log: FakeDriver) -> None:
    """Refused without an exchange, not even to tell the other ranks; the capture stays valid."""
    communicator = Recorder()
    kind = fake_libraries.ndarray if library == "cupy" else lambda shape, dtype: device_view(np.zeros(shape, dtype))
    query = kind((1, 4, 2, 16), "float32")
    driver.call("cuStreamBeginCapture", 0x77, driver.bindings().CUstreamCaptureMode(0))
    with pytest.raises(NotSupported, match=r"stream = 0x77 is being captured.*: must not be, for the call waits"):
        attention_forward(query, query, query, group=Group(communicator), stream=0x77)
    assert driver.call("cuStreamEndCapture", 0x77)
    assert not communicator.streams


def test_a_group_of_the_other_kind(fake: FakeDriver) -> None:
    arrays = [np.zeros((1, 4, 2, 16), np.float32) for _ in range(3)]
    with pytest.raises(NotSupported, match=r"backend='reference' in a group of GPU 0: must be a group of host memory"):
        attention_forward(*arrays, group=Group(Recorder()), backend="reference")
    with pytest.raises(NotSupported, match=r"backend = 'auto' in a group of host memory: must be 'reference' there"):
        attention_forward(*arrays, group=simulated.groups(1)[0])


def test_kernels_of_few_merges_are_kept(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge that was not used for the longest time is bound again."""
    monkeypatch.setattr(gpu, "_merges", LruCache(2))
    device, group = driver.device(0), Group(Recorder(), check_calls=False)
    with device.current(), OutputArrays("numpy", device, 0, None) as results:
        machine = gpu.Gpu(group, results, device, 0, fakes.artifact)
        one, two, three = (MergeProblem.dense((1, rows, 2, 64), "float16") for rows in (1, 2, 3))
        first, second = machine._merge(one), machine._merge(two)
        assert machine._merge(one) is first
        machine._merge(three)
        assert machine._merge(one) is first
        assert machine._merge(two) is not second
    assert len(gpu._merges) == 2


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring"])
def test_kernels_are_launched(strategy: str, driver_log: FakeDriver) -> None:
    """The kernels of the package, as one device launches them, and merges of the ring: with a driver that runs none."""
    driver.call("cuCtxSetCurrent", 0xC0)
    operands = [np.zeros((1, 64, 4, 64), np.float16) for _ in range(3)]
    options = {"mask": Causal(), "kernels": fakes.artifact, "context_strategy": strategy, "load_balance": "zigzag"}

    def of_rank(group: Group) -> None:
        output, logsumexp = attention_forward(*operands, group=group, **options)
        found = attention_backward(output, *operands, output, logsumexp, group=group, **options)
        assert [array.shape for array in (found.query, found.key, found.value)] == [operands[0].shape] * 3

    simulated.run(2, of_rank, device=0, timeout=30.0)
    symbols = [call.text for call in driver_log.of("cuLaunchKernelEx")]
    assert any(symbol.startswith("fwd_") for symbol in symbols)
    assert any(symbol.startswith("bwd_") for symbol in symbols)
    merges = {symbol.split("_a8_")[-1].partition("_")[0] for symbol in symbols if symbol.startswith("merge_")}
    assert {"sum"} <= merges if strategy != "ulysses" else not merges
    is_merged = any(symbol.startswith("merge_sm80_f16") and "_a8_" not in symbol for symbol in symbols)
    assert is_merged == (strategy == "ring")


class Neighbour:
    """A communicator of several ranks that all have the same arrays. It notes where the driver's log is then."""

    rank, device = 0, 0

    def __init__(self, fake: FakeDriver, size: int) -> None:
        self.size, self._fake = size, fake
        self.exchanges: list[tuple[int, set[int]]] = []  # number of driver calls before, and addresses

    def exchange(self, sends: Any, receives: Any, stream: int, timeout: float) -> None:
        addresses = {array.pointer for _, array in (*sends, *receives)}
        self.exchanges.append((len(self._fake.calls), addresses))
        for (_, target), (_, source) in zip(receives, sends, strict=True):
            ctypes.memmove(target.pointer, source.pointer, target.nbytes)

    def failure(self) -> str:
        return ""

    def abort(self) -> None: ...

    close = abort


def test_a_part_that_all_ranks_get_is_copied_once(fake: FakeDriver) -> None:
    """The keys of two items, which are not dense: one dense copy of each chunk, whatever the number of ranks."""
    communicator = Neighbour(fake, 4)
    sent: list[list[tuple[int, int]]] = []
    exchange = communicator.exchange
    communicator.exchange = lambda sends, *rest: (  # type: ignore[method-assign, assignment]
        sent.append([(target, array.pointer) for target, array in sends]),
        exchange(sends, *rest),
    )
    query, key = np.zeros((2, 8, 2, 16), np.float32), np.zeros((2, 8, 1, 16), np.float32)
    options = {"group": Group(communicator, check_calls=False), "mask": Causal(), "load_balance": "zigzag"}
    attention_forward(query, key, key, **options)
    (messages,) = sent
    assert sorted(target for target, _ in messages) == [1] * 4 + [2] * 4 + [3] * 4
    assert len({pointer for _, pointer in messages}) == 4  # two chunks of key and of value


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring"])
def test_memory_of_an_exchange_outlives_it(strategy: str, fake: FakeDriver) -> None:
    """Nothing that is sent or received is freed on the caller's stream before this waits for the exchange.

    Freed earlier, the memory would be that of the next array while NCCL still reads it.
    """
    communicator = Neighbour(fake, 3)
    query, key, value = (np.zeros((1, 8, heads, 16), np.float32) for heads in (6, 3, 3))
    options = {"group": Group(communicator, check_calls=False), "mask": Causal(), "context_strategy": strategy}
    options |= {"load_balance": "zigzag", "stream": 0x77}
    results = attention_forward(query, key, value, **options)
    attention_backward(query, query, key, value, *results, **options)
    calls = fake.calls
    assert communicator.exchanges
    for start, addresses in communicator.exchanges:
        wait = next(i for i, call in enumerate(calls[start:]) if call.name == "cuStreamWaitEvent")
        assert calls[start + wait].numbers[0] == 0x77
        freed = {call.numbers[0] for call in calls[start : start + wait] if call.name == "cuMemFreeAsync"}
        assert not freed & addresses


@pytest.mark.parametrize("case", context_cases.CASES, ids=lambda case: case.name)
def test_the_suite_has_every_kernel_of_the_ranks(case: context_cases.ContextCase, driver_log: FakeDriver) -> None:
    """Those of tests/gpu/test_distributed.py, which a machine without the compiler gets from a folder."""
    driver.call("cuCtxSetCurrent", 0xC0)
    needed: set[str] = set()

    def kernels(build: Any) -> Any:
        needed.add(build.symbol)
        return fakes.artifact(build)

    whole = {name: narrow(name, array) for name, array in case.arrays().items()}

    def of_rank(group: Group, strategy: str, order: str | None) -> None:
        own = {name: rows_of(group, order, name, array, case.rows) for name, array in whole.items()}
        terms = {name: own[name] for name in ("bias", "sinks", "alibi_slopes") if name in own}
        options = {**terms, **case.options(), "group": group, "context_strategy": strategy, "load_balance": order}
        operands = [own[name] for name in ("query", "key", "value")]
        results = attention_forward(*operands, kernels=kernels, **options)
        more = {"gradients": case.gradients, "deterministic": True}
        attention_backward(own["grad_output"], *operands, *results, kernels=kernels, **more, **options)

    for strategy, order in case.splits:
        simulated.run(case.ranks[-1], lambda group, it=(strategy, order): of_rank(group, *it), device=0)
    assert needed
    assert needed - built() == set()


@functools.cache
def built() -> set[str]:
    return {first.symbol for first, *_ in context_cases.builds("sm_90a")}


def narrow(name: str, array: Any) -> Any:
    """Returns an array in the dtype of the operands."""
    return array if name in ("sinks", "alibi_slopes") else array.astype(ml_dtypes.bfloat16)


def rows_of(group: Group, order: str | None, name: str, array: Any, rows: int) -> Any:
    """Returns a rank's part of an array of all rows."""
    parts = rows_of_rank(group.rank, group.size, rows, order)
    return array if name in ("sinks", "alibi_slopes") else cut(array, 2 if name == "bias" else 1, parts)
