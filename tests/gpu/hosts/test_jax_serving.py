"""append_to_cache and merge_states inside JAX on the GPU: the reference's bytes, in the memory of donated caches."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.testing.check import Kernels

CACHE = (16, 16, 8, 128)


@pytest.fixture
def jax() -> Any:
    """JAX with a GPU."""
    found = pytest.importorskip("jax", reason="jax is not installed")
    if found.default_backend() != "gpu":
        pytest.skip("jax has no GPU backend here")
    return found


@pytest.fixture
def serving(jax: Any) -> Any:
    """The module with both functions."""
    return importlib.import_module("cutlass_py_attn.jax.serving")


def operands(jax: Any, dtype: str) -> dict[str, Any]:
    """Returns 100 tokens, caches of `dtype` and slots, some of which are skipped."""
    keys = jax.random.split(jax.random.key(0), 2)
    rows = {
        name: jax.random.normal(key, (100, *CACHE[2:]), "bfloat16")
        for name, key in zip(("key", "value"), keys, strict=True)
    }
    slots = np.random.default_rng(0).permutation(256)[:100].astype(np.int32)
    slots[[3, 60]] = -1, 256
    caches = {name: jax.numpy.ones(CACHE, dtype) for name in ("key_cache", "value_cache")}
    return {**rows, **caches, "slots": jax.numpy.asarray(slots)}


def latent_operands(jax: Any) -> dict[str, Any]:
    """Returns 100 tokens, a latent cache of e4m3 codes with its scales, and slots."""
    given, pages = operands(jax, "bfloat16"), CACHE[:2]
    rows = {"key": given["key"].reshape(200, 1, 512)[:100], "value": given["value"].reshape(1600, 1, 64)[:100]}
    caches = {"key_cache": (512, "float8_e4m3fn"), "value_cache": (64, "bfloat16"), "key_scale": (4, "float32")}
    made = {name: jax.numpy.ones((*pages, 1, columns), dtype) for name, (columns, dtype) in caches.items()}
    return {**rows, **made, "slots": given["slots"]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "latent"])
def test_donated_caches_have_the_bytes_of_the_reference(jax: Any, serving: Any, kernels: Kernels, dtype: str) -> None:
    """Two appends in a loop of a compiled program; the caches stay where they are."""
    given = latent_operands(jax) if dtype == "latent" else operands(jax, dtype)
    names = ["key_cache", "value_cache"]
    if dtype == "latent":
        names.append("key_scale")
    elif dtype != "bfloat16":
        names += ["key_scale", "value_scale"]
        given |= {name: jax.numpy.ones(CACHE[:3], "float32") for name in names[2:]}

    def steps(backend: str, **arrays: Any) -> Any:
        def step(number: Any, caches: Any) -> Any:
            slots = (arrays["slots"] + 7 * number) % 300 - 20
            rows = {name: arrays[name] * (number + 1).astype("bfloat16") for name in ("key", "value")}
            found = serving.append_to_cache(
                **rows, **dict(zip(names, caches, strict=True)), slots=slots, backend=backend, kernels=kernels
            )
            return tuple(found)

        return jax.lax.fori_loop(0, 2, step, tuple(arrays[name] for name in names))

    expected = jax.jit(functools.partial(steps, "reference"))(**given)
    before = {name: given[name].unsafe_buffer_pointer() for name in names}
    found = jax.jit(functools.partial(steps, "gpu"), donate_argnames=names)(**given)
    for name, array, truth in zip(names, found, expected, strict=True):
        assert np.asarray(array).tobytes() == np.asarray(truth).tobytes(), name
        assert array.unsafe_buffer_pointer() == before[name], f"{name} was copied"


def test_kept_caches_keep_their_values(jax: Any, serving: Any, kernels: Kernels) -> None:
    given = operands(jax, "bfloat16")
    found = jax.jit(functools.partial(serving.append_to_cache, kernels=kernels))(**given)
    assert (np.asarray(given["key_cache"], "f4") == 1).all()
    assert not (np.asarray(found[0], "f4") == 1).all()


@pytest.mark.parametrize("packed", [False, True])
def test_merge(jax: Any, serving: Any, kernels: Kernels, packed: bool) -> None:
    rng = np.random.default_rng(1)
    shape, padded = ((1, 50, 4, 64), (3, 4, 32)) if packed else ((3, 40, 4, 64), (3, 4, 64))
    outputs = [jax.numpy.asarray(rng.standard_normal(shape), "float16") for _ in range(2)]
    logs = [jax.numpy.asarray(rng.standard_normal(padded) * 4, "float32") for _ in range(2)]
    given = outputs[0], logs[0], outputs[1], logs[1]
    options: dict[str, Any] = {}
    if packed:
        options = {"cu_seqlens_q": jax.numpy.array([0, 20, 20, 47], "int32"), "max_seqlen_q": 27}
    found = jax.jit(functools.partial(serving.merge_states, kernels=kernels, **options))(*given)
    expected = serving.merge_states(*given, backend="reference", **options)
    np.testing.assert_array_max_ulp(np.asarray(found[0]), np.asarray(expected[0]), maxulp=1)
    finite = np.isfinite(np.asarray(expected[1]))
    np.testing.assert_allclose(np.asarray(found[1])[finite], np.asarray(expected[1])[finite], rtol=0, atol=2e-6)
    assert np.isposinf(np.asarray(found[1])[~finite]).all()
