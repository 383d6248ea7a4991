"""Tests of every option of the two functions, from the caller's arrays to the kernel parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutlass_py_attn.api import calls
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import driver, fill
from cutlass_py_attn.score_terms.dropout import Dropout
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import InterfaceArray, aligned, artifact, decode
from tests.support.requests import lengths

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16
B, MQ, MK, H, D = 2, 40, 50, 3, 16
FORWARD = ("query", "key", "value")
BACKWARD = ("grad_output", *FORWARD, "output", "logsumexp")


class Kernels:
    """Returns artifacts for the fake driver. build: the build of the last call."""

    build: Build

    def __call__(self, build: Build) -> Any:
        self.build = build
        return artifact(build)


@pytest.fixture
def kernels() -> Kernels:
    calls._prepared.clear()
    return Kernels()


def arrays_of(names: tuple[str, ...], batch: int = B, num_queries: int = MQ, num_keys: int = MK) -> dict[str, Array]:
    """Returns host arrays of these operands; D is every head dim."""
    keys, queries = (batch, num_keys, H, D), (batch, num_queries, H, D)
    shapes = {"key": keys, "value": keys, "logsumexp": (batch, H, -(-num_queries // 32) * 32)}
    return {
        name: aligned(shapes.get(name, queries), "f4" if name == "logsumexp" else BF16, seed)
        for seed, name in enumerate(names)
    }


def on_device(arrays: Mapping[str, Array]) -> list[InterfaceArray]:
    return [InterfaceArray(array) for array in arrays.values()]


def last_struct(log: FakeDriver, kernels: Kernels) -> dict[str, float]:
    """Returns the struct of the last launch."""
    return decode(kernels.build, log.of("cuLaunchKernelEx")[-1].parameters)


TERMS: dict[str, Any] = {
    "bias": aligned((1, H, 1, MK), BF16, 11),
    "alibi_slopes": aligned((B, H), "f4", 12),
    "sinks": aligned((H,), "f4", 13),
}


def test_numpy_score_mod_arrays_are_copied(driver_log: FakeDriver, kernels: Kernels) -> None:
    attention_forward(*arrays_of(FORWARD).values(), kernels=kernels, **TERMS)
    copies = {call.numbers[1] for call in driver_log.of("cuMemcpyHtoDAsync")}
    assert {array.ctypes.data for array in TERMS.values()} < copies
    assert len(driver_log.of("cuMemAllocAsync")) == len(driver_log.of("cuMemFreeAsync")) == 8


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dropout_seed_as_ints_and_as_arrays(driver_log: FakeDriver, kernels: Kernels, direction: str) -> None:
    names, call = (FORWARD, attention_forward) if direction == "forward" else (BACKWARD, attention_backward)
    operands: Any = on_device(arrays_of(names))
    call(*operands, kernels=kernels, dropout=Dropout(0.5, 2**63, 7))
    struct = last_struct(driver_log, kernels)
    assert (struct["philox_seed"] % 2**64, struct["philox_offset"], struct["keep_scale"]) == (2**63, 7, 2.0)
    assert struct["philox_seed_address"] == struct["philox_offset_address"] == 0
    seed, offset = aligned((), "i8", 1), aligned((1,), "i8", 2)
    call(*operands, kernels=kernels, dropout=Dropout(0.5, InterfaceArray(seed), InterfaceArray(offset)))
    struct = last_struct(driver_log, kernels)
    assert (struct["philox_seed_address"], struct["philox_offset_address"]) == (seed.ctypes.data, offset.ctypes.data)
    assert struct["philox_seed"] == struct["philox_offset"] == 0
    call(*operands, kernels=kernels, dropout=Dropout(0.0, 1, 1))
    assert "dropout" not in kernels.build.features


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_numbers_of_numpy_are_those_of_python(driver_log: FakeDriver, kernels: Kernels, direction: str) -> None:
    """Of dropout, of the longest sequences and of the splits; an array's int64 below 0 is its 64 bits."""
    names, call = (FORWARD, attention_forward) if direction == "forward" else (BACKWARD, attention_backward)
    operands: Any = on_device(arrays_of(names))
    more: dict[str, Any] = {} if direction == "forward" else {"num_splits_key": np.int64(1), "deterministic": np.True_}
    plain: dict[str, Any] = {} if direction == "forward" else {"num_splits_key": 1, "deterministic": True}
    call(*operands, kernels=kernels, dropout=Dropout(0.5, 2**64 - 3, 7), **plain)
    expected = last_struct(driver_log, kernels)
    for seed, offset in ((np.array(-3), np.uint64(7)), (np.uint64(2**64 - 3), np.array(7, "u1"))):
        call(*operands, kernels=kernels, dropout=Dropout(np.float32(0.5), seed, offset), **more)
        found = last_struct(driver_log, kernels)
        for name in ("philox_seed", "philox_offset", "philox_seed_address", "keep_scale", "dropout_threshold"):
            assert found[name] == expected[name]
        assert kernels.build.deterministic == bool(more)
    with pytest.raises(NotSupported, match=r"philox_seed = -3 \(int\): must be an int from 0"):
        call(*operands, kernels=kernels, dropout=Dropout(0.5, np.int64(-3)))


