"""The handler in C of XLA's calls on the GPU: the bits of the one in Python, also in graphs, and less waiting.

A process has one handler, so exported programs are loaded and run in processes of their own.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.testing.check import Kernels

ROOT: Final = Path(__file__).resolve().parents[3]
SHAPE: Final = 2, 203, 4, 128
# Loads programs, calls each, and again with buffers that move, and times the first while another thread is busy.
LOADER: Final = """
import hashlib, json, statistics, sys, threading, time
import jax, numpy
import cutlass_py_attn.jax
from cutlass_py_attn.jax import native_library

keys = jax.random.split(jax.random.key(0), 4)
arrays = [jax.random.normal(key, (2, 203, 4, 128)).astype("bfloat16") for key in keys]

def digest(results):
    leaves = jax.tree.leaves(results)
    return hashlib.sha256(b"".join(numpy.asarray(leaf, "f4").tobytes() for leaf in leaves)).hexdigest()

digests, programs = {}, {}
for path in sys.argv[1:]:
    programs[path] = jax.jit(jax.export.deserialize(open(path, "rb").read()).call)
    first = digest(programs[path](*arrays))
    kept = [programs[path](*(array + 0 for array in arrays)) for _ in range(20)]
    digests[path] = first, all(digest(each) == first for each in kept)

is_over = threading.Event()
def work():
    while not is_over.is_set():
        sum(range(1000))

run, times = programs[sys.argv[1]], []
thread = threading.Thread(target=work)
thread.start()
for _ in range(30):
    start = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    times.append(time.perf_counter() - start)
is_over.set()
thread.join()
found = {"name": native_library.choice().name, "digests": digests, "busy_ms": 1e3 * statistics.median(times)}
print(json.dumps(found))
"""


@pytest.fixture
def jax() -> Any:
    """JAX with a GPU, on a machine with a C compiler."""
    found = pytest.importorskip("jax", reason="jax is not installed")
    if found.default_backend() != "gpu":
        pytest.skip("jax has no GPU backend here")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    return found


def run(handler: str, programs: list[Path]) -> dict[str, Any]:
    """Returns what LOADER prints in a process with that handler."""
    environment = {**os.environ, "CUTLASS_PY_ATTN_JAX_HANDLER": handler}
    command = [sys.executable, "-c", LOADER, *map(str, programs)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def programs(jax: Any, attend: Callable[..., Any]) -> list[Any]:
    """Forward, both directions, packed sequences, and eight calls that XLA records in a graph; each jitted.

    attend: causal, deterministic attention
    """
    starts = jax.numpy.array([0, 90, 200], "int32")
    packed = importlib.import_module("cutlass_py_attn").VariableLength(starts, starts, 110, 110)

    def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
        return attend(query, key, value)

    def both(query: Any, key: Any, value: Any, grad_output: Any) -> Any:
        output, pull = jax.vjp(attend, query, key, value)
        return output, pull(grad_output)

    def eight(query: Any, key: Any, value: Any, _: Any) -> Any:
        for number in range(8):
            query = query + 0.1 * attend(query, key * (number + 1), value)
        return query

    def in_sequences(query: Any, key: Any, value: Any, grad_output: Any) -> Any:
        output, pull = jax.vjp(functools.partial(attend, sequences=packed), query[:1], key[:1], value[:1])
        return output, pull(grad_output[:1])

    return [jax.jit(function) for function in (forward, both, eight, in_sequences)]


def operands(jax: Any) -> list[Any]:
    """Returns the shapes of the operands of each program."""
    return [jax.ShapeDtypeStruct(SHAPE, "bfloat16")] * 4


def test_both_handlers_give_the_same_bits(jax: Any, kernels: Kernels, tmp_path: Path) -> None:
    module = importlib.import_module("cutlass_py_attn.jax")
    attend = functools.partial(module.attention, mask=Causal(), kernels=kernels, deterministic=True)
    paths = []
    for number, jitted in enumerate(programs(jax, attend)):
        program = jax.export.export(jitted, disabled_checks=module.export_checks())(*operands(jax))
        paths.append(tmp_path / f"{number}.program")
        paths[-1].write_bytes(program.serialize())
    native, python = (run(handler, paths) for handler in ("native", "python"))
    assert (native["name"], python["name"]) == ("native", "python")
    assert native["digests"] == python["digests"]
    assert all(is_repeated for _, is_repeated in native["digests"].values())
    assert native["busy_ms"] < python["busy_ms"]
