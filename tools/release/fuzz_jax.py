"""Fuzz of JAX programs: random programs of attention calls, compared with the same programs of jax.numpy.

python -m tools.release.fuzz_jax --programs 1000 [--first SEED] [--processes N] [--record FILE]   on the CPU
python -m tools.release.fuzz_jax --programs 1000 --backend gpu [--kernels FOLDER]                 kernels, on a GPU
python -m tools.release.fuzz_jax --programs 1000 --build FOLDER                                   their kernels, no GPU
python -m tools.release.fuzz_jax --programs 1000 --ranges [...]                                   with ranges of keys
python -m tools.release.fuzz_jax --first SEED --programs 1 --shrink                               one again, reduced

Results of bfloat16 may differ as errors of rounding of the operands make those of float32 differ.
A program that differs is run again after jax.clear_caches(), and beside finite differences of its own loss:

    GRADIENT   the gradient is not the derivative of the program's own loss
    VALUE      loss and gradient agree with each other, and differ from those of jax.numpy
    CACHE      it is wrong only after other programs of the process
    RAISED     it raised an error, and the program of jax.numpy did not
    REFUSED    it raised NotSupported: not wrong, and counted on its own

Exit code 1 if any program is wrong.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

# Compiling takes most of the time, and the programs are small.
_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if tuple(map(int, metadata.version("jaxlib").split(".")[:3])) < (0, 11, 1):  # later ones end at the unknown flag
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
if "--backend" in sys.argv:
    _FLAGS += " --xla_gpu_autotune_level=0"
_DEVICES: Final = 1 if "--build" in sys.argv else 2  # --build is for a machine with one GPU
os.environ.setdefault("XLA_FLAGS", f"{_FLAGS} --xla_force_host_platform_device_count={_DEVICES}")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if "gpu" not in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from cutlass_py_attn.artifact import Artifact, Folder  # noqa: E402
from cutlass_py_attn.bench.harness import commit  # noqa: E402
from cutlass_py_attn.compilation.turns import artifact_for  # noqa: E402
from cutlass_py_attn.errors import NotSupported  # noqa: E402
from cutlass_py_attn.launch.build import Build  # noqa: E402
from tools.docs import attempts  # noqa: E402
from tools.release.jax_programs import (  # noqa: E402
    FORWARD,
    OPERANDS,
    REVERSE,
    Attention,
    Layer,
    Program,
    draw,
    function_of,
    leaves_of,
    loss_of,
    ours,
    plain,
    results,
    with_ranges,
)

Arrays = dict[str, Any]

ARCH: Final = "sm_90a"
RIGHT: Final = ("", "SKIPPED", "REFUSED")  # "SKIPPED" is a program that jax.numpy cannot run
TOLERANCE: Final = {"float32": 2e-3, "bfloat16": 6e-2}  # of the largest element
HALF_UNIT: Final = 2.0**-9  # the largest relative error of rounding to bfloat16
SPREADS: Final = 8  # draws of such errors
SPREADS_ALLOWED: Final = 2.0  # times the largest change that they make
STEP: Final = 0.01  # of finite differences
KEPT: Final = 10  # programs whose compiled code JAX keeps


@dataclass(frozen=True, slots=True)
class Outcome:
    """result: one of RIGHT, or a word of this module's text for a wrong program."""

    seed: int
    result: str
    what: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """modes, kernel_sets: as for `jax_programs.draw`. backend: of the calls. kernels: folder of prebuilt kernels.

    has_ranges: whether most calls have ranges of keys. of_kernels: whether kernels compute those with ranges
    """

    modes: tuple[str, ...] = REVERSE + FORWARD
    backend: str = "reference"
    kernel_sets: int = 0
    kernels: Path | None = None
    has_ranges: bool = False
    of_kernels: bool = False

    def program(self, seed: int) -> Program:
        """Returns the program of a seed, for the devices at hand."""
        program = draw(seed, self.modes, len(jax.devices()), self.kernel_sets)
        return with_ranges(program, seed, of_kernels=self.of_kernels) if self.has_ranges else program

    @property
    def attention(self) -> Attention:
        """The package's attention."""
        return ours(self.backend) if self.kernels is None else ours(self.backend, kernels=Folder(self.kernels))