def test_longest_sequences_of_numpy(driver_log: FakeDriver, kernels: Kernels) -> None:
    tokens = arrays_of(FORWARD, batch=1)
    sequences = lengths(max_seqlen_q=np.int32(25), max_seqlen_k=np.array(30))
    attention_forward(*tokens.values(), kernels=kernels, sequences=sequences)
    struct = last_struct(driver_log, kernels)
    assert (struct["num_queries"], struct["num_keys"]) == (25, 30)


def test_kernels_without_a_hash(driver_log: FakeDriver) -> None:
    """A callable may have any type; its calls are prepared anew."""

    class Unhashable(Kernels):
        __hash__ = None  # type: ignore[assignment]

    kernels = Unhashable()
    for _ in range(2):
        attention_forward(*on_device(arrays_of(FORWARD)), kernels=kernels)
    assert len(driver_log.of("cuLaunchKernelEx")) == 2


@pytest.mark.parametrize("on_host", [False, True])
def test_sequences(driver_log: FakeDriver, kernels: Kernels, on_host: bool) -> None:
    """Results are filled with 0 and +inf before the kernel, which writes the rows of sequences."""
    tokens = arrays_of(FORWARD, batch=1)
    bounds = {name: aligned((3,), "i4") for name in ("cu_seqlens_q", "cu_seqlens_k")} | {"seqused_k": np.ones(2, "i4")}
    bounds["cu_seqlens_q"][:], bounds["cu_seqlens_k"][:] = (0, 15, 30), (0, 30, 45)
    place: Any = (lambda array: array) if on_host else InterfaceArray
    sequences = lengths(**{name: place(array) for name, array in bounds.items()})
    output, logsumexp = attention_forward(*map(place, tokens.values()), kernels=kernels, sequences=sequences)
    assert kernels.build.features == ("seqused", "varlen")
    struct = last_struct(driver_log, kernels)
    assert (struct["batch"], struct["num_queries"], struct["num_keys"]) == (2, 25, 30)
    assert output.shape == (1, MQ, H, D)
    assert logsumexp.shape == (2, H, 32)
    if on_host:
        assert not output.any()
        assert np.isposinf(logsumexp).all()
    else:
        assert {name: struct[name] for name in bounds} == {n: a.ctypes.data for n, a in bounds.items()}
    names = driver_log.names
    assert names.index("cuMemsetD8Async") < names.index("cuMemsetD2D32Async") < names.index("cuLaunchKernelEx")


def test_cu_seqlens_of_any_integer_dtype(driver_log: FakeDriver, kernels: Kernels) -> None:
    """NumPy arrays of any integer dtype are copied as int32."""
    tokens = arrays_of(FORWARD, batch=1)
    sequences = lengths(cu_seqlens_q=np.array([0, 15, 40], "u2"))
    attention_forward(*tokens.values(), kernels=kernels, sequences=sequences)
    copied = [call.numbers[2] for call in driver_log.of("cuMemcpyHtoDAsync")]
    assert copied[3:] == [12, 12], "three int32 each"


def strided(shape: tuple[int, ...], dtype: Any = BF16) -> Array:
    """Returns ones with gaps, which hold ones too, between the rows."""
    return np.ones((*shape[:-1], shape[-1] + 8), dtype)[..., : shape[-1]]


