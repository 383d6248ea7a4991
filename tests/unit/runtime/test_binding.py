"""Tests of Bound: the driver gets the plan's launches in order with the right parameters, and no wait."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.artifact import first_available
from cutlass_py_attn.errors import DoesNotFit, DriverError, NoDevice, NotSupported, Stale
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Launch, Plan, TensorMap, Workspace
from cutlass_py_attn.plan.planner import plans
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.runtime import binding, driver, kernel_launch
from cutlass_py_attn.runtime.binding import Bound, bind, portable_arch
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import SHAPE, addresses, aligned, artifact, decode, plan_of


def bound_of(direction: str, **changes: Any) -> tuple[Problem, Plan, Bound]:
    problem, plan = plan_of(direction, **changes)
    return problem, plan, bind(artifact(plan.build), plan, problem)


def test_forward_launch_is_the_plan(driver_log: FakeDriver) -> None:
    _, plan, bound = bound_of("forward")
    (opt_in,) = driver_log.of("cuKernelSetAttribute")
    assert opt_in.text == plan.launches[0].symbol
    assert opt_in.numbers[:2] == (8, plan.launches[0].shared_memory_bytes)
    driver_log.clear()
    bound(addresses(bound.tensor_names), 0x123)
    assert driver_log.names == ["cuLaunchKernelEx"]
    (launch,) = driver_log.of("cuLaunchKernelEx")
    planned = plan.launches[0]
    assert (launch.text, launch.grid, launch.block) == (planned.symbol, planned.grid, planned.block)
    assert (launch.shared_memory, launch.stream) == (planned.shared_memory_bytes, 0x123)
    assert (launch.cluster, launch.numbers[9]) == (1, 0xC0), "no launch attributes, in the device's own context"


@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_launches_are_the_plan(driver_log: FakeDriver, deterministic: bool) -> None:
    _, plan, bound = bound_of("backward", deterministic=deterministic)
    driver_log.clear()
    bound(addresses(bound.tensor_names), 0x123)
    assert driver_log.names == [
        "cuMemAllocAsync",
        "cuMemsetD8Async",
        *["cuLaunchKernelEx"] * 3,
        "cuMemFreeAsync",
    ]
    found = [(c.text, c.grid, c.block, c.shared_memory) for c in driver_log.of("cuLaunchKernelEx")]
    assert found == [(i.symbol, i.grid, i.block, i.shared_memory_bytes) for i in plan.launches]
    (allocated,), (cleared,) = driver_log.of("cuMemAllocAsync"), driver_log.of("cuMemsetD8Async")
    (freed,) = driver_log.of("cuMemFreeAsync")
    assert allocated.numbers[:2] == (plan.workspace.bytes, 0x123)
    assert cleared.numbers[1:4] == (0, plan.workspace.zero_bytes, 0x123)
    assert freed.numbers[:2] == (cleared.numbers[0], 0x123)


@pytest.mark.parametrize("deterministic", [False, True])
def test_struct_of_the_backward(driver_log: FakeDriver, deterministic: bool) -> None:
    strided = Tensor(SHAPE.of("query"), (200 * 512, 512, 128, 1), "bfloat16")
    problem, plan, bound = bound_of(
        "backward", query=strided, scale=0.3, mask=Causal(), num_splits_key=1, deterministic=deterministic
    )
    given = addresses(bound.tensor_names)
    workspace = aligned((bound.workspace_bytes,), np.uint8)
    bound(given, workspace=workspace.ctypes.data)
    for launch in driver_log.of("cuLaunchKernelEx"):
        struct = decode(plan.build, launch.parameters)
        assert {name: struct.pop(name) for name in given} == given
        for name, tensor in problem.tensors().items():
            steps = tuple(struct.pop(f"{name}_{axis}") for axis in ("batch", "row", "head"))
            assert steps == tensor.strides[:3]
        assert struct.pop("grad_output_column") == 1
        assert struct.pop("scale") == np.float32(0.3)
        assert struct.pop("scale_log2") == np.float32(0.3 / math.log(2))
        assert struct.pop("keep_scale") == 1.0
        for name, value in plan.params:
            assert struct.pop(name) == value
        buffers = {buffer.name: workspace.ctypes.data + buffer.offset for buffer in plan.workspace.buffers}
        assert {name: struct.pop(name) for name in buffers} == buffers
        assert set(struct.values()) == {0}, "fields of features that the problem does not have"
    assert dict(plan.params)["num_splits_key"] == 1
    assert not workspace[: plan.workspace.zero_bytes].any()
    assert not driver_log.of("cuMemAllocAsync"), "the caller's workspace is used"


def test_calls_do_not_share_addresses(driver_log: FakeDriver) -> None:
    _, plan, bound = bound_of("forward")
    first = addresses(bound.tensor_names)
    second = {name: address + 0x100000 for name, address in first.items()}
    for given in (first, second):
        bound(given)
    seen = [decode(plan.build, call.parameters)["value"] for call in driver_log.of("cuLaunchKernelEx")]
    assert seen == [first["value"], second["value"]]


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_later_calls_are_one_graph_with_the_same_bytes(driver_log: FakeDriver, arch: str) -> None:
    """For every sequence of addresses and workspaces, a graph passes the parameters that a first launch would."""
    problem, plan = plan_of("backward", arch=arch, shape=dataclasses.replace(SHAPE, head_dim_value=64))
    bound = bind(artifact(plan.build), plan, problem)
    first = addresses(bound.tensor_names)
    second = {name: address + 0x100000 for name, address in first.items()}
    spaces = [aligned((bound.workspace_bytes,), np.uint8) for _ in range(2)]
    calls = [(first, 0), (second, 0), (first, 0), (first, 1), (first, 1), (second, 1), (first, 0)]
    for number, (given, space) in enumerate(calls):
        driver_log.clear()
        bound(given, 0x123, workspace=spaces[space].ctypes.data)
        assert len(driver_log.of("cuGraphLaunch")) == (number > 0), "the first call launches kernel by kernel"
        memsets = ["cuMemsetD8Async"] if plan.workspace.zero_bytes else []
        assert driver_log.names[-3 - len(memsets) :] == [*memsets, *["cuLaunchKernelEx"] * 3]
        found = [(c.text, c.grid, c.block, c.parameters, c.stream) for c in driver_log.of("cuLaunchKernelEx")]
        driver_log.clear()
        fresh = bind(artifact(plan.build), plan, problem)
        fresh(given, 0x123, workspace=spaces[space].ctypes.data)
        expected = [(c.text, c.grid, c.block, c.parameters, c.stream) for c in driver_log.of("cuLaunchKernelEx")]
        assert found == expected, number
    driver_log.clear()
    bound(first, 0x123, workspace=spaces[0].ctypes.data)
    assert driver_log.of("cuGraphExecKernelNodeSetParams") == [], "nothing has changed"


def test_blocks_of_a_cluster_are_launched_together(driver_log: FakeDriver) -> None:
    shape = Shape(1, 64, 300, 2, 256, 256)
    problem = Problem.dense("backward", shape, "bfloat16", Causal())
    plan = plans(problem, "sm_90a", 132)[0]
    bound = bind(artifact(plan.build), plan, problem)
    for _ in range(2):
        driver_log.clear()
        bound(addresses(bound.tensor_names), 0x123)
        assert [(call.grid[0], call.cluster) for call in driver_log.of("cuLaunchKernelEx")][1] == (12, 2)
        assert [call.cluster for call in driver_log.of("cuLaunchKernelEx")] == [1, 2, 1]
    assert len(driver_log.of("cuGraphLaunch")) == 1


def test_default_scale(driver_log: FakeDriver) -> None:
    _, plan, bound = bound_of("forward")
    bound(addresses(bound.tensor_names))
    struct = decode(plan.build, driver_log.of("cuLaunchKernelEx")[0].parameters)
    assert struct["scale"] == np.float32(1 / 8)
    assert struct["scale_log2"] == np.float32(math.log2(math.e) / 8)


def test_cubin_is_loaded_once_per_device(driver_log: FakeDriver) -> None:
    problem, plan = plan_of("forward", dtype="float16", arch="sm_86")
    made = artifact(plan.build)
    _, plan_90 = plan_of("forward", dtype="float16")
    for _ in range(2):
        bind(made, plan, problem, device=1)
        bind(artifact(plan_90.build), plan_90, problem, device=0)
    assert len(driver_log.of("cuLibraryLoadData")) == 2


def test_another_device_s_context_is_used(driver_log: FakeDriver) -> None:
    problem, plan = plan_of("forward", arch="sm_80")
    small = dataclasses.replace(plan.launches[0], shared_memory_bytes=1024)
    plan = dataclasses.replace(plan, launches=(small,))
    bound = bind(artifact(plan.build), plan, problem, device=1)
    bound(addresses(bound.tensor_names))
    assert driver_log.of("cuLaunchKernelEx")[0].numbers[9] == 0xC1


def test_only_clusters_are_launch_attributes(driver_log: FakeDriver) -> None:
    _, plan = plan_of("forward", "sm_90")
    for cluster, count in ((1, 0), (2, 1)):
        launched = kernel_launch.KernelLaunch(0x10, dataclasses.replace(plan.launches[0], cluster=cluster), 0x20)
        assert launched._config.numAttrs == count


@pytest.mark.parametrize(("static", "counted"), [(0, 0), (1000, 0), (1024, 0), (1536, 512)])
def test_the_driver_s_reserved_shared_memory_does_not_count(
    driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch, static: int, counted: int
) -> None:
    problem, plan = plan_of("forward", "sm_90")
    made = artifact(plan.build)
    kernels = tuple(dataclasses.replace(kernel, static_shared_memory_bytes=static) for kernel in made.kernels)
    asked = []
    monkeypatch.setattr(driver, "allow_shared_memory", lambda *given: asked.append(given[3]))
    bind(dataclasses.replace(made, kernels=kernels), plan, problem)
    assert asked == [counted]


def test_no_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="plans is empty: at least one is needed"):
        first_available((), artifact)


def test_empty_plan_does_nothing(driver_log: FakeDriver) -> None:
    problem = Problem.dense("forward", dataclasses.replace(SHAPE, num_keys=0), "float16")
    from cutlass_py_attn.plan.planner import plan_forward

    plan = plan_forward(problem, "sm_90")
    bound = bind(artifact(plan.build), plan, problem)
    driver_log.clear()
    bound(dict.fromkeys(bound.tensor_names, 0))
    assert driver_log.calls == []


def test_component_gemm_with_tensor_maps(driver_log: FakeDriver) -> None:
    _, forward = plan_of("forward", arch="sm_90a")
    build = dataclasses.replace(forward.build, kind="component_gemm", family="sm90", component_gemm="matmul_qk")
    maps = (TensorMap("a", (64, 64), (64,), (64, 64), 128), TensorMap("b", (64, 128), (64,), (64, 128), 128))
    launch = Launch(f"{build.symbol}_0", (2, 1, 1), (128, 1, 1), 0, maps)
    plan = Plan(build, (launch,), Workspace(), (("tiles", 5),), "")
    bound = bind(artifact(build), plan)
    assert bound.tensor_names == ("a", "b", "c")
    given = addresses(bound.tensor_names)
    bound(given)
    bound(given)
    bound({**given, "b": 0x9000})
    last = driver_log.of("cuLaunchKernelEx")[-1].parameters
    assert len(last) == 2 * abi.TENSOR_MAP_BYTES + 32
    assert np.frombuffer(last, "<u8")[[0, 16]].tolist() == [given["a"], 0x9000]
    assert decode(build, last) == {**given, "b": 0x9000, "tiles": 5}


def test_stale_artifacts_are_refused(driver_log: FakeDriver) -> None:
    problem, plan = plan_of("forward")
    _, other = plan_of("forward", mask=Causal())
    with pytest.raises(Stale, match="built from another plan than fwd_sm80_bf16_d64v32_full"):
        bind(artifact(other.build), plan, problem)
    packed = abi.numpy_struct(abi.FORWARD).itemsize
    with pytest.raises(Stale, match=rf"the artifact's parameters have \(152,\) bytes, the plan has \({packed},\)"):
        bind(artifact(plan.build, (152,)), plan, problem)
    with pytest.raises(Stale, match=rf"the driver reads parameters of \(152,\) bytes, the plan has \({packed},\)"):
        bind(artifact(plan.build, driver_sizes=(152,)), plan, problem)


def test_wrong_architecture_names_both(driver_log: FakeDriver) -> None:
    problem, plan = plan_of("forward", arch="sm_90")
    with pytest.raises(Stale, match=r"is built for sm_90: fake GPU 1 has compute capability 8.6"):
        bind(artifact(plan.build), plan, problem, device=1)


def test_too_much_shared_memory(driver_log: FakeDriver) -> None:
    problem, plan = plan_of("backward", arch="sm_80")
    assert plan.build.shared_memory_bytes > 101376
    with pytest.raises(DoesNotFit, match="fake GPU 1 allows 101376"):
        bind(artifact(plan.build), plan, problem, device=1)


def test_problem_of_another_kind(driver_log: FakeDriver) -> None:
    problem, plan = plan_of("forward")
    with pytest.raises(Stale, match="needs the strides and scale of its problem"):
        bind(artifact(plan.build), plan)
    backward, _ = plan_of("backward")
    with pytest.raises(Stale, match="the plan is a forward plan"):
        bind(artifact(plan.build), plan, backward)
    with pytest.raises(NoDevice, match="device = 9"):
        bind(artifact(plan.build), plan, problem, device=9)


BIAS = Tensor.contiguous(SHAPE.bias, "bfloat16")
ODD_BIAS = dataclasses.replace(BIAS, alignment=4)
KEY = Tensor.contiguous(SHAPE.of("key"), "bfloat16")
SINKS = Tensor.contiguous((3,), "float32")
OTHER_PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "mask": ({}, {"mask": Causal()}, ["mask", "window_right"]),
    "alignment of the mask": ({"mask": Causal()}, {"mask": CausalBottomRight()}, ["bottom_right"]),
    "window": ({"mask": Causal(5)}, {"mask": Causal(6)}, ["window_left"]),
    "lengths": ({}, {"shape": dataclasses.replace(SHAPE, num_keys=17)}, ["num_keys"]),
    "heads": ({}, {"shape": dataclasses.replace(SHAPE, num_heads_key=1)}, ["features", "group"]),
    "features": ({}, {"softcap": 2.0}, ["features"]),
    "dropout": ({"dropout_p": 0.5}, {"dropout_p": 0.25}, ["dropout_threshold"]),
    "gradients": (
        {"sinks": SINKS},
        {"sinks": SINKS, "grad_sinks": SINKS, "grad_value": None},
        ["gradients"],
    ),
    "reduction of a gradient": (
        {"bias": BIAS, "grad_bias": BIAS},
        {"bias": BIAS, "grad_bias": dataclasses.replace(BIAS, shape=(1, 3, 200, 300))},
        ["grad_bias_mode"],
    ),
    "rows": ({}, {"key": dataclasses.replace(KEY, alignment=8)}, ["rows"]),
    "bias": ({"bias": BIAS}, {"bias": ODD_BIAS}, ["bias"]),
    "gradient of the bias": (
        {"bias": BIAS, "grad_bias": BIAS},
        {"bias": BIAS, "grad_bias": ODD_BIAS},
        ["grad_bias"],
    ),
}


@pytest.mark.parametrize(("planned", "given", "named"), OTHER_PLANS.values(), ids=OTHER_PLANS)
def test_problem_of_another_plan(
    driver_log: FakeDriver, planned: dict[str, Any], given: dict[str, Any], named: list[str]
) -> None:
    _, plan = plan_of("backward", **planned)
    other, _ = plan_of("backward", **given)
    with pytest.raises(Stale) as caught:
        bind(artifact(plan.build), plan, other)
    lines = str(caught.value).splitlines()
    assert [line.removeprefix("problem").lstrip(".'s").split()[0] for line in lines] == named
    assert all(line.endswith("; plan this problem") for line in lines)


def test_total_tiles_of_another_plan(driver_log: FakeDriver) -> None:
    """The number of tokens decides the workspace size; of the struct's fields only total_tiles depends on it."""
    shapes = [Shape(2, 100, 150, 3, 64, 64, tokens=(tokens, 300)) for tokens in (200, 900)]
    (_, plan), (longer, _) = (plan_of("backward", shape=shape) for shape in shapes)
    with pytest.raises(Stale, match=r"problem.total_tiles = \d+: the plan has \d+; plan this problem"):
        bind(artifact(plan.build), plan, longer)


