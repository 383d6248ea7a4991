"""Rows split over ranks without JAX: the results of one GPU, forward and gradients, for every strategy.

On one GPU the ranks are threads that share it. NCCL joins with one rank where nccl4py and libnccl are installed; two
processes join where there are two GPUs (tools/bench/bench_distributed.py).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import distributed
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.distributed import simulated
from cutlass_py_attn.errors import NoDevice
from cutlass_py_attn.problem.masks import Causal, Full, Mask
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing.check import Kernels

ROWS, HEADS, HEADS_KEY, HEAD_DIM = 512, 8, 4, 64
ALLOWED = 0.01  # relative rms, of a whole bfloat16 array
SPLITS = [("all_gather", None), ("all_gather", "zigzag"), ("ulysses", "zigzag"), ("ring", None), ("ring", "zigzag")]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def draw(torch: Any) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(3)
    heads = {"query": HEADS, "key": HEADS_KEY, "value": HEADS_KEY, "grad_output": HEADS}
    return {
        name: torch.randn((2, ROWS, count, HEAD_DIM), generator=generator, device="cuda", dtype=torch.bfloat16)
        for name, count in heads.items()
    }


def run(attend: tuple[Callable[..., Any], Callable[..., Any]], given: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns output and gradients by the forward and backward of one GPU, or of a rank."""
    operands = [given[name] for name in ("query", "key", "value")]
    output, logsumexp = attend[0](*operands, **options)
    found = attend[1](given["grad_output"], *operands, output, logsumexp, deterministic=True, **options)
    return {"output": output, **{name: getattr(found, name) for name in ("query", "key", "value")}}


def of_group(torch: Any, given: dict[str, Any], group: Any, strategy: str, order: str | None, **options: Any) -> Any:
    """Returns a rank's results."""
    parts = distributed.rows_of_rank(group.rank, group.size, ROWS, order)
    own = {name: torch.cat([array[:, part] for part in parts], 1) for name, array in given.items()}
    attend = distributed.attention_forward, distributed.attention_backward
    found = run(attend, own, group=group, context_strategy=strategy, load_balance=order, **options)
    torch.cuda.synchronize()
    return found


def expect(torch: Any, found: list[dict[str, Any]], given: dict[str, Any], order: str | None, **options: Any) -> None:
    """Compares the ranks' results with those of one GPU."""
    expected = run((attention_forward, attention_backward), given, **options)
    for rank, results in enumerate(found):
        parts = distributed.rows_of_rank(rank, len(found), ROWS, order)
        for name, array in results.items():
            part = torch.cat([expected[name][:, rows] for rows in parts], 1).float()
            error = float((array.float() - part).norm() / part.norm())
            assert error < ALLOWED, f"{name} of rank {rank}: {error}"


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
@pytest.mark.parametrize(("strategy", "order"), SPLITS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_a_gpu(
    size: int, strategy: str, order: str | None, mask: Mask, torch: Any, kernels: Kernels
) -> None:
    """And the same bits when it runs again."""
    given, options = draw(torch), {"mask": mask, "kernels": kernels}
    runs = [
        simulated.run(size, lambda group: of_group(torch, given, group, strategy, order, **options), device=0)
        for _ in range(2)
    ]
    expect(torch, runs[0], given, order, **options)
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(array, other[name]) for name, array in one.items())


def test_copies_of_numpy_arrays(kernels: Kernels) -> None:
    """Ulysses adds nothing, so that no array library is needed."""
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
    given, options = draw(torch), {"mask": Causal(), "kernels": kernels}
    with group:
        found = of_group(torch, given, group, "ring", "zigzag", **options)
    expect(torch, [found], given, "zigzag", **options)


def test_two_processes(request: pytest.FixtureRequest) -> None:
    """The benchmark checks what it times."""
    if driver.device_count() < 2 or importlib.util.find_spec("nccl") is None:
        pytest.skip("needs two GPUs and nccl4py")
    folder = request.config.getoption("--kernels")
    arguments = ["--kernels", str(folder)] if folder else []
    command = [sys.executable, "-m", "tools.bench.bench_distributed", "--tokens", "8192", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
