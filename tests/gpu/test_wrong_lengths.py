"""Wrong lengths on the device: every kernel clamps cu_seqlens_q, cu_seqlens_k and seqused_k to the tensors.

The host does not see these values. A wrong one gives wrong rows of the sequences that it belongs to, and never reads or
writes outside of the tensors, the results and the workspace: these are between guards, which must not change, and a
NaN that a kernel computes was read from a guard. Sequences whose own lengths are right, and that share no rows with
another, have the results of right lengths.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.problem.tensors import OPERANDS, Tensor
from cutlass_py_attn.testing import check, device_memory, guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, Kernels, same_bits
from cutlass_py_attn.testing.device_memory import GuardedLaunch
from tests.cases import suite
from tests.gpu.matrix_check import OnDevice, on_host

LIMIT_S = 120  # of one test; a kernel that never ends would block the driver
GUARD = 1 << 17  # elements: more than the rows of the longest sequence
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")
OF_QUERIES = ("output", "grad_query")
# An atomic sum has its terms in any order.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5}
LEAST_COMPARED = 50  # sequences of a case with right results beside wrong ones


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    """Ends the process with a traceback if a launch does not return."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a sequence that a kernel uses: the first, and how many."""

    start: int
    count: int

    def overlaps(self, other: Rows) -> bool:
        """Whether both have a row in common."""
        return max(self.start, other.start) < min(self.start + self.count, other.start + other.count)


@dataclass(frozen=True, slots=True)
class Sequence:
    """What a kernel uses for one sequence, after the clamp. tiles: its query tiles in the workspace of a backward."""

    queries: Rows
    keys: Rows
    used: int
    tiles: Rows

    def shares(self, other: Sequence, direction: str) -> bool:
        """Whether the results of one of both may depend on the other."""
        if direction == "forward":
            return self.queries.overlaps(other.queries)
        pairs = ((self.queries, other.queries), (self.keys, other.keys), (self.tiles, other.tiles))
        return any(first.overlaps(second) for first, second in pairs)


