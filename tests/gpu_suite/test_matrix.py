"""Tests of the matrix without a GPU: every case has a kernel, and its tests run on an emulated GPU.

The emulated GPU is the fake driver, whose device memory is the host's, with the reference in place of the kernels. It
reads and writes by the problem's strides. The tests must notice a faulty emulated GPU.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api import calls, cpu_backend
from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.launch.arch import ARCHITECTURES
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import OPERANDS, Shape, Tensor
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.frameworks import numpy_dtype
from cutlass_py_attn.score_terms.dropout import Dropout
from cutlass_py_attn.testing import device_memory
from cutlass_py_attn.testing.cases import ARCH
from tests.cases import covering_cases, matrix
from tests.cases.matrix import MatrixCase
from tests.gpu import matrix_check
from tests.gpu import test_matrix_pytorch as pytorch
from tests.gpu import test_matrix_xformers as xformers
from tests.support.fake_driver import FakeDriver

KERNELS = 180
LEAST = float(np.finfo(np.float32).min) * math.log(2)  # what lies below is infinite once it is in base 2
# Too much for an emulation.
LARGE = ("test_large_mask", "test_many_batches", "test_many_batches_with_dropout", "test_level_attention_of_49999_keys",
         "test_keep_rates", "test_sizes_beyond_16_bits")  # fmt: skip
Array = np.ndarray[Any, Any]


@functools.cache
def known() -> frozenset[Any]:
    """The builds of the whole matrix."""
    return frozenset(matrix.builds())


def test_every_case_is_supported_and_has_a_kernel() -> None:
    for case in matrix.ALL:
        kinds = [first.kind for first, *_ in matrix.builds_of(case)]
        passes = ["forward", "backward"] if case.direction == "backward" else ["forward"]
        assert kinds == ([] if case in matrix.EMPTY else passes), case.line
    for case in matrix.EMPTY:
        assert case.forward.problem().reasons() == case.problem().reasons() == []
    assert len({case.line for case in matrix.ALL}) == len(set(matrix.ALL)), "a line names one case"


def test_kernels_are_few_and_named_apart() -> None:
    assert len(known()) <= KERNELS
    names = Counter((build.arch, build.symbol) for build, *_ in known().union(covering_cases.builds()))
    assert [name for name, count in names.items() if count > 1] == [], "a folder holds one kernel of a name"


def test_a_kernel_for_every_target_dtype_and_head_dim() -> None:
    """xFormers' table of kernels that must exist, for the targets there are here."""
    targets = [name for name in ARCHITECTURES if name[-1].isdigit()]
    for arch, dtype, dim, direction in product(targets, matrix.DTYPES, (16, 32, 64, 128, 256), ("forward", "backward")):
        plan = planner.plan(Problem.dense(direction, Shape(1, 128, 128, 1, dim, dim), dtype), arch)
        assert plan.build.shared_memory_bytes <= ARCHITECTURES[arch].shared_memory_per_block


def view(address: int, tensor: Tensor) -> Array:
    """Device memory that is the host's, as the tensor lies in it."""
    kind = numpy_dtype(tensor.dtype)
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, kind)
    count = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
    there = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    strides = [step * kind.itemsize for step in tensor.strides]
    whole: Array = np.frombuffer(there, kind)  # type: ignore[call-overload]
    return np.lib.stride_tricks.as_strided(whole, tensor.shape, strides, writeable=True)


class Emulated:
    """One problem's kernels. faults: factors of results by name, and under "philox_offset" what is added to it."""

    plan, workspace_bytes = None, 0

    def __init__(self, problem: Problem, faults: Mapping[str, float]) -> None:
        assert planner.builds(problem, ARCH) in known()
        self.problem = problem
        self.faults = faults

    def __call__(self, pointers: Mapping[str, int], stream: object = 0, *, workspace: int | None = None) -> None:
        """A launch."""
        problem = self.problem
        tensors = problem.tensors() | problem.vectors()
        tensors["logsumexp"] = Tensor.contiguous(problem.shape.logsumexp, "float32")
        given = {name: view(pointers[name], tensor) for name, tensor in tensors.items()}
        options: dict[str, Any] = {
            "mask": problem.mask,
            "scale": problem.scale_value,
            "score_mod": cpu_backend.score_mod_of(problem, self._settings(given, pointers)),
        }
        query, key, value = (given[name] for name in OPERANDS)
        if problem.direction == "forward":
            found = dict(
                zip(("output", "logsumexp"), numpy_reference.forward(query, key, value, **options), strict=True)
            )
        else:
            output, logsumexp = given["output"], given["logsumexp"]
            gradients = numpy_reference.backward(given["grad_output"], query, key, value, output, logsumexp, **options)
            found = {f"grad_{name}": getattr(gradients, name) for name in problem.gradients}
        for name, result in found.items():
            given[name][...] = result * self.faults.get(name, 1.0)

    def _settings(self, given: dict[str, Array], pointers: Mapping[str, int]) -> Options:
        problem, sequences, bias = self.problem, None, given.get("bias")
        if problem.sequences is not None:
            lengths = problem.sequences.max_seqlen_q, problem.sequences.max_seqlen_k
            bounds = given["cu_seqlens_q"], given["cu_seqlens_k"]
            sequences = VariableLength(*bounds, *lengths, given.get("seqused_k"))
        if bias is not None:
            bias = np.where(bias.astype(np.float64) < LEAST, -np.inf, bias.astype(np.float64))
        numbers = [0, 0]
        if problem.dropout_p:
            names = ("philox_seed", "philox_offset")
            numbers = [int(given[name][0]) if problem.philox_on_device else pointers[name] for name in names]
            numbers[1] += int(self.faults.get("philox_offset", 0))
        return Options(bias=bias, dropout=Dropout(problem.dropout_p, *numbers), sequences=sequences)


