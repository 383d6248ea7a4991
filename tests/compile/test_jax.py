"""Tests of attention in JAX: values, gradients and transformations by the reference; launches on the fake driver."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.errors import NoDevice, NotSupported, Stale
from cutlass_py_attn.plan.performance import PerformanceWarning
from cutlass_py_attn.plan.planner import plan_backward
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.score_terms.dropout import Dropout
from tests.cases.distance_squared import distance_squared
from tests.support import crafted_json, fakes
from tests.support.c_compiler import compiler
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact, decode
from tests.support.refusals import expect_raised

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles in half the time
jnp = jax.numpy

import cutlass_py_attn.jax as attention_module  # noqa: E402
from cutlass_py_attn.jax import attention, calls, export_checks, functions, handler, merge_states, payload, primitive  # noqa: E402

B, MQ, MK, H, D = 2, 13, 17, 4, 8
KEY = jax.random.key(0)
ARGUMENTS = (0, 1, 2)
CAUSAL = Causal()


def draw(number: int, *shape: int, dtype: Any = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32), dtype)


def operands(heads_key: int = H, dtype: Any = "float32") -> tuple[Any, Any, Any]:
    return (
        draw(1, B, MQ, H, D, dtype=dtype),
        draw(2, B, MK, heads_key, D, dtype=dtype),
        draw(3, B, MK, heads_key, D, dtype=dtype),
    )


def test_options_have_the_defaults_of_the_other_functions() -> None:
    others = {field.name: field.default for field in dataclasses.fields(Options)}
    declared = inspect.signature(attention).parameters
    shared = [name for name in declared if others.get(name, dataclasses.MISSING) is not dataclasses.MISSING]
    assert {"scale", "softcap", "sinks", "sequences", "deterministic", "backend"} <= set(shared)
    assert {name: declared[name].default for name in shared} == {name: others[name] for name in shared}
    assert (declared["mask"].default, declared["dropout_p"].default) == (Full(), 0.0)


def plain(query: Any, key: Any, value: Any, mask: Any = CAUSAL, bias: Any = None, sinks: Any = None) -> Any:
    """Attention in jax.numpy."""
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") / np.sqrt(query.shape[3])
    scores = scores if bias is None else scores + bias
    scores = jnp.where(mask.materialise(query.shape[1], key.shape[1]), scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], -1)
    weights = jax.nn.softmax(scores, -1)[..., : key.shape[1]]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")


ours = functools.partial(attention, mask=Causal(), backend="reference")


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss with a different weight for each element of the output."""
    return lambda *arrays: jnp.sum(jnp.sin(jnp.arange(B * MQ * H * D)).reshape(B, MQ, H, D) * function(*arrays))


def expect_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one, "f4"), np.asarray(other, "f4"), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("mask", [Full(), Causal(), Causal(5), CausalBottomRight(), Window(4, 2)], ids=repr)
@pytest.mark.parametrize("heads_key", [H, 2])
def test_values_and_gradients(mask: Any, heads_key: int) -> None:
    arrays = operands(heads_key)
    expect_close(jax.jit(functools.partial(ours, mask=mask))(*arrays), plain(*arrays, mask=mask))
    found = jax.jit(jax.grad(loss(functools.partial(ours, mask=mask)), ARGUMENTS))(*arrays)
    expect_close(found, jax.grad(loss(functools.partial(plain, mask=mask)), ARGUMENTS)(*arrays))


@pytest.mark.parametrize("shape", [(1, 1, MQ, MK), (B, H, MQ, MK), (1, H, 1, MK)], ids=str)
def test_gradient_of_a_bias_that_broadcasts(shape: tuple[int, ...]) -> None:
    arrays = (*operands(), draw(4, *shape))
    found = jax.grad(loss(lambda q, k, v, b: ours(q, k, v, bias=b)), (0, 1, 2, 3))(*arrays)
    expect_close(found, jax.grad(loss(lambda q, k, v, b: plain(q, k, v, bias=b)), (0, 1, 2, 3))(*arrays))


def test_gradient_of_sinks() -> None:
    arrays = (*operands(), draw(4, H))
    found = jax.grad(loss(lambda q, k, v, s: ours(q, k, v, sinks=s)), 3)(*arrays)
    expect_close(found, jax.grad(loss(lambda q, k, v, s: plain(q, k, v, sinks=s)), 3)(*arrays))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays(dtype: str) -> None:
    arrays = operands(dtype=dtype)
    output, pull = jax.vjp(ours, *arrays)
    assert [array.dtype for array in (output, *pull(output))] == [dtype] * 4


