"""Native frames: the handler in C on the fake driver, called with made-up frames and with XLA's frames of the CPU."""

from __future__ import annotations

import ctypes
import functools
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.jax import handler, native, native_library
from cutlass_py_attn.jax.payload import Payload
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.runtime.binding import bind
from cutlass_py_attn.score_terms.dropout import PHILOX
from tests.support import fake_driver
from tests.support.c_compiler import STRICT, build, compiler
from tests.support.fakes import artifact

SOURCE: Final = Path(__file__).with_name("native_frames.c")
HEADERS: Final = ("-isystem", jax.ffi.include_dir())
TARGETS: Final = {name: f"{handler.TARGET}_{name}_frames" for name in ("native", "python")}
RESULTS: Final = ("output", "logsumexp")
MADE_UP: Final = 0x7F0000000000
COMPARED: Final = ("cuLaunchKernelEx", "cuMemsetD8Async", "cuMemsetD2D8Async", "cuMemsetD2D32Async")

_numbers = itertools.count(1)
_folder = tempfile.TemporaryDirectory(prefix="native_frames_")


@functools.cache
def frames() -> Any:
    """Returns the functions of native_frames.c."""
    made = Path(_folder.name, "frames.so")
    build([compiler("c"), "-std=c11", *STRICT, "-shared", "-fPIC", *HEADERS, str(SOURCE), "-o", str(made), "-lpthread"])
    return ctypes.CDLL(str(made))


@functools.cache
def native_handler() -> native.NativeHandler:
    """Returns the handler in C, which this process has once, and registers it and the one in Python with XLA's CPU."""
    assert fake_driver.compiler() is not None
    made = Path(_folder.name, "handler.so")
    source = str(native_library.SOURCE)
    build([compiler("c"), *STRICT, *native_library.FLAGS, *HEADERS, source, "-o", str(made)])
    found = native.NativeHandler(ctypes.CDLL(str(made)))
    frames().frames_set_handlers(found.function, handler._handlers["CUDA"])
    for name, target in TARGETS.items():
        function = getattr(frames(), f"frames_{name}")
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    return found


def payload_of(problem: Problem | None, plan: Plan, made: Artifact, names: Sequence[str]) -> Payload:
    """Returns the payload of a call whose kernels take these arrays."""
    found = [name for name in names if name not in PHILOX]
    found += [handler.PHILOX] if len(found) < len(names) else []
    is_forward = problem is not None and problem.direction == "forward"
    results = [
        name for name in found if name.startswith("grad_") and name != "grad_output" and name != "grad_logsumexp"
    ]
    results = [name for name in found if name in RESULTS] if is_forward else results
    operands = tuple(name for name in found if name not in results)
    return Payload(problem, plan, made, operands, (*results, *([handler.WORKSPACE] if plan.workspace.bytes else [])))


class Call:
    """A call of both handlers, with made-up buffers."""

    def __init__(self, payload: Payload, ordinal: int = 0) -> None:
        self.key = next(_numbers)
        self.payload = payload
        self.bound = handler.BoundPayload(payload, ordinal)
        handler._payloads[self.key, ordinal] = self.bound
        self.stream = (ordinal << 32) + 0x77

    def addresses(self, first: int) -> list[int]:
        """Returns made-up addresses of the buffers."""
        return [MADE_UP + 2**36 * first + 2**32 * number for number in range(len(self.bound.names))]

    def native(self, addresses: Sequence[int], what: int = 0) -> str:
        """Calls the handler in C; returns the error's text, "" if there is none. what: as in native_frames.c."""
        operands = len(self.payload.operands)
        given = (ctypes.c_uint64 * len(addresses))(*addresses)
        key, stream = ctypes.c_int64(self.key), ctypes.c_uint64(self.stream)
        error = ctypes.create_string_buffer(4096)
        failed = frames().frames_call(
            *(native_handler().function, key, given, operands, len(addresses) - operands, what, stream),
            *(error, ctypes.c_size_t(len(error))),
        )
        return error.value.decode() if failed else ""

    def python(self, addresses: list[int]) -> None:
        """Launches as the handler in Python does."""
        self.bound(addresses, self.stream)


def call_of(problem: Problem, plan: Plan, ordinal: int = 0) -> Call:
    """Returns a call of a problem on a GPU, with kernels for the fake driver."""
    made = artifact(plan.build)
    return Call(payload_of(problem, plan, made, bind(made, plan, problem, ordinal).tensor_names), ordinal)


def compared(log: fake_driver.FakeDriver) -> list[tuple[Any, ...]]:
    """Returns the calls that decide what happens on the device, in order."""
    return [(call.name, call.text, call.numbers, call.parameters) for call in log.calls if call.name in COMPARED]


def launches_of_both(log: fake_driver.FakeDriver, call: Call) -> list[tuple[Any, ...]]:
    """Launches that both handlers make: C leaves the first to Python; other addresses give other launches."""
    found: list[list[tuple[Any, ...]]] = []
    for launch in (call.native, call.native, call.python):
        log.clear()
        assert not launch(call.addresses(1))
        found.append(compared(log))
    assert found[0] == found[1] == found[2]
    log.clear()
    call.python(call.addresses(2))
    others = compared(log)
    log.clear()
    assert call.native(call.addresses(2)) == ""
    assert compared(log) == others != found[0]
    return found[0]