@pytest.fixture
def emulate(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts the emulated GPU in place, with its faults; a graph is its launch, made when it is launched."""
    real = driver.call

    def call(name: str, *arguments: Any, purpose: str = "") -> Any:
        if name == "cuGraphLaunch":
            return arguments[0](arguments[1])
        return None if name in ("cuCtxSynchronize", "cuGraphExecDestroy") else real(name, *arguments, purpose=purpose)

    def start(**faults: float) -> None:
        monkeypatch.setattr(calls, "_prepared", LruCache(64))
        monkeypatch.setattr(calls.performance, "warn", lambda plan: None)
        monkeypatch.setattr(calls, "bind_problem", lambda problem, kernels, ordinal: Emulated(problem, faults))
        monkeypatch.setattr(device_memory, "bind_problem", lambda problem, kernels: Emulated(problem, faults))
        monkeypatch.setattr(pytorch, "captured", lambda launch, stream: launch)
        monkeypatch.setattr(driver, "call", call)

    return start


def kind_of(value: Any) -> Any:
    """What one case of stands for all."""
    if isinstance(value, tuple):
        return value[0].spec.mask.name
    if not isinstance(value, MatrixCase):
        return value
    layouts = value.layout, value.bias_layout, value.key_layout, value.grad_layout
    spec = value.spec
    is_grouped = spec.num_heads_key != spec.num_heads
    return *layouts, value.bias_values, value.inputs, spec.has_used_keys, spec.dropout_p > 0, is_grouped


def work_of(value: Any) -> int:
    """How much there is to compute."""
    case = value[0] if isinstance(value, tuple) else value
    return math.prod(case.spec.shape.bias) if isinstance(case, MatrixCase) else 0


def bodies() -> Iterator[Any]:
    """The tests for a GPU, each with the smallest case of each kind."""
    tests = {name: body for module in (xformers, pytorch) for name, body in vars(module).items()}
    for name, body in tests.items():
        if not name.startswith("test_") or name.startswith("test_torch") or name in LARGE:
            continue
        marks = [mark for mark in getattr(body, "pytestmark", ()) if mark.name == "parametrize"]
        if not marks:
            yield pytest.param(body, id=name)
            continue
        values = sorted(marks[0].args[1], key=work_of)
        smallest = {kind_of(value): value for value in reversed(values)}
        for number, value in enumerate(smallest.values()):
            yield pytest.param(functools.partial(body, value), id=f"{name}-{number}")


@pytest.mark.parametrize("body", list(bodies()))
def test_bodies(body: Callable[[Any], None], emulate: Callable[..., None]) -> None:
    """No mistake in Python, no kernel beyond those that are built, no tolerance that float64 does not meet."""
    emulate()
    with driver.device(0).current():
        body(None)


BIASED = next(case for case in matrix.BIASES if "b" in case.spec.gradients)
MASKED = next(case for case in matrix.ATTN_MASKS if case.spec.dtype == "float32")


@pytest.mark.parametrize("name", ["output", "logsumexp", *(f"grad_{each}" for each in (*OPERANDS, "bias"))])
@pytest.mark.parametrize(
    ("body", "case"), [(xformers.test_biases, BIASED), (pytorch.test_mask_with_gradient, MASKED)], ids=["xf", "torch"]
)
def test_a_wrong_result_is_named(body: Any, case: MatrixCase, name: str, emulate: Callable[..., None]) -> None:
    emulate(**{name: 1.5})
    # A wrong logsumexp moves the backward too, but the forward is compared first; so is the output.
    with driver.device(0).current(), pytest.raises(AssertionError, match=f"^{name}: error"):
        body(case, None)


@pytest.mark.parametrize("case", [matrix.DROPPED_SEQUENCES[2], matrix.DROPOUT[1], matrix.TORCH_MASKS[0]])
def test_other_random_numbers_are_noticed(case: MatrixCase, emulate: Callable[..., None]) -> None:
    emulate(philox_offset=1)
    expect = (
        matrix_check.expect_probe
        if case.inputs == "probe" and not case.spec.sequences
        else matrix_check.expect_xformers
    )
    with driver.device(0).current(), pytest.raises(AssertionError):
        expect(case, None)  # type: ignore[arg-type]


def test_a_write_beside_an_output_is_noticed(emulate: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in matrix.LAYOUTS if case.layout == "padded")
    emulate()
    sound = view

    def careless(address: int, tensor: Tensor) -> Array:
        found = sound(address, tensor)
        if tensor.shape == case.forward.problem().output.shape:
            ctypes.c_uint16.from_address(address - 2).value = 0
        return found

    monkeypatch.setattr(sys.modules[__name__], "view", careless)
    with (
        driver.device(0).current(),
        pytest.raises(AssertionError, match="outside the tensor changed, the first at element -1"),
    ):
        xformers.test_layouts(case, None)  # type: ignore[arg-type]


def test_p_values_of_the_binomial_distribution() -> None:
    """Against the sums by hand; and a coin that is not fair is found out."""
    exact = [math.comb(10, count) * 0.3**count * 0.7 ** (10 - count) for count in range(11)]
    found = matrix_check.binomial_p_values(10, 0.3)
    for count, chance in enumerate(exact):
        np.testing.assert_allclose(found[count], sum(other for other in exact if other <= chance * (1 + 1e-9)))
    assert matrix_check.binomial_p_values(1000, 0.3)[[300, 400]].tolist() == pytest.approx([1, 0], abs=1e-8)
    assert matrix_check.normal_p_value(300_000, 1_000_000, 0.3) == 1
    assert matrix_check.normal_p_value(303_000, 1_000_000, 0.3) < xformers.LEAST_P_VALUE