def items(function: Callable[..., Any], axes: tuple[int | None, ...], *arrays: Any) -> Any:
    """Applies the function to one element after the other, as vmap is defined."""
    count = next(array.shape[0] for array, axis in zip(arrays, axes, strict=True) if axis == 0)
    each = [
        function(*(array[i] if axis == 0 else array for array, axis in zip(arrays, axes, strict=True)))
        for i in range(count)
    ]
    return jax.tree.map(lambda *results: jnp.stack(results), *each)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (None, 0, 0, None), (0, 0, 0, None)], ids=str)
@pytest.mark.parametrize("batch", [1, B])
def test_vmap_joins_the_batch(axes: tuple[int | None, ...], batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward are one call each, whichever operands have the axis and however the bias broadcasts."""
    arrays = (*operands(), draw(4, batch, H, MQ, MK))
    stacked = [a if axis is None else jnp.stack([a, 2 * a, -a]) for a, axis in zip(arrays, axes, strict=True)]
    gradients = jax.grad(loss(lambda q, k, v, b: ours(q, k, v, bias=b)), (0, 1, 2, 3))
    expected = jax.block_until_ready(items(gradients, axes, *stacked))  # computed before the calls are counted
    counted: list[tuple[int, ...]] = []
    monkeypatch.setattr(calls.cpu_backend, "compute", functools.partial(_counting, counted, calls.cpu_backend.compute))
    expect_close(jax.vmap(gradients, axes)(*stacked), expected)
    assert (3 * B, MQ, H, D) in counted
    assert len(counted) == 2


def _counting(counted: list[tuple[int, ...]], real: Callable[..., Any], request: Any) -> Any:
    counted.append(request.arrays["query"].shape)
    return real(request)


def test_vmap_over_lengths_and_over_keys_of_dropout() -> None:
    """Elements that cannot join the batch run one by one, with the results of single calls."""
    query, key, value = (draw(i, 3, 1, 20, H, D) for i in range(3))
    bounds = jnp.array([[0, 4, 20], [0, 9, 15], [0, 0, 7]])

    def packed(q: Any, k: Any, v: Any, starts: Any) -> Any:
        return ours(q, k, v, sequences=VariableLength(starts, starts, 20, 20))

    expect_close(jax.vmap(packed)(query, key, value, bounds), items(packed, (0, 0, 0, 0), query, key, value, bounds))
    keys = jax.random.split(KEY, 3)

    def dropped(q: Any, k: Any, v: Any, dropout_key: Any) -> Any:
        return ours(q, k, v, dropout_p=0.5, dropout_key=dropout_key)

    one_by_one = [dropped(query[i], key[i], value[i], keys[i]) for i in range(3)]
    expect_close(jax.vmap(dropped)(query, key, value, keys), jnp.stack(one_by_one))


def test_dropout_draws_the_same_in_both_directions() -> None:
    """Compares a Jacobian, whose backward alone is under vmap, with differences of the function."""
    query, key, value = (array[:1, :3, :2] for array in operands())

    def function(v: Any) -> Any:
        return ours(query, key, v, dropout_p=0.5, dropout_key=KEY)

    jacobian = jax.jacrev(function)(value)
    direction = draw(9, *value.shape)
    expect_close(jnp.tensordot(jacobian, direction, 4), function(value + direction) - function(value))
    assert bool((function(value) != ours(query, key, value)).any())
    assert bool((function(value) == function(value)).all())


@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_shard_map(axis: int) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = jax.sharding.PartitionSpec(*(["x" if i == axis else None for i in range(4)]))
    sharded = jax.shard_map(ours, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    arrays = operands()
    for call in (sharded, jax.jit(sharded)):
        expect_close(call(*arrays), ours(*arrays))
    found = jax.jit(jax.grad(loss(sharded), ARGUMENTS))(*arrays)
    expect_close(found, jax.grad(loss(ours), ARGUMENTS)(*arrays))


def test_no_keys() -> None:
    query, key, value = operands()
    for call in (ours, functools.partial(attention, kernels=artifact, arch="sm_90")):
        output, pull = jax.vjp(call, query, key[:, :0], value[:, :0])
        assert not output.any()
        assert [array.shape for array in pull(output)] == [query.shape, key[:, :0].shape, key[:, :0].shape]


# Tracing, which neither plans nor compiles


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, and nothing traced or planned before."""

    def absent(ordinal: int) -> Any:
        raise NoDevice("there is none")

    monkeypatch.setattr(primitive.driver, "device", absent)
    primitive.payload_of.cache_clear()
    functions._traced.clear_cache()


def unavailable(build: Any) -> Any:
    """Kernels of which nothing may ask for one."""
    raise AssertionError(f"{build.symbol} was wanted while tracing")


def squares(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: jnp.sum(function(*arrays).astype(jnp.float32) ** 2)


def traces(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Returns what JAX does with a function before it lowers it, by name."""
    gradients = jax.grad(squares(function), ARGUMENTS)
    return {
        "eval_shape": functools.partial(jax.eval_shape, function),
        "jit.trace": jax.jit(function).trace,
        "jit.eval_shape": jax.jit(function).eval_shape,
        "grad": functools.partial(jax.eval_shape, gradients),
        "make_jaxpr of grad": jax.make_jaxpr(gradients),
        "checkpoint": functools.partial(jax.eval_shape, jax.grad(squares(jax.checkpoint(function)), ARGUMENTS)),
        "vmap": lambda *arrays: jax.eval_shape(jax.vmap(gradients), *(jnp.stack([a, a]) for a in arrays)),
    }


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("what", traces(plain))
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5, "dropout_key": KEY}], ids=len)
def test_tracing_needs_neither_kernels_nor_a_gpu(what: str, options: dict[str, Any]) -> None:
    found = traces(functools.partial(attention, mask=CAUSAL, kernels=unavailable, **options))[what](*operands())
    if what == "eval_shape":
        assert (found.shape, found.dtype) == ((B, MQ, H, D), "float32")
    if what == "grad":
        assert [each.shape for each in found] == [array.shape for array in operands()]


@pytest.mark.usefixtures("no_gpu")
def test_lowering_without_a_gpu_needs_arch() -> None:
    traced = jax.jit(functools.partial(attention, kernels=artifact)).trace(*operands())
    with pytest.raises(NoDevice, match=r'there is none; .*pass arch="sm_90"'):
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.usefixtures("no_gpu")
def test_kernels_are_compiled_when_the_program_is_lowered() -> None:
    builds: list[str] = []

    def kernels(build: Any) -> Any:
        builds.append(build.kind)
        return artifact(build)

    call = functools.partial(attention, mask=CAUSAL, kernels=kernels, arch="sm_90")
    traced = jax.jit(jax.grad(lambda *arrays: call(*arrays).sum())).trace(*operands())
    assert builds == []
    traced.lower()
    assert builds == ["forward", "backward"]
    traced.lower()
    assert builds == ["forward", "backward"], "a payload is packed once"


def test_errors_of_a_missing_kernel_are_those_of_the_package() -> None:
    def kernels(build: Any) -> Any:
        raise Stale(f"{build.symbol}: not in the folder")

    with pytest.raises(Stale, match="not in the folder"):
        jax.jit(functools.partial(attention, kernels=kernels, arch="sm_90")).lower(*operands())


def test_kernels_that_are_none_are_refused() -> None:
    """Those that `kernels` returns, when a program is lowered."""
    with pytest.raises(NotSupported, match=r"kernels\(fwd_sm\w+\) = None: must be an Artifact; pass a function"):
        jax.jit(functools.partial(attention, kernels=lambda build: None, arch="sm_90")).lower(*operands())
    output, logsumexp = jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 2, 32))
    merge = functools.partial(merge_states, kernels=lambda build: 5, arch="sm_90")
    with pytest.raises(NotSupported, match=r"kernels\(merge_sm\w+\) = 5 \(int\): must be an Artifact; pass a"):
        jax.jit(merge).lower(output, logsumexp, output, logsumexp)


def test_a_mesh_with_explicit_axes() -> None:
    """A program of arrays that are whole on every device is traced and lowered, and so is its result."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        traced = jax.jit(gpu_call).trace(*operands())
        assert traced.out_info.sharding.spec == jax.sharding.PartitionSpec(*(None,) * 4)
        traced.lower()


# Launches for a GPU


def gpu_call(*arrays: Any, **options: Any) -> Any:
    """Attention with made-up kernels for an H200, without a GPU."""
    return attention(*arrays, **{"mask": Causal(), "kernels": artifact, "arch": "sm_90", **options})


def exported(function: Callable[..., Any], *arrays: Any) -> Any:
    return jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=export_checks())(*arrays)


def packed_payloads(monkeypatch: pytest.MonkeyPatch) -> list[payload.Payload]:
    """Returns a list that gets every payload that is packed later, after a round trip through its bytes."""
    found: list[payload.Payload] = []
    functions._traced.clear_cache()
    primitive.payload_of.cache_clear()
    real = payload.Payload.pack

    def pack(self: payload.Payload) -> bytes:
        data = real(self)
        found.append(payload.unpack(data))
        assert found[-1] == self
        return data

    monkeypatch.setattr(payload.Payload, "pack", pack)
    return found


@pytest.mark.parametrize("name", ["attention", "dot_product_attention", "context_parallel_attention"])
def test_symbolic_sizes_are_refused_in_one_sentence(name: str) -> None:
    sizes = jax.export.symbolic_shape("b, 16, 8, 64")
    shape, lengths = jax.ShapeDtypeStruct(sizes, "float16"), jax.ShapeDtypeStruct(sizes[:1], "int32")

    def call(query: Any, lengths: Any) -> Any:
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
        options: dict[str, Any] = {
            "attention": {},
            "dot_product_attention": {"key_value_seq_lengths": lengths},
            "context_parallel_attention": {"context_axis": "x", "mesh": mesh},
        }[name]
        return getattr(attention_module, name)(query, query, query, **options)

    with pytest.raises(NotSupported) as refusal:
        jax.export.export(jax.jit(call), platforms=["cuda"])(shape, lengths)
    assert refusal.value.reasons[0] == (
        "query.shape = (b, 16, 8, 64) (tuple): must have no symbolic size, b, for a call is planned for its sizes; "
        "export a program for each of them"
    )


def test_a_slow_call_warns_when_it_is_lowered_and_is_lowered_all_the_same() -> None:
    """Once for a plan: a second lowering neither warns nor, where warnings are errors, fails again."""
    primitive.payload_of.cache_clear()
    shapes = (1, 1, 16, 576), (1, 4096, 1, 576), (1, 4096, 1, 512)
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    options = {"mask": Full(), "arch": "sm_90"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        with pytest.raises(PerformanceWarning, match="times as fast with a latent cache"):
            exported(lambda *given: gpu_call(*given, **options), *arrays)
        exported(lambda *given: gpu_call(*given, **options), *arrays)
    primitive.payload_of.cache_clear()
    with pytest.warns(PerformanceWarning) as given:
        exported(lambda *given: gpu_call(*given, **options), *arrays)
    assert [warning.filename for warning in given] == [__file__]


@pytest.fixture
def on_fake_driver(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """XLA's CPU client calls the CUDA handler, with a made-up stream and the fake driver."""
    monkeypatch.setattr(handler, "_stream", lambda *_: 0x77)
    monkeypatch.setattr(handler, "_payloads", {})
    monkeypatch.setattr(primitive, "TARGET", f"{handler.TARGET}_fake_driver")
    functions._traced.clear_cache()
    return driver_log


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    target = f"{handler.TARGET}_fake_driver"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler._handlers["CUDA"]), platform="cpu")


def structs(log: FakeDriver, build: Any) -> list[dict[str, float]]:
    return [decode(build, call.parameters) for call in log.of("cuLaunchKernelEx")]


@pytest.mark.parametrize(("dtype", "clears"), [("bfloat16", 0), ("float32", 1)])  # one block per head; split
def test_handler_launches_the_plan(
    dtype: str, clears: int, on_fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_payloads(monkeypatch)
    output, pull = jax.vjp(gpu_call, *operands(dtype=dtype))
    pull(output)[0].block_until_ready()
    forward, backward = packed
    launches = on_fake_driver.of("cuLaunchKernelEx")
    assert [call.text for call in launches] == [each.symbol for p in packed for each in p.plan.launches]
    assert {call.stream for call in launches} == {0x77}
    assert on_fake_driver.of("cuMemAllocAsync") == [], "the workspace is XLA's"
    cleared = [call.numbers[2] for call in on_fake_driver.of("cuMemsetD8Async")]
    assert (backward.plan.workspace.zero_bytes > 0) == clears
    assert cleared == [backward.plan.workspace.zero_bytes] * clears
    (first,) = structs(on_fake_driver, forward.plan.build)[:1]
    last = decode(backward.plan.build, launches[-1].parameters)
    assert first["num_queries"] == MQ
    assert last["logsumexp"] == first["logsumexp"], "the forward's buffer"
    assert len({first[name] for name in ("query", "key", "value", "output", "logsumexp")}) == 5


def test_handler_loads_a_kernel_once_in_relaxed_capture_mode(on_fake_driver: FakeDriver) -> None:
    run = jax.jit(gpu_call)
    arrays = operands(dtype="float16")
    for _ in range(3):
        run(*arrays).block_until_ready()
    assert len(on_fake_driver.of("cuLaunchKernelEx")) == 3
    assert [call.numbers[0] for call in on_fake_driver.of("cuThreadExchangeStreamCaptureMode")] == [2, 0]


def test_a_call_outside_of_jit_is_launched(on_fake_driver: FakeDriver) -> None:
    arrays = operands(dtype="float16")
    with jax.disable_jit():
        gpu_call(*arrays).block_until_ready()
    assert len(on_fake_driver.of("cuLaunchKernelEx")) == 1


def test_sequences_fill_the_rows_outside(on_fake_driver: FakeDriver) -> None:
    starts = np.array([0, 5, 13])
    query, key, value = (draw(i, 1, 13, H, D) for i in range(3))
    output = gpu_call(query, key, value, sequences=VariableLength(starts, starts, 8, 8))
    assert not np.asarray(output).any(), "zeros, for the fake driver's kernels write nothing"
    assert on_fake_driver.names.index("cuMemsetD2D32Async") < on_fake_driver.names.index("cuLaunchKernelEx")


@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "cuLibraryLoadData"])
def test_an_error_of_the_driver_reaches_the_caller(on_fake_driver: FakeDriver, name: str) -> None:
    on_fake_driver.fail(name, 2)
    head_dim = {"cuLaunchKernelEx": 16, "cuLibraryLoadData": 24}[name]  # kernels that no other test has loaded
    query = draw(1, 1, 40, 1, head_dim)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"cutlass_py_attn: {name}.*CUDA_ERROR_OUT_OF_MEMORY"):
        gpu_call(query, query, query).block_until_ready()