def test_out_of_the_forward(driver_log: FakeDriver, kernels: Kernels) -> None:
    target = InterfaceArray(strided((B, MQ, H, D)))
    output, _ = attention_forward(*on_device(arrays_of(FORWARD)), kernels=kernels, out=target)
    assert output is target
    struct = last_struct(driver_log, kernels)
    assert struct["output"] == target.array.ctypes.data
    assert [struct[f"output_{axis}"] for axis in ("batch", "row", "head")] == [MQ * H * 24, H * 24, 24]


def test_numpy_out_gets_the_result(driver_log: FakeDriver, kernels: Kernels) -> None:
    """The fake driver's kernels write nothing, so the array keeps its values."""
    target = strided((B, MQ, H, D))
    target[...] = 3
    output, _ = attention_forward(*arrays_of(FORWARD).values(), kernels=kernels, out=target)
    assert output is target
    assert (target == 3).all()
    assert (target.base[..., D:] == 1).all()
    target.flags.writeable = False
    with pytest.raises(NotSupported, match=r"output = .*: must be writable"):
        attention_forward(*arrays_of(FORWARD).values(), kernels=kernels, out=target)


def test_some_gradients(driver_log: FakeDriver, kernels: Kernels) -> None:
    given: dict[str, Any] = {name: InterfaceArray(array) for name, array in TERMS.items()}
    operands = on_device(arrays_of(BACKWARD))
    found = attention_backward(*operands, kernels=kernels, gradients=("value", "bias", "sinks"), **given)
    assert found.query is found.key is None
    assert (found.value.shape, found.bias.shape, found.sinks.shape) == ((B, MK, H, D), (1, H, 1, MK), (H,))
    assert (found.bias.dtype, found.sinks.dtype) == ("bfloat16", "float32")
    struct = last_struct(driver_log, kernels)
    pointers = {f"grad_{name}": getattr(found, name).pointer for name in ("value", "bias", "sinks")}
    assert {name: struct[name] for name in pointers} == pointers
    assert struct["grad_query"] == struct["grad_key"] == 0
    assert kernels.build.gradients == ("value", "bias", "sinks")


def test_out_of_the_backward(driver_log: FakeDriver, kernels: Kernels) -> None:
    target, grad_bias = InterfaceArray(strided((B, MK, H, D))), InterfaceArray(strided((1, H, 1, MK)))
    found = attention_backward(
        *on_device(arrays_of(BACKWARD)),
        kernels=kernels,
        bias=InterfaceArray(TERMS["bias"]),
        gradients=("query", "key", "bias"),
        out=Gradients(key=target, bias=grad_bias),
    )
    assert (found.key, found.bias) == (target, grad_bias)
    assert found.query.shape == (B, MQ, H, D)
    struct = last_struct(driver_log, kernels)
    assert (struct["grad_key"], struct["grad_key_row"]) == (target.array.ctypes.data, H * 24)
    assert [struct[f"grad_bias_{axis}"] for axis in ("batch", "head", "row", "column")] == [0, MK + 8, 0, 1]


def test_packed_gradients(driver_log: FakeDriver, kernels: Kernels) -> None:
    operands = arrays_of(BACKWARD, num_keys=MQ)
    found = attention_backward(*operands.values(), kernels=kernels, packed=True)
    slices = [found.query, found.key, found.value]
    whole = found.query.base
    assert whole.shape == (B, MQ, 3, H, D)
    for i, part in enumerate(slices):
        assert part.base is whole
        assert part.ctypes.data == whole[:, :, i].ctypes.data
    struct = last_struct(driver_log, kernels)
    steps = [struct["grad_key"] - struct["grad_query"], struct["grad_value"] - struct["grad_key"]]
    assert steps == [H * D * 2] * 2
    assert [struct[f"grad_value_{axis}"] for axis in ("batch", "row", "head")] == [MQ * 3 * H * D, 3 * H * D, D]
    with pytest.raises(NotSupported, match=r"packed = True: .* arrays of an unknown library"):
        attention_backward(*on_device(operands), kernels=kernels, packed=True)


def test_packed_gradients_of_sequences_are_zero_outside(driver_log: FakeDriver, kernels: Kernels) -> None:
    operands = arrays_of(BACKWARD, batch=1, num_keys=MQ) | {"logsumexp": aligned((2, H, 32), "f4")}
    sequences = lengths(cu_seqlens_k=np.array([0, 15, 40]), max_seqlen_k=25)
    found = attention_backward(*operands.values(), kernels=kernels, packed=True, sequences=sequences)
    assert not found.query.base.any()
    assert len(driver_log.of("cuMemsetD2D8Async")) == 3


