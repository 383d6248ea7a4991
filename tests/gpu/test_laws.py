"""Laws on the GPU: what must hold to the last bit, or for any input, and needs no tolerance of a dtype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cutlass_py_attn import driver
from cutlass_py_attn.launch import bind_problem
from cutlass_py_attn.problem import Tensor
from tests.gpu import cases, check, layouts, memory
from tests.gpu.cases import Case, Variant
from tests.gpu.check import Array, Kernels, same_bits

SIZES = ((2, 3, 65, 129), (1, 2, 203, 257), (3, 2, 640, 513))
CAUSAL = (Variant("bfloat16", 128, 128, "causal"), Variant("float16", 64, 64, "causal"),
          Variant("float32", 64, 64, "causal"))  # fmt: skip
MIXED = (Variant("bfloat16", 64, 64, "full"), Variant("bfloat16", 80, 40, "causal"),
         Variant("float32", 128, 128, "causal"))  # fmt: skip
HUGE = 1e4
REPEATS = 20
# Sums of thousands of rounded terms, against the norm of what is summed.
SUMS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}


def case_of(variant: Variant, size: tuple[int, int, int, int], seed: int = 1) -> Case:
    """A backward case with one block per head, so that even the query gradient is repeatable."""
    return Case("backward", variant, *size, "gaussian", seed, num_splits_key=1)


def directed(case: Case, direction: str) -> Case:
    """The same case in that direction; the forward splits no keys."""
    return case if direction == "backward" else replace(case, direction="forward", num_splits_key=None)


def name(value: object) -> str:
    """Test id of a variant or a size."""
    if isinstance(value, Variant):
        return replace(case_of(value, (1, 1, 1, 1)), num_splits_key=None).line.split(" 1x")[0].replace(" ", "_")
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def differing(left: dict[str, Array], right: dict[str, Array]) -> list[str]:
    """Names of the tensors whose bits differ."""
    return [key for key in left if not same_bits(left[key], right[key])]


def operands_of(case: Case, arrays: dict[str, Array]) -> dict[str, Array]:
    """What the backward reads, from the reference: output and logsumexp beside the given arrays."""
    found = check.by_reference(case, arrays, "float64")
    output = found["output"].astype(arrays["query"].dtype)
    return {**arrays, "output": output, "logsumexp": found["logsumexp"].astype(np.float32)}


@pytest.mark.parametrize("size", SIZES, ids=name)
@pytest.mark.parametrize("variant", CAUSAL, ids=name)
def test_later_keys_move_nothing(variant: Variant, size: tuple[int, int, int, int], kernels: Kernels) -> None:
    """Causality: huge keys and values from t on leave output, logsumexp and dQ of rows before t as they were."""
    case = case_of(variant, size)
    arrays = check.make(case)
    first = min(case.num_queries, case.num_keys) // 2 + 1
    changed = {key: arrays[key].copy() for key in arrays}
    for key in ("key", "value"):
        changed[key][:, first:] = HUGE
    before, after = (check.attend(case, given, kernels) for given in (arrays, changed))
    for key in ("output", "grad_query"):
        assert same_bits(before[key][:, :first], after[key][:, :first]), key
    assert same_bits(before["logsumexp"][..., :first], after["logsumexp"][..., :first])
    assert not same_bits(before["output"], after["output"]), "the change must be seen by later rows"


@pytest.mark.parametrize("size", SIZES, ids=name)
@pytest.mark.parametrize("variant", MIXED, ids=name)
def test_factor_two(variant: Variant, size: tuple[int, int, int, int], kernels: Kernels) -> None:
    """Twice V gives twice the output; twice dO gives twice each gradient: powers of two round nothing."""
    case = case_of(variant, size)
    arrays = check.make(case)
    single = check.attend(case, arrays, kernels)
    of_value = check.attend(case, {**arrays, "value": arrays["value"] * 2}, kernels)
    of_gradient = check.attend(case, {**arrays, "grad_output": arrays["grad_output"] * 2}, kernels)
    assert same_bits(of_value["output"], single["output"] * 2)
    assert same_bits(of_value["logsumexp"], single["logsumexp"])
    for key in check.GRADIENTS:
        assert same_bits(of_gradient[key], single[key] * 2), key


@pytest.mark.parametrize("size", SIZES, ids=name)
@pytest.mark.parametrize("variant", MIXED, ids=name)
def test_batch_and_head_order(variant: Variant, size: tuple[int, int, int, int], kernels: Kernels) -> None:
    case = case_of(variant, size)
    arrays = check.make(case)
    straight = check.attend(case, arrays, kernels)
    turned = check.attend(case, {key: array[::-1, :, ::-1].copy() for key, array in arrays.items()}, kernels)
    turned = {k: a[::-1, ::-1] if k == "logsumexp" else a[::-1, :, ::-1] for k, a in turned.items()}
    assert differing(straight, turned) == []


@pytest.mark.parametrize("layout", ["padded", "heads_first", "packed"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("variant", MIXED, ids=name)
def test_layout_changes_nothing(variant: Variant, direction: str, layout: str, kernels: Kernels) -> None:
    """Strides move no bit, NaN in every gap and in 512 elements around is neither read nor overwritten."""
    case = directed(case_of(variant, SIZES[0]), direction)
    operands = operands_of(case, check.make(case))
    with memory.placed(case.problem(), operands, kernels) as dense:
        expected = dense.run()
    assert not any(np.isnan(array).any() for array in expected.values())
    with memory.placed(layouts.of_problem(case.problem(), layout), operands, kernels) as other:
        assert differing(expected, other.run()) == []


@pytest.mark.parametrize("variant", MIXED, ids=name)
def test_grad_output_of_stride_zero(variant: Variant, kernels: Kernels) -> None:
    """The gradient of a plain sum: one number, expanded."""
    case = case_of(variant, SIZES[1])
    arrays = check.make(case)
    row = arrays["grad_output"][:1, :1, :1]
    arrays["grad_output"] = np.broadcast_to(row, arrays["grad_output"].shape).copy()
    operands = operands_of(case, arrays)
    problem = case.problem()
    flat = Tensor(problem.shape.of("grad_output"), (0, 0, 0, 1), problem.dtype)
    with memory.placed(problem, operands, kernels) as dense:
        expected = dense.run()
    with memory.placed(problem.replace(grad_output=flat), operands, kernels) as expanded:
        assert differing(expected, expanded.run()) == []


@pytest.mark.parametrize("variant", [*MIXED, *CAUSAL], ids=name)
def test_guards_and_unwritten_elements(variant: Variant, kernels: Kernels) -> None:
    """Outputs are NaN before every launch: none stays, none outside changes, all lengths around a tile."""
    for length in (1, 63, 64, 65, 129):
        case = case_of(variant, (2, 2, length, 130 - length))
        operands = operands_of(case, check.make(case))
        for direction in ("forward", "backward"):
            with memory.placed(directed(case, direction).problem(), operands, kernels) as placed:
                found = placed.run()
            assert not any(np.isnan(array).any() for array in found.values()), (length, direction)


@pytest.mark.parametrize("variant", [*MIXED, *cases.DETERMINISTIC], ids=name)
def test_repeats(variant: Variant, kernels: Kernels) -> None:
    """The same launch gives the same bits; dQ too where it is deterministic or summed by one block."""
    case = replace(case_of(variant, (3, 6, 799, 800)), num_splits_key=None)
    operands = operands_of(case, check.make(case))
    _repeat(case, operands, kernels, set() if variant.deterministic else {"grad_query"})
    if not variant.deterministic:
        _repeat(replace(case, num_splits_key=1), operands, kernels, set())
        _repeat(directed(case, "forward"), operands, kernels, set())


def _repeat(case: Case, operands: dict[str, Array], kernels: Kernels, free: set[str]) -> None:
    with memory.placed(case.problem(), operands, kernels) as placed:
        first = placed.run()
        for _ in range(REPEATS):
            assert set(differing(first, placed.run())) <= free, case.line


@pytest.mark.parametrize("size", SIZES, ids=name)
@pytest.mark.parametrize("variant", [*MIXED, *CAUSAL], ids=name)
def test_sums(variant: Variant, size: tuple[int, int, int, int], kernels: Kernels) -> None:
    """Weights of a row add up to one, so dV sums to dO; sum q dQ and sum k dK are both the sum of S dS."""
    case = case_of(variant, size)
    arrays = check.make(case)
    found = check.attend(case, arrays, kernels)
    wide = {key: array.astype(np.float64) for key, array in {**arrays, **found}.items()}
    left, right = wide["grad_value"].sum(axis=1), wide["grad_output"].sum(axis=1)
    assert np.linalg.norm(left - right) <= SUMS[variant.dtype] * np.linalg.norm(right)
    left, right = ((wide[k] * wide[f"grad_{k}"]).sum(axis=(1, 3)) for k in ("query", "key"))
    scale = np.sqrt((wide["key"] ** 2).sum() * (wide["grad_key"] ** 2).sum())
    assert np.linalg.norm(left - right) <= SUMS[variant.dtype] * scale


@pytest.mark.parametrize("size", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 3, 0, 70), (2, 3, 70, 0)], ids=name)
def test_empties(size: tuple[int, int, int, int], kernels: Kernels) -> None:
    """Nothing is launched, and the results are those of a sum over nothing."""
    case = replace(case_of(MIXED[0], size), num_splits_key=None)
    found = check.attend(case, check.make(case), kernels)
    expected = check.by_reference(case, check.make(case), "float64")
    for key, array in found.items():
        np.testing.assert_array_equal(array.astype(np.float64), expected[key], err_msg=key)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_without_keys(dtype: str, kernels: Kernels) -> None:
    """Bottom-right causal with more queries than keys: the first rows see nothing and give exact zeros."""
    variant = next(v for v in cases.MAIN if v.dtype == dtype and v.mask == "causal_br")
    case = case_of(variant, (2, 3, 203, 65))
    found = check.attend(case, check.make(case), kernels)
    blind = case.num_queries - case.num_keys
    assert not found["output"][:, :blind].any()
    assert not found["grad_query"][:, :blind].any()
    assert np.isneginf(found["logsumexp"][:, :, :blind]).all()
    assert np.isfinite(found["logsumexp"][:, :, blind : case.num_queries]).all()
    assert np.isposinf(found["logsumexp"][:, :, case.num_queries :]).all()
    assert all(np.isfinite(array.astype(np.float32)).all() for key, array in found.items() if key != "logsumexp")


def test_batches_far_apart(kernels: Kernels) -> None:
    """A batch stride beyond 2^31 elements: addresses are 64 bits wide."""
    case = Case("forward", MIXED[0], 2, 1, 70, 70, "gaussian", 1)
    arrays = check.make(case)
    expected = check.attend(case, arrays, kernels)["output"]
    problem = case.problem()
    stride = 2**31 + 8
    far = replace(problem.key, strides=(stride, *problem.key.strides[1:]))
    half = arrays["key"][0].nbytes
    with memory.placed(problem, arrays, kernels) as placed:
        base = driver.allocate_now(2 * stride + half, "a key tensor of two distant batches")
        try:
            for batch in (0, 1):
                part = np.ascontiguousarray(arrays["key"][batch])
                driver.copy_to_device(base + batch * 2 * stride, part.ctypes.data, half, 0)
                driver.synchronise(0)
            bound = bind_problem(problem.replace(key=far), kernels)
            placed.reset()
            bound({**placed.pointers, "key": base})
            driver.synchronise(0)
            assert same_bits(placed.read()["output"], expected)
        finally:
            driver.free_now(base)