def test_a_scale_of_0_by_which_the_kernel_would_divide(driver_log: FakeDriver) -> None:
    problem = Problem.dense("backward", Shape(4, 4096, 4096, 16, 128, 128), "bfloat16")
    plan = plans(problem, "sm_90a")[0]
    assert plan.build.variant == "ds_registers"
    with pytest.raises(Stale, match=r"problem.scale = 0: the plan's kernel divides by the scale; plan this problem"):
        bind(artifact(plan.build), plan, problem.replace(scale=0.0))


def test_wrong_pointers_are_all_named(driver_log: FakeDriver) -> None:
    _, _, bound = bound_of("forward")
    given = addresses(bound.tensor_names)
    del given["key"]
    driver_log.clear()
    with pytest.raises(NotSupported) as caught:
        bound({**given, "value": 0x1008, "query": 0, "grad_key": 0x1000}, workspace=0x11)
    assert len(caught.value.reasons) == 5
    assert [reason.split()[0] for reason in caught.value.reasons] == [
        "key", "grad_key", "query", "value", "workspace",
    ]  # fmt: skip
    assert driver_log.calls == []


@pytest.mark.parametrize("number", [-1, 2**64])
def test_numbers_have_64_bits(driver_log: FakeDriver, number: int) -> None:
    _, _, bound = bound_of("forward", dropout_p=0.5)
    given = {**addresses(bound.tensor_names), "philox_offset": 0}
    driver_log.clear()
    with pytest.raises(NotSupported, match=rf"philox_seed = {number} \(int\): must be an int from 0"):
        bound({**given, "philox_seed": number})
    with pytest.raises(NotSupported, match=r"query = .*: must be a device address"):
        bound({**given, "query": number})
    assert driver_log.names == []
    bound({**given, "philox_seed": 2**64 - 1})
    assert len(driver_log.of("cuLaunchKernelEx")) == 1


