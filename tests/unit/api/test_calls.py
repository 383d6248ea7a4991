"""Tests of repeated calls: they launch and return as a validated call does; and which calls are validated."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api import attention, calls, options
from cutlass_py_attn.api.attention import attention_backward, attention_forward, mla_attention_forward
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal, Full, Window
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.runtime import driver, frameworks
from cutlass_py_attn.runtime.arrays import Array
from cutlass_py_attn.score_terms.dropout import Dropout
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import aligned, artifact, decode

SHAPE = (2, 5, 3, 8)
STREAM = 0x66


class Tensor:
    """A torch tensor over host memory."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "torch.float32", shift: int = 0) -> None:
        self.array = aligned((int(np.prod(shape)) + 8,), "f4")[shift:]
        self.shape, self.dtype, self.device = shape, dtype, "cuda:0"
        self.is_cuda, self.requires_grad, self.is_negative = True, False, False

    def is_neg(self) -> bool:
        return self.is_negative

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(int(np.prod(self.shape[axis + 1 :])) for axis in range(len(self.shape)))

    def get_device(self) -> int:
        return 0


class ndarray:  # noqa: N801
    """A CuPy array over host memory."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = "f4") -> None:
        self.array = aligned(shape, np.dtype(dtype))
        self.shape, self.strides, self.dtype = shape, self.array.strides, self.array.dtype
        self.data = SimpleNamespace(ptr=self.array.ctypes.data, device_id=0)


@pytest.fixture
def log(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The fake driver, with a fake torch and a fake CuPy that compute on STREAM."""
    torch = SimpleNamespace(
        Tensor=Tensor,
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: STREAM),
        device=lambda kind, ordinal: f"{kind}:{ordinal}",
        empty=lambda shape, dtype, device: Tensor(shape, dtype),
        float32="torch.float32",
        cuda=SimpleNamespace(stream=contextlib.nullcontext, ExternalStream=lambda handle, device: handle, Stream=()),
    )
    cuda = SimpleNamespace(get_current_stream=lambda ordinal: SimpleNamespace(ptr=STREAM))
    cupy = SimpleNamespace(ndarray=ndarray, cuda=cuda, empty=lambda shape, dtype: ndarray(shape, dtype))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for cached in (frameworks._torch_dtype, frameworks._torch_device):
        cached.cache_clear()
    calls._repeated.clear()
    calls._prepared.clear()
    driver.call("cuCtxSetCurrent", 0xC0)
    yield driver_log
    calls._repeated.clear()
    for cached in (frameworks._torch_dtype, frameworks._torch_device):
        cached.cache_clear()


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions of the calls that were validated."""
    directions: list[str] = []
    real = calls.launch

    def launch(request: attention.AttentionRequest, *rest: Any) -> Any:
        directions.append(request.direction)
        return real(request, *rest)

    monkeypatch.setattr(calls, "launch", launch)
    return directions


def forward(make: Callable[..., Any] = Tensor, **changes: Any) -> tuple[Any, ...]:
    operands = [make(SHAPE) for _ in range(3)]
    options: dict[str, Any] = {"mask": Causal(), "kernels": artifact, "stream": STREAM, **changes}
    return (*operands, *attention_forward(*operands, **options))


@pytest.mark.parametrize("make", [Tensor, ndarray], ids=["torch", "cupy"])
def test_a_cached_forward_launches_new_addresses(
    log: FakeDriver, validated: list[str], make: Callable[..., Any]
) -> None:
    for number in range(3):
        log.clear()
        driver.call("cuCtxSetCurrent", 0xC0)
        arrays = forward(make)
        addresses = [frameworks.framework_of(array).addresses([array])[0] for array in arrays]  # type: ignore[union-attr]
        (launch,) = log.of("cuLaunchKernelEx")
        build = next(iter(calls._prepared.values())).bound.plan.build  # type: ignore[union-attr]
        struct = decode(build, launch.parameters)
        assert [struct[name] for name in ("query", "key", "value", "output", "logsumexp")] == addresses, number
        assert [type(array) for array in arrays] == [make] * 5
        assert [array.shape for array in arrays[3:]] == [SHAPE, (2, 3, 32)]
    assert validated == ["forward"]


def test_a_cached_call_of_a_latent_cache_is_not_validated(log: FakeDriver, validated: list[str]) -> None:
    for _ in range(3):
        log.clear()
        driver.call("cuCtxSetCurrent", 0xC0)
        query, cache = Tensor((2, 5, 3, 32)), Tensor((2, 7, 1, 32))
        output, logsumexp = mla_attention_forward(query, cache, head_dim_value=16, kernels=artifact, stream=STREAM)
        assert (output.shape, logsumexp.shape) == ((2, 5, 3, 16), (2, 3, 32))
        assert len(log.of("cuLaunchKernelEx")) == 1
    assert validated == ["forward"]


@pytest.mark.parametrize("gradients", [("query", "key", "value"), ("value", "query")], ids="-".join)
def test_a_cached_backward_returns_the_requested_gradients(
    log: FakeDriver, validated: list[str], gradients: tuple[str, ...]
) -> None:
    operands = [Tensor(SHAPE) for _ in range(5)]
    logsumexp = Tensor((2, 3, 32))
    options: dict[str, Any] = {"gradients": gradients, "kernels": artifact, "stream": STREAM}
    for _ in range(3):
        log.clear()
        driver.call("cuCtxSetCurrent", 0xC0)
        found = attention_backward(*operands, logsumexp, **options)
        assert isinstance(found, Gradients)
        struct = decode(
            next(iter(calls._prepared.values())).bound.plan.build, log.of("cuLaunchKernelEx")[-1].parameters
        )  # type: ignore[union-attr]
        for name in ("query", "key", "value"):
            result = getattr(found, name)
            assert (result is not None) == (name in gradients)
            assert struct[f"grad_{name}"] == (0 if result is None else result.data_ptr())
    assert validated == ["backward"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"mask": Full()}, {"scale": 0.5}, {"stream": 0x99}, {"dropout": Dropout(0.5, 1, 2)}),
        {"kernels": lambda build: artifact(build)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_options_are_validated(log: FakeDriver, validated: list[str], changes: dict[str, Any]) -> None:
    forward()
    forward()
    assert validated == ["forward"]
    forward(**changes)
    assert validated == ["forward"] * 2


@pytest.mark.parametrize("what", ["shape", "dtype", "class", "alignment", "gradient", "device's context"])
def test_other_arrays_are_validated(log: FakeDriver, validated: list[str], what: str) -> None:
    make = ndarray if what == "device's context" else Tensor
    forward(make)
    forward(make)
    assert validated == ["forward"]
    options: dict[str, Any] = {"mask": Causal(), "kernels": artifact, "stream": STREAM}
    operands = [make(SHAPE) for _ in range(3)]
    if what == "shape":
        operands = [Tensor((2, 6, 3, 8)) for _ in range(3)]
    elif what == "class":
        operands[1] = ndarray(SHAPE)
    elif what == "alignment":
        operands[2] = Tensor(SHAPE, shift=1)
    elif what == "device's context":
        driver.call("cuCtxSetCurrent", 0xC1)
    elif what == "dtype":
        operands[1].dtype = "torch.int32"
    else:
        operands[0].requires_grad = True
    if what in ("dtype", "gradient"):
        with pytest.raises(NotSupported):
            attention_forward(*operands, **options)
    else:
        attention_forward(*operands, **options)
    assert validated == ["forward"] * 2


def test_misaligned_arrays_are_not_cached(log: FakeDriver, validated: list[str]) -> None:
    """Their kernel loads shorter vectors than the kernel of aligned arrays, which have the same key."""
    options: dict[str, Any] = {"mask": Causal(), "kernels": artifact, "stream": STREAM}
    for shift in (1, 0, 1, 0):
        attention_forward(Tensor(SHAPE), Tensor(SHAPE), Tensor(SHAPE, shift=shift), **options)
    assert validated == ["forward"] * 3
    assert len(calls._repeated) == 1


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [  # equal for Python; the second is no option
    ({"mask": Causal(7)}, {"mask": Causal(7.0)}),  # type: ignore[arg-type]
    ({"mask": Causal(1)}, {"mask": Causal(True)}),
    ({"mask": Window(3, 0)}, {"mask": Window(3.0, 0)}),  # type: ignore[arg-type]
    ({"scale": 0.5}, {"scale": Decimal("0.5")}),
    ({"scale": 1.0}, {"scale": True}),
    ({"softcap": 0.0}, {"softcap": False}),
    ({"softcap": 2.0}, {"softcap": 2 + 0j}),
]


@pytest.mark.parametrize(("right", "wrong"), SAME, ids=lambda options: repr(options))
@pytest.mark.parametrize("make", [Tensor, np.zeros], ids=["cached", "prepared"])
def test_a_refused_value_and_an_equal_one_are_kept_apart(
    log: FakeDriver, make: Any, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """Whichever comes first: a refusal does not reach later calls, and a call does not let a wrong value pass."""
    options._checked.clear()
    make = make if make is Tensor else lambda shape: np.zeros(shape, "f4")
    for _ in range(2):
        with pytest.raises(NotSupported, match="must be"):
            forward(make, **wrong)
        driver.call("cuCtxSetCurrent", 0xC0)
        forward(make, **right)
        forward(make, **right)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"mask": Causal(np.int64(7))}, {"mask": Causal(7)}),
        ({"mask": Window(np.array(3), np.uint8(0))}, {"mask": Window(3, 0)}),
        ({"scale": np.float32(0.5)}, {"scale": 0.5}),
        ({"scale": np.array(0.5)}, {"scale": 0.5}),
        ({"scale": 2}, {"scale": 2.0}),
        ({"softcap": np.int64(3)}, {"softcap": 3.0}),
    ],
    ids=repr,
)
def test_numbers_of_numpy_are_those_of_python(log: FakeDriver, given: dict[str, Any], plain: dict[str, Any]) -> None:
    """They share the prepared call, and launch the same parameters."""
    launched = []
    for changes in (plain, given, given):
        log.clear()
        driver.call("cuCtxSetCurrent", 0xC0)
        forward(**changes)
        (prepared,) = calls._prepared.values()
        struct = decode(prepared.bound.plan.build, log.of("cuLaunchKernelEx")[-1].parameters)  # type: ignore[union-attr]
        launched.append({name: struct[name] for name in ("scale", "softcap", "window_left", "window_right")})
    assert launched[0] == launched[1] == launched[2]


def run_in_threads(work: Callable[[int], None]) -> list[BaseException]:
    """Runs work(0) to work(7) in threads that switch as often as Python can, and returns what they raised."""
    errors: list[BaseException] = []

    def catching(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=catching, args=(number,)) for number in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    sys.setswitchinterval(interval)
    return errors


def test_threads_store_calls_together(log: FakeDriver) -> None:
    """Each store evicts another thread's call."""
    gpu, operand = driver.device(0), Array(4096, SHAPE, (120, 24, 8, 1), "float32", 0, "torch", None)
    call = calls.PreparedCall(MergeProblem.dense(SHAPE, "float32"), {}, {"query": operand}, (), gpu)

    def work(number: int) -> None:
        for step in range(3000):
            calls._repeated.put((number, step), call)

    assert run_in_threads(work) == []
    assert len(calls._repeated) == calls.MAX_REPEATED