def test_host_operands_are_refused_where_they_run() -> None:
    functions._traced.clear_cache()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r'in host memory: must be on a CUDA device.*"reference"'):
        gpu_call(*operands()).block_until_ready()


def test_foreign_and_damaged_payloads_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_payloads(monkeypatch)
    exported(gpu_call, *operands())
    data = packed[0].pack()
    with pytest.raises(Stale, match="export the program again"):
        payload.unpack(b"something else")
    with pytest.raises(Stale, match="of another version"):
        payload.unpack(data[:-9])


def repacked(data: bytes, change: Callable[[Any], Any]) -> bytes:
    """Returns packed bytes whose JSON text is changed."""
    body = zlib.decompress(data[len(payload.FORMAT) :])
    (length,) = payload._LENGTH.unpack_from(body)
    start = payload._LENGTH.size
    found = json.loads(body[start : start + length])
    changed = change(found)
    text = changed if isinstance(changed, str) else json.dumps(changed or found)
    return payload.FORMAT + zlib.compress(payload._LENGTH.pack(len(text)) + text.encode() + body[start + length :])


@pytest.fixture(scope="module")
def packed_call() -> bytes:
    problem, plan = fakes.plan_of("forward", "sm_80")
    return payload.Payload(problem, plan, artifact(plan.build), ("query", "key", "value"), ("output",)).pack()


