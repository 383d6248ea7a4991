"""Attention whose rows are split over two GPUs: the results of one GPU, forward and gradients, for every strategy.

On one GPU jax.vmap with an axis name stands for the devices: the elements run the same program in one launch each.

python -m tests.gpu.hosts.test_jax_context FOLDER    compiles the kernels of these tests on a machine without a GPU
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.problem.masks import Causal, Full, Mask, Window
from cutlass_py_attn.testing import check
from tests.gpu.hosts.test_jax_sharding import difference, draw

ALLOWED = 0.01  # relative, of a whole bfloat16 array
DEVICES = 2
BATCH, TOKENS, HEADS, HEADS_KEY, HEAD_DIM = 2, 1024, 8, 4, 128
COLLECTIVES = re.compile(r"= (?:\(.*?\)|\S+) (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
DOCUMENTS = np.array([0, 100, 101, 700, 1024], np.int32)


@dataclass(frozen=True)
class Case:
    """terms: shapes of differentiable arrays. splits: (strategy, load_balance) that compute it."""

    splits: tuple[tuple[str, str | None], ...]
    mask: Mask = field(default_factory=Causal)
    terms: dict[str, tuple[int, ...]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = BATCH


ZIGZAG = (("all_gather", "zigzag"), ("ulysses", "zigzag"), ("ring", "zigzag"))
CONTIGUOUS = (("all_gather", None), ("ulysses", None), ("ring", None))
BIAS = {"bias": (1, HEADS, TOKENS, TOKENS)}
SEQUENCES = {"sequences": VariableLength(DOCUMENTS, DOCUMENTS, 599, 599)}
CASES = {
    "causal": Case((*ZIGZAG, *CONTIGUOUS)),
    "full, softcap, sinks": Case(CONTIGUOUS, Full(), {"sinks": (HEADS,)}, {"softcap": 5.0}),
    "window 200, sinks": Case((ZIGZAG[0], *CONTIGUOUS), Causal(200), {"sinks": (HEADS,)}),
    "window both sides": Case((CONTIGUOUS[0],), Window(70, 30)),
    "ALiBi": Case((ZIGZAG[0],), Causal(), {}, {"alibi_slopes": 0.1 * np.arange(1, HEADS + 1, dtype=np.float32)}),
    "bias": Case(ZIGZAG, Causal(), BIAS),
    "dropout": Case((ZIGZAG[1],), Causal(), {}, {"dropout_p": 0.3}),
    "documents": Case((ZIGZAG[0], CONTIGUOUS[1]), Causal(), {}, SEQUENCES, batch=1),
}
SIMULATED = 4  # devices
ON_ONE_GPU = [("causal", "ring", "zigzag"), ("causal", "ulysses", "zigzag"), ("window 200, sinks", "ring", None)]
PARAMETERS = [
    pytest.param(name, *split, id=f"{name}-{split[0]}-{split[1]}")
    for name, case in CASES.items()
    for split in case.splits
]


def given(jax: Any, case: Case) -> tuple[dict[str, Any], Any, Any]:
    """Returns the differentiable operands, and the gradients of output and logsumexp."""
    shapes = {"query": (case.batch, TOKENS, HEADS, HEAD_DIM)}
    shapes |= dict.fromkeys(("key", "value"), (case.batch, TOKENS, HEADS_KEY, HEAD_DIM))
    arrays = {name: draw(jax, number, *shape) for number, (name, shape) in enumerate(shapes.items())}
    for name, shape in case.terms.items():
        arrays[name] = draw(jax, 9, *shape, dtype="float32" if name == "sinks" else "bfloat16")
    gradients = draw(jax, 4, *shapes["query"]), draw(jax, 5, case.batch, HEADS, TOKENS, dtype="float32")
    return arrays, *gradients


def both(jax: Any, attend: Callable[..., Any], case: Case, **split: Any) -> Callable[..., Any]:
    """Returns a function of operands and gradients: output, logsumexp, and the gradients of the operands."""
    options = dict(case.options)
    if "dropout_p" in options:
        options["dropout_key"] = jax.random.key(7)
    has_logsumexp = "sequences" not in options

    def function(arrays: dict[str, Any], grad_output: Any, grad_logsumexp: Any) -> Any:
        def call(arrays: dict[str, Any]) -> Any:
            terms = {name: arrays[name] for name in case.terms}
            operands = (arrays[name] for name in ("query", "key", "value"))
            return attend(*operands, mask=case.mask, return_logsumexp=has_logsumexp, **terms, **options, **split)

        found, pull = jax.vjp(call, arrays)
        return found, pull((grad_output, grad_logsumexp) if has_logsumexp else grad_output)[0]

    return function


def specs(jax: Any, case: Case) -> tuple[Any, ...]:
    """Returns the PartitionSpecs of operands, gradients of the results, and the results."""
    spec = jax.sharding.PartitionSpec
    rows, lines = spec(None, "x"), spec(None, None, "x")
    of_operands = {**dict.fromkeys(("query", "key", "value"), rows), **{name: spec() for name in case.terms}}
    of_operands |= {"bias": lines} if "bias" in case.terms else {}
    return of_operands, rows, lines, rows if "sequences" in case.options else (rows, lines)


def on_two(jax: Any, attend: Callable[..., Any], case: Case, strategy: str, load_balance: str | None) -> Any:
    """Returns the function of `both` on global arrays, whose rows are split over two devices."""
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:DEVICES])
    of_operands, rows, lines, of_results = specs(jax, case)
    function = both(jax, attend, case, context_axis="x", context_strategy=strategy, load_balance=load_balance)
    return jax.shard_map(function, mesh=mesh, in_specs=(of_operands, rows, lines), out_specs=(of_results, of_operands))


def in_order(change: Callable[..., Any], case: Case, found: Any, devices: int = DEVICES) -> Any:
    """Returns operands or their gradients with rows in another order."""
    axes = {"query": 1, "key": 1, "value": 1, "bias": 2}
    return {name: change(array, devices, axes[name]) if name in axes else array for name, array in found.items()}


def simulated(jax: Any, attend: Callable[..., Any], case: Case, strategy: str, load_balance: str | None) -> Any:
    """Returns the function of `both` on global arrays, whose rows are split over the elements of a jax.vmap."""
    function = both(jax, attend, case, context_axis="x", context_strategy=strategy, load_balance=load_balance)

    def split(array: Any, axis: int) -> Any:
        shape = array.shape
        parts = array.reshape(*shape[:axis], SIMULATED, shape[axis] // SIMULATED, *shape[axis + 1 :])
        return jax.numpy.moveaxis(parts, axis, 0)

    def join(parts: Any, axis: int) -> Any:
        moved = jax.numpy.moveaxis(parts, 0, axis)
        return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])

    def run(arrays: dict[str, Any], grad_output: Any, grad_logsumexp: Any) -> Any:
        axes = {name: None if name == "sinks" else 0 for name in arrays}
        parts = {name: array if name == "sinks" else split(array, 1) for name, array in arrays.items()}
        mapped = jax.vmap(function, (axes, 0, 0), axis_name="x")
        (output, logsumexp), gradients = mapped(parts, split(grad_output, 1), split(grad_logsumexp, 2))
        return (join(output, 1), join(logsumexp, 2)), {
            name: gradient.sum(0) if name == "sinks" else join(gradient, 1) for name, gradient in gradients.items()
        }

    return run


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """JAX with a GPU, which leaves memory to the other tests."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = pytest.importorskip("jax", reason="jax is not installed")
    if found.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    return found