def test_out_of_memory_says_how_much_and_what_for(driver_log: FakeDriver) -> None:
    _, plan, bound = bound_of("backward")
    driver_log.fail("cuMemAllocAsync", 2)
    text = f"for the workspace of {plan.symbol} \\({plan.workspace.bytes} bytes\\): CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(DriverError, match=text):
        bound(addresses(bound.tensor_names))


@pytest.mark.parametrize("call", ["cuMemsetD8Async", "cuLaunchKernelEx"])
def test_failed_launch_frees_the_workspace(driver_log: FakeDriver, call: str) -> None:
    _, _, bound = bound_of("backward")
    driver_log.fail(call, 400)
    with pytest.raises(DriverError, match=f"{call}.*CUDA_ERROR_INVALID_HANDLE: .*closed"):
        bound(addresses(bound.tensor_names))
    assert len(driver_log.of("cuMemFreeAsync")) == 1
    bound(addresses(bound.tensor_names))


@pytest.mark.parametrize(
    ("compute_capability", "arch"),
    [
        ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_87"), ((8, 9), "sm_89"), ((9, 0), "sm_90"),
        ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((12, 1), "sm_120"),
    ],
)  # fmt: skip
def test_generic_arch(compute_capability: tuple[int, int], arch: str) -> None:
    assert portable_arch(compute_capability) == arch


@pytest.mark.parametrize("compute_capability", [(7, 5), (11, 0)])
def test_no_arch(compute_capability: tuple[int, int]) -> None:
    with pytest.raises(NotSupported, match=r"no target runs on it; allowed are sm_80, .*use another GPU"):
        portable_arch(compute_capability)


@pytest.mark.parametrize("name", ["bf16_d32_s8192_b4_h32_causal_scale0", "bf16_d96_s8192_b4_h16_full_scale0"])
def test_a_plan_takes_its_own_scale_of_0(name: str) -> None:
    """Variant ds_registers divides by the scale with 128 columns alone."""
    problem = parse(name).problem("backward")
    plan = planner.plan(problem, "sm_90a", 132)
    assert plan.build.variant == "ds_registers"
    assert not [*binding._problem_mismatches(plan, problem)]