def test_payloads_of_another_version_are_stale(packed_call: bytes) -> None:
    """Kernels of swapped fields have the same sizes of parameters: the digest differs alone."""
    assert (
        payload.unpack(repacked(packed_call, lambda found: None)).artifact.abi
        == payload.unpack(packed_call).artifact.abi
    )
    other = repacked(packed_call, lambda found: found["artifact"].update(abi="0" * 64))
    with pytest.raises(Stale, match=r"other kernel parameters .*; export the program again with this version"):
        payload.unpack(other)
    earlier = repacked(packed_call, lambda found: found["artifact"].pop("abi") and None)
    with pytest.raises(Stale, match=r"missing fields \['abi'\].*: export the program again with this version"):
        payload.unpack(earlier)


def test_crafted_payloads_are_stale_or_of_no_effect(packed_call: bytes) -> None:
    wanted = payload.unpack(packed_call)
    body = zlib.decompress(packed_call[len(payload.FORMAT) :])
    (length,) = payload._LENGTH.unpack_from(body)
    found = json.loads(body[payload._LENGTH.size :][:length])
    stale = 0
    for what, changed in crafted_json.each(found, every=23):
        try:
            read = payload.unpack(repacked(packed_call, lambda found, changed=changed: changed))
        except Stale:
            stale += 1
            continue
        assert (read.artifact.cubin, read.artifact.abi) == (wanted.artifact.cubin, wanted.artifact.abi), what
    assert stale > 100
    with pytest.raises(Stale, match="nested"):
        payload.unpack(repacked(packed_call, lambda found: crafted_json.DEEP))


