"""append_to_cache and merge_states in JAX: values by the reference, launches on the fake driver, refused calls."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api import serving as api
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from tests.support.bad_calls import Unreadable
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact, decode

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from cutlass_py_attn.jax import append_to_cache, attention, handler, merge_states, payload, serving  # noqa: E402

TOKENS, HEADS, D, PAGES, PAGE = 5, 2, 16, 3, 4
SLOTS = np.array([3, -1, 11, 0, 12], np.int32)
TARGET = f"{handler.TARGET}_fake_serving"


def draw(seed: int, *shape: int, dtype: str = "float16") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(dtype: str = "float16") -> dict[str, Any]:
    """Returns rows, caches and slots of an append."""
    rows = {name: jnp.asarray(draw(seed, TOKENS, HEADS, D)) for seed, name in enumerate(("key", "value"))}
    caches = {name: jnp.ones((PAGES, PAGE, HEADS, D), dtype) for name in ("key_cache", "value_cache")}
    return {**rows, **caches, "slots": jnp.asarray(SLOTS)}


def latent_operands() -> dict[str, Any]:
    """Returns rows, slots, caches and scales of a latent cache of e4m3 codes."""
    dims, arrays = {"key": 160, "value": D}, {}
    for seed, (name, columns) in enumerate(dims.items()):
        arrays[name] = jnp.asarray(draw(seed, TOKENS, 1, columns))
    caches = {"key_cache": (160, "float8_e4m3fn"), "value_cache": (D, "float16"), "key_scale": (2, "float32")}
    arrays |= {name: jnp.ones((PAGES, PAGE, 1, columns), dtype) for name, (columns, dtype) in caches.items()}
    return {**arrays, "slots": jnp.asarray(SLOTS)}


def parts() -> list[Any]:
    """Returns two partial results of (2, 5, 3, 8) queries."""
    shapes = ((2, 5, 3, 8), (2, 3, 32))
    return [jnp.asarray(draw(seed, *shape, dtype=f"f{4}")) for seed in range(2) for shape in shapes]


def on_host(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays after the append of the NumPy function."""
    arrays = {name: np.array(array) for name, array in given.items()}
    arrays["slots"] = arrays["slots"].astype(np.int64)
    api.append_to_cache(**arrays, backend="reference")
    return arrays


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "uint8"])
def test_append_by_the_reference(dtype: str) -> None:
    """The caches, and with a scale for each row the scales too, as the NumPy function has them."""
    given = operands(dtype)
    names = ["key_cache", "value_cache"]
    if dtype != "float16":
        names += ["key_scale", "value_scale"]
        given |= {name: jnp.ones((PAGES, PAGE, HEADS), "float32") for name in names[2:]}
    found = jax.jit(functools.partial(append_to_cache, backend="reference"))(**given)
    expected = on_host(given)
    assert len(found) == len(names)
    for name, array in zip(names, found, strict=True):
        assert array.dtype == given[name].dtype
        assert np.asarray(array).tobytes() == expected[name].tobytes(), name


def test_append_to_a_latent_cache_by_the_reference() -> None:
    """Codes, 16-bit columns and the scales of tiles of 128 and of 32 columns."""
    given = latent_operands()
    found = jax.jit(functools.partial(append_to_cache, backend="reference"))(**given)
    expected = on_host(given)
    for name, array in zip(("key_cache", "value_cache", "key_scale"), found, strict=True):
        assert np.asarray(array).tobytes() == expected[name].tobytes() != np.asarray(given[name]).tobytes(), name


def test_merge_by_the_reference() -> None:
    given = parts()
    found = jax.jit(functools.partial(merge_states, backend="reference"))(*given)
    expected = api.merge_states(*map(np.asarray, given), backend="reference")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)
    stacked = [jnp.stack([array, 2 * array]) for array in given]
    mapped = jax.vmap(functools.partial(merge_states, backend="reference"))(*stacked)
    np.testing.assert_array_equal(np.asarray(mapped[0][0]), expected[0])


