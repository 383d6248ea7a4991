"""Tests of the caller's arrays for results: any overlap is refused before a launch, and interleaved slices are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.api import calls
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.refusals import Refusal
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import InterfaceArray, aligned, artifact
from tests.support.refusals import expect

Array = npt.NDArray[Any]
B, M, H, D = 2, 20, 3, 16
SHAPE = (B, M, H, D)
RESULT = "each result must have memory of its own, and this shares it with"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls._prepared.clear()


def own(name: str, operand: str) -> str:
    """Returns the refusal of a result in an operand's memory."""
    return f"{name}: must have memory of its own, and shares it with {operand}"


def refusals_of(call: Callable[[], Any], log: FakeDriver) -> tuple[Refusal, ...]:
    """Returns why the call is refused, and checks that nothing was written or launched."""
    log.clear()
    with pytest.raises(NotSupported) as caught:
        call()
    assert not [name for name in log.names if name.startswith(("cuMem", "cuLaunch", "cuGraph"))]
    return caught.value.refusals


# How a caller passes arrays, and the backend.
WAYS = {
    "device": (InterfaceArray, "auto"),
    "NumPy": (np.asarray, "auto"),
    "reference": (np.asarray, "reference"),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[Callable[[Array], Any], dict[str, Any]]:
    """A function from NumPy arrays to the caller's, and options."""
    made, backend = WAYS[request.param]
    return made, {"backend": backend, "kernels": artifact}


def backward_operands() -> list[Array]:
    """Returns grad_output, query, key, value, output and logsumexp."""
    return [*(aligned(SHAPE, "f4", seed) for seed in range(5)), aligned((B, H, 32), "f4", 5)]


def test_one_array_for_two_gradients(driver_log: FakeDriver, way: Any) -> None:
    made, options = way
    target = made(aligned(SHAPE, "f4"))
    operands = [made(array) for array in backward_operands()]
    out = Gradients(query=target, key=target, value=made(aligned(SHAPE, "f4")))
    found = refusals_of(lambda: attention_backward(*operands, out=out, **options), driver_log)
    expect(found, [f"grad_query: {RESULT} grad_key"])


def test_gradients_that_overlap_in_part(driver_log: FakeDriver, way: Any) -> None:
    made, options = way
    whole = aligned((B, 2 * M, H, D), "f4")
    parts = [made(whole[:, start : start + M]) for start in (0, M, M - 1)]
    operands = [made(array) for array in backward_operands()]
    found = refusals_of(lambda: attention_backward(*operands, out=Gradients(*parts), **options), driver_log)
    expect(found, [f"grad_{name}: {RESULT} grad_value" for name in ("query", "key")])


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "sequences"])
def test_out_in_the_memory_of_query(driver_log: FakeDriver, way: Any, varlen: bool) -> None:
    made, options = way
    query, key, value = (made(aligned((1, M, H, D), "f4", seed)) for seed in range(3))
    if varlen:
        bounds = made(np.array([0, 5, M], "i4"))
        options = options | {"sequences": VariableLength(bounds, bounds, M - 5, M - 5)}
    found = refusals_of(lambda: attention_forward(query, key, value, out=query, **options), driver_log)
    expect(found, [own("output", "query")])


def test_out_in_the_memory_of_several_operands(driver_log: FakeDriver, way: Any) -> None:
    made, options = way
    whole = aligned((B, M, 2 * H, D), "f4")
    query, key, value = (made(part) for part in (whole[:, :, :H], whole[:, :, H:], aligned(SHAPE, "f4")))
    bias = made(whole[..., 0].reshape(-1)[:H].reshape(1, H, 1, 1).copy())
    sinks = made(whole.reshape(-1)[-H:])
    target = made(whole[:, :, 1 : H + 1])
    found = refusals_of(
        lambda: attention_forward(query, key, value, out=target, bias=bias, sinks=sinks, **options), driver_log
    )
    expect(found, [own("output", "query"), own("output", "key")])
    target = made(whole[:, :, H:])
    found = refusals_of(
        lambda: attention_forward(query, value, value, out=target, bias=bias, sinks=sinks, **options), driver_log
    )
    expect(found, [own("output", "sinks")])


def test_gradient_in_the_memory_of_an_operand(driver_log: FakeDriver, way: Any) -> None:
    made, options = way
    operands = [made(array) for array in backward_operands()]
    found = refusals_of(lambda: attention_backward(*operands, out=Gradients(value=operands[0]), **options), driver_log)
    expect(found, [own("grad_value", "grad_output")])


def test_slices_of_one_array_are_separate(driver_log: FakeDriver, way: Any) -> None:
    """The address ranges of the slices [:, :, i] overlap, and no element does."""
    made, options = way
    inputs, results = aligned((B, M, 3, H, D), "f4"), np.ones((B, M, 4, H, D), "f4")
    query, key, value = (made(inputs[:, :, i]) for i in range(3))
    grad_output, output, logsumexp = (made(backward_operands()[i]) for i in (0, 4, 5))
    out = Gradients(*(made(results[:, :, i]) for i in range(3)))
    found = attention_backward(grad_output, query, key, value, output, logsumexp, out=out, **options)
    assert found.query is out.query
    assert found.key is out.key
    assert found.value is out.value
    assert (results[:, :, 3] == 1).all()
    packed = aligned((B, M, 4, H, D), "f4", 1)
    attention_forward(*(made(packed[:, :, i]) for i in range(3)), out=made(packed[:, :, 3]), **options)


@pytest.mark.parametrize("stride", [0, 4, 8 * 4])
def test_an_array_that_overlaps_itself(driver_log: FakeDriver, way: Any, stride: int) -> None:
    """The device copy of a NumPy array is dense, so only the array itself can be wrong."""
    made, options = way
    whole = np.ones(B * M * H * D, "f4")
    target = np.lib.stride_tricks.as_strided(whole, SHAPE, (M * H * D * 4, H * D * 4, stride, 4))
    operands = [made(aligned(SHAPE, "f4", seed)) for seed in range(3)]
    (found,) = refusals_of(lambda: attention_forward(*operands, out=made(target), **options), driver_log)
    assert found.name == "output"
    assert "an output must not overlap itself" in found.rule


def test_overlaps_join_the_other_reasons(driver_log: FakeDriver, way: Any) -> None:
    made, options = way
    operands = [made(array) for array in backward_operands()]
    options = options | {"scale": float("nan"), "num_splits_key": 0}
    found = refusals_of(lambda: attention_backward(*operands, out=Gradients(query=operands[1]), **options), driver_log)
    assert [refusal.field for refusal in found] == ["scale", "num_splits_key", "grad_query"]


def test_overlaps_are_found_in_every_call_of_a_layout(driver_log: FakeDriver, way: Any) -> None:
    made, options = way
    operands = [made(aligned(SHAPE, "f4", seed)) for seed in range(3)]
    for _ in range(2):
        attention_forward(*operands, out=made(aligned(SHAPE, "f4")), **options)
        found = refusals_of(lambda: attention_forward(*operands, out=operands[2], **options), driver_log)
        expect(found, [own("output", "value")])
