"""Tests of kernel parameters: score modification, dropout, windows, variable lengths and split grids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.bundle.numbers import inputs as bundle_inputs
from cutlass_py_attn.bundle.numbers import pointers as bundle_pointers
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch import abi, entry_points
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.masks import UNLIMITED, Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Sequences, Shape, Tensor
from cutlass_py_attn.runtime.binding import Bound, bind
from cutlass_py_attn.score_terms.dropout import keep_scale
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import SHAPE, addresses, artifact, decode, plan_of

B, H = SHAPE.batch, SHAPE.num_heads
SEED = {"philox_seed": 2**64 - 1, "philox_offset": 2**63 + 5}


def bound_of(direction: str, **changes: Any) -> tuple[Plan, Bound]:
    problem, plan = plan_of(direction, **changes)
    return plan, bind(artifact(plan.build), plan, problem)


def structs(log: FakeDriver, direction: str, **changes: Any) -> list[dict[str, float]]:
    """Returns the struct of each launch of this problem. Philox seed and offset are SEED; addresses are made up."""
    plan, bound = bound_of(direction, **changes)
    given = addresses(bound.tensor_names)
    if not changes.get("philox_on_device"):
        given |= {name: number for name, number in SEED.items() if name in given}
    bound(given)
    found = [decode(plan.build, launch.parameters) for launch in log.of("cuLaunchKernelEx")]
    assert {name: found[0].get(name) for name in given if name not in SEED} == {
        name: address for name, address in given.items() if name not in SEED
    }
    return found


@pytest.mark.parametrize(
    ("bias", "steps"),
    [
        (Tensor.contiguous((B, H, 200, 300), "bfloat16"), (180000, 60000, 300, 1)),
        (Tensor((1, H, 1, 300), (7, 300, 9, 1), "bfloat16"), (0, 300, 0, 1)),
        (Tensor((B, 1, 200, 1), (200, 7, 1, 5), "bfloat16"), (200, 0, 1, 0)),
        (Tensor((B, H, 200, 300), (0, 1, -3, 600), "bfloat16"), (0, 1, -3, 600)),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_steps_of_a_bias(driver_log: FakeDriver, direction: str, bias: Tensor, steps: tuple[int, ...]) -> None:
    """An axis of size 1 broadcasts, whatever its stride."""
    for struct in structs(driver_log, direction, bias=bias):
        assert tuple(struct[f"bias_{axis}"] for axis in ("batch", "head", "row", "column")) == steps


@pytest.mark.parametrize(("slopes", "step"), [((H,), 0), ((B, H), H)])
def test_steps_of_slopes(driver_log: FakeDriver, slopes: tuple[int, ...], step: int) -> None:
    (struct,) = structs(driver_log, "forward", alibi_slopes=Tensor.contiguous(slopes, "float32"), softcap=2.5)
    assert struct["alibi_batch"] == step
    assert struct["softcap"] == 2.5


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_slopes_step_by_the_heads_of_query(driver_log: FakeDriver, direction: str) -> None:
    """Not by those of key, by the batch or by a row."""
    shape = dataclasses.replace(SHAPE, batch=5, num_heads=6, num_heads_key=2)
    for slopes, step in (((6,), 0), ((5, 6), 6)):
        problem, plan = plan_of(direction, shape=shape, alibi_slopes=Tensor.contiguous(slopes, "float32"))
        assert bundle_inputs(problem, plan.build)["alibi_batch"].value == step
        bound = bind(artifact(plan.build), plan, problem)
        driver_log.clear()
        bound(addresses(bound.tensor_names))
        found = [decode(plan.build, call.parameters)["alibi_batch"] for call in driver_log.of("cuLaunchKernelEx")]
        assert set(found) == {step}


@pytest.mark.parametrize(
    ("strides", "column"),
    [((200 * 192, 192, 64, 1), 1), ((200 * 384, 384, 128, 2), 2), ((0, 0, 0, 0), 0), ((200 * 192, 192, 64, -1), -1)],
)
def test_column_stride_of_grad_output(driver_log: FakeDriver, strides: tuple[int, ...], column: int) -> None:
    """A gradient of a sum has strides of 0, and a gradient of a slice has others."""
    grad_output = Tensor((B, 200, H, 64), strides, "bfloat16")
    shape = dataclasses.replace(SHAPE, head_dim_value=64)
    problem, plan = plan_of("backward", shape=shape, grad_output=grad_output)
    bound = bind(artifact(plan.build), plan, problem)
    driver_log.clear()
    bound(addresses(bound.tensor_names))
    for call in driver_log.of("cuLaunchKernelEx"):
        struct = decode(plan.build, call.parameters)
        axes = ("batch", "row", "head", "column")
        assert tuple(struct[f"grad_output_{axis}"] for axis in axes) == (*strides[:3], column)
    assert bundle_inputs(problem, plan.build)["grad_output_column"].value == column


def test_gradients_of_bias_and_sinks(driver_log: FakeDriver) -> None:
    bias, sinks = Tensor((1, H, 1, 300), (900, 300, 300, 1), "bfloat16"), Tensor.contiguous((H,), "float32")
    found = structs(driver_log, "backward", bias=bias, grad_bias=bias, sinks=sinks, grad_sinks=sinks)
    assert len(found) == 5, "preprocess, main, postprocess, bias, sinks"
    for struct in found:
        assert tuple(struct[f"grad_bias_{axis}"] for axis in ("batch", "head", "row", "column")) == (0, 300, 0, 1)


def test_the_gradient_of_logsumexp_is_an_address_or_none(driver_log: FakeDriver) -> None:
    """The same kernels serve both: the preprocess reads the address."""
    lse = Tensor.contiguous(SHAPE.logsumexp, "float32")
    problem, plan = plan_of("backward", grad_logsumexp=lse)
    bound = bind(artifact(plan.build), plan, problem)
    other, without = bound_of("backward")
    assert plan.build == other.build
    assert set(bound.tensor_names) - set(without.tensor_names) == {"grad_logsumexp"}
    given = addresses(bound.tensor_names)
    bound(given)
    without({name: given[name] for name in without.tensor_names})
    found = [decode(plan.build, call.parameters)["grad_logsumexp"] for call in driver_log.of("cuLaunchKernelEx")]
    assert found == [given["grad_logsumexp"]] * 3 + [0] * 3
    pointer = bundle_pointers(problem)["grad_logsumexp"]
    assert (pointer.access, pointer.dtype, tuple(map(str, pointer.shape))) == (
        "read",
        "float32",
        ("batch", "num_heads", "round_up(num_queries, 32)"),
    )


def test_seed_and_offset_are_numbers(driver_log: FakeDriver) -> None:
    for struct in structs(driver_log, "backward", dropout_p=0.25):
        assert {name: struct[name] % 2**64 for name in SEED} == SEED
        assert struct["philox_seed_address"] == struct["philox_offset_address"] == 0


def test_seed_and_offset_are_addresses(driver_log: FakeDriver) -> None:
    plan, bound = bound_of("forward", dropout_p=0.25, philox_on_device=True)
    given = addresses(bound.tensor_names)
    bound(given)
    struct = decode(plan.build, driver_log.of("cuLaunchKernelEx")[0].parameters)
    assert [struct[f"{name}_address"] for name in SEED] == [given[name] for name in SEED]
    assert [struct[name] for name in SEED] == [0, 0], "the values in device memory are used alone"
    with pytest.raises(NotSupported, match="philox_seed = 0x1004: must be a device address, 8-byte aligned"):
        bound({**given, "philox_seed": 0x1004})


@pytest.mark.parametrize(
    ("dropout_p", "word", "factor"), [(0.0, 0, 1.0), (0.5, 2**31, 2.0), (0.3, None, None), (1.0, 2**32 - 1, 0.0)]
)
def test_dropout_numbers(driver_log: FakeDriver, dropout_p: float, word: int | None, factor: float | None) -> None:
    for struct in structs(driver_log, "backward", dropout_p=dropout_p):
        threshold, scale = struct["dropout_threshold"] % 2**32, struct["keep_scale"]
        # The first word whose number in (0, 1] is above p: the number is word / 2**32 rounded to 24 bits.
        assert abs(threshold - (dropout_p * 2**32 if word is None else word)) <= 2**8
        assert scale == (keep_scale(dropout_p) if factor is None else factor)


@pytest.mark.parametrize(
    ("mask", "edges"),
    [
        (Full(), (UNLIMITED, UNLIMITED, 0)),
        (Causal(), (UNLIMITED, 0, 0)),
        (CausalBottomRight(300), (299, 0, 1)),
        (Window(3, 4), (3, 4, 1)),
    ],
    ids=str,
)
def test_edges_of_a_window(driver_log: FakeDriver, mask: Mask, edges: tuple[int, ...]) -> None:
    for struct in structs(driver_log, "backward", mask=mask):
        assert tuple(struct[name] for name in ("window_left", "window_right", "bottom_right")) == edges


@pytest.mark.parametrize("num_queries", [100, 1], ids=["sm80", "decode"])
def test_only_kernels_with_variable_lengths_have_tokens(driver_log: FakeDriver, num_queries: int) -> None:
    """They clamp to these what they read of lengths; the struct of other kernels is as it is without."""
    shape = Shape(5, num_queries, 300, 3, 64, 64, tokens=(430, 600))
    plan, bound = bound_of("forward", shape=shape, sequences=Sequences(5, num_queries, 300))
    fields = abi.DECODE if num_queries == 1 else abi.FORWARD
    assert abi.fields_of(plan.build) == (*fields, ("tokens_q", "i32"), ("tokens_k", "i32"))
    bound(addresses(bound.tensor_names))
    for launch in driver_log.of("cuLaunchKernelEx"):
        struct = decode(plan.build, launch.parameters)
        assert (struct["tokens_q"], struct["tokens_k"]) == (430, 600)
    _, dense = plan_of("forward", shape=dataclasses.replace(shape, tokens=None))
    assert abi.fields_of(dense.build) == fields


def test_sequences(driver_log: FakeDriver) -> None:
    shape = Shape(5, 100, 150, 3, 64, 64, tokens=(430, 600))
    plan, bound = bound_of("backward", shape=shape, sequences=Sequences(5, 100, 150, seqused_k=True))
    assert {"cu_seqlens_q", "cu_seqlens_k", "seqused_k"} < set(bound.tensor_names)
    given = addresses(bound.tensor_names)
    bound({**given, "seqused_k": 0x1004})
    for launch in driver_log.of("cuLaunchKernelEx"):
        struct = decode(plan.build, launch.parameters)
        assert (struct["cu_seqlens_q"], struct["seqused_k"]) == (given["cu_seqlens_q"], 0x1004)
        assert (struct["batch"], struct["num_queries"], struct["num_keys"]) == (5, 100, 150)
        assert (struct["tokens_q"], struct["tokens_k"]) == (430, 600)
        assert struct["total_tiles"] == 430 // plan.build.tile_m + 5
    rows = 3 * (430 // plan.build.tile_m + 5) * plan.build.tile_m
    sizes = {buffer.name: buffer.bytes for buffer in plan.workspace.buffers}
    assert sizes == {"grad_query_accum": rows * 64 * 4, "delta": rows * 4, "logsumexp_log2": rows * 4}
    with pytest.raises(NotSupported, match="cu_seqlens_k = 0x1002: must be a device address, 4-byte aligned"):
        bound({**given, "cu_seqlens_k": 0x1002})


@pytest.fixture
def no_memory(driver_log: FakeDriver) -> Iterator[None]:
    """For workspaces larger than this machine's memory."""
    driver_log.without_memory(True)
    yield
    driver_log.without_memory(False)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_split_grids(driver_log: FakeDriver, direction: str) -> None:
    """Every launch has the head and batch of its first block, in every call."""
    shape = Shape(65536, 9, 9, 65540, 64, 64, num_heads_key=65540)
    problem, plan = plan_of(direction, shape=shape)
    bound = bind(artifact(plan.build), plan, problem)
    starts = [(0, 0), (0, 65535), (65535, 0), (65535, 65535)] * len(entry_points.entries(plan.build))
    for _ in range(2):
        driver_log.clear()
        bound(addresses(bound.tensor_names), workspace=0x100000)
        launches = driver_log.of("cuLaunchKernelEx")
        found = [decode(plan.build, launch.parameters) for launch in launches]
        assert [(struct["first_head"], struct["first_batch"]) for struct in found] == starts
        assert [launch.grid for launch in launches] == [launch.grid for launch in plan.launches]
        assert {struct["batch"] for struct in found} == {65536}


