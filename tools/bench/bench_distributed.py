"""Context parallelism over NCCL, one process for each GPU: checked against one GPU, and timed beside it.

    python -m tools.bench.bench_distributed --kernels FOLDER [--ranks 2] [--record FILE]
    python -m tools.bench.bench_distributed --build FOLDER                  compiles the kernels without a GPU
    python -m tools.bench.bench_distributed --rank R --address HOST:PORT    one process of several that you start

Arrays are torch's, which must be installed. Times are milliseconds of the forward, and of forward and backward
together: medians, of the slowest rank. First comes the speed of an exchange alone, in GB/s that a rank receives while
it sends as much. The share is that of a perfect split: one GPU's time / ranks / time. The error is the largest relative
one of all ranks' outputs and gradients (rms) beside one GPU's, for as many tokens as CHECKED or fewer.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from cutlass_py_attn import distributed
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench import harness
from cutlass_py_attn.compilation.compiler import artifact_for
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tests.cases import context_cases
from tools.bench import torch_ring
from tools.release import record

HEADS, HEADS_KEY, HEAD_DIM = 32, 8, 128
SMS: Final = 132  # multiprocessors of an H200
TOKENS: Final = (8192, 32768, 131072)
SPLITS: Final = (("all_gather", "zigzag"), ("ulysses", None), ("ring", "zigzag"))
PEER: Final = "torch ring, zigzag"
CHECKED: Final = 32768  # tokens; one GPU's results are compared up to this
ALLOWED: Final = 0.01  # relative error
SAMPLES: Final = 7
EXCHANGED: Final = 2**27  # bytes of an exchange that is timed alone
EXCHANGES: Final = 50
SECONDS: Final = 540.0  # that the processes may take
ARGUMENT = argparse.ArgumentParser(description="attention over the GPUs of several processes, in milliseconds")

Arrays = dict[str, Any]


def draw(torch: Any, tokens: int) -> Arrays:
    """Returns all rows of query, key, value and grad_output, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(1)
    heads = {"query": HEADS, "key": HEADS_KEY, "value": HEADS_KEY, "grad_output": HEADS}
    return {
        name: torch.randn((1, tokens, count, HEAD_DIM), generator=generator, device="cuda", dtype=torch.bfloat16)
        for name, count in heads.items()
    }


def rows(torch: Any, array: Any, group: Any, order: str | None) -> Any:
    """Returns a rank's rows of an array of all rows."""
    parts = distributed.rows_of_rank(group.rank, group.size, array.shape[1], order)
    return torch.cat([array[:, part] for part in parts], 1)


def one_gpu(given: Arrays, kernels: Any, with_backward: bool) -> Arrays:
    """Returns output, and gradients, of attention on one GPU."""
    operands: Arrays = {name: given[name] for name in ("query", "key", "value")}
    options: dict[str, Any] = {"mask": Causal(), "kernels": kernels}
    output, logsumexp = attention_forward(**operands, **options)
    found = {"output": output}
    if with_backward:
        operands |= {"grad_output": given["grad_output"], "output": output, "logsumexp": logsumexp}
        gradients = attention_backward(**operands, **options)
        found |= {name: getattr(gradients, name) for name in ("query", "key", "value")}
    return found


def split(given: Arrays, kernels: Any, with_backward: bool, **context: Any) -> Arrays:
    """Returns output, and gradients, of a rank's rows."""
    operands: Arrays = {name: given[name] for name in ("query", "key", "value")}
    options: dict[str, Any] = {"mask": Causal(), "kernels": kernels, **context}
    output, logsumexp = distributed.attention_forward(**operands, **options)
    found = {"output": output}
    if with_backward:
        operands |= {"grad_output": given["grad_output"], "output": output, "logsumexp": logsumexp}
        gradients = distributed.attention_backward(**operands, **options)
        found |= {name: getattr(gradients, name) for name in ("query", "key", "value")}
    return found


def split_by_peer(given: Arrays, ring: torch_ring.Ring, with_backward: bool) -> Arrays:
    """Returns output, and gradients, of a rank's rows by the peer."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    output, logsumexp = ring.forward(query, key, value)
    if not with_backward:
        return {"output": output}
    gradients = ring.backward(given["grad_output"], query, key, value, output, logsumexp)
    return {"output": output, **dict(zip(("query", "key", "value"), gradients, strict=True))}


def median(torch: Any, function: Callable[[], Any]) -> float:
    """Returns the median milliseconds of calls, each waited for."""
    function()
    found = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def slowest(group: Any, milliseconds: float) -> float:
    """Returns the largest of all ranks' times."""
    return max(float(text) for text in group.share(f"{milliseconds:24.6f}".encode()))


