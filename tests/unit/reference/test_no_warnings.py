"""No legal call of backend="reference" warns, whatever its numbers: infinities and NaN are results, as of kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn import (
    Causal,
    CausalBottomRight,
    Dropout,
    Full,
    NotSupported,
    Paged,
    VariableLength,
    Window,
    append_to_cache,
    attention_backward,
    attention_forward,
    merge_states,
)

Array = npt.NDArray[Any]
DTYPES = np.float32, np.float16, ml_dtypes.bfloat16
NUMBERS = 0.0, 1.0, -1.0, 1e-45, 1e-38, 1e-7, 6e4, 7e4, 3e38, -3e38, np.inf, -np.inf, np.nan
MASKS = Full(), Causal(), CausalBottomRight(2), Window(1, 1)


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings(action="error"):
        yield


def tensor(rng: np.random.Generator, dtype: Any, *shape: int) -> Array:
    """Numbers of all magnitudes, some special ones among them, or one special one alone."""
    made, kind = rng.standard_normal(shape), rng.integers(4)
    with np.errstate(all="ignore"):
        if kind == 1:
            made = made * 10.0 ** rng.uniform(-40, 38)
        elif kind == 2:
            made = np.where(rng.random(shape) < 0.2, rng.choice(NUMBERS, shape), made)
        elif kind == 3:
            made = np.full(shape, rng.choice(NUMBERS))
        return made.astype(dtype)


def options_of(rng: np.random.Generator, dtype: Any, heads: int, num_queries: int, num_keys: int) -> dict[str, Any]:
    chosen: dict[str, Any] = {"mask": MASKS[rng.integers(len(MASKS))]}
    drawn = {
        "scale": float(rng.choice([2.0**127, -(2.0**127), 1e-29, 1.0, -3.0, 1e30])),
        "bias": tensor(rng, dtype, 1, heads, num_queries, num_keys),
        "alibi_slopes": tensor(rng, np.float32, heads),
        "sinks": rng.choice(NUMBERS, heads).astype(np.float32),
        "softcap": float(rng.choice([1e-3, 30.0, 8000.0])),
        "dropout": Dropout(float(rng.choice([0.1, 0.5, 1.0])), 1, 2),
    }
    return chosen | {name: value for name, value in drawn.items() if rng.random() < 0.3}


@pytest.mark.parametrize("seed", range(4))
def test_forwards_and_backwards(seed: int) -> None:
    rng, refused = np.random.default_rng(seed), 0
    for _ in range(60):
        dtype = DTYPES[rng.integers(len(DTYPES))]
        batch, num_queries, num_keys = (int(rng.integers(0, most)) for most in (3, 7, 7))
        heads_key, group = rng.integers(1, 3, 2).tolist()
        head_dim, head_dim_value = rng.choice([8, 16], 2).tolist()
        query = tensor(rng, dtype, batch, num_queries, heads_key * group, head_dim)
        key = tensor(rng, dtype, batch, num_keys, heads_key, head_dim)
        value = tensor(rng, dtype, batch, num_keys, heads_key, head_dim_value)
        options = options_of(rng, dtype, heads_key * group, num_queries, num_keys)
        try:
            output, logsumexp = attention_forward(query, key, value, backend="reference", **options)
            grad_output = tensor(rng, dtype, *output.shape)
            if rng.random() < 0.4:
                options["grad_logsumexp"] = tensor(rng, np.float32, *logsumexp.shape)
            attention_backward(grad_output, query, key, value, output, logsumexp, backend="reference", **options)
        except NotSupported as error:  # of scale and softcap
            assert "scale / softcap" in str(error)  # noqa: PT017
            refused += 1
    assert refused < 6


@pytest.mark.parametrize("seed", range(3))
def test_packed_and_paged_sequences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(15):
        dtype = DTYPES[rng.integers(len(DTYPES))]
        scale = float(rng.choice([2.0**127, 1.0]))
        query, key, value = (tensor(rng, dtype, 1, 9, 2, 8) for _ in range(3))
        starts = np.array([0, 4, 4, 9], np.int32)
        packed = VariableLength(starts, starts, 5, 5)
        given = {"sequences": packed, "mask": Causal(), "scale": scale, "backend": "reference"}
        output, logsumexp = attention_forward(query, key, value, **given)
        attention_backward(tensor(rng, dtype, *output.shape), query, key, value, output, logsumexp, **given)
        pools = [tensor(rng, dtype, 3, 4, 1, 8) for _ in range(2)]
        paged = Paged(np.array([[0, 1], [2, 0]], np.int32), np.array([7, 0], np.int32))
        attention_forward(tensor(rng, dtype, 2, 3, 2, 8), *pools, sequences=paged, scale=scale, backend="reference")


@pytest.mark.parametrize("seed", range(3))
def test_caches_and_states(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(15):
        dtype = DTYPES[rng.integers(len(DTYPES))]
        rows = [tensor(rng, dtype, 5, 2, 16) for _ in range(2)]
        caches = [np.zeros((3, 4, 2, 16), dtype) for _ in range(2)]
        slots = np.array([0, 5, 11, -1, 7], np.int64)
        append_to_cache(*rows, *caches, slots, backend="reference")
        codes = [np.zeros((3, 4, 2, 16), ml_dtypes.float8_e4m3fn) for _ in range(2)]
        scales = [np.ones((3, 4, 2), np.float32) for _ in range(2)]
        append_to_cache(*rows, *codes, slots, key_scale=scales[0], value_scale=scales[1], backend="reference")
        outputs = [tensor(rng, dtype, 1, 6, 2, 8) for _ in range(2)]
        sums = [tensor(rng, np.float32, 1, 2, 32) for _ in range(2)]
        merge_states(outputs[0], sums[0], outputs[1], sums[1], backend="reference")
