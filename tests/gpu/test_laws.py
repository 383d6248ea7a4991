"""Laws on the GPU: properties that hold bitwise, or for any input, without a tolerance of a dtype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cutlass_py_attn.problem.spec import ProblemSpec, parse
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.binding import bind_problem
from cutlass_py_attn.testing import check, device_memory, layouts
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, Kernels, same_bits
from tests.cases import covering_cases

SIZES = ((2, 3, 65, 129), (1, 2, 203, 257), (3, 2, 640, 513))
CAUSAL = tuple(map(parse, ("bf16_d128_s1_b1_h1_causal", "f16_d64_s1_b1_h1_causal", "f32_d64_s1_b1_h1_causal")))
MIXED = tuple(map(parse, ("bf16_d64_s1_b1_h1_full", "bf16_d80v40_s1_b1_h1_causal", "f32_d128_s1_b1_h1_causal")))
HUGE = 1e4
REPEATS = 20
# Sums of thousands of rounded terms, against the norm of what is summed.
SUMS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}


def case_of(variant: ProblemSpec, size: tuple[int, int, int, int]) -> Case:
    """A backward case of (batch, heads, queries, keys). One block sums each head, so even grad_query is repeatable."""
    batch, heads, queries, keys = size
    sizes = {"batch": batch, "num_heads": heads, "num_queries": queries, "num_keys": keys}
    return Case("backward", variant.replace(**sizes, num_splits_key=1), seed=1)


def directed(case: Case, direction: str) -> Case:
    """The same case in that direction; the forward splits no keys."""
    return case if direction == "backward" else case.replace(direction="forward", num_splits_key=None)


def name(value: object) -> str:
    """Test id of a variant or a size."""
    if isinstance(value, ProblemSpec):
        return value.name.replace("_s1_b1_h1", "")
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
def test_later_keys_move_nothing(variant: ProblemSpec, size: tuple[int, int, int, int], kernels: Kernels) -> None:
    """Causality: huge keys and values from t on do not change output, logsumexp and dQ of rows before t."""
    case = case_of(variant, size)
    arrays = case.arrays()
    first = min(case.spec.num_queries, case.spec.num_keys) // 2 + 1
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
def test_factor_two(variant: ProblemSpec, size: tuple[int, int, int, int], kernels: Kernels) -> None:
    """Twice V gives twice the output; twice dO gives twice each gradient: powers of two round nothing."""
    case = case_of(variant, size)
    arrays = case.arrays()
    single = check.attend(case, arrays, kernels)
    of_value = check.attend(case, {**arrays, "value": arrays["value"] * 2}, kernels)
    of_gradient = check.attend(case, {**arrays, "grad_output": arrays["grad_output"] * 2}, kernels)
    assert same_bits(of_value["output"], single["output"] * 2)
    assert same_bits(of_value["logsumexp"], single["logsumexp"])
    for key in check.GRADIENTS:
        assert same_bits(of_gradient[key], single[key] * 2), key


@pytest.mark.parametrize("size", SIZES, ids=name)
@pytest.mark.parametrize("variant", MIXED, ids=name)
def test_batch_and_head_order(variant: ProblemSpec, size: tuple[int, int, int, int], kernels: Kernels) -> None:
    case = case_of(variant, size)
    arrays = case.arrays()
    straight = check.attend(case, arrays, kernels)
    turned = check.attend(case, {key: array[::-1, :, ::-1].copy() for key, array in arrays.items()}, kernels)
    turned = {k: a[::-1, ::-1] if k == "logsumexp" else a[::-1, :, ::-1] for k, a in turned.items()}
    assert differing(straight, turned) == []


@pytest.mark.parametrize("layout", ["padded", "heads_first", "packed"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("variant", MIXED, ids=name)
def test_layout_changes_nothing(variant: ProblemSpec, direction: str, layout: str, kernels: Kernels) -> None:
    """Strides change no bit, and NaN in every gap and in 512 elements around is neither read nor overwritten."""
    case = directed(case_of(variant, SIZES[0]), direction)
    operands = operands_of(case, case.arrays())
    with device_memory.guarded_launch(case.problem(), operands, kernels) as dense:
        expected = dense.run()
    assert not any(np.isnan(array).any() for array in expected.values())
    with device_memory.guarded_launch(layouts.of_problem(case.problem(), layout), operands, kernels) as other:
        assert differing(expected, other.run()) == []


@pytest.mark.parametrize("variant", MIXED, ids=name)
def test_grad_output_of_stride_zero(variant: ProblemSpec, kernels: Kernels) -> None:
    """The gradient of a plain sum: one number, expanded."""
    case = case_of(variant, SIZES[1])
    arrays = case.arrays()
    row = arrays["grad_output"][:1, :1, :1]
    arrays["grad_output"] = np.broadcast_to(row, arrays["grad_output"].shape).copy()
    operands = operands_of(case, arrays)
    problem = case.problem()
    flat = Tensor(problem.shape.of("grad_output"), (0, 0, 0, 1), problem.dtype)
    with device_memory.guarded_launch(problem, operands, kernels) as dense:
        expected = dense.run()
    with device_memory.guarded_launch(problem.replace(grad_output=flat), operands, kernels) as expanded:
        assert differing(expected, expanded.run()) == []


@pytest.mark.parametrize("variant", [*MIXED, *CAUSAL], ids=name)
def test_guards_and_unwritten_elements(variant: ProblemSpec, kernels: Kernels) -> None:
    """Outputs are NaN before every launch: none stays, none outside changes, all lengths around a tile."""
    for length in (1, 63, 64, 65, 129):
        case = case_of(variant, (2, 2, length, 130 - length))
        operands = operands_of(case, case.arrays())
        for direction in ("forward", "backward"):
            with device_memory.guarded_launch(directed(case, direction).problem(), operands, kernels) as guarded:
                found = guarded.run()
            assert not any(np.isnan(array).any() for array in found.values()), (length, direction)


@pytest.mark.parametrize("variant", [*MIXED, *covering_cases.DETERMINISTIC], ids=name)
def test_repeats(variant: ProblemSpec, kernels: Kernels) -> None:
    """The same launch gives the same bits; dQ too where it is deterministic or summed by one block."""
    case = case_of(variant, (3, 6, 799, 800)).replace(num_splits_key=None)
    operands = operands_of(case, case.arrays())
    _repeat(case, operands, kernels, set() if variant.deterministic else {"grad_query"})
    if not variant.deterministic:
        _repeat(case.replace(num_splits_key=1), operands, kernels, set())
        _repeat(directed(case, "forward"), operands, kernels, set())


def _repeat(case: Case, operands: dict[str, Array], kernels: Kernels, free: set[str]) -> None:
    with device_memory.guarded_launch(case.problem(), operands, kernels) as guarded:
        first = guarded.run()
        for _ in range(REPEATS):
            assert set(differing(first, guarded.run())) <= free, case.line


@pytest.mark.parametrize("size", SIZES, ids=name)
@pytest.mark.parametrize("variant", [*MIXED, *CAUSAL], ids=name)
def test_sums(variant: ProblemSpec, size: tuple[int, int, int, int], kernels: Kernels) -> None:
    """Weights of a row add up to one, so dV sums to dO; sum q dQ and sum k dK are both the sum of S dS."""
    case = case_of(variant, size)
    arrays = case.arrays()
    found = check.attend(case, arrays, kernels)
    wide = {key: array.astype(np.float64) for key, array in {**arrays, **found}.items()}
    left, right = wide["grad_value"].sum(axis=1), wide["grad_output"].sum(axis=1)
    assert np.linalg.norm(left - right) <= SUMS[variant.dtype] * np.linalg.norm(right)
    left, right = ((wide[k] * wide[f"grad_{k}"]).sum(axis=(1, 3)) for k in ("query", "key"))
    scale = np.sqrt((wide["key"] ** 2).sum() * (wide["grad_key"] ** 2).sum())
    assert np.linalg.norm(left - right) <= SUMS[variant.dtype] * scale


@pytest.mark.parametrize("size", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 3, 0, 70), (2, 3, 70, 0)], ids=name)
def test_empties(size: tuple[int, int, int, int], kernels: Kernels) -> None:
    """Nothing is launched, and the results are those of an empty sum."""
    case = case_of(MIXED[0], size).replace(num_splits_key=None)
    found = check.attend(case, case.arrays(), kernels)
    expected = check.by_reference(case, case.arrays(), "float64")
    for key, array in found.items():
        np.testing.assert_array_equal(array.astype(np.float64), expected[key], err_msg=key)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_without_keys(dtype: str, kernels: Kernels) -> None:
    """Bottom-right causal with more queries than keys: the first rows see no key and give exact zeros."""
    variant = next(v for v in covering_cases.MAIN if v.dtype == dtype and v.mask.name == "causal_br")
    case = case_of(variant, (2, 3, 203, 65))
    found = check.attend(case, case.arrays(), kernels)
    blind = case.spec.num_queries - case.spec.num_keys
    assert not found["output"][:, :blind].any()
    assert not found["grad_query"][:, :blind].any()
    assert np.isneginf(found["logsumexp"][:, :, :blind]).all()
    assert np.isfinite(found["logsumexp"][:, :, blind : case.spec.num_queries]).all()
    assert np.isposinf(found["logsumexp"][:, :, case.spec.num_queries :]).all()
    assert all(np.isfinite(array.astype(np.float32)).all() for key, array in found.items() if key != "logsumexp")


@pytest.mark.device_memory(gib=5)
def test_batches_far_apart(kernels: Kernels) -> None:
    """A batch stride beyond 2^31 elements: addresses are 64 bits wide."""
    case = directed(case_of(MIXED[0], (2, 1, 70, 70)), "forward")
    arrays = case.arrays()
    expected = check.attend(case, arrays, kernels)["output"]
    problem = case.problem()
    stride = 2**31 + 8
    far = replace(problem.key, strides=(stride, *problem.key.strides[1:]))
    half = arrays["key"][0].nbytes
    with device_memory.guarded_launch(problem, arrays, kernels) as guarded:
        base = driver.allocate_now(2 * stride + half, "a key tensor of two distant batches")
        try:
            for batch in (0, 1):
                part = np.ascontiguousarray(arrays["key"][batch])
                driver.copy_to_device(base + batch * 2 * stride, part.ctypes.data, half, 0)
                driver.synchronise(0)
            bound = bind_problem(problem.replace(key=far), kernels)
            guarded.reset()
            bound({**guarded.pointers, "key": base})
            driver.synchronise(0)
            assert same_bits(guarded.read()["output"], expected)
        finally:
            driver.free_now(base)