# Registered score terms


def test_a_registered_term_is_that_of_the_reference() -> None:
    slopes = jnp.linspace(-0.05, 0.02, H)
    distance = jnp.arange(MQ)[:, None] + MK - MQ - jnp.arange(MK)
    bias = slopes[:, None, None] * distance**2
    with distance_squared() as term:
        found = jax.value_and_grad(loss(functools.partial(ours, score_terms={term.name: slopes})), ARGUMENTS)(
            *operands()
        )
    expected = jax.value_and_grad(loss(functools.partial(plain, bias=bias)), ARGUMENTS)(*operands())
    expect_close(found, expected)


@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize("axis", [None, 0])
def test_vmap_joins_the_batch_of_a_registered_term(of_batch: bool, axis: int | None) -> None:
    slopes = draw(5, *((B,) if of_batch else ()), H) / 20
    stacked = slopes if axis is None else jnp.stack([slopes, -slopes, 2 * slopes])
    arrays = (*(jnp.stack([array, 2 * array, -array]) for array in operands()), stacked)
    with distance_squared() as term:

        def attend(query: Any, key: Any, value: Any, given: Any) -> Any:
            return ours(query, key, value, score_terms={term.name: given})

        gradients = jax.grad(loss(attend), ARGUMENTS)
        axes = (0, 0, 0, axis)
        batched = jax.make_jaxpr(jax.vmap(attend, axes))(*arrays)
        expect_close(jax.vmap(gradients, axes)(*arrays), items(gradients, axes, *arrays))
    assert str(batched).count("pure_callback[") == 1
    assert "scan[" not in str(batched), "one call, not one for each element"