@pytest.mark.usefixtures("no_memory")
def test_a_split_grid_beside_a_whole_one(driver_log: FakeDriver) -> None:
    """The kernel of grad_sinks has one grid for all heads, so its launch starts at head 0."""
    shape, sinks = Shape(1, 9, 9, 65536, 64, 64), Tensor.contiguous((65536,), "float32")
    problem, plan = plan_of("backward", shape=shape, sinks=sinks, grad_sinks=sinks)
    bound = bind(artifact(plan.build), plan, problem)
    bound(addresses(bound.tensor_names), workspace=0x100000)
    found = [decode(plan.build, launch.parameters)["first_head"] for launch in driver_log.of("cuLaunchKernelEx")]
    assert found == [0, 65535] * 3 + [0]


def test_gradients_that_are_not_computed(driver_log: FakeDriver) -> None:
    found = structs(driver_log, "backward", grad_query=None, grad_value=None)
    symbols = [launch.text for launch in driver_log.of("cuLaunchKernelEx")]
    assert [symbol.partition("_to_k_128x128")[2] for symbol in symbols] == ["_delta_1", "_0"]
    assert all(struct["grad_query"] == struct["grad_value"] == struct["grad_query_accum"] == 0 for struct in found)
    assert not driver_log.of("cuMemsetD8Async"), "no accumulation"


