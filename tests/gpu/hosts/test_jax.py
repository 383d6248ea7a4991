"""Attention inside JAX on the GPU: the reference's values, in compiled, batched, recorded and exported programs."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels

SHAPE = 2, 203, 3, 128
ALLOWED = {"bfloat16": 0.01, "float16": 0.002, "float32": 1e-5}  # relative, of the whole array
LATENT_CACHES = {
    "dense": Case.parse("forward bf16_d576v512_q1_s192_b3_h16k1_full_scale0.07_mla_kv8_descaletile"),
    "pages": Case.parse(
        "forward bf16_d576v512_n1x192u192,1x192u0,1x192u77_h16k1_full_scale0.07_paged16_mla_kv8_descaletile"
    ),
}
LOADER = """
import sys, jax, numpy, cutlass_py_attn.jax
program = jax.export.deserialize(open(sys.argv[1], "rb").read())
keys = jax.random.split(jax.random.key(0), 3)
found = program.call(*(jax.random.normal(key, (2, 203, 3, 128)).astype("bfloat16") for key in keys))
numpy.save(sys.argv[2], numpy.asarray(found, "f4"))
assert "cutlass" not in sys.modules, "the compiler was loaded"
"""


@pytest.fixture
def jax() -> Any:
    """JAX with a GPU."""
    found = pytest.importorskip("jax", reason="jax is not installed")
    if found.default_backend() != "gpu":
        pytest.skip("jax has no GPU backend here")
    return found


@pytest.fixture
def attend(jax: Any, kernels: Kernels) -> Callable[..., Any]:
    """Causal attention with the tests' kernels."""
    module = importlib.import_module("cutlass_py_attn.jax")
    return functools.partial(module.attention, mask=Causal(), kernels=kernels)


def operands(jax: Any, dtype: str, count: int = 3) -> list[Any]:
    return [jax.random.normal(key, SHAPE).astype(dtype) for key in jax.random.split(jax.random.key(0), count)]


def difference(found: Any, expected: Any) -> float:
    one, other = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("dtype", ALLOWED)
def test_values_and_gradients(jax: Any, attend: Callable[..., Any], dtype: str) -> None:
    query, key, value, grad_output = operands(jax, dtype, 4)

    def both(backend: str) -> Any:
        output, pull = jax.vjp(jax.jit(functools.partial(attend, backend=backend)), query, key, value)
        return output, *pull(grad_output)

    for found, expected in zip(both("gpu"), both("reference"), strict=True):
        assert difference(found, expected) < ALLOWED[dtype]


def test_vmap_is_one_launch_with_the_same_bits(jax: Any, attend: Callable[..., Any]) -> None:
    query, key, value = (jax.numpy.stack([array, -array, 2 * array]) for array in operands(jax, "bfloat16"))
    expected = [attend(query[i], key[0], value[i]) for i in range(3)]
    program = jax.jit(jax.vmap(attend, (0, None, 0))).lower(query, key[0], value).compile()
    assert program.as_text().count('custom_call_target="cutlass_py_attn"') == 1
    assert bool((program(query, key[0], value) == jax.numpy.stack(expected)).all())


def test_programs_that_xla_records_give_the_same_bits(jax: Any, attend: Callable[..., Any]) -> None:
    """Eight calls, again and again, with buffers that move."""
    query, key, value = operands(jax, "bfloat16")

    def program(query: Any) -> Any:
        for number in range(8):
            query = query + 0.1 * attend(query, key * (number + 1), value)
        return query

    run = jax.jit(program)
    first = run(query)
    assert difference(first, program(query)) < 0.02, "XLA fuses what eager calls round in between"
    kept = [run(query + 0) for _ in range(20)]
    assert all(bool((found == first).all()) for found in kept)


def latent_results(jax: Any, case: Case, arrays: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns output and logsumexp of a latent cache of codes, by a compiled program whose table and lengths are
    operands."""
    module = importlib.import_module("cutlass_py_attn.jax")
    names = {"cache": "key", "cache_scale": "key_scale", "cache_rope": "key_rope"}
    cache = {name: arrays[given] for name, given in names.items()}
    pages = [arrays[name] for name in ("page_table", "seqused_k") if name in arrays]

    def attend(query: Any, cache: dict[str, Any], pages: list[Any]) -> Any:
        sequences = Paged(*pages) if pages else None
        given = {**cache, "scale": case.spec.scale, "sequences": sequences, "return_logsumexp": True, **options}
        return module.mla_attention(query, **given)

    output, logsumexp = jax.jit(attend)(*jax.device_put((arrays["query"], cache, pages)))
    padded = np.full(case.shape.logsumexp, np.inf, np.float32)
    padded[..., : logsumexp.shape[2]] = logsumexp
    return {"output": np.asarray(output), "logsumexp": padded}


@pytest.mark.parametrize("case", LATENT_CACHES.values(), ids=LATENT_CACHES)
def test_a_latent_cache_of_codes(jax: Any, kernels: Kernels, gpu: driver.Device, case: Case) -> None:
    """By the kernel of sm_90a, which rounds every product of a code and its scale to bfloat16."""
    if gpu.compute_capability != (9, 0):
        pytest.skip(f"{gpu.name} does not run the kernel of latent caches of e4m3 codes")
    expected = guarded_check.expect(case)
    found = latent_results(jax, case, expected.arrays, backend="gpu", kernels=kernels)
    ratios = guarded_check.ratios(case, expected, found)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_shard_map_gives_each_gpu_its_part(jax: Any, attend: Callable[..., Any], axis: int) -> None:
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip("one GPU: nothing to spread")
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(each, (2, 203, 4, 128)).astype("bfloat16") for each in keys)
    spec = jax.sharding.PartitionSpec(*("x" if i == axis else None for i in range(4)))
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spread = jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)

    def gradients(function: Callable[..., Any]) -> Any:
        def loss(*arrays: Any) -> Any:
            return (function(*arrays).astype("float32") ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value)

    found = jax.jit(spread)(query, key, value)
    assert found.sharding.device_set == set(devices)
    assert (np.asarray(found) == np.asarray(jax.jit(attend)(query, key, value))).all()
    for one, other in zip(gradients(spread), gradients(attend), strict=True):
        assert difference(one, other) < ALLOWED["bfloat16"]


def test_exported_program_runs_in_another_process(jax: Any, attend: Callable[..., Any], tmp_path: Path) -> None:
    arrays = operands(jax, "bfloat16")
    checks = importlib.import_module("cutlass_py_attn.jax").export_checks()
    program = jax.export.export(jax.jit(attend), disabled_checks=checks)(*arrays)
    (tmp_path / "program").write_bytes(program.serialize())
    arguments = [sys.executable, "-c", LOADER, str(tmp_path / "program"), str(tmp_path / "output.npy")]
    subprocess.run(arguments, check=True, cwd=Path(__file__).resolve().parents[3])
    assert (np.load(tmp_path / "output.npy") == np.asarray(jax.jit(attend)(*arrays), "f4")).all()
