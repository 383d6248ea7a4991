"""Fault programs: each causes a fault of the GPU or of a process in a process of its own, for test_faults.py.

python -m tests.gpu.fault_programs NAME FOLDER [ARGUMENT ...]

FOLDER has the kernels; "" stands for the compiler. A program prints the errors that it caught as a JSON list of type
and text, and ends with an AssertionError if anything else changed, or if the next correct call is wrong.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.compilation.cache import Cache
from cutlass_py_attn.errors import AttentionError, DriverError
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.binding import bind_problem
from cutlass_py_attn.testing import check
from cutlass_py_attn.testing.check import Array, Kernels, same_bits
from tests.cases import covering_cases, suite
from tests.gpu.matrix_check import OnDevice, on_host

# Repeatable bits, with operands, results and a workspace of several MiB: more than an allocator has in reserve.
CASE: Final = suite.LAUNCHERS["backward"].replace(num_heads=64)
MASK: Final = CASE.spec.mask
BACKWARD_OPERANDS: Final = ("grad_output", *check.OPERANDS, "output", "logsumexp")
LARGEST_BYTES, SMALLEST_BYTES = 1 << 35, 1 << 9  # of the allocations that take all memory
LOADS: Final = 80  # kernels to load until no memory is left; some fit in memory that the driver has in reserve
SLACK_BYTES: Final = 1 << 22  # less than any result or workspace of CASE
ROUNDS: Final = 6
OUT_OF_MEMORY: Final = 2

caught: list[tuple[str, str]] = []


@contextlib.contextmanager
def catch() -> Iterator[None]:
    """Context manager for code that must raise one of this package's errors, which is printed at the end."""
    try:
        yield
    except AttentionError as error:
        caught.append((type(error).__name__, str(error)))
    else:
        raise AssertionError("nothing was raised")


class Scene:
    """Operands and results of CASE in guarded device memory, on the host, and the right results."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.host = CASE.arrays()
        self.expected = check.attend(CASE, self.host, kernels)
        self.host |= {name: self.expected[name] for name in ("output", "logsumexp")}
        self.before = {name: array.tobytes() for name, array in self.host.items()}
        problem = CASE.problem()
        logsumexp = Tensor.contiguous(problem.shape.logsumexp, "float32")
        self.tensors = {**problem.tensors(), "logsumexp": logsumexp}
        self.operands = {name: OnDevice(self.tensors[name], self.host[name]) for name in BACKWARD_OPERANDS}
        self.results = {name: OnDevice(self.tensors[name]) for name in check.GRADIENTS}

    def forward(self, given: Any) -> Any:
        """Calls the forward with operands by name."""
        return attention_forward(*(given[name] for name in check.OPERANDS), mask=MASK, kernels=self.kernels)

    def backward(self, out: Gradients | None = None) -> Any:
        """Calls the backward with operands on the device."""
        given = (self.operands[name] for name in BACKWARD_OPERANDS)
        return attention_backward(*given, mask=MASK, deterministic=True, kernels=self.kernels, out=out)

    def out(self) -> Gradients:
        """Returns the arrays for results."""
        return Gradients(*(self.results[name] for name in check.GRADIENTS))

    def expect_untouched(self) -> None:
        """AssertionError if an operand, its guards or an array for results changed."""
        driver.call("cuCtxSynchronize")
        for name, array in self.operands.items():
            assert same_bits(array.buffer.read(), self.host[name]), name
        for name, array in self.results.items():
            assert np.isnan(array.buffer.read().astype(np.float32)).all(), name
        assert {name: array.tobytes() for name, array in self.host.items()} == self.before

    def expect_next_calls_right(self) -> None:
        """AssertionError if a call with NumPy or device arrays gives other bits than before the fault."""
        output, _ = self.forward(self.host)
        assert same_bits(output, self.expected["output"])
        output, _ = self.forward(self.operands)
        assert same_bits(on_host(output), self.expected["output"])
        found = self.backward()
        for name, array in zip(check.GRADIENTS, (found.query, found.key, found.value), strict=True):
            assert same_bits(on_host(array), self.expected[name]), name


@contextlib.contextmanager
def no_memory() -> Iterator[None]:
    """Context manager in which the GPU has no free memory; the memory that is taken keeps its bytes."""
    driver.call("cuCtxSynchronize")
    pool = driver.call("cuDeviceGetDefaultMemPool", driver.device(0).handle)
    driver.call("cuMemPoolTrimTo", pool, 0)
    taken, size = [], LARGEST_BYTES
    try:
        while size >= SMALLEST_BYTES:
            try:
                taken.append((driver.allocate_now(size, "all memory"), size))
            except DriverError as error:
                expect_no_memory(error)
                size //= 2
        for address, size in taken:
            driver.call("cuMemsetD8Async", address, 0xA5, size, 0)
        driver.synchronise(0)
        yield
        driver.call("cuCtxSynchronize")
        for address, size in taken:
            for place in {address, address + size - SMALLEST_BYTES}:
                found = np.zeros(SMALLEST_BYTES, np.uint8)
                driver.copy_to_host(found.ctypes.data, place, found.nbytes, 0)
                driver.synchronise(0)
                assert (found == 0xA5).all(), "memory of others was written"
    finally:
        for address, _ in taken:
            driver.free_now(address)


def expect_no_memory(error: DriverError) -> None:
    """Raises the error again unless it says that memory ran out."""
    if error.code != OUT_OF_MEMORY:
        raise error


def without_memory(scene: Scene, call: Callable[[], object]) -> None:
    """Makes the call without memory, and checks that only its error remains."""
    gc.collect()
    free = free_bytes()
    with no_memory(), catch():
        call()
    scene.expect_untouched()
    gc.collect()
    driver.call("cuCtxSynchronize")
    assert free_bytes() >= free - SLACK_BYTES, "the failed call kept memory"
    scene.expect_next_calls_right()


def free_bytes() -> int:
    """Returns the free memory of the GPU."""
    return int(driver.call("cuMemGetInfo")[0])


def workspace(kernels: Kernels) -> None:
    """No memory for the workspace; the results are the caller's arrays."""
    scene = Scene(kernels)
    scene.expect_next_calls_right()
    without_memory(scene, lambda: scene.backward(scene.out()))