def test_threads_evict_prepared_and_cached_calls(log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads, whose calls evict each other's: none fails, and each launches with its own scale."""
    monkeypatch.setattr(calls._repeated, "size", 3)
    monkeypatch.setattr(calls._prepared, "size", 3)
    made: dict[float, list[int]] = {}
    monkeypatch.setattr(calls, "bind_problem", lambda problem, *_: RecordingBound(problem.scale, made))
    monkeypatch.setattr(calls.performance, "warn", lambda plan: None)

    def work(number: int) -> None:
        driver.call("cuCtxSetCurrent", 0xC0)
        for step in range(30):
            scale = 1.0 + (number + step) % 8
            query, *_ = forward(scale=scale)
            assert query.data_ptr() in made[scale]

    assert run_in_threads(work) == []
    assert len(calls._repeated) <= 3
    assert sum(map(len, made.values())) == 8 * 30


class RecordingBound:
    """Takes the place of a Bound: records the address of query by scale."""

    def __init__(self, scale: float, made: dict[float, list[int]]) -> None:
        self.plan = None
        self._calls = made.setdefault(scale, [])

    def __call__(self, pointers: dict[str, int], stream: int) -> None:
        self._calls.append(pointers["query"])


def test_gradients_named_twice_are_refused_before_a_launch(log: FakeDriver) -> None:
    operands = [Tensor(SHAPE) for _ in range(5)]
    for gradients in (("query", "query"), ["key", "value", "key"]):
        for _ in range(2):
            with pytest.raises(NotSupported, match=r"gradients = .*: must name each once"):
                attention_backward(*operands, Tensor((2, 3, 32)), gradients=gradients, kernels=artifact, stream=STREAM)  # type: ignore[arg-type]
    assert log.names == []


def test_number_of_cached_calls_is_limited(log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls._repeated, "size", 2)
    for scale in (0.1, 0.2, 0.3):
        forward(scale=scale)
    assert len(calls._repeated) == 2


def test_empty_problems_are_filled_each_time(log: FakeDriver, validated: list[str]) -> None:
    options: dict[str, Any] = {"kernels": artifact, "stream": STREAM}
    for _ in range(2):
        log.clear()
        attention_forward(Tensor(SHAPE), Tensor((2, 0, 3, 8)), Tensor((2, 0, 3, 8)), **options)
        assert log.of("cuMemsetD2D32Async")
    assert validated == ["forward"] * 2
    assert len(calls._repeated) == 0
