"""Large problems on the GPU: offsets beyond 2^31 elements, and more heads than a grid has blocks in a dimension."""

from __future__ import annotations

import math

import pytest

from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import suite
from tests.gpu.large_run import LargeRun, large_run, repeated, samples_at

GRADIENTS = ("grad_query", "grad_key", "grad_value")
LIMITS = (2**31, 2**30)  # elements, and bytes in elements of two bytes
GRID_LIMIT = 65_535


def name(case: Case) -> str:
    return case.line.replace(" ", "_")


def launched(run: LargeRun, kernels: Kernels, family: str, elements: list[int]) -> None:
    """Launches, and compares samples around these elements of the query tensor."""
    run.launch(kernels, family)
    run.check(samples_at(run.case, elements))
    run.expect_guards()


# Eight tensors of 4 GiB, and up to 10.2 GiB of workspace.
@pytest.mark.device_memory(gib=46)
@pytest.mark.expected_seconds(20)
@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("case", suite.MANY_ELEMENTS, ids=name)
def test_more_than_2_to_the_31_elements(case: Case, family: str, on_this_gpu: None, kernels: Kernels) -> None:
    size = math.prod(case.spec.problem("forward").query.shape)
    assert size > LIMITS[0]
    row = case.spec.head_dim
    near = [limit + offset for limit in LIMITS for offset in (-row, 0)]
    with large_run(case, repeated(case)) as run:
        launched(run, kernels, family, [200 * case.spec.num_heads * row, *near, 3 * 2**29 + 5 * row, size - row])


# At most eight tensors of 0.3 GiB, and 2.1 GiB of workspace.
@pytest.mark.device_memory(gib=6)
@pytest.mark.expected_seconds(8)
@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("case", suite.BEYOND_GRID, ids=name)
def test_more_heads_than_a_grid_has_blocks(case: Case, family: str, on_this_gpu: None, kernels: Kernels) -> None:
    beyond_grid(case, family, kernels, ("output", *GRADIENTS))


# key and value have 2.4 GiB each.
@pytest.mark.device_memory(gib=6)
@pytest.mark.expected_seconds(5)
@pytest.mark.parametrize("case", suite.DECODE_BEYOND_GRID, ids=name)
def test_decode_of_more_heads_than_a_grid_has_blocks(case: Case, kernels: Kernels) -> None:
    beyond_grid(case, "decode", kernels, ("output",))


def beyond_grid(case: Case, family: str, kernels: Kernels, written: tuple[str, ...]) -> None:
    """Samples heads on both sides of the limit, and reads every element of the results."""
    spec = case.spec
    of_head = spec.num_queries * spec.head_dim
    heads = spec.batch * spec.num_heads
    assert heads > GRID_LIMIT
    # An element of each of these heads: heads are an inner axis, but every batch element has all of its own.
    places = [divmod(number, spec.num_heads) for number in (0, 1, 9_999, GRID_LIMIT - 1, GRID_LIMIT, heads - 1)]
    elements = [batch * spec.num_heads * of_head + head * spec.head_dim for batch, head in places]
    with large_run(case, repeated(case)) as run:
        launched(run, kernels, family, elements)
        run.expect_written(written)
