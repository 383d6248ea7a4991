"""Tests of the GPU's part of split rows: views, copies, streams and memory, on the fake driver.

Its device memory is host memory: the NumPy reference computes there in place of the kernels. So the results are those
of one device, although no kernel runs.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.distributed import Group, attention_backward, attention_forward, gpu, simulated
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
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tests.support.split_cases import BATCH, HEADS, ROWS, Case


def numpy_of(view: View) -> Any:
    """Returns the memory of a view as a NumPy array."""
    dtype = numpy_dtype(view.dtype)
    memory = (ctypes.c_char * max(view.reach, 1)).from_address(view.pointer) if view.reach else b""
    strides = [stride * dtype.itemsize for stride in view.strides]
    return np.ndarray(view.shape, dtype, memory, 0, strides) if view.reach else np.empty(view.shape, dtype)


class Reference(gpu.Gpu):
    """The machine, with the reference in place of the kernels."""

    def _launch(self, direction: str, options: Any, operands: Any, outputs: dict[str, View]) -> Any:
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
