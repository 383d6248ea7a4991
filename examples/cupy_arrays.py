"""CuPy: bfloat16 arrays are read in place on a non-default stream; results are CuPy arrays from CuPy's memory pool."""

from __future__ import annotations

import sys
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from cutlass_py_attn import Causal, attention_backward, attention_forward


def main(**options: Any) -> float:
    """Runs forward and backward; returns the largest difference of the output from the NumPy reference."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((2, 300, 4, 128), dtype=np.float32).astype(ml_dtypes.bfloat16) for _ in range(3)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        query, key, value = (cupy.asarray(array) for array in host)
        # The kernels run on the same stream, after the copies.
        output, logsumexp = attention_forward(query, key, value, mask=Causal(), stream=stream, **options)
        gradients = attention_backward(
            output, query, key, value, output, logsumexp, mask=Causal(), stream=stream, **options
        )
        copied = output.copy()  # CuPy's kernel runs on the same stream, after the attention kernels
    stream.synchronize()
    assert isinstance(gradients.query, cupy.ndarray)
    assert gradients.query.dtype == ml_dtypes.bfloat16
    expected, _ = attention_forward(*host, mask=Causal(), backend="reference")
    return float(np.abs(cupy.asnumpy(copied).astype("f4") - expected.astype("f4")).max())


if __name__ == "__main__":
    sys.stdout.write(f"largest difference from the reference: {main():.1e}\n")