def check(program: Program, settings: Settings, seed: int) -> Outcome:
    """Runs a program; a wrong one again without what JAX has cached."""
    outcome = _attempt(program, settings, seed)
    if outcome.result in RIGHT:
        return outcome
    jax.clear_caches()
    alone = _attempt(program, settings, seed)
    return alone if alone.result else Outcome(seed, "CACHE", outcome.what)


def _attempt(program: Program, settings: Settings, seed: int) -> Outcome:
    try:
        leaves = leaves_of(program)
        with jax.default_device(jax.devices("cpu")[0]) if settings.backend == "gpu" else contextlib.nullcontext():
            expected = jax.block_until_ready(results(plain, program, leaves, True))
    except Exception as error:  # such as shardings that JAX cannot derive
        return Outcome(seed, "SKIPPED", _first_line(error))
    try:
        found = jax.block_until_ready(results(settings.attention, program, leaves, program.is_jitted))
    except NotSupported as error:
        return Outcome(seed, "REFUSED", _first_line(error))
    except Exception as error:  # the program of jax.numpy ran
        return Outcome(seed, "RAISED", _first_line(error))
    what = difference(found, expected, TOLERANCE[program.dtype])
    if not what or (program.dtype == "bfloat16" and is_within_rounding(program, leaves, found)):
        return Outcome(seed, "")
    if program.mode in FORWARD or program.dtype != "float32":
        return Outcome(seed, "VALUE", what)
    return Outcome(
        seed, "VALUE" if _agrees_with_itself(program, settings.attention, found, expected) else "GRADIENT", what
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def difference(found: Any, expected: Any, tolerance: float) -> str:
    """Returns where two results differ; "" if nowhere."""
    pairs = zip(*(jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (found, expected)), strict=True)
    wrong = []
    for (path, array), (_, other) in pairs:
        one, two = np.asarray(array, np.float64), np.asarray(other, np.float64)
        largest = float(np.abs(two).max(initial=0))
        if one.shape != two.shape or not np.allclose(one, two, rtol=tolerance, atol=tolerance * max(1.0, largest)):
            size = (
                f"off by {np.abs(one - two).max():.2g} of {largest:.2g}" if one.shape == two.shape else f"{one.shape}"
            )
            wrong.append(f"{jax.tree_util.keystr(path)} {'is 0, ' if not one.any() else ''}{size}")
    return "; ".join(wrong)


def is_within_rounding(program: Program, leaves: Arrays, found: Any) -> bool:
    """Returns whether results of bfloat16 are as near to those of float32 as errors of rounding leave them.

    A chain of calls may enlarge such errors: they are drawn for the operands of every call, SPREADS times.
    """
    whole = replace(program, dtype="float32")

    def run(attend: Attention) -> list[Any]:
        with jax.default_device(jax.devices("cpu")[0]):
            return [np.asarray(array, np.float64) for array in jax.tree.leaves(results(attend, whole, leaves, True))]

    exact = run(plain)
    drawn = [run(functools.partial(_with_errors, number)) for number in range(SPREADS)]
    for array, wanted, *others in zip(jax.tree.leaves(found), exact, *drawn, strict=True):
        spread = max(np.abs(other - wanted).max(initial=0) for other in others)
        allowed = SPREADS_ALLOWED * spread + TOLERANCE[program.dtype] * np.abs(wanted).max(initial=0)
        if not np.abs(np.asarray(array, np.float64) - wanted).max(initial=0) <= allowed:
            return False
    return True


def _with_errors(number: int, layer: Layer, operands: Arrays, key: Any) -> tuple[Any, Any]:
    """Computes attention in jax.numpy with relative errors of up to HALF_UNIT in query, key and value."""
    own = dict(operands)
    for place, name in enumerate(OPERANDS[:3]):
        draws = jax.random.fold_in(jax.random.key(number), place)
        error = jax.random.uniform(draws, own[name].shape, minval=-HALF_UNIT, maxval=HALF_UNIT)
        own[name] = own[name] * (1 + error)
    return plain(layer, own, key)


def _agrees_with_itself(program: Program, attend: Attention, found: Any, expected: Any) -> bool:
    """Returns whether the gradient is the derivative of the program's own loss, by finite differences.

    They are taken at the elements where the two gradients differ most, and where the found one is largest.
    """
    leaves, loss = leaves_of(program), jax.jit(loss_of(attend, replace(program, mesh="none")))
    for name, array in leaves.items():
        gradient, other = np.asarray(found[1][name], np.float64), np.asarray(expected[1][name], np.float64)
        of_example = program.mode == "vmap_grad"
        axis = dict(program.examples).get(name) if of_example else None
        allowed = max(6e-3, 0.03 * max(np.abs(gradient).max(), np.abs(other).max()))
        for order in (np.abs(gradient - other), np.abs(gradient)):
            for flat in np.argsort(order.ravel())[-3:]:
                where = np.unravel_index(flat, gradient.shape)
                place = where[1:] if of_example else where
                if axis is not None:
                    place = (*place[:axis], where[0], *place[axis:])
                ends = [loss({**leaves, name: array.at[place].add(step)}) for step in (STEP, -STEP)]
                slopes = (np.asarray(ends[0], np.float64) - np.asarray(ends[1], np.float64)) / (2 * STEP)
                slope = slopes[where[0]] if of_example else slopes.sum()
                if not abs(slope - gradient[where]) <= allowed:
                    return False
    return True


# Smaller programs


def _smaller(program: Program) -> Iterator[Program]:
    """Yields programs with one feature less."""
    layers = program.layers
    for number in range(len(layers)):
        rest = layers[:number] + layers[number + 1 :]
        if rest:
            yield replace(program, layers=(replace(rest[0], query="query"), *rest[1:]))
    for number, layer in enumerate(layers):
        for field in dataclasses.fields(Layer):
            if field.name != "query" and getattr(layer, field.name) != field.default:
                default: Any = {field.name: field.default}
                yield replace(program, layers=(*layers[:number], replace(layer, **default), *layers[number + 1 :]))
    simple: tuple[dict[str, Any], ...] = (
        {"is_jitted": False},
        {"mode": "grad"},
        {"mesh": "none"},
        {"dtype": "float32"},
    )
    for less in simple:
        if replace(program, **less) != program and not (program.mode in FORWARD and "mode" in less):
            yield replace(program, **less)
    for name in program.trained if len(program.trained) > 1 else ():
        trained = tuple(other for other in program.trained if other != name)
        examples = tuple(pair for pair in program.examples if pair[0] != name) or ((trained[0], 0),)
        yield replace(program, trained=trained, examples=examples)


def shrunk(program: Program, settings: Settings, result: str) -> Program:
    """Returns the smallest program that keeps the result when one feature after the other is removed."""
    while True:
        for candidate in _smaller(program):
            jax.clear_caches()
            if _attempt(candidate, settings, 0).result == result:
                program = candidate
                break
        else:
            return program


def described(program: Program) -> str:
    """Returns a program in a line for each call."""
    lines = [f"{program.mode} of {', '.join(program.trained)}"]
    lines[0] += f"{' in jit' if program.is_jitted else ''}, {program.dtype}, mesh {program.mesh}"
    if program.mode in ("vmap_grad", "grad_vmap"):
        lines[0] += f", examples {dict(program.examples)}"
    for layer in program.layers:
        given = [
            f"{field.name}={getattr(layer, field.name)}"
            for field in dataclasses.fields(Layer)
            if getattr(layer, field.name) != field.default
            and (field.name not in ("mapped", "axes") or layer.wrap == "vmap")
        ]
        lines.append(f"    {', '.join(given)}")
    return "\n".join(lines)


# Kernels


def builds(seeds: range, settings: Settings) -> set[Build]:
    """Returns the kernels of programs on one GPU of `ARCH`, as lowering them asks for; compiles them."""
    needed: set[Build] = set()

    def kernels(build: Build) -> Artifact:
        artifact = artifact_for(build)
        needed.add(build)
        return artifact

    for seed in seeds:
        program = settings.program(seed)
        function = function_of(ours("gpu", arch=ARCH, kernels=kernels), program)
        with contextlib.suppress(NotSupported):
            jax.jit(function).trace(leaves_of(program)).lower(lowering_platforms=("cuda",))
    return needed


def build(folder: Path, seeds: range, settings: Settings, processes: int) -> int:
    """Compiles the kernels of programs into the folder; exit code 0."""
    from tools.release.build_ptx import build_into

    parts = [seeds[start::processes] for start in range(processes)]
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        needed = set[Build]().union(*pool.map(functools.partial(builds, settings=settings), parts))
    return build_into(folder, [(build,) for build in sorted(needed, key=lambda build: build.symbol)])


# Runs


def run(seeds: range, settings: Settings) -> list[Outcome]:
    """Checks the programs of these seeds in this process."""
    return [check(settings.program(seed), settings, seed) for seed in seeds]


def run_in_processes(seeds: range, settings: Settings, processes: int, seconds: float) -> Iterator[Outcome]:
    """Yields the outcomes of programs until the time is over; processes take parts of KEPT programs."""
    end = time.monotonic() + seconds
    parts = [seeds[start : start + KEPT] for start in range(0, len(seeds), KEPT)]
    if processes == 1:
        for part in parts:
            if time.monotonic() < end:
                yield from run(part, settings)
                jax.clear_caches()
        return
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, spawn) as pool:
        waiting = {pool.submit(run, part, settings) for part in parts}
        while waiting and time.monotonic() < end:
            done, waiting = concurrent.futures.wait(waiting, 1, concurrent.futures.FIRST_COMPLETED)
            for future in done:
                yield from future.result()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children() if waiting else ():
            process.terminate()


