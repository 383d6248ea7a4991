"""PyTorch's tests of memory-efficient attention, at its tolerances, with inputs from 0 to 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.problem.tensors import OPERANDS
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import device_memory
from cutlass_py_attn.testing.check import Kernels
from cutlass_py_attn.testing.device_memory import GuardedLaunch
from cutlass_py_attn.testing.guarded_check import by_reference
from tests.cases import matrix
from tests.cases.matrix import MatrixCase
from tests.gpu.matrix_check import (
    LOGSUMEXP,
    attend,
    expect_by_pytorch,
    expect_close,
    expect_probe,
    expect_pytorch,
    expect_xformers,
    factors_of,
    kept_by,
    name_of,
    pytorch_bounds,
    results,
    shown,
)
from tests.gpu.test_launch import captured
from tests.gpu.test_laws import differing

Array = npt.NDArray[Any]

GRAPH_FACTORS = {"output": 1.0, "grad_query": 1.5, "grad_key": 8.0, "grad_value": 1.0}
SAMPLED_ROWS = 96  # of a mask that is too large for the reference
SUBNORMAL = 2e-3  # relative error of 1 / 49999 in float16, below its normal numbers
MOVED = 1 << 20  # words by which a graph's dropout moves on
LEAST_LOGSUMEXP = (2e-4, 1e-6)  # float32 has no finer numbers near float16's least


def all_of(*cases: MatrixCase) -> pytest.MarkDecorator:
    """The test for each of these cases."""
    return pytest.mark.parametrize("case", cases, ids=name_of)


@all_of(*matrix.MATH)
def test_against_math(case: MatrixCase, kernels: Kernels) -> None:
    """Lengths 4 to 2048, head dims 8 to 128, causal or not, with and without dropout, two scales."""
    expect_pytorch(case, kernels)


@all_of(*matrix.ATTN_MASKS)
def test_mask_with_gradient(case: MatrixCase, kernels: Kernels) -> None:
    """A mask [queries, keys] that all batches and heads share, and its gradient."""
    expect_pytorch(case, kernels)


@all_of(*matrix.MASK_FORMS)
def test_mask_forms(case: MatrixCase, kernels: Kernels) -> None:
    """One to four axes, 15 keys, expanded by strides (0, 0, 0, 1), and one head of keys for all (MQA)."""
    expect_pytorch(case, kernels)


def test_gradients_of_packed_inputs(kernels: Kernels) -> None:
    """Within 1e-5 of float64, as slices of one array."""
    case = matrix.SMALL_PACKED
    arrays = case.arrays()
    query, key, value, grad_output = (arrays[name] for name in matrix.OPERANDS)
    output, logsumexp = attention_forward(query, key, value, kernels=kernels)
    found = attention_backward(grad_output, query, key, value, output, logsumexp, packed=True, kernels=kernels)
    truth = by_reference(case, arrays, "float64")
    for name in OPERANDS:
        expect_close(case, f"grad_{name}", getattr(found, name), truth[f"grad_{name}"], (1e-5, 1e-5))


def test_packed_forward(kernels: Kernels) -> None:
    case = matrix.PACKED_FORWARD
    found = expect_pytorch(case, kernels)
    truth = by_reference(case.core, case.core.arrays(), "float64")
    expect_close(case, "output", found["output"], truth["output"], (2e-3, 1e-2))


@all_of(*matrix.LARGE_MASKS)
def test_large_mask(case: MatrixCase, kernels: Kernels) -> None:
    """8192 x 8192. Rows that are not compared have no gradient, so that the keys' comes from those that are."""
    rng = np.random.default_rng(case.seed)
    arrays = case.replace(bias="").arrays()
    arrays["bias"] = rng.random(case.shape.bias, dtype=np.float32).astype(arrays["query"].dtype)
    rows = np.sort(rng.choice(case.spec.num_queries, SAMPLED_ROWS, replace=False))
    rows[[0, -1]] = 0, case.spec.num_queries - 1
    others = np.setdiff1d(np.arange(case.spec.num_queries), rows)
    arrays["grad_output"][:, others] = 0
    found = attend(case, arrays, kernels)
    assert not found["grad_query"][:, others].any()
    few = {name: array[:, rows] if name in ("query", "grad_output") else array for name, array in arrays.items()}
    few["bias"] = arrays["bias"][:, :, rows]
    found |= {name: found[name][:, rows] for name in ("output", "grad_query")}
    found["logsumexp"] = found["logsumexp"][..., rows]
    expect_by_pytorch(case.replace(num_queries=SAMPLED_ROWS), few, found, factors_of(case))


