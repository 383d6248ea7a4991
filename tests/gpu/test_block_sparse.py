"""Block-sparse masks on the GPU against the reference in float64, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.runtime.driver import Device
from cutlass_py_attn.testing import check
from tests.cases.block_masks import CASES, BlockCase

ERROR = 0.01  # relative L2 error of 16-bit operands
LOGSUMEXP = 0.01


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks(case: BlockCase, kernels: check.Kernels, gpu: Device) -> None:
    if gpu.compute_capability != (9, 0):
        pytest.skip(f"{gpu.name} does not run kernels with visible blocks")
    mask, (grad_output, query, key, value) = case.mask(), case.operands()
    output, logsumexp = attention_forward(query, key, value, mask=mask, kernels=kernels)
    truth, expected = attention_forward(query, key, value, mask=mask, backend="reference")
    results = {"output": (output, truth)}
    rows = case.shape.num_queries
    np.testing.assert_allclose(logsumexp[..., :rows], expected[..., :rows], rtol=0, atol=LOGSUMEXP)
    forward = truth, expected
    gradients = attention_backward(grad_output, query, key, value, *forward, mask=mask, kernels=kernels)
    references = attention_backward(grad_output, query, key, value, *forward, mask=mask, backend="reference")
    results |= {name: (getattr(gradients, name), getattr(references, name)) for name in ("query", "key", "value")}
    shape = case.shape
    visible = mask.materialise(shape.batch, shape.num_heads, shape.num_queries, shape.num_keys)
    groups = shape.batch, shape.num_heads_key, shape.group, shape.num_keys
    rows_unseen = ~visible.any(axis=3).swapaxes(1, 2)
    keys_unseen = ~visible.any(axis=2).reshape(groups).any(axis=2).swapaxes(1, 2)
    for name, (found, reference) in results.items():
        differences = found.astype(np.float64) - reference.astype(np.float64)
        assert np.linalg.norm(differences) <= ERROR * np.linalg.norm(reference.astype(np.float64)), name
        assert not found[rows_unseen if name in ("output", "query") else keys_unseen].any(), name
