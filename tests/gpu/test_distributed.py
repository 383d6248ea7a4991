"""Rows split over ranks without JAX: the results of one GPU, forward and gradients, for every strategy.

On one GPU the ranks are threads that share it. NCCL joins with one rank where nccl4py and libnccl are installed; two
processes join where there are two GPUs (tools/bench/bench_distributed.py).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import distributed
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.distributed import simulated
from cutlass_py_attn.errors import NoDevice, NotSupported
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing.check import Kernels
from tests.cases import context_cases
from tests.cases.context_cases import ContextCase

ALLOWED = 0.01  # relative rms, of a whole bfloat16 array
CAUSAL = context_cases.CASES[0]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def draw(torch: Any, case: ContextCase) -> dict[str, Any]:
    """Returns the case's arrays on the GPU; those of terms by head stay float32."""
    found = {name: torch.from_numpy(array).cuda() for name, array in case.arrays().items()}
    whole = ("sinks", "alibi_slopes")
    return {name: array if name in whole else array.to(torch.bfloat16) for name, array in found.items()}


def run(
    attend: tuple[Callable[..., Any], Callable[..., Any]], case: ContextCase, given: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Returns output and gradients by the forward and backward of one GPU, or of a rank."""
    operands = [given[name] for name in ("query", "key", "value")]
    terms = {name: given[name] for name in ("bias", "sinks", "alibi_slopes") if name in given}
    options = {**case.options(), **terms, **options}
    output, logsumexp = attend[0](*operands, **options)
    more = {"deterministic": True, "gradients": case.gradients}
    found = attend[1](given["grad_output"], *operands, output, logsumexp, **more, **options)
    return {"output": output, **{name: getattr(found, name) for name in case.gradients}}


def lengths_on_gpu(torch: Any, case: ContextCase) -> dict[str, Any]:
    """Returns the lengths of packed sequences as a call of one GPU takes them: beside its operands, not on the host."""
    packed = case.options().get("sequences")
    if packed is None:
        return {}
    given = {name: torch.from_numpy(array).cuda() for name, array in packed.arrays().items()}
    return {"sequences": replace(packed, **given)}


def rows_of(torch: Any, case: ContextCase, name: str, array: Any, rank: int, size: int, order: str | None) -> Any:
    """Returns a rank's rows of an array of all rows."""
    if name in ("sinks", "alibi_slopes"):
        return array
    parts = distributed.rows_of_rank(rank, size, case.rows, order)
    if name == "bias":
        return torch.cat([array[:, :, part] for part in parts], 2)
    return torch.cat([array[:, part] for part in parts], 1)


def of_group(
    torch: Any, case: ContextCase, given: dict[str, Any], group: Any, split: context_cases.Split, kernels: Kernels
) -> dict[str, Any]:
    """Returns a rank's results."""
    strategy, order = split
    own = {name: rows_of(torch, case, name, array, group.rank, group.size, order) for name, array in given.items()}
    attend = distributed.attention_forward, distributed.attention_backward
    context = {"group": group, "context_strategy": strategy, "load_balance": order, "kernels": kernels}
    found = run(attend, case, own, **context)
    torch.cuda.synchronize()
    return found


def expect(torch: Any, case: ContextCase, found: list[dict[str, Any]], expected: dict[str, Any], order: Any) -> None:
    """Compares the ranks' results with those of one GPU."""
    for rank, results in enumerate(found):
        for name, array in results.items():
            part = rows_of(torch, case, name, expected[name], rank, len(found), order).float()
            error = float((array.float() - part).norm() / part.norm())
            assert error < ALLOWED, f"{name} of rank {rank}: {error}"


@pytest.mark.parametrize(
    ("case", "split", "size"),
    [(case, split, size) for case in context_cases.CASES for split in case.splits for size in case.ranks],
    ids=str,
)
def test_ranks_that_share_a_gpu(
    case: ContextCase, split: context_cases.Split, size: int, torch: Any, kernels: Kernels
) -> None:
    """And the same bits when it runs again."""
    given = draw(torch, case)
    lengths = lengths_on_gpu(torch, case)
    expected = run((attention_forward, attention_backward), case, given, kernels=kernels, **lengths)
    runs = [
        simulated.run(size, lambda group: of_group(torch, case, given, group, split, kernels), device=0)
        for _ in range(2)
    ]
    expect(torch, case, runs[0], expected, split[1])
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(array, other[name]) for name, array in one.items())


def test_a_rank_that_refuses(torch: Any, kernels: Kernels) -> None:
    """Every rank learns of it over device memory, and the group still works."""
    given = draw(torch, CAUSAL)

    def of_rank(group: Any) -> Any:
        operands = [given[name][:, : 129 if group.rank else 128] for name in ("query", "key", "value")]
        options = {"group": group, "load_balance": "zigzag", "mask": Causal(), "kernels": kernels}
        with pytest.raises(NotSupported, match=r"must be an even number|rank 1 refuses it, NotSupported"):
            distributed.attention_forward(*operands, **options)
        return of_group(torch, CAUSAL, given, group, ("ring", "zigzag"), kernels)

    assert len(simulated.run(2, of_rank, device=0)) == 2


def test_copies_of_numpy_arrays(kernels: Kernels) -> None:
    """The bits of one GPU, whose heads Ulysses divides; no array library is needed."""
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((1, 64, 4, 64), np.float32).astype(np.float16) for _ in range(3))
    expected, _ = attention_forward(query, key, value, mask=Causal(), kernels=kernels)

    def of_rank(group: Any) -> Any:
        (part,) = distributed.rows_of_rank(group.rank, group.size, 64)
        operands = (np.ascontiguousarray(array[:, part]) for array in (query, key, value))
        context = {"group": group, "context_strategy": "ulysses", "mask": Causal(), "kernels": kernels}
        return distributed.attention_forward(*operands, **context)[0]

    np.testing.assert_array_equal(np.concatenate(simulated.run(2, of_rank, device=0), 1), expected)


def test_a_communicator_of_nccl(torch: Any, kernels: Kernels, tmp_path: Path) -> None:
    """NCCL itself, with one rank: connects, waits, computes and closes."""
    try:
        group = distributed.connect(0, 1, str(tmp_path / "id"), device=0, timeout=60.0)
    except NoDevice as error:
        pytest.skip(str(error))
    given = draw(torch, CAUSAL)
    with group:
        found = of_group(torch, CAUSAL, given, group, ("ring", "zigzag"), kernels)
    expected = run((attention_forward, attention_backward), CAUSAL, given, kernels=kernels)
    expect(torch, CAUSAL, [found], expected, "zigzag")


def test_two_processes(request: pytest.FixtureRequest) -> None:
    """The benchmark checks what it times."""
    if driver.device_count() < 2 or importlib.util.find_spec("nccl") is None:
        pytest.skip("needs two GPUs and nccl4py")
    folder = request.config.getoption("--kernels")
    arguments = ["--kernels", str(folder)] if folder else []
    command = [sys.executable, "-m", "tools.bench.bench_distributed", "--tokens", "8192", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