def test_many_batches(kernels: Kernels) -> None:
    """65536 of them."""
    expect_pytorch(matrix.MANY, kernels)


def test_many_batches_with_dropout(kernels: Kernels) -> None:
    """Above 65535 batch elements there are several launches; each continues the random numbers of the last."""
    expect_probe(matrix.MANY_DROPPED, kernels)


def test_level_attention_of_49999_keys(kernels: Kernels) -> None:
    """All scores 0, all values 1, nothing masked: the output is 1, dq and dk are 0, dv is 1."""
    case = matrix.LEVEL
    found = attend(case, case.arrays(), kernels)
    assert (found["output"] == 1).all()
    np.testing.assert_allclose(found["logsumexp"][..., : case.spec.num_queries], np.log(case.spec.num_keys), rtol=1e-6)
    assert not found["grad_query"].any()
    assert not found["grad_key"].any()
    np.testing.assert_allclose(found["grad_value"].astype(np.float64), 1, rtol=SUBNORMAL)


@all_of(*matrix.HIDDEN)
def test_rows_that_a_mask_hides(case: MatrixCase, kernels: Kernels) -> None:
    """By -inf or the dtype's least number: rows all of -inf are zeros, as are rows all of float32's or bfloat16's
    least, which log2(e) makes infinite; float16's moves all scores of a row alike. Nothing is ever NaN."""
    arrays = case.arrays()
    found = attend(case, arrays, kernels)
    assert not any(np.isnan(array.astype(np.float32)).any() for array in found.values())
    logsumexp = LOGSUMEXP
    if case.bias_values == "most_negative":
        logsumexp = LEAST_LOGSUMEXP
        if case.spec.dtype != "float16":
            arrays["bias"] = np.where(arrays["bias"] < 0, -np.inf, arrays["bias"]).astype(arrays["bias"].dtype)
    expect_by_pytorch(case, arrays, found, factors_of(case), logsumexp)


@all_of(*matrix.BIAS_SEQUENCES)
def test_bias_with_sequences(case: MatrixCase, kernels: Kernels) -> None:
    """Which PyTorch refuses; at the tolerances of xFormers, whose inputs these are."""
    expect_xformers(case, kernels)


@all_of(*matrix.GRAPHS)
def test_graphs(case: MatrixCase, kernels: Kernels) -> None:
    """A captured forward gives the same twice, and something else once the offset on the device has moved; then the
    backward, eager and captured, drops what that forward dropped."""
    arrays = case.arrays()
    with (
        device_memory.guarded_launch(case.forward.problem(), arrays, kernels) as forward,
        device_memory.stream() as stream,
    ):
        graph = captured(forward.launch, stream)
        found = _replayed(forward, graph, stream)
        expect_by_pytorch(case, arrays, found, GRAPH_FACTORS)
        assert differing(found, _replayed(forward, graph, stream)) == []
        if case.spec.dropout_p:
            case = case.replace(philox_offset=case.philox_offset + MOVED)
            arrays = case.arrays()
            offset = arrays["philox_offset"]
            driver.copy_to_device(forward.pointers["philox_offset"], offset.ctypes.data, offset.nbytes, stream)
            moved = _replayed(forward, graph, stream)
            assert differing(found, moved) == ["output"]
            expect_by_pytorch(case, arrays, moved, GRAPH_FACTORS)
            found = moved
        driver.call("cuGraphExecDestroy", graph)
    with (
        device_memory.guarded_launch(case.problem(), arrays | found, kernels) as backward,
        device_memory.stream() as stream,
    ):
        eager = backward.run()
        graph = captured(backward.launch, stream)
        assert differing(eager, _replayed(backward, graph, stream)) == []
        driver.call("cuGraphExecDestroy", graph)
    expect_by_pytorch(case, arrays, eager, GRAPH_FACTORS)


def _replayed(guarded: GuardedLaunch, graph: Any, stream: int) -> dict[str, Array]:
    """The results of one launch of the graph, from fresh NaN. Inputs may have changed since."""
    guarded.reset()
    driver.call("cuGraphLaunch", graph, stream)
    driver.synchronise(stream)
    return {name: buffer.read() for name, buffer in guarded.buffers.items() if buffer.is_output}


def _tensor(torch: Any, array: Array) -> Any:
    """A NumPy array on the device; torch takes bfloat16 as bits alone."""
    bits = torch.from_numpy(np.ascontiguousarray(array).view(f"i{array.itemsize}"))
    return bits.cuda().view(getattr(torch, array.dtype.name))