def test_merge_into_a_float32_total() -> None:
    total, of_total, part, of_part = parts()
    given = (total, of_total, part.astype(jnp.float16), of_part)
    output, _ = merge_states(*given, backend="reference")
    expected, _ = api.merge_states(*map(np.asarray, given), backend="reference")
    assert output.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(output), expected)


def test_packed_merge_by_the_reference() -> None:
    """Rows that belong to no sequence are 0."""
    outputs = [jnp.asarray(draw(seed, 1, 9, 3, 8)) for seed in range(2)]
    logs = [jnp.asarray(draw(seed, 2, 3, 32, dtype="f4")) for seed in range(2)]
    bounds = jnp.array([0, 3, 7], jnp.int32)
    given = (outputs[0], logs[0], outputs[1], logs[1])
    output, logsumexp = merge_states(*given, cu_seqlens_q=bounds, max_seqlen_q=4, backend="reference")
    options = {"cu_seqlens_q": np.asarray(bounds), "max_seqlen_q": 4, "backend": "reference"}
    expected = api.merge_states(*map(np.asarray, given), **options)
    np.testing.assert_array_equal(np.asarray(output), expected[0])
    np.testing.assert_array_equal(np.asarray(logsumexp), expected[1])
    assert not np.asarray(output)[:, 7:].any()


def test_slots_as_two_words() -> None:
    slots = np.array([0, 1, -1, -7, 2**31 - 1, -(2**31)], np.int32)
    words = np.asarray(serving._words(jnp.asarray(slots)))
    assert words.view(np.int64)[:, 0].tolist() == slots.tolist()


def test_tracing_needs_neither_kernels_nor_a_gpu() -> None:
    def unavailable(build: Any) -> Any:
        raise AssertionError(build)

    found = jax.eval_shape(functools.partial(append_to_cache, kernels=unavailable), **operands())
    assert [(array.shape, array.dtype) for array in found] == [((PAGES, PAGE, HEADS, D), "float16")] * 2
    output, logsumexp = jax.eval_shape(functools.partial(merge_states, kernels=unavailable), *parts())
    assert (output.shape, logsumexp.shape) == ((2, 5, 3, 8), (2, 3, 32))


def test_an_exported_call_has_its_kernel() -> None:
    """The custom call of a lowered program aliases its caches, and its payload is read back."""
    step = jax.jit(functools.partial(append_to_cache, kernels=artifact, arch="sm_90"))
    text = step.trace(**operands()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == 2
    given = {name: array for name, array in operands().items() if name != "slots"}
    described = {name: serving._described(array) for name, array in given.items()}
    problem = serving.AppendProblem(**described, slots=serving.Tensor.contiguous((TOKENS,), "int64"))
    data = serving.payload_of(serving._Call(problem, artifact, "sm_90", False))
    found = payload.unpack(data)
    assert found.problem is None
    assert (found.plan.build.arch, found.plan.build.symbol) == ("sm_90", "append_sm80_f16_d16_64x2")
    assert found.pack() == data


@pytest.fixture
def on_fake_driver(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """XLA's CPU client calls the CUDA handler, with a made-up stream and the fake driver."""
    monkeypatch.setattr(handler, "_stream", lambda *_: 0x77)
    monkeypatch.setattr(handler, "_payloads", {})
    monkeypatch.setattr(serving, "TARGET", TARGET)
    serving._traced.clear_cache()
    return driver_log


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler._handlers["CUDA"]), platform="cpu")