def result(kernels: Kernels) -> None:
    """No memory for the output."""
    scene = Scene(kernels)
    scene.expect_next_calls_right()
    without_memory(scene, lambda: scene.forward(scene.operands))


def copy(kernels: Kernels) -> None:
    """No memory for the copy of a NumPy operand."""
    scene = Scene(kernels)
    scene.expect_next_calls_right()
    without_memory(scene, lambda: scene.forward(scene.host))


def load(kernels: Kernels) -> None:
    """No memory for the code of further kernels."""
    scene = Scene(kernels)
    cases = [case for case in covering_cases.FORWARD if case.needs_kernels][:LOADS]
    failed = None
    with no_memory():
        for case in cases:
            try:
                bind_problem(case.problem(), kernels)
            except DriverError as error:
                expect_no_memory(error)
                caught.append((type(error).__name__, str(error)))
                failed = case
                break
    assert failed is not None, f"all of {len(cases)} cases found memory for their kernels"
    scene.expect_untouched()
    check.assert_accurate(failed, check.run(failed, kernels))
    scene.expect_next_calls_right()


def destroyed(kernels: Kernels) -> None:
    """The GPU's context is reset by somebody else after a call."""
    scene = Scene(kernels)
    result, _ = scene.forward(scene.operands)
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    driver.call("cuDevicePrimaryCtxReset", driver.device(0).handle)
    for _ in range(2):
        with catch():
            scene.forward(scene.host)
    assert {name: array.tobytes() for name, array in scene.host.items()} == scene.before
    del result
    gc.collect()
    assert ignored == [], "the end of an array raised an error"
    output, _ = attention_forward(*(scene.host[name] for name in check.OPERANDS), mask=MASK, backend="reference")
    assert np.isfinite(output.astype(np.float32)).all(), "the CPU still works"


def forked(kernels: Kernels) -> None:
    """A child of a process that has called calls too."""
    scene = Scene(kernels)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writer, "w") as file:
            for given in (scene.host, scene.operands):
                with catch():
                    scene.forward(given)
            json.dump(caught, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        caught.extend(map(tuple, json.load(file)))
    _, status = os.waitpid(child, 0)
    assert status == 0
    scene.expect_untouched()
    scene.expect_next_calls_right()


def killed(kernels: Kernels, target: str, count: str) -> None:
    """Kills this process before it renames file number `count` of another kernel in the folder `target`."""
    calls, rename = 0, Path.replace

    def die(self: Path, *arguments: Any) -> Path:
        nonlocal calls
        calls += 1
        if calls == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, *arguments)

    Path.replace = die  # type: ignore[method-assign, assignment]
    (old,) = Folder(target).all()
    Folder(target).put(replace(old, ptx="// another"))


def race(kernels: Kernels, target: str, start: str) -> None:
    """Writes and reads kernels of one cache and one folder, and launches them, beside another such process.

    Prints the hash of the results of each round.
    """
    cache, folder = Cache(Path(target, "cache")), Folder(Path(target, "kernels"))
    arrays = CASE.arrays()
    while time.time() < float(start):
        pass
    for _ in range(ROUNDS):

        def through_cache(build: Build) -> Artifact:
            made = kernels(build)
            found = cache.get(build, made.toolchain)
            cache.put(found or made)
            return found or made

        def through_folder(build: Build) -> Artifact:
            folder.put(kernels(build))
            return folder(build)

        for source in (through_cache, through_folder):
            found = check.attend(CASE, arrays, source)
            caught.append(("sha256", digest(found)))


def digest(found: dict[str, Array]) -> str:
    """Returns the hash that `race` prints for these results."""
    return hashlib.sha256(b"".join(array.tobytes() for array in found.values())).hexdigest()


PROGRAMS: Final[dict[str, Callable[..., None]]] = {
    each.__name__: each for each in (workspace, result, copy, load, destroyed, forked, killed, race)
}


def main() -> int:
    """Runs a program; exit code 0 unless it fails."""
    name, folder, *arguments = sys.argv[1:]
    kernels = check.kernels_from(Path(folder) if folder else None)
    with driver.device(0).current():
        PROGRAMS[name](kernels, *arguments)
    sys.stdout.write(json.dumps(caught) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