def _values(tensor: Any) -> Array:
    """A torch tensor's values."""
    found: Array = tensor.detach().double().cpu().numpy()
    return found


@all_of(*(case for case in matrix.GRAPHS if case.spec.num_queries == 256))
def test_torch_graphs(case: MatrixCase, kernels: Kernels) -> None:
    """The public functions under torch.cuda.graph, seed and offset in tensors that later replays read anew."""
    torch = pytest.importorskip("torch")
    arrays = case.arrays()
    given = {name: _tensor(torch, array) for name, array in arrays.items()}

    def run() -> dict[str, Any]:
        return results(case, given, {}, kernels=kernels, stream=torch.cuda.current_stream())

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()  # what is bound and loaded on first use must be before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    moves = (0, 0, MOVED) if case.spec.dropout_p else (0, 0)
    found = []
    for move in moves:
        if move:
            given["philox_offset"] += move
        graph.replay()
        torch.cuda.synchronize()
        found.append({name: _values(tensor) for name, tensor in made.items()})
        moved = case.replace(philox_offset=case.philox_offset + move)
        expect_by_pytorch(moved, arrays, found[-1], GRAPH_FACTORS)
    assert differing(found[0], found[1]) == []
    assert all("output" in differing(found[0], other) for other in found[2:])


@all_of(*matrix.TORCH_MASKS)
def test_torch_drops_the_same(case: MatrixCase, kernels: Kernels) -> None:
    """torch's kernel and torch's mask of its own seed and offset, the second time from an offset above 0."""
    torch = pytest.importorskip("torch")
    arrays = case.arrays()
    operands = [_tensor(torch, arrays[name]) for name in OPERANDS]
    nothing = [None] * 5
    torch.manual_seed(case.seed)
    offsets = []
    for _ in range(2):
        output, _, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
            *operands, *nothing, case.spec.dropout_p, 0, True
        )
        offsets.append(int(offset))
        uniform = torch.empty(case.spec.shape.bias, device="cuda")
        torch.ops.aten._fill_mem_eff_dropout_mask_(uniform, case.spec.dropout_p, int(seed), int(offset))
        seeded = case.replace(philox_seed=int(seed), philox_offset=int(offset))
        expect_probe(seeded, kernels)
        kept = kept_by(seeded)
        assert np.array_equal((uniform > case.spec.dropout_p).cpu().numpy(), kept)
        assert np.array_equal(shown(_values(output), case.spec.num_keys), kept)
    assert offsets[1] > offsets[0]


@all_of(*matrix.TORCH_GRADIENTS)
def test_torch_gradients(case: MatrixCase, kernels: Kernels) -> None:
    """torch's memory-efficient attention with autograd, and ours of the same seed and offset: both may be as far from
    the truth as is allowed, so from each other twice as far."""
    torch = pytest.importorskip("torch")
    arrays = case.arrays()
    names = [name for name in (*OPERANDS, "bias") if name in arrays]
    leaves = {name: _tensor(torch, arrays[name]).requires_grad_() for name in names}
    heads_first = [leaves[name].transpose(1, 2) for name in OPERANDS]
    bias = leaves["bias"].expand(case.shape.bias) if case.spec.bias else None
    torch.manual_seed(case.seed)
    output, logsumexp, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
        *heads_first, bias, True, case.spec.dropout_p
    )
    output.transpose(1, 2).backward(_tensor(torch, arrays["grad_output"]))
    theirs = {"output": _values(output.transpose(1, 2)), "logsumexp": _values(logsumexp)}
    theirs |= {f"grad_{name}": _values(leaf.grad) for name, leaf in leaves.items()}
    seeded = case.replace(philox_seed=int(seed), philox_offset=int(offset)) if case.spec.dropout_p else case
    ours = attend(seeded, arrays, kernels)
    assert set(ours) == set(theirs)
    expect_by_pytorch(seeded, arrays, ours, factors_of(case))
    truth, low = (by_reference(seeded, arrays, precision) for precision in ("float64", case.spec.dtype))
    for name, factor in factors_of(case).items():
        if name in ours:
            bounds = pytorch_bounds(case, truth[name], low[name], 2 * factor)
            expect_close(seeded, name, ours[name], theirs[name], bounds)
    rows = slice(0, case.spec.num_queries)
    expect_close(seeded, "logsumexp", ours["logsumexp"][..., rows], theirs["logsumexp"][..., rows], LOGSUMEXP)
