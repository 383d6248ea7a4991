"""NumPy: host arrays are copied to the GPU and back; results are complete when the call returns."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cutlass_py_attn import Causal, attention_backward, attention_forward


def main(**options: Any) -> float:
    """Runs forward and backward on the GPU; returns the largest difference from the NumPy reference."""
    rng = np.random.default_rng(0)
    query, key, value, grad_output = (rng.standard_normal((2, 300, 4, 64), dtype=np.float32) for _ in range(4))
    operands = query, key, value
    output, logsumexp = attention_forward(*operands, mask=Causal(), **options)
    found = attention_backward(grad_output, *operands, output, logsumexp, mask=Causal(), **options)

    expected_output, _ = attention_forward(*operands, mask=Causal(), backend="reference")
    expected = attention_backward(grad_output, *operands, output, logsumexp, mask=Causal(), backend="reference")
    pairs = [(output, expected_output), (found.query, expected.query), (found.value, expected.value)]
    return max(float(np.abs(one - other).max()) for one, other in pairs)


if __name__ == "__main__":
    sys.stdout.write(f"largest difference from the reference: {main():.1e}\n")