def test_addresses_need_the_problem_s_alignment(driver_log: FakeDriver) -> None:
    key = Tensor(SHAPE.of("key"), (300 * 195, 195, 65, 1), "bfloat16", 2)
    problem, plan = plan_of("forward", key=key)
    bound = bind(artifact(plan.build), plan, problem)
    given = addresses(bound.tensor_names)
    bound({**given, "key": 0x1002, "logsumexp": 0x1004})
    with pytest.raises(NotSupported) as caught:
        bound({**given, "key": 0x1001, "value": 0x1008, "logsumexp": 0x1002})
    assert list(caught.value.reasons) == [
        f"{name} = {address:#x}: must be a device address, {alignment}-byte aligned; copy it"
        for name, address, alignment in (("key", 0x1001, 2), ("value", 0x1008, 16), ("logsumexp", 0x1002, 4))
    ]


def test_a_forward_without_keys_but_with_sinks(driver_log: FakeDriver) -> None:
    shape, sinks = Shape(2, 9, 0, 3, 64, 64), Tensor.contiguous((3,), "float32")
    plan, bound = bound_of("forward", shape=shape, sinks=sinks)
    bound({**addresses(bound.tensor_names), "key": 0, "value": 0})
    (launch,) = driver_log.of("cuLaunchKernelEx")
    assert decode(plan.build, launch.parameters)["num_keys"] == 0


def test_every_field_is_a_pointer_a_stride_a_size_or_a_factor() -> None:
    """Every field is aligned to its size, so that addresses (64-bit) and sizes (32-bit) can be written in place."""
    for kind, fields in abi.FIELDS.items():
        kinds = dict(fields)
        assert len(kinds) == len(fields), kind
        assert all(offset % size == 0 for _, offset, size in abi.layout(fields))
        assert abi.numpy_struct(fields).itemsize % 8 == 0
    problem = Problem.dense("backward", SHAPE, "bfloat16")
    named = {*problem.tensors(), "alibi_slopes", "sinks", "grad_sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"}
    assert named <= {name for name, kind in abi.BACKWARD if kind == "i64"}
    assert np.int32 == abi.numpy_struct(abi.BACKWARD)["first_head"].type
