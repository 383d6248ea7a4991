"""Variable-length sequences on the GPU: values outside a sequence, NaN included, change no bit of its results."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.testing import device_memory, guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, Kernels, same_bits
from tests.cases import suite

INVALID = {"query": np.nan, "key": np.nan, "value": np.inf, "grad_output": np.inf}
OF_QUERIES = ("query", "grad_output", "output", "grad_query")  # all other tensors have rows of keys


def rows_of(case: Case, name: str, number: int) -> slice:
    """The rows of one sequence in a tensor."""
    lengths = [each.num_queries if name in OF_QUERIES else each.num_keys for each in case.spec.sequences]
    return slice(sum(lengths[:number]), sum(lengths[: number + 1]))


def with_invalid_rows(case: Case, arrays: dict[str, Array], number: int) -> dict[str, Array]:
    """The inputs with NaN and infinities in the rows of one sequence."""
    found = {name: array.copy() for name, array in arrays.items()}
    for name, value in INVALID.items():
        found[name][:, rows_of(case, name, number)] = value
    return found


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", suite.VARIABLE_LENGTH, ids=lambda case: case.line.replace(" ", "_"))
def test_neighbours_change_nothing(case: Case, direction: str, kernels: Kernels) -> None:
    case = case.replace(direction=direction)
    expected = guarded_check.expect(case)
    found = guarded_check.check_case(case, expected, kernels)
    names = [name for name in found if name != "logsumexp"]
    for number in (1, 3, 5):
        arrays = with_invalid_rows(case, expected.arrays, number)
        with device_memory.guarded_launch(case.problem(), arrays, kernels) as guarded:
            other = guarded.run()
        for beside in set(range(len(case.spec.sequences))) - {number}:
            for name in names:
                rows = rows_of(case, name, beside)
                assert same_bits(found[name][:, rows], other[name][:, rows]), (name, number, beside)
