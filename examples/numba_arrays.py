"""Numba: device arrays and a stream of Numba; Numba reads the results without a copy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import cuda

from cutlass_py_attn import Causal, attention_forward


@cuda.jit  # type: ignore[untyped-decorator]
def scale(array: Any, factor: float) -> None:
    """Multiplies every element in place."""
    for i in range(cuda.grid(1), array.size, cuda.gridsize(1)):
        array[i] *= factor


def main(**options: Any) -> float:
    """Returns the largest difference of a scaled output from the NumPy reference."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((2, 300, 4, 64), dtype=np.float32) for _ in range(3)]
    stream = cuda.stream()
    query, key, value = (cuda.to_device(array, stream=stream) for array in host)
    scale[64, 128, stream](query.ravel(), np.float32(0.5))
    # All kernels run on one stream, in order: Numba's, the attention kernels, Numba's.
    output, _ = attention_forward(query, key, value, mask=Causal(), stream=stream, **options)
    result = cuda.as_cuda_array(output, sync=False)
    scale[64, 128, stream](result.ravel(), np.float32(2))
    found = result.copy_to_host(stream=stream)
    stream.synchronize()
    expected, _ = attention_forward(host[0] * np.float32(0.5), *host[1:], mask=Causal(), backend="reference")
    return float(np.abs(found - 2 * expected).max())


if __name__ == "__main__":
    sys.stdout.write(f"largest difference from the reference: {main():.1e}\n")