@pytest.fixture
def jax(one_gpu: Any) -> Any:
    """JAX with two GPUs or more."""
    if len(one_gpu.devices()) < DEVICES:
        pytest.skip("fewer than two GPUs: nothing to split")
    return one_gpu


@pytest.fixture
def attend(one_gpu: Any, kernels: check.Kernels) -> Callable[..., Any]:
    """Attention with the tests' kernels."""
    return functools.partial(importlib.import_module("cutlass_py_attn.jax").attention, kernels=kernels)


_expected: dict[str, Any] = {}  # of one GPU, by the name of the case


@pytest.mark.parametrize(("name", "strategy", "load_balance"), PARAMETERS)
def test_two_gpus_give_the_results_of_one(
    jax: Any, attend: Callable[..., Any], name: str, strategy: str, load_balance: str | None
) -> None:
    module = importlib.import_module("cutlass_py_attn.jax")
    case = CASES[name]
    arrays, grad_output, grad_logsumexp = given(jax, case)
    if name not in _expected:
        _expected[name] = jax.jit(both(jax, attend, case))(arrays, grad_output, grad_logsumexp)
    placed = arrays, grad_output, grad_logsumexp
    if load_balance:
        placed = (
            in_order(module.reorder, case, arrays),
            module.reorder(grad_output, DEVICES),
            module.reorder(grad_logsumexp, DEVICES, 2),
        )
    compiled = jax.jit(on_two(jax, attend, case, strategy, load_balance)).lower(*placed).compile()
    found, gradients = compiled(*placed)
    if strategy != "all_gather" and "bias" not in case.terms:
        assert not {"all-gather", "reduce-scatter"} & set(COLLECTIVES.findall(compiled.as_text()))
    if load_balance:
        gradients = in_order(module.restore, case, gradients)
        found = [module.restore(array, DEVICES, axis) for axis, array in enumerate(jax.tree.leaves(found), 1)]
    leaves = [*jax.tree.leaves(found), *jax.tree.leaves(gradients)]
    for one, other in zip(leaves, jax.tree.leaves(_expected[name]), strict=True):
        assert difference(one, other) < ALLOWED


