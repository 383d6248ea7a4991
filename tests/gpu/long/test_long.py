"""A quarter of a million tokens on the GPU: sampled rows of the forward and of every gradient against float64.

Keys are vectors of signs. An even query is random and averages over every key. An odd one is the sum of its own key and
of a random earlier one, so that a key at a wrong address changes half of the result.
"""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.reference.numpy_reference import DTYPES
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import suite
from tests.gpu.large_run import Host, Sample, Source, large_run

NEEDLE = 2.0  # factor of an odd query: its two scores exceed the mean of the others by 22
TOKENS = (64, 65, 4095, 4096, 99_999, 131_071, 131_072, 131_073, 200_000, 262_015, 262_142, 262_143)


def sources_of(case: Case) -> dict[str, Source]:
    """Returns the inputs, with rows over tokens and heads."""
    rng, shape = np.random.default_rng(case.seed), case.shape
    _, _, heads, channels = shape.of("query")
    found = {
        name: rng.standard_normal((shape.of(name)[1], heads, channels), np.float32)
        for name in ("query", "value", "grad_output")
    }
    found["key"] = (2 * rng.integers(0, 2, (shape.of("key")[1], heads, channels), np.int8) - 1).astype(np.float32)
    odd = np.arange(1, case.spec.num_queries, 2)
    earlier = rng.integers(0, odd)
    found["query"][odd] = NEEDLE * (found["key"][odd] + found["key"][earlier])
    dtype = DTYPES[case.spec.dtype]
    return {name: Host(array.astype(dtype).reshape(-1, channels)) for name, array in found.items()}


@pytest.mark.device_memory(gib=4)
@pytest.mark.expected_seconds(30)
@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("case", suite.LONG, ids=lambda case: case.line.replace(" ", "_"))
def test_long(case: Case, family: str, on_this_gpu: None, kernels: Kernels) -> None:
    with large_run(case, sources_of(case)) as run:
        run.launch(kernels, family)
        run.check(Sample(0, head, TOKENS) for head in range(case.spec.num_heads))
        if case.spec.sequences:
            run.check([Sample(1, 0, (0,)), Sample(2, 0, (64, 100, 332))])
        run.expect_guards()