def test_the_handler_passes_the_array_of_a_registered_term(
    on_fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with distance_squared() as term:
        packed = packed_payloads(monkeypatch)
        gpu_call(*operands(dtype="float16"), score_terms={term.name: jnp.ones((B, H))}).block_until_ready()
        (struct,) = structs(on_fake_driver, packed[0].plan.build)
    assert struct[term.name] not in (0, struct["query"])
    assert struct[f"{term.name}_batch"] == H


# Refused calls


def test_refusals_when_traced() -> None:
    arrays = operands()
    with pytest.raises(NotSupported) as caught:
        attention(*arrays, dropout_p=0.1, maks=Full(), mask="causal", backend="cpu")
    assert [reason.split()[0] for reason in caught.value.reasons] == ["option", "dropout_p", "mask", "backend"]
    with pytest.raises(NotSupported, match=r"value.dtype = 'bfloat16' .*: must be float32 as query"):
        jax.eval_shape(ours, *arrays[:2], arrays[2].astype("bfloat16"))
    with pytest.raises(NotSupported, match=r"scale = .*must be a number"):
        jax.jit(lambda *a: ours(*a[:3], scale=a[3]))(*arrays, 0.5)
    with pytest.raises(NotSupported, match="alibi_slopes is differentiated: must be a constant"):
        jax.grad(lambda slopes: ours(*arrays, alibi_slopes=slopes).sum())(jnp.ones(H))
    assert ours(*arrays, alibi_slopes=jnp.ones(H)).shape == (B, MQ, H, D)
    with pytest.raises(NotSupported, match=r"score_terms = 'distance_squared' .*: must be registered terms"):
        ours(*arrays, score_terms={"distance_squared": jnp.ones(H)})
    with distance_squared() as term:
        with pytest.raises(NotSupported, match="distance_squared is differentiated: must be a constant"):
            jax.grad(lambda slopes: ours(*arrays, score_terms={term.name: slopes}).sum())(jnp.ones(H))
        with pytest.raises(NotSupported, match=r"distance_squared = array of shape \(3,\)"):
            ours(*arrays, score_terms={term.name: jnp.ones(3)})


BAD_NUMBERS: dict[str, Any] = {"str": "2", "list": [2.0], "array": np.ones(2), "bool": True, "huge": 10**400}
BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{name} {kind}": ({name: value, "dropout_key": KEY}, f"{name} = ")
        for name in ("scale", "softcap", "dropout_p")
        for kind, value in BAD_NUMBERS.items()
    },
    **{f"{name} None": ({name: None}, f"{name} = None: must be an array") for name in ("query", "key", "value")},
    "query str": ({"query": "x"}, "query = 'x' (str): must be an array"),
    "key objects": ({"key": np.array([object()])}, "key = array of shape (1,) and dtype object"),
    "bias str": ({"bias": "x"}, "bias = 'x' (str): must be an array"),
    "deterministic": ({"deterministic": "no"}, "deterministic = 'no' (str): must be True or False"),
    "window float": ({"mask": Causal(3.0)}, "window_size = 3.0 (float)"),  # type: ignore[arg-type]
    "window list": ({"mask": Window([3], 0)}, "window_left = [3] (list)"),  # type: ignore[arg-type]
    "mask": ({"mask": "causal"}, "mask = 'causal' (str)"),
    "base mask": ({"mask": Causal.__base__()}, "mask = Mask() (cutlass_py_attn.problem.masks.Mask)"),  # type: ignore[misc]
    "kernels": ({"kernels": 5}, "kernels = 5 (int)"),
    "kernels without a hash": ({"kernels": type("F", (), {"__call__": artifact, "__hash__": None})()}, "be hashable"),
    "arch int": ({"arch": 90}, "arch = 90 (int)"),
    "arch list": ({"arch": ["sm_90"]}, "arch = ['sm_90'] (list)"),
    "arch unknown": ({"arch": "sm_10"}, "arch = 'sm_10' (str)"),
    "backend": ({"backend": 5}, "backend = 5 (int)"),
    "dropout_key": ({"dropout_p": 0.5, "dropout_key": "x"}, "dropout_key = 'x' (str)"),
    "sequences": ({"sequences": [0, 1]}, "sequences = [0, 1] (list)"),
    "longest sequence": ({"sequences": VariableLength(0, 0, True, "1")}, "max_seqlen_k = '1' (str)"),  # type: ignore[arg-type]
    "score_terms": ({"score_terms": [1]}, "score_terms = [1] (list)"),
    "tiny scale": ({"scale": 1e-34, "backend": "reference"}, "scale = 1e-34 (float)"),
}


