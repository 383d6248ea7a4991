"""Sequences of several lengths on the GPU: what lies beside a sequence, be it NaN, moves no bit of its results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cutlass_py_attn.plan import Build
from tests.gpu import drawn_check, memory
from tests.gpu.cases import ARCH
from tests.gpu.check import Array, Kernels, same_bits
from tests.gpu.drawn import Drawn, builds_of

# queries/keys/used keys: lengths off the tiles, without queries, without keys, and a tile of keys that are not used.
LENGTHS = "70/200/30,130/190/190,0/40/40,257/300/290,65/0/0,5/333/333,200/129/129"
CASES = (
    Drawn("backward", "bfloat16", 1, 2, 0, 0, 128, mask="causal", sequences=LENGTHS, seqused=True, deterministic=True),
    Drawn("backward", "float16", 1, 2, 0, 0, 64, sequences=LENGTHS, seqused=True, deterministic=True),
    Drawn("backward", "bfloat16", 1, 4, 0, 0, 96, heads_key=2, mask="causal_br:50", sequences=LENGTHS,
          seqused=True, deterministic=True),
)  # fmt: skip
NOTHING = {"query": np.nan, "key": np.nan, "value": np.inf, "grad_output": np.inf}
AXES = {"query": "q", "grad_output": "q", "output": "q", "grad_query": "q"}  # all others have rows of keys


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that these tests run, once, and what stands in for it where ptxas spills."""
    return builds_of((replace(one, direction=way) for one in CASES for way in ("forward", "backward")), arch)


def rows_of(one: Drawn, name: str, number: int) -> slice:
    """The rows of one sequence in a tensor."""
    lengths = [queries if AXES.get(name) else keys for queries, keys, _ in one.lengths]
    return slice(sum(lengths[:number]), sum(lengths[: number + 1]))


def spoilt(one: Drawn, arrays: dict[str, Array], number: int) -> dict[str, Array]:
    """The inputs with NaN and infinities in the rows of one sequence."""
    found = {name: array.copy() for name, array in arrays.items()}
    for name, nothing in NOTHING.items():
        found[name][:, rows_of(one, name, number)] = nothing
    return found


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.dtype}_d{one.dim}_{one.mask}")
def test_neighbours_change_nothing(one: Drawn, direction: str, kernels: Kernels) -> None:
    one = replace(one, direction=direction, deterministic=direction == "backward")
    expected = drawn_check.expect(one)
    found = drawn_check.expect_agreement(one, expected, kernels)
    names = [name for name in found if name != "logsumexp"]
    for number in (1, 3, 5):
        arrays = spoilt(one, expected.arrays, number)
        with memory.placed(one.problem(), arrays, kernels) as placed:
            other = placed.run()
        for beside in set(range(len(one.lengths))) - {number}:
            for name in names:
                rows = rows_of(one, name, beside)
                assert same_bits(found[name][:, rows], other[name][:, rows]), (name, number, beside)