def clamped(case: Case, lengths: dict[str, Array], tile_m: int) -> list[Sequence]:
    """What a kernel uses for each sequence."""
    shape = case.shape
    assert shape.tokens is not None
    sides = zip(BOUNDS, shape.tokens, (shape.num_queries, shape.num_keys), strict=True)
    queries, keys = ([rows(lengths[name], number, *most) for number in range(shape.batch)] for name, *most in sides)
    found = []
    for number, (of_queries, of_keys) in enumerate(zip(queries, keys, strict=True)):
        used = int(lengths["seqused_k"][number]) if "seqused_k" in lengths else of_keys.count
        tiles = Rows(of_queries.start // tile_m + number, max(-(-of_queries.count // tile_m), 1))
        found.append(Sequence(of_queries, of_keys, min(max(used, 0), of_keys.count), tiles))
    return found


def rows(bounds: Array, number: int, tokens: int, longest: int) -> Rows:
    """The rows between two bounds, of `tokens` rows and at most `longest`."""
    start, end = (int(bound) for bound in bounds[number : number + 2])
    start = min(max(start, 0), tokens)
    return Rows(start, min(min(max(end, start), tokens) - start, longest))


def wrong_lengths(case: Case, right: dict[str, Array]) -> Iterator[dict[str, Array]]:
    """Yields the arrays with one wrong value, or with a whole array of wrong values."""
    tokens = case.shape.tokens
    assert tokens is not None
    totals = dict(zip(BOUNDS, tokens, strict=True)) | {"seqused_k": tokens[1]}
    for name, array in right.items():
        total = totals[name]
        for value in (INT_MIN, -1, total + 1, total + 100, INT_MAX):
            for place in range(array.size):
                yield right | {name: with_value(array, place, value)}
        for place in range(1, array.size - 1):  # joins two sequences, which may be longer than the longest
            yield right | {name: with_value(array, place, int(array[place + 1]))}
        ends = np.resize(np.array([0, total], np.int32), array.size)
        wholes = (array[::-1], ends, ends[::-1], np.resize(np.array([INT_MAX, INT_MIN], np.int32), array.size))
        for values in (*wholes, *(np.full_like(array, value) for value in (INT_MIN, -1, 0, total, INT_MAX))):
            yield right | {name: np.ascontiguousarray(values, np.int32)}
    for value in (INT_MIN, INT_MAX):
        yield {name: np.full_like(array, value) for name, array in right.items()}


def with_value(array: Array, place: int, value: int) -> Array:
    """A copy of the array with another value at one place."""
    found = array.copy()
    found[place] = value
    return found


def lengths_of(arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays of lengths."""
    return {name: arrays[name] for name in (*BOUNDS, "seqused_k") if name in arrays}


def untouched(case: Case, right: list[Sequence], wrong: list[Sequence]) -> list[int]:
    """The sequences with queries whose own lengths are right and that share nothing with another."""
    return [
        number
        for number, sequence in enumerate(wrong)
        if sequence == right[number]
        and sequence.queries.count
        and not any(sequence.shares(other, case.direction) for place, other in enumerate(wrong) if place != number)
    ]


def expect_right(case: Case, sequence: Sequence, number: int, found: dict[str, Array], truth: dict[str, Array]) -> None:
    """Compares the rows of a sequence with those of right lengths."""
    for name, array in found.items():
        if name in ("grad_bias", "grad_sinks"):  # may be sums over the sequences
            continue
        if name == "logsumexp":
            place: Any = (number, slice(None), slice(0, sequence.queries.count))
        else:
            of = sequence.queries if name in OF_QUERIES else sequence.keys
            place = (0, slice(of.start, of.start + of.count))
        if case.direction == "forward":
            assert same_bits(array[place], truth[name][place]), (name, number)
            continue
        ours, theirs = (each[place].astype(np.float64) for each in (array, truth[name]))
        error = np.linalg.norm(ours - theirs)
        assert error <= TOLERANCE[case.spec.dtype] * np.linalg.norm(theirs) + 1e-6, (name, number, error)


def expect_no_computed_nan(found: dict[str, Array]) -> None:
    """A kernel's NaN has other bits than those that the results are filled with."""
    for name, array in found.items():
        filler = np.full(1, np.nan, array.dtype).view(f"u{array.itemsize}")
        computed = np.isnan(array) & (array.view(f"u{array.itemsize}") != filler)
        assert not computed.any(), f"{name}: {computed.sum()} NaN, the first at {np.argwhere(computed)[0]}"


def run_with(guarded: GuardedLaunch, lengths: dict[str, Array]) -> dict[str, Array]:
    """Launches with these lengths; AssertionError if a guard changed or was read."""
    for name, values in lengths.items():
        guarded.buffers[name].change(values)
    found = guarded.run()
    expect_no_computed_nan(found)
    return found


@pytest.mark.parametrize("case", suite.WRONG_LENGTHS, ids=lambda case: case.line.replace(" ", "_"))
def test_wrong_lengths_stay_in_the_tensors(case: Case, kernels: Kernels) -> None:
    arrays, families = guarded_check.expect(case).arrays, check.families(case)
    # Of a decode step the suite has the decode kernel alone.
    for family in families[:1] if "decode" in families else families:
        expect_inside(case, arrays, family, check.only_family(kernels, family, case.direction))


def expect_inside(case: Case, arrays: dict[str, Array], family: str, kernels: Kernels) -> None:
    """Launches the kernels of a family with every wrong length, and with the right ones before and after."""
    lengths = lengths_of(arrays)
    philox = {"philox_seed": 3, "philox_offset": 5} if case.spec.dropout_p else None
    with device_memory.guarded_launch(case.problem(), arrays, kernels, philox, GUARD) as guarded:
        build = guarded.bound.plan.build
        assert build.family == family
        right, truth = clamped(case, lengths, build.tile_m), run_with(guarded, lengths)
        compared = 0
        for wrong in wrong_lengths(case, lengths):
            found = run_with(guarded, wrong)
            for number in untouched(case, right, clamped(case, wrong, build.tile_m)):
                expect_right(case, right[number], number, found, truth)
                compared += 1
        assert compared >= LEAST_COMPARED
        found = run_with(guarded, lengths)
        for number, sequence in enumerate(right):
            expect_right(case, sequence, number, found, truth)


@pytest.mark.parametrize("case", suite.CHANGED_LENGTHS, ids=lambda case: case.direction)
def test_arrays_that_change_between_calls(case: Case, kernels: Kernels) -> None:
    """The public functions read no value on the device: the lengths of a later call may be wrong."""
    problem, arrays = case.problem(), guarded_check.expect(case).arrays
    # A row's weights may be those of another row's logsumexp, and large: small gradients stay within float16.
    arrays["grad_output"] = arrays["grad_output"] * np.float16(2**-6)
    logsumexp = Tensor.contiguous(problem.shape.logsumexp, "float32")
    tensors = {**problem.tensors(), **problem.vectors(), "logsumexp": logsumexp}
    lengths, shape = lengths_of(arrays), case.shape
    written = ("output",) if case.direction == "forward" else tuple(f"grad_{name}" for name in OPERANDS)
    with ExitStack() as stack:
        given = {
            name: stack.enter_context(closing(OnDevice(tensors[name], values)))
            for name, values in arrays.items()
            if name in tensors and name not in written
        }
        results = {name: stack.enter_context(closing(OnDevice(tensors[name]))) for name in written}
        sequences = VariableLength(
            given["cu_seqlens_q"], given["cu_seqlens_k"], shape.num_queries, shape.num_keys, given["seqused_k"]
        )
        options: dict[str, Any] = {"mask": case.spec.mask, "sequences": sequences, "kernels": kernels}

        def call() -> dict[str, Array]:
            operands = (given[name] for name in OPERANDS)
            if case.direction == "forward":
                attention_forward(*operands, out=results["output"], **options)
            else:
                out = Gradients(**{name: results[f"grad_{name}"] for name in OPERANDS})
                saved = given["output"], given["logsumexp"]
                attention_backward(given["grad_output"], *operands, *saved, out=out, **options)
            return {name: on_host(array) for name, array in results.items()}

        truth = call()
        for wrong in wrong_lengths(case, lengths):
            for name, values in wrong.items():
                given[name].buffer.change(values)
            found = call()
            assert all(np.isfinite(array.astype(np.float32)).all() for array in found.values())
        for name, values in lengths.items():
            given[name].buffer.change(values)
        found = call()
        for number, sequence in enumerate(clamped(case, lengths, 1)):
            expect_right(case, sequence, number, found, truth)