def main() -> int:
    """Runs programs; exit code 1 if one is wrong."""
    parser = argparse.ArgumentParser(
        prog="fuzz_jax", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=100, help="number of programs (100)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first program (0)")
    parser.add_argument("--backend", choices=["reference", "gpu"], default="reference")
    parser.add_argument("--processes", type=int, default=1, help="processes that run programs (1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no program after this time")
    parser.add_argument(
        "--kernel-sets", type=int, default=0, help="sets of features that programs share (any features)"
    )
    parser.add_argument("--reverse", action="store_true", help="without forward mode and second derivatives")
    parser.add_argument("--ranges", action="store_true", help="ranges of keys in most calls; no other drawn programs")
    parser.add_argument("--shrink", action="store_true", help="reduce the first wrong program of each result")
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    parser.add_argument("--build", type=Path, help="only build the kernels, into this folder")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    options = parser.parse_args()
    modes = REVERSE if options.reverse else REVERSE + FORWARD
    of_kernels = options.backend == "gpu" or options.build is not None
    settings = Settings(modes, options.backend, options.kernel_sets, options.kernels, options.ranges, of_kernels)
    seeds = range(options.first, options.first + options.programs)
    if options.build:
        return build(options.build, seeds, settings, options.processes)
    start, counts = time.monotonic(), collections.Counter[str]()
    for outcome in run_in_processes(seeds, settings, options.processes, options.seconds):
        counts[outcome.result or "right"] += 1
        if outcome.result == "REFUSED":
            print(f"REFUSED seed {outcome.seed}: {outcome.what}", flush=True)
        if outcome.result in RIGHT:
            continue
        program = settings.program(outcome.seed)
        print(f"{outcome.result} seed {outcome.seed}: {outcome.what}\n{described(program)}", flush=True)
        if options.shrink and counts[outcome.result] == 1 and outcome.result != "CACHE":
            print(f"reduced: {described(shrunk(program, settings, outcome.result))}", flush=True)
    seconds = time.monotonic() - start
    wrong = sum(counts.values()) - counts["right"] - sum(counts[result] for result in RIGHT)
    print(f"{sum(counts.values())} programs in {seconds:.0f} s: {dict(counts)}")
    if options.record:
        on_gpu = options.backend == "gpu"
        record = {
            "what": f"JAX programs of attention calls{'' if on_gpu else ', reference backend'}",
            "count": sum(counts.values()) - counts["SKIPPED"],
            "wrong": wrong,
            "gpu": jax.devices()[0].device_kind if on_gpu else "CPU",
            "commit": commit(),
            "jax": jax.__version__,
            "first": options.first,
            "kernel_sets": options.kernel_sets,
            "ranges": options.ranges,
            "refused": counts["REFUSED"],
            "seconds": round(seconds),
        }
        attempts.write(options.record, record)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
