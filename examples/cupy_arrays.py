"""CuPy: bfloat16 arrays are read in place on a stream of our own, and results are CuPy arrays from its pool."""

from __future__ import annotations

import sys
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from cutlass_py_attn import Causal, attention_backward, attention_forward


def main(**options: Any) -> float:
    """Forward and backward; the largest difference of the output from the NumPy reference."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((2, 300, 4, 128), dtype=np.float32).astype(ml_dtypes.bfloat16) for _ in range(3)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        query, key, value = (cupy.asarray(array) for array in host)
        # The kernels are put on the same stream, behind the copies.
        output, logsumexp = attention_forward(query, key, value, mask=Causal(), stream=stream, **options)
        gradients = attention_backward(
            output, query, key, value, output, logsumexp, mask=Causal(), stream=stream, **options
        )
        copied = output.copy()  # and what CuPy does with them, behind the kernels
    stream.synchronize()
    assert isinstance(gradients.query, cupy.ndarray)
    assert gradients.query.dtype == ml_dtypes.bfloat16
    expected, _ = attention_forward(*host, mask=Causal(), backend="reference")
    return float(np.abs(cupy.asnumpy(copied).astype("f4") - expected.astype("f4")).max())


if __name__ == "__main__":
    sys.stdout.write(f"largest difference from the reference: {main():.1e}\n")