@pytest.mark.parametrize("is_latent", [False, True])
def test_donated_caches_are_written_in_place(on_fake_driver: FakeDriver, is_latent: bool) -> None:
    """The kernel gets the memory of the donated caches, which the results have too; scales of tiles are one of them."""
    builds: list[Any] = []

    def kernels(build: Any) -> Any:
        builds.append(build)
        return artifact(build)

    names = ("key_cache", "value_cache", *(("key_scale",) if is_latent else ()))
    step = jax.jit(functools.partial(append_to_cache, kernels=kernels), donate_argnames=names)
    given = latent_operands() if is_latent else operands()
    before = [given[name].unsafe_buffer_pointer() for name in names]
    found = step(**given)
    jax.block_until_ready(found)
    (launch,) = on_fake_driver.of("cuLaunchKernelEx")
    struct = decode(builds[0], launch.parameters)
    assert [struct[name] for name in names] == before
    assert [array.unsafe_buffer_pointer() for array in found] == before
    rows = TOKENS * (1 if is_latent else HEADS)
    assert (struct["num_rows"], struct["num_slots"], struct["page_size"]) == (rows, PAGES * PAGE, PAGE)
    assert launch.stream == 0x77


def test_kept_caches_are_copied(on_fake_driver: FakeDriver) -> None:
    given = operands()
    found = jax.jit(functools.partial(append_to_cache, kernels=artifact))(**given)
    jax.block_until_ready(found)
    assert len(on_fake_driver.of("cuLaunchKernelEx")) == 1
    for name, array in zip(("key_cache", "value_cache"), found, strict=True):
        assert array.unsafe_buffer_pointer() != given[name].unsafe_buffer_pointer()
        assert (np.asarray(array) == 1).all(), "the fake driver's kernel writes nothing"


def test_merge_is_launched(on_fake_driver: FakeDriver) -> None:
    """Packed outputs start as zeros, which rows outside of every sequence keep."""
    jax.block_until_ready(merge_states(*parts(), kernels=artifact))
    output = jnp.ones((1, 9, 3, 8), "float16")
    logsumexp = jnp.ones((2, 3, 32), "float32")
    bounds = jnp.array([0, 3, 7], jnp.int32)
    found = merge_states(output, logsumexp, output, logsumexp, cu_seqlens_q=bounds, max_seqlen_q=4, kernels=artifact)
    assert not np.asarray(found[0]).any()
    symbols = [call.text for call in on_fake_driver.of("cuLaunchKernelEx")]
    assert symbols == ["merge_sm80_f32_d8_64x2_0", "merge_sm80_f16_d8_varlen_128x1_0"]