def test_an_empty_problem_fills_the_caller_s_arrays(driver_log: FakeDriver, kernels: Kernels) -> None:
    target, grads = strided((B, MQ, H, D)), strided((B, MQ, H, D))
    output, logsumexp = attention_forward(*arrays_of(FORWARD, num_keys=0).values(), out=target)
    assert output is target
    assert not target.any()
    assert (target.base[..., D:] == 1).all()
    assert np.isneginf(logsumexp[..., :MQ]).all()
    sinks = np.ones(H, "f4")
    found = attention_backward(
        *arrays_of(BACKWARD, num_keys=0).values(),
        sinks=sinks,
        gradients=("query", "sinks"),
        out=Gradients(query=grads),
    )
    assert not grads.any()
    assert not found.sinks.any()
    assert not driver_log.of("cuLaunchKernelEx")


def test_sinks_are_launched_without_keys(driver_log: FakeDriver, kernels: Kernels) -> None:
    attention_forward(*arrays_of(FORWARD, num_keys=0).values(), kernels=kernels, sinks=TERMS["sinks"])
    assert last_struct(driver_log, kernels)["num_keys"] == 0
    empty = VariableLength(np.array([0, 15, 40]), np.zeros(3, "i4"), 25, 0)
    attention_forward(*arrays_of(FORWARD, batch=1, num_keys=0).values(), kernels=kernels, sequences=empty)
    assert last_struct(driver_log, kernels)["num_queries"] == 25
    assert len(driver_log.of("cuLaunchKernelEx")) == 2


@pytest.mark.parametrize("option", [{"deterministic": True}, {"num_splits_key": 1}])
def test_options_that_only_the_backward_has(driver_log: FakeDriver, kernels: Kernels, option: dict[str, Any]) -> None:
    attention_backward(*on_device(arrays_of(BACKWARD)), kernels=kernels, **option)
    assert kernels.build.deterministic == ("deterministic" in option)
    assert last_struct(driver_log, kernels)["num_splits_key"] == 1
    with pytest.raises(NotSupported, match="option = "):
        attention_forward(*on_device(arrays_of(FORWARD)), kernels=kernels, **option)


LAYOUTS = st.permutations(range(4)).flatmap(
    lambda order: st.tuples(st.just(order), st.tuples(*[st.integers(0, 4)] * 4), st.tuples(*[st.integers(0, 2)] * 4))
)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LAYOUTS, st.tuples(*[st.booleans()] * 4))
def test_clear_changes_every_element_and_no_gap(
    driver_log: FakeDriver, layout: tuple[Any, tuple[int, ...], tuple[int, ...]], backwards: tuple[bool, ...]
) -> None:
    """Any order of the axes, gaps between their elements, and strides of either sign."""
    order, shape, gaps = layout
    whole = np.ones([size + gap for size, gap in zip(shape, gaps, strict=True)], "i2")
    part = whole[tuple(slice(size) for size in shape)].transpose(order)
    part = part[tuple(slice(None, None, -1 if flip else 1) for flip in backwards)]
    tensor = Tensor(part.shape, tuple(stride // 2 for stride in part.strides), "float16")
    expected = whole.copy()
    expected[tuple(slice(size) for size in shape)] = 0
    with driver.device(0).current():
        fill.clear(tensor, part.ctypes.data, 0)
    np.testing.assert_array_equal(whole, expected)


def test_dense_results_are_cleared_by_one_call(driver_log: FakeDriver) -> None:
    memory = np.ones(2000, "f2")
    for shape, strides, count in (
        ((2, 5, 3, 8), (120, 24, 8, 1), 1),
        ((2, 5, 3, 8), (120, 8, 40, 1), 1),  # heads before rows
        ((2, 5, 3, 8), (360, 72, 8, 1), 1),  # a slice of packed gradients
        ((2, 5, 3, 8), (1000, 72, 8, 1), 2),
    ):
        driver_log.clear()
        with driver.device(0).current():
            fill.clear(Tensor(shape, strides, "float16"), memory.ctypes.data, 0)
        assert len(driver_log.names) == count
