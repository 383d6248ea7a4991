"""Programs of mask functions for joined batches, and for parts of the batch and the heads, against parts of a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.problem.mask_function import MaskFunction
from cutlass_py_attn.problem.mask_program import MaskProgram

BATCH, HEADS, ROWS, KEYS = 3, 4, 6, 9
RANDOM = np.random.default_rng(3)
IDS = RANDOM.integers(0, 3, (5, BATCH, KEYS)).astype(np.int32)  # of five calls
WEIGHT = RANDOM.random((5, HEADS, ROWS), np.float32)


def function(batch: Any, head: Any, query: Any, key: Any, ids: Any, weight: Any, step: Any) -> Any:
    of_batch = (query + batch) % step == 1
    return ((ids[batch, query] == ids[batch, key]) & (weight[head, query] < 0.7)) | of_batch


def without_batch(batch: Any, head: Any, query: Any, key: Any, ids: Any, weight: Any, step: Any) -> Any:
    return (ids[0, key] == step) | (weight[head, query] < 0.3)


def mask_of(each: Any, ids: Any, weight: Any) -> MaskFunction:
    return MaskFunction(each, {"ids": ids, "weight": weight, "step": 2})


def seen(program: MaskProgram, arrays: list[Any], scalars: tuple[int, ...], batch: int, heads: int = HEADS) -> Any:
    names = {str(number): value for number, value in enumerate((*arrays, *scalars))}
    parsed = MaskProgram.parse(str(program))
    assert parsed == program
    return MaskFunction(parsed, names).materialise(batch, heads, ROWS, KEYS)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("is_outer", [True, False])
@pytest.mark.parametrize("mapped", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("each", [function, without_batch])
def test_joined_batches(each: Any, mapped: tuple[int, ...], is_outer: bool, batch: int) -> None:
    """Twice: calls of calls."""
    whole = IDS, WEIGHT
    arrays = [array if number in mapped else array[0] for number, array in enumerate(whole)]
    calls = [
        mask_of(each, *(array[call] if number in mapped else array[0] for number, array in enumerate(whole)))
        for call in range(5)
    ]
    expected = np.stack([mask.materialise(batch, HEADS, ROWS, KEYS) for mask in calls], 0 if is_outer else 1)
    program, integers = calls[0].program.joined(batch if is_outer else 5, mapped, is_outer)
    assert len(integers) == (batch > 1 or not is_outer)
    scalars = 2, *integers
    found = seen(program, arrays, scalars, 5 * batch)
    assert (found == expected.reshape(5 * batch, HEADS, ROWS, KEYS)).all()
    several = [np.stack([array, array[::-1]]) if number in mapped else array for number, array in enumerate(arrays)]
    twice, integers = program.joined(5 * batch, mapped, True)
    found = seen(twice, several, (*scalars, *integers), 10 * batch)
    halves = [[array[half] if n in mapped else array for n, array in enumerate(several)] for half in range(2)]
    wanted = [seen(program, half, scalars, 5 * batch) for half in halves]
    assert (found == np.concatenate(wanted)).all()


def test_sizes_are_integers_of_a_program() -> None:
    """So other sizes need no other kernel."""
    program = mask_of(function, IDS[0], WEIGHT[0]).program
    assert program.joined(2, [0], True)[0] == program.joined(7, [0], True)[0]


@pytest.mark.parametrize("names", [("batch",), ("head",), ("batch", "head")])
def test_placed_parts(names: tuple[str, ...]) -> None:
    mask = mask_of(function, IDS[0], WEIGHT[0])
    program = mask.program.placed(names)
    whole = mask.materialise(BATCH, HEADS, ROWS, KEYS)
    batch, head = (1 if "batch" in names else 0), (2 if "head" in names else 0)
    found = seen(program, [IDS[0], WEIGHT[0], np.array([1, 2], np.int32)], (2,), BATCH - batch, HEADS - head)
    assert (found == whole[batch:, head:]).all()
    assert program.coordinates == mask.program.coordinates