@pytest.mark.parametrize(("name", "strategy", "load_balance"), ON_ONE_GPU)
def test_simulated_devices_give_the_results_of_one(
    one_gpu: Any, attend: Callable[..., Any], name: str, strategy: str, load_balance: str | None
) -> None:
    module: Any = importlib.import_module("cutlass_py_attn.jax")
    case = CASES[name]
    arrays, grad_output, grad_logsumexp = given(one_gpu, case)
    expected = one_gpu.jit(both(one_gpu, attend, case))(arrays, grad_output, grad_logsumexp)
    function = simulated(one_gpu, attend, case, strategy, load_balance)
    if load_balance:
        plain = function

        def function(arrays: Any, grad_output: Any, grad_logsumexp: Any) -> Any:
            order = functools.partial(in_order, module.reorder, case, devices=SIMULATED)
            rows = module.reorder(grad_output, SIMULATED), module.reorder(grad_logsumexp, SIMULATED, 2)
            (output, logsumexp), gradients = plain(order(arrays), *rows)
            found = module.restore(output, SIMULATED), module.restore(logsumexp, SIMULATED, 2)
            return found, in_order(module.restore, case, gradients, devices=SIMULATED)

    found = one_gpu.jit(function)(arrays, grad_output, grad_logsumexp)
    for one, other in zip(one_gpu.tree.leaves(found), one_gpu.tree.leaves(expected), strict=True):
        assert difference(one, other) < ALLOWED


@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_deterministic_calls_repeat_bit_by_bit(jax: Any, attend: Callable[..., Any], strategy: str) -> None:
    case = Case((), options={"deterministic": True})
    function = jax.jit(on_two(jax, attend, case, strategy, "zigzag"))
    runs = [jax.tree.leaves(function(*given(jax, case))) for _ in range(3)]
    for again in runs[1:]:
        for one, other in zip(again, runs[0], strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_the_gradient_of_logsumexp(one_gpu: Any, attend: Callable[..., Any]) -> None:
    """Against jax.numpy in float32."""
    case = CASES["causal"]
    arrays, grad_output, grad_logsumexp = given(one_gpu, case)
    arrays = {name: array.astype("float32") for name, array in arrays.items()}
    grad_output = one_gpu.numpy.zeros_like(grad_output, "float32")
    _, found = one_gpu.jit(both(one_gpu, attend, case))(arrays, grad_output, grad_logsumexp)

    def logsumexp(arrays: dict[str, Any]) -> Any:
        key = one_gpu.numpy.repeat(arrays["key"], HEADS // HEADS_KEY, 2)
        scores = one_gpu.numpy.einsum("bihd,bjhd->bhij", arrays["query"], key, precision="highest") / HEAD_DIM**0.5
        visible = case.mask.materialise(TOKENS, TOKENS)
        return (one_gpu.nn.logsumexp(one_gpu.numpy.where(visible, scores, -np.inf), -1) * grad_logsumexp).sum()

    expected = one_gpu.jit(one_gpu.grad(logsumexp))(arrays)
    for name in ("query", "key"):
        assert difference(found[name], expected[name]) < ALLOWED / 10
    assert not np.asarray(found["value"]).any()


def build(folder: Path) -> None:
    """Compiles the kernels of every test for an H100 or H200 into a folder, by lowering the programs on the CPU."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    jax = importlib.import_module("jax")
    attention = importlib.import_module("cutlass_py_attn.jax").attention
    kernels = compiler_into(folder)
    attend = functools.partial(attention, kernels=kernels, arch="sm_90a")

    for case in CASES.values():
        lower(jax, both(jax, attend, case), case)
        for split in case.splits:
            lower(jax, on_two(jax, attend, case, *split), case)
    lower_for_one_gpu(jax, attend)
    deterministic = Case((), options={"deterministic": True})
    for strategy in ("all_gather", "ring"):
        lower(jax, on_two(jax, attend, deterministic, strategy, "zigzag"), deterministic)


def lower(jax: Any, function: Callable[..., Any], case: Case, dtype: str = "bfloat16") -> None:
    """Lowers the function for CUDA, on a machine with or without a GPU; every array has `dtype` if it is float32."""
    described = jax.eval_shape(lambda: given(jax, case))
    if dtype == "float32":
        described = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, dtype), described)
    jax.jit(function).trace(*described).lower(lowering_platforms=("cuda",))


def lower_for_one_gpu(jax: Any, attend: Callable[..., Any]) -> None:
    """Lowers the programs of the tests that one GPU runs."""
    lower(jax, both(jax, attend, CASES["causal"]), CASES["causal"], "float32")
    for name, *split in ON_ONE_GPU:
        lower(jax, both(jax, attend, CASES[name]), CASES[name])
        lower(jax, simulated(jax, attend, CASES[name], *split), CASES[name])


def compiler_into(folder: Path) -> check.Kernels:
    """Returns kernels from the compiler, which are also written to a folder."""
    compile_one, done = check.kernels_from(None), {}

    def kernels(build: Any) -> Any:
        if build not in done:
            done[build] = compile_one(build)
            Folder(folder).put(done[build])
            sys.stdout.write(f"{build.symbol}\n")
        return done[build]

    return kernels


if __name__ == "__main__":
    build(Path(sys.argv[1]))