def exchange_speed(torch: Any, group: Any) -> float:
    """Returns GB/s that a rank receives from the one before it while it sends as much to the next one; 0 for one."""
    if group.size == 1:
        return 0.0
    arrays = [torch.empty(EXCHANGED, dtype=torch.uint8, device="cuda") for _ in range(2)]
    outgoing, incoming = (SimpleNamespace(pointer=array.data_ptr(), nbytes=EXCHANGED) for array in arrays)

    def exchange(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            group.exchange([((group.rank + 1) % group.size, outgoing)], [((group.rank - 1) % group.size, incoming)])
        group.finish()
        return time.perf_counter() - start

    exchange(2)
    return EXCHANGED * EXCHANGES / 1e6 / slowest(group, exchange(EXCHANGES) * 1e3)


def error_of(torch: Any, found: Arrays, expected: Arrays, group: Any, order: str | None) -> float:
    """Returns the largest relative rms error of a rank's rows."""
    errors = []
    for name, array in found.items():
        part = rows(torch, expected[name], group, order).float()
        errors.append(float((array.float() - part).norm() / part.norm()))
    return max(errors)


def measured(torch: Any, group: Any, tokens: int, kernels: Any) -> Iterator[dict[str, Any]]:
    """Yields a row for one GPU, and for each strategy."""
    whole = draw(torch, tokens)
    alone = {
        field: slowest(group, median(torch, functools.partial(one_gpu, whole, kernels, field == "both")))
        for field in ("forward", "both")
    }
    yield {"tokens": tokens, "ranks": 1, "name": "one GPU", **alone}
    for strategy, order in SPLITS:
        context = {"group": group, "context_strategy": strategy, "load_balance": order}
        of_ranks = functools.partial(split, kernels=kernels, **context)
        name = f"{strategy}{', zigzag' if order else ''}"
        yield {"tokens": tokens, "name": name, **timed(torch, group, whole, kernels, order, of_ranks)}


def timed(
    torch: Any, group: Any, whole: Arrays, kernels: Any, order: str | None, of_ranks: Callable[..., Arrays]
) -> dict[str, Any]:
    """Returns the times of a function of a rank's rows, and its error.

    of_ranks: takes the arrays of these rows, and `with_backward`
    """
    own = {name: rows(torch, array, group, order) for name, array in whole.items()}
    row: dict[str, Any] = {"ranks": group.size}
    for field in ("forward", "both"):
        row[field] = slowest(group, median(torch, functools.partial(of_ranks, own, with_backward=field == "both")))
    if whole["query"].shape[1] <= CHECKED:
        expected = one_gpu(whole, kernels, True)
        row["error"] = error_of(torch, of_ranks(own, with_backward=True), expected, group, order)
    return row


def of_peer(torch: Any, group: Any, ring: torch_ring.Ring, tokens: int, kernels: Any) -> dict[str, Any]:
    """Returns the row of the peer."""
    of_ranks = functools.partial(split_by_peer, ring=ring)
    return {"tokens": tokens, "name": PEER, **timed(torch, group, draw(torch, tokens), kernels, "zigzag", of_ranks)}


def text(row: dict[str, Any], one: dict[str, Any]) -> str:
    """Returns a row as text, with the share of a perfect split."""
    words = [f"{row['tokens']:>7} {row['name']:<18}"]
    for field in ("forward", "both"):
        share = "" if row is one else f"{one[field] / row['ranks'] / row[field]:5.2f}"
        words.append(f"{field} {row[field]:9.3f} {share:5}")
    return " ".join(words) + (f" error {row['error']:.1e}" if "error" in row else "")


def all_rows(torch: Any, group: Any, given: argparse.Namespace, kernels: Any) -> Iterator[dict[str, Any]]:
    """Yields every row: ours for each number of tokens, then those of the peer."""
    for tokens in given.tokens:
        yield from measured(torch, group, tokens, kernels)
    if group.size > 1:
        ring = torch_ring.connected(torch, group.rank, group.size, given.address, given.device)
        for tokens in given.tokens:
            yield of_peer(torch, group, ring, tokens, kernels)
        torch.distributed.destroy_process_group()


def run_rank(given: argparse.Namespace) -> int:
    """Measures as one rank; rank 0 prints and records. Returns 1 if the results are wrong."""
    import torch

    torch.cuda.set_device(given.device)
    kernels = Folder(given.kernels) if given.kernels else None
    found: list[dict[str, Any]] = []
    alone: dict[int, dict[str, Any]] = {}  # rows of one GPU, by tokens
    with distributed.connect(given.rank, given.ranks, given.address, device=given.device) as group:
        speed = exchange_speed(torch, group)
        about = {**record.about_run(), "commit": harness.commit(), "torch": torch.__version__}
        about |= {"exchange_gb_s": round(speed, 1)}
        if given.rank == 0:
            print(f"exchange of {EXCHANGED // 2**20} MiB both ways: {speed:.1f} GB/s", flush=True)
        for row in all_rows(torch, group, given, kernels):
            found.append(row)
            one = alone.setdefault(row["tokens"], row)
            if given.rank == 0:
                print(text(row, one), flush=True)
                if given.record:  # after each row: a run that is cut off has those before it
                    record.put_part(given.record, "nccl", {**about, "rows": found})
    wrong = [row for row in found if row.get("error", 0.0) > ALLOWED]
    for row in wrong:
        print(
            f"rank {given.rank}: {row['name']} of {row['tokens']} tokens is wrong: error {row['error']:.1e}", flush=True
        )
    return 1 if wrong else 0


def expect_torch() -> None:
    """Ends the program with one sentence if there is no torch, before it starts processes."""
    if importlib.util.find_spec("torch") is None:
        sys.exit("bench_distributed measures with torch's arrays: run pip install torch")


def start_all(given: argparse.Namespace, arguments: list[str]) -> int:
    """Starts a process for each GPU of this host, and returns the first exit code that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tools.bench.bench_distributed", *arguments, "--address", f"{folder}/id"]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--device", str(rank % given.gpus)])
            for rank in range(given.ranks)
        ]
        limit = time.monotonic() + SECONDS
        try:
            codes = [process.wait(max(limit - time.monotonic(), 0.1)) for process in ranks]
        except subprocess.TimeoutExpired:
            print(f"the processes took more than {SECONDS:g} s", flush=True)
            return 1
        finally:
            for process in ranks:
                process.kill()
    return next((code for code in codes if code), 0)


def build(folder: Path, ranks: int, tokens: tuple[int, ...]) -> None:
    """Compiles the kernels of all functions for an H100 or H200 into a folder."""
    for made in builds(ranks, tokens):
        Folder(folder).put(artifact_for(made))
        print(made.symbol, flush=True)


def builds(ranks: int, tokens: tuple[int, ...]) -> list[Build]:
    """Returns the kernels of one GPU, of every part of a split, and of merges and sums, on an H200."""
    found = [planner.plans_on(problem, (9, 0), SMS)[0].build for problem in problems(ranks, tokens)]
    merges = (plan_merge(problem, "sm_90").build for problem in context_cases.merge_problems(HEAD_DIM))
    return [*dict.fromkeys([*found, *merges])]


def problems(ranks: int, tokens: tuple[int, ...]) -> Iterator[Problem]:
    """Yields the problems of one GPU, of Ulysses, and of the parts of all-gather and ring in zigzag order."""
    for count in tokens:
        own, half = count // ranks, count // ranks // 2
        sizes: list[tuple[int, int, int, Mask]] = [(count, count, 1, Causal()), (count, count, ranks, Causal())]
        sizes += [(half, half * (number + 1), 1, CausalBottomRight()) for number in range(2 * ranks)]
        sizes += [(own, own, 1, Causal()), (own, half, 1, Full()), (half, own, 1, Full())]
        for queries, keys, parts, mask in sizes:
            shape = Shape(1, queries, keys, HEADS // parts, HEAD_DIM, HEAD_DIM, max(HEADS_KEY // parts, 1))
            for direction in ("forward", "backward"):
                yield Problem.dense(direction, shape, "bfloat16", mask)


def main() -> int:
    """Starts the processes, or is one of them."""
    ARGUMENT.add_argument("--kernels", type=Path, help="folder of prebuilt kernels")
    ARGUMENT.add_argument("--build", type=Path, metavar="FOLDER", help="compile the kernels into FOLDER and stop")
    ARGUMENT.add_argument("--ranks", type=int, default=2, help="number of processes")
    ARGUMENT.add_argument("--gpus", type=int, help="GPUs of this host; as many as ranks by default")
    ARGUMENT.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    ARGUMENT.add_argument("--record", type=Path, metavar="FILE", help='write the run to FILE, as its part "nccl"')
    ARGUMENT.add_argument("--rank", type=int, help="be this rank; without it, start all of them")
    ARGUMENT.add_argument("--device", type=int, default=0, help="this rank's GPU")
    ARGUMENT.add_argument("--address", help="host:port of rank 0, or a file that all ranks see")
    given = ARGUMENT.parse_args()
    given.gpus = given.gpus or given.ranks
    if given.build:
        build(given.build, given.ranks, tuple(given.tokens))
        return 0
    expect_torch()
    return start_all(given, sys.argv[1:]) if given.rank is None else run_rank(given)


if __name__ == "__main__":
    sys.exit(main())
