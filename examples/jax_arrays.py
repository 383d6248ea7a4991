"""JAX arrays outside of jit: operands are read in place, results are JAX arrays. Inside of jit: jax_training.py."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from cutlass_py_attn import Causal, attention_backward, attention_forward


def main(**options: Any) -> float:
    """Runs forward and backward; returns the largest difference of the output from the NumPy reference."""
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(each, (2, 300, 4, 128)).astype("bfloat16") for each in keys)
    output, logsumexp = attention_forward(query, key, value, mask=Causal(), **options)
    gradients = attention_backward(output, query, key, value, output, logsumexp, mask=Causal(), **options)
    # JAX does not expose its streams, so a call returns when its results are complete.
    assert isinstance(gradients.query, jax.Array)
    host = [np.asarray(array) for array in (query, key, value)]
    expected, _ = attention_forward(*host, mask=Causal(), backend="reference")
    return float(np.abs(np.asarray(output, "f4") - expected.astype("f4")).max())


if __name__ == "__main__":
    sys.stdout.write(f"largest difference from the reference: {main():.1e}\n")