@pytest.mark.parametrize("function", ["append", "merge"])
def test_derivatives_are_refused(function: str) -> None:
    def loss(array: Any) -> Any:
        if function == "append":
            found = append_to_cache(**{**operands(), "key": array}, backend="reference")
        else:
            found = merge_states(array, *parts()[1:], backend="reference")
        return found[0].astype("float32").sum()

    array = operands()["key"] if function == "append" else parts()[0]
    with pytest.raises(NotSupported, match="must not be, for it has no derivative"):
        jax.grad(loss)(array)


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[str, ...]]] = {
    "missing": (lambda given: {"slots": None}, ("slots = None: must be an array that JAX takes",)),
    "several": (
        lambda given: {"slots": given["slots"].astype("int16"), "backend": "cuda", "kernels": 3, "arch": "sm_1"},
        (
            "backend = 'cuda' (str): must be one of auto, gpu, reference",
            "kernels = 3 (int): must be a hashable function",
            "arch = 'sm_1' (str): must be one of sm_80",
            "slots.dtype = 'int16' (str): must be int64",
        ),
    ),
    "raises": (lambda given: {"slots": Unreadable("__array__")}, ("slots = ",)),
    "scales": (
        lambda given: {"key_scale": jnp.ones(2)},
        ("key_scale = array of shape (2,) and dtype float32: only an e4m3 cache has scales",),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str) -> None:
    change, starts = REFUSALS[name]
    given = operands()
    with pytest.raises(NotSupported) as caught:
        append_to_cache(**{**given, **change(given)})
    assert len(caught.value.reasons) == len(starts)
    assert all(reason.startswith(start) for reason, start in zip(caught.value.reasons, starts, strict=True))


def test_a_split_array_is_refused() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        output, *rest = parts()
        output = jax.device_put(output, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
        with pytest.raises(NotSupported, match=r"output_a = .*, and an Explicit mesh splits it"):
            merge_states(output, *rest)


def test_inside_shard_map() -> None:
    """Each device merges its own part."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    whole = functools.partial(merge_states, backend="reference")
    found = jax.shard_map(whole, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, spec))(*parts())
    expected = whole(*parts())
    np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(expected[0]))


EXAMPLE = Path(__file__).resolve().parents[2] / "examples/serving_jax.py"
LARGEST = 0.15  # difference of logits up to 4, behind two layers of attention in bfloat16


def test_the_serving_example_without_a_gpu() -> None:
    example = runpy.run_path(str(EXAMPLE))
    found = example["main"](**example["SMALL"], backend="reference")
    assert found.steps > found.decode_steps > 0
    assert found.behind <= 2 * found.logit_error < 2 * LARGEST
    assert found.tokens > 2 * example["SMALL"]["conversations"]


def partial_results(**options: Any) -> tuple[list[Any], Any]:
    """Returns the partial results of attention over two parts of the keys, and those over all."""
    query, key, value = (jnp.asarray(draw(seed, 1, rows, 2, 8, dtype="f4")) for seed, rows in enumerate((6, 40, 40)))
    call = functools.partial(attention, query, return_logsumexp=True, backend="reference", **options)
    of_parts = [call(key[:, part], value[:, part]) for part in (slice(30), slice(30, None))]
    return [array for results in of_parts for array in results], call(key, value)


def test_merge_of_what_attention_returns() -> None:
    """Its logsumexp has no padding, and neither has that of the merge, which may be merged again."""
    given, expected = partial_results()
    merged = jax.jit(functools.partial(merge_states, backend="reference"))(*given)
    assert merged[1].shape == (1, 2, 6)
    padded = [jnp.pad(array, ((0, 0), (0, 0), (0, 26)), constant_values=jnp.inf) for array in given[1::2]]
    mixed = merge_states(given[0], padded[0], given[2], given[3], backend="reference")
    assert mixed[1].shape == (1, 2, 32)
    for one, same, other in zip(merged, (mixed[0], mixed[1][..., :6]), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(one, same)


def test_merge_of_what_attention_of_sequences_returns() -> None:
    query, key, value = (jnp.asarray(draw(seed, 1, rows, 2, 8, dtype="f4")) for seed, rows in enumerate((6, 40, 40)))
    starts = np.array([0, 2, 6], np.int32)

    def attend(bounds: list[int], used: list[int]) -> Any:
        sequences = VariableLength(starts, np.array(bounds), 4, 20, np.array(used))
        return attention(query, key, value, sequences=sequences, return_logsumexp=True, backend="reference")

    shifted = key[:, 12:], value[:, 12:]
    first = attend([0, 20, 40], [12, 12])
    sequences = VariableLength(starts, np.array([0, 20, 28]), 4, 20, np.array([8, 8]))
    second = attention(query, *shifted, sequences=sequences, return_logsumexp=True, backend="reference")
    options: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": 4, "backend": "reference"}
    found = merge_states(*first, *second, **options)
    for one, other in zip(found, attend([0, 20, 40], [20, 20]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_logsumexp_of_another_shape() -> None:
    given, _ = partial_results()
    given[1] = jnp.swapaxes(given[1], 1, 2)
    with pytest.raises(NotSupported) as caught:
        merge_states(*given, backend="reference")
    assert caught.value.reasons == (
        "logsumexp_a.shape = (1, 6, 2): must be (1, 2, 6) as `attention` returns it, or (1, 2, 32) as "
        "attention_forward does; pass that, and of the residual of dot_product_attention "
        "jax.numpy.swapaxes(residual, 1, 2).astype('float32')",
    )
