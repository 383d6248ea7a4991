"""Correctness of every variant on small problems, then timings of all variants of a case in turn; prints tables.

BUDGET: seconds. Variants: plan/variants.py. OUTDIR: where results.json goes.
"""
import json, multiprocessing, os, statistics, time, traceback
from contextlib import ExitStack
from pathlib import Path

T0 = time.time()
HERE = Path(__file__).parent
BUDGET = float(os.environ.get("BUDGET", "80"))
OUT = Path(os.environ.get("OUTDIR", "."))
import numpy as np
from cases import CASES
from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench import harness, timing
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.launch import bind, bind_problem
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.device_memory import GUARD, GuardedLaunch

K = Folder(HERE / "kernels")
GPU = None  # set after the references are computed in forked processes
SMALL = {  # by dtype and head dim: full, causal; several key tiles a block, tails of queries and keys, two heads
    "full": "q500_s700_b1_h2_full",
    "causal": "s700_b1_h2_causal",
}


def left():
    return BUDGET - (time.time() - T0)


def bound(name, variant, problem):
    tile, _ = CASES[name]
    text = tile + (f"+trial_{variant}" if variant != "base" else "")
    plan = planner.plan_with_tile(problem, "sm_90a", TileConfig.parse(text), GPU.num_sms)
    return bind(K(plan.build), plan, problem)


def small(name):
    kind, dim, mask = name.split("_")[0], name.split("_")[1], name.rsplit("_", 1)[1]
    return Case.parse(f"backward {kind}_{dim}_{SMALL[mask]}")


def expected_of(name):
    return guarded_check.expect(small(name))


def correctness():
    global GPU
    with multiprocessing.get_context("fork").Pool(len(CASES)) as pool:
        references = dict(zip(CASES, pool.map(expected_of, CASES, chunksize=1)))
    print(f"references {time.time() - T0:.0f} s", flush=True)
    GPU = driver.device(0)
    bad = []
    for name, (_, variants) in CASES.items():
        case = small(name)
        expected = references[name]
        problem = case.problem()
        tensors = {**problem.tensors(), **problem.vectors(), "logsumexp": Tensor.contiguous(problem.shape.logsumexp, "float32")}
        given = {n: a for n, a in expected.arrays.items() if n in tensors}
        for variant in variants:
            try:
                with GuardedLaunch(bound(name, variant, problem), tensors, given, None, GUARD) as launch:
                    found = launch.run()
                    again = [launch.run() for _ in range(2)]
                ratios = guarded_check.ratios(case, expected, found)
                error = {n: float(np.linalg.norm(found[n].astype(float) - expected.truth[n]) / np.linalg.norm(expected.truth[n])) for n in ratios}
                spread = max(float(np.abs(found[n].astype(float) - each[n].astype(float)).max()) for each in again for n in ratios)
                worst = max(ratios.values())
                print(f"{name.split('_s')[0]} {name.rsplit('_', 1)[1]:6s} {variant:7s} worst ratio {worst:.2f}  "
                      + "  ".join(f"{n[5:]} {e:.2e}" for n, e in error.items()) + f"  repeats differ by {spread:.1e}", flush=True)
                if not worst <= 1:
                    bad.append((name, variant))
            except Exception as error:
                bad.append((name, variant))
                print("BAD", name, variant, type(error).__name__, str(error)[:300], flush=True)
                traceback.print_exc()
    print("wrong:", bad or "none", f"{time.time() - T0:.0f} s", flush=True)
    return bad


def timings(bad):
    results = {}
    share = left() / len(CASES)
    for name, (_, variants) in CASES.items():
        start = time.time()
        spec = parse(name)
        with GPU.current(), ExitStack() as stack:
            stream = driver.create_stream()
            operands = harness.Operands(spec, stream)
            before = bind_problem(spec.problem("forward"), K)
            before(operands.pointers(before.tensor_names), stream)
            driver.synchronise(stream)
            problem = spec.problem("backward")
            bounds = {v: bound(name, v, problem) for v in variants if v == "base" or (name, v) not in bad}
            workspace = driver.allocate_now(max(b.workspace_bytes for b in bounds.values()), "the workspace")
            replays = {
                v: stack.enter_context(harness.captured(b, operands.pointers(b.tensor_names), stream, workspace))
                for v, b in bounds.items()
            }
            burst, long, clock = ({v: [] for v in replays} for _ in range(3))
            while time.time() - start < 0.62 * share or not burst["base"]:
                for v, replay in replays.items():
                    burst[v].append(timing.median(replay, stream, 7))
            while time.time() - start < 0.95 * share or not long["base"]:
                for v, replay in replays.items():
                    long[v].append(timing.sustained(replay, stream, 5))
                    clock[v].append(timing.sm_clock_mhz())
            flops = spec.flops("backward")
            rate = lambda ms: flops / ms / 1e9
            print(f"\n{name}: TFLOP/s burst (slowest, fastest round), of base; sustained, of base; MHz; {len(burst['base'])} and {len(long['base'])} rounds")
            results[name] = {}
            for v in replays:
                b, s = statistics.median(burst[v]), statistics.median(long[v])
                print(f"  {v:7s} {rate(b):6.1f} ({rate(max(burst[v])):.1f} {rate(min(burst[v])):.1f}) {statistics.median(burst['base']) / b:.3f}"
                      f"   {rate(s):6.1f} {statistics.median(long['base']) / s:.3f}  {clock[v][-1]}", flush=True)
                results[name][v] = {"burst": rate(b), "sustained": rate(s), "bursts": [rate(x) for x in burst[v]], "mhz": clock[v][-1]}
            driver.synchronise(stream)
            driver.free_now(workspace)
        del operands
    (OUT / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    wrong = correctness()
    timings(wrong)
    print(f"{time.time() - T0:.0f} s")