@pytest.mark.parametrize(("changes", "given"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(driver_log: FakeDriver, changes: dict[str, Any], given: str) -> None:
    arguments = dict(zip(("query", "key", "value"), operands(), strict=True)) | changes
    with pytest.raises(NotSupported, match=re.escape(given)) as caught:
        attention(**arguments)
    assert all(re.fullmatch(r"(?s).+: .*must .+; .+", reason) or "arch" in reason for reason in caught.value.reasons)
    assert len(set(caught.value.reasons)) == len(caught.value.reasons)
    assert driver_log.names == []


def test_scalars_of_jax_are_numbers() -> None:
    """Of the call in JAX, of a Problem and of the two functions."""
    arrays, options = operands(), {"scale": 0.5, "softcap": 3.0}
    scalars: dict[str, Any] = {name: jnp.float32(number) for name, number in options.items()}
    expected = ours(*arrays, **options, mask=Window(4, 2))
    np.testing.assert_array_equal(expected, ours(*arrays, **scalars, mask=Window(jnp.int32(4), jnp.array(2))))  # type: ignore[arg-type]
    problem = Problem.dense("backward", Shape(2, 13, 17, 4, 8, 8), "float16", Causal(3))
    numbers: Any = {"scale": jnp.float32(0.5), "num_splits_key": jnp.int32(1), "dropout_p": jnp.float32(0.25)}
    changed = problem.replace(mask=Causal(jnp.int32(3)), deterministic=jnp.array(True), **numbers)  # type: ignore[arg-type]
    assert changed == problem.replace(scale=0.5, num_splits_key=1, dropout_p=0.25, deterministic=True)
    assert plan_backward(changed, "sm_90", jnp.int32(66)) == plan_backward(changed, "sm_90", 66)  # type: ignore[arg-type]
    on_host = [np.asarray(array) for array in arrays]
    of_ints = attention_forward(*on_host, scale=0.5, dropout=Dropout(0.25, 5, 7), backend="reference")
    given = Dropout(jnp.float32(0.25), jnp.uint32(5), jnp.array(7))  # type: ignore[arg-type]
    found = attention_forward(*on_host, scale=jnp.float32(0.5), dropout=given, backend="reference")
    np.testing.assert_array_equal(found[0], of_ints[0])


def test_the_training_example_without_a_gpu() -> None:
    path = Path(__file__).resolve().parents[2] / "examples/jax_training.py"
    losses, worst = runpy.run_path(str(path))["main"](steps=2, batch=2, length=12, backend="reference")
    assert all(2 < loss < 4 for loss in losses)
    assert losses[0] != losses[1]
    assert worst < 1e-5


def test_importing_loads_neither_driver_nor_compiler(tmp_path: Path) -> None:
    """With the handler in C too, which the import compiles."""
    code = (
        "import sys, cutlass_py_attn.jax; print([m for m in ('cutlass', 'cuda.bindings.driver') if m in sys.modules]);"
        "from cutlass_py_attn.jax import native_library as n; print(n.choice().reason)"
    )
    compiler("c")
    environment = {**os.environ, "CUTLASS_PY_ATTN_JAX_HANDLER": "native", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    (library,) = (tmp_path / "cutlass_py_attn_jax").iterdir()
    assert done.stdout.splitlines() == ["[]", str(library)]


def test_without_jax_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['jax'] = None; import cutlass_py_attn.jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'jax>=0.10' 'flatbuffers>=24'" in done.stderr.splitlines()[-1]


def test_the_benchmark_records_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two small cases by the reference in place of kernels; cuDNN is missing."""
    bench_jax = importlib.import_module("tools.bench.bench_jax")

    def ours(*arrays: Any, kernels: Any, **options: Any) -> Any:
        assert kernels.path == tmp_path
        return attention(*arrays, backend="reference", **options)

    cases = tuple(bench_jax.Case("float32", 1, 8, 1, 8, is_causal) for is_causal in (True, False))
    monkeypatch.setattr(bench_jax, "CASES", cases)
    monkeypatch.setattr(bench_jax, "SMALL", bench_jax.Case("float32", 1, 8, 1, 8, True))
    monkeypatch.setattr(bench_jax, "HOST_CALLS", 1)
    monkeypatch.setattr(bench_jax, "attention", ours)
    about = {"gpu": "none", "driver": "none", "date": "2026-11-22"}
    monkeypatch.setattr(bench_jax.record, "about_run", lambda: about)
    log = tmp_path / "jax.json"
    monkeypatch.setattr(sys, "argv", ["bench_jax", "--kernels", str(tmp_path), "--record", str(log)])
    assert bench_jax.main() == 0
    run = json.loads(log.read_text())
    assert run.keys() == {*about, "commit", "jax", "rows", "handler", "host"}
    printed = capsys.readouterr().out.splitlines()
    assert printed == [line for line in bench_jax.jax_table.table(run).splitlines()[2:] if line]
    assert [line.split(" | ")[0] for line in printed[2:4]] == [
        f"| float32, {mask}, batch 1, 8 tokens, 1 heads of 8" for mask in ("causal", "full")
    ]
    assert all(line.count("refused") == 2 for line in printed[2:4])
    chosen = importlib.import_module("cutlass_py_attn.jax.native_library").choice().name
    assert printed[4] == f"| small program, times in ms | ours ({chosen} handler) | cuDNN |"
    programs = [f"{name}{place}" for place in ("", ", 2 GPUs") for name in bench_jax.PROGRAMS]
    names = [f"| {name}{beside} " for name in programs for beside in ("", ", beside a busy thread")]
    assert [line.split("| ")[1] for line in printed[6:]] == [name[2:] for name in names]
    assert all(line.count("refused") == 1 for line in printed[6:])


def test_the_small_programs_are_a_part_of_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the handler of the process; without a file they are printed alone."""
    bench_jax = importlib.import_module("tools.bench.bench_jax")
    host = {"program": "forward", "gpus": 2, "busy_threads": 1, "ours_ms": 0.25, "cudnn_ms": None}
    monkeypatch.setattr(bench_jax, "host_rows", lambda _: iter([host]))
    monkeypatch.setattr(bench_jax, "row", lambda *_: pytest.fail("the first table was measured"))
    monkeypatch.setattr(bench_jax.record, "about_run", lambda: {"gpu": "none"})
    path = tmp_path / "two.json"
    path.write_text('{"jax": 1}')
    chosen = importlib.import_module("cutlass_py_attn.jax.native_library").choice().name
    for arguments in (["--host"], ["--host", str(path)]):
        monkeypatch.setattr(sys, "argv", ["bench_jax", *arguments])
        assert bench_jax.main() == 0
    found = json.loads(path.read_text())
    assert found.keys() == {"jax", f"{chosen} handler"}
    assert (found[f"{chosen} handler"]["handler"], found[f"{chosen} handler"]["host"]) == (chosen, [host])


def lengths(q: Any, k: Any, longest: tuple[int, int] = (412, 412), used: Any = None) -> VariableLength:
    return VariableLength(q, k, *longest, used)


RIGHT = np.array([0, 100, 512])
WRONG_LENGTHS: dict[str, tuple[VariableLength, str]] = {
    "beyond the tokens": (lengths(np.array([0, 900, 100]), RIGHT), "cu_seqlens_q: start with 0"),
    "keys": (lengths(RIGHT, np.array([0, 900, 100])), "cu_seqlens_k: start with 0"),
    "start": (lengths(np.array([1, 100, 512]), RIGHT), "cu_seqlens_q: start with 0"),
    "64 bits": (lengths(RIGHT, np.array([0, 100, 512 + 2**32])), "cu_seqlens_k: end at most at the 512 tokens"),
    "a list": (lengths([0, 900, 100], RIGHT), "cu_seqlens_q: start with 0"),
    "longest": (lengths(RIGHT, RIGHT, (412, 411)), "max_seqlen_k: at least the longest sequence, 412"),
    "used": (lengths(RIGHT, RIGHT, used=np.array([101, 412])), "seqused_k: from 0 to the keys"),
}


@pytest.mark.parametrize(("sequences", "expected"), WRONG_LENGTHS.values(), ids=WRONG_LENGTHS)
@pytest.mark.parametrize("how", ["eager", "jit", "grad", "vmap"])
def test_wrong_numpy_lengths_are_refused_when_traced(sequences: VariableLength, expected: str, how: str) -> None:
    """Nothing is planned, compiled or run: `kernels` fails."""

    def call(query: Any) -> Any:
        return attention(query, query, query, sequences=sequences, arch="sm_90", kernels=_no_kernels)

    query = jnp.ones((1, 512, 2, 8), jnp.bfloat16)
    traced: Callable[..., Any] = {
        "eager": call,
        "jit": jax.jit(call),
        "grad": jax.grad(lambda query: call(query).sum()),
        "vmap": lambda query: jax.vmap(call)(query[None]),
    }[how]
    expect_raised(lambda: traced(query), [expected])


def _no_kernels(build: Any) -> Any:
    raise AssertionError("wrong lengths were planned")


def test_numpy_lengths_in_jax_agree_with_jax_lengths() -> None:
    """Of any integer dtype, and as lists."""
    query, key, value = (draw(number, 1, 20, H, D) for number in range(3))
    expected = ours(query, key, value, sequences=lengths(jnp.array([0, 7, 20]), jnp.array([0, 7, 20]), (13, 13)))
    for given in (np.array([0, 7, 20]), np.array([0, 7, 20], "u8"), [0, 7, 20]):
        found = jax.jit(functools.partial(ours, sequences=lengths(given, given, (13, 13))))(query, key, value)
        expect_close(found, expected)
