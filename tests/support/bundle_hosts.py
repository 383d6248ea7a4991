"""Bundle hosts: what three ways of launching a bundle ask of the driver, to be compared call by call.

`bound_calls` is the package's own launch, `header_calls` the C header compiled by the C++ compiler, `manifest_calls`
the example that reads manifest.json alone.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.pathfinder import find_nvidia_header_directory
from host import Host

from cutlass_py_attn.bundle.files import Bundle, export_bundle
from cutlass_py_attn.bundle.numbers import inputs, pointers
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.runtime.driver import device
from tests.support import fake_driver
from tests.support.c_compiler import STRICT, build, compiler
from tests.support.fakes import artifact
from tests.support.library_host import SPACE

ROOT = Path(__file__).resolve().parents[2]
STREAM = 0x5EED0
_scratch = np.zeros(2**28, np.uint8)  # the fake driver clears it; what nobody clears takes no memory
WORKSPACE = -(-_scratch.ctypes.data // 256) * 256
ADDRESSES = 0x7F0000000000  # of the operands, which follow each other
COMPARED = ("cuLaunchKernelEx", "cuMemsetD8Async", "cuTensorMapEncodeTiled")


def exported(folder: Path, problems: tuple[Problem, ...], arch: str = "sm_90a") -> Bundle:
    """A bundle whose cubins are for the fake driver."""
    return export_bundle(folder, problems, arch.split(","), kernels=artifact)


def described(bundle: Bundle, direction: str) -> dict[str, Any]:
    """The problem of this direction in the manifest."""
    found: dict[str, Any] = next(item for item in bundle.manifest["problems"] if item["direction"] == direction)
    return found


def cuda_headers() -> str:
    """The folder of cuda.h, of the wheel nvidia-cuda-runtime."""
    found = find_nvidia_header_directory("cudart")
    assert found, "cuda.h is missing: pip install nvidia-cuda-runtime"
    return found


@dataclass(frozen=True)
class Numbers:
    """What a host passes to one call: numbers by name, addresses by name."""

    inputs: dict[str, float]
    addresses: dict[str, int]


def numbers_of(bundle: Bundle, problem: Problem) -> Numbers:
    """Those of `problem`, with made-up addresses and random numbers."""
    chosen = bundle.plans(problem.direction)[0].build
    found = {name: item.value for name, item in inputs(problem, chosen).items()}
    found |= {name: 2**40 + i for i, name in enumerate(("philox_seed", "philox_offset")) if name in found}
    return Numbers(found, {name: ADDRESSES + SPACE * i for i, name in enumerate(pointers(problem), 1)})


def compared(log: fake_driver.FakeDriver) -> list[tuple[Any, ...]]:
    """The calls that decide what happens on the device; where a map was encoded, which context, and trials do not."""
    found = []
    for call in log.calls:
        if call.name == "cuLaunchKernelEx":
            found.append((call.name, call.text, call.numbers[:9], call.parameters))
        elif call.name == "cuTensorMapEncodeTiled":
            if call.numbers[3] % SPACE >= ADDRESSES:
                found.append((call.name, call.numbers[1:], call.parameters))
        elif call.name in COMPARED:
            found.append((call.name, call.numbers))
    return sorted(found, key=lambda item: COMPARED.index(item[0]))


def bound_calls(log: fake_driver.FakeDriver, bundle: Bundle, problem: Problem) -> tuple[list[tuple[Any, ...]], int]:
    """Of `Bundle.bind`; and the bytes of its workspace."""
    bound = bundle.bind(problem.direction, problem)
    assert bound.workspace_bytes <= _scratch.size - 256
    given = numbers_of(bundle, problem)
    seeds = {name: int(given.inputs[name]) for name in ("philox_seed", "philox_offset") if name in given.inputs}
    log.clear()
    bound(given.addresses | seeds, STREAM, workspace=WORKSPACE)
    return compared(log), bound.workspace_bytes


def manifest_calls(log: fake_driver.FakeDriver, bundle: Bundle, problem: Problem) -> tuple[list[tuple[Any, ...]], int]:
    """Of the example that reads the manifest alone."""
    library = ctypes.CDLL(str(fake_driver.library()))
    with device(0).current():
        host = Host(bundle.path, problem.direction, library)
        given = numbers_of(bundle, problem)
        log.clear()
        host.launch(given.inputs, given.addresses, WORKSPACE, STREAM)
    return compared(log), host.workspace(host.numbers(given.inputs))[0]


class RustHost:
    """The example in Rust as a shared library whose driver is the fake driver; skips where there is no rustc."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("rustc") is None:
            pytest.skip("no rustc to build the example with")
        self._made = folder / "host_rust.so"
        source = ROOT / "examples" / "rust_host" / "lib.rs"
        options = (
            "--edition",
            "2021",
            "-D",
            "warnings",
            "--crate-type",
            "cdylib",
            "-C",
            f"link-arg={fake_driver.library()}",
        )
        build(["rustc", *options, str(source), "-o", str(self._made)])

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        """Loaded once the process has the fake driver."""
        return ctypes.CDLL(str(self._made))

    def launch(self, folder: Path, direction: str, given: Numbers, workspace: int) -> tuple[int, str]:
        """(bytes of the workspace, error); launches nothing where the workspace is 0 and needed."""
        texts = [str(folder), direction, *("\n".join(f"{name} {value!r}" for name, value in part.items())
                                           for part in (given.inputs, given.addresses))]  # fmt: skip
        found, error = ctypes.c_int64(), ctypes.create_string_buffer(512)
        self.library.bundle_launch(
            *(text.encode() for text in texts), ctypes.c_uint64(workspace), ctypes.c_void_p(STREAM),
            ctypes.byref(found), error,
        )  # fmt: skip
        return found.value, error.value.decode()


def rust_calls(
    log: fake_driver.FakeDriver, host: RustHost, bundle: Bundle, problem: Problem
) -> tuple[list[tuple[Any, ...]], int]:
    """Of the example in Rust."""
    log.clear()
    with device(0).current():
        found, error = host.launch(bundle.path, problem.direction, numbers_of(bundle, problem), WORKSPACE)
    assert error == ""
    return compared(log), found


_WRAPPER = """
#include "attention.h"
#ifdef __cplusplus
extern "C" {
#endif
size_t bundle_bytes(void) { return sizeof(attention_bundle); }
size_t call_bytes(void) { return sizeof(attention_PASS_call); }
const char *error_of(attention_bundle *b) { return b->error; }
int open_bundle(attention_bundle *b, const char *folder) { return attention_open(b, folder, 0); }
void close_bundle(attention_bundle *b) { attention_close(b); }
void init(attention_PASS_call *c) { attention_PASS_init(c); }
void contiguous(attention_PASS_call *c) { attention_PASS_contiguous(c); }
int workspace(attention_bundle *b, attention_PASS_call *c, int64_t *n) { return attention_PASS_workspace(b, c, n); }
int launch(attention_bundle *b, attention_PASS_call *c, CUdeviceptr w, CUstream s) {
    return attention_PASS(b, c, w, s);
}
#ifdef __cplusplus
}
#endif
"""


class HeaderHost:
    """The header of a bundle as a shared library whose driver is the fake driver."""

    def __init__(self, folder: Path, bundle: Bundle, direction: str, language: str = "c++") -> None:
        source = folder / f"{direction}.{'cpp' if language == 'c++' else 'c'}"
        source.write_text(_WRAPPER.replace("PASS", direction))
        made = folder / f"{direction}_{language}.so"
        standard = {"c": "-std=c11", "c++": "-std=c++11"}[language]
        folders = "-I", str(bundle.path), "-isystem", cuda_headers()
        build([compiler(language), standard, *STRICT, "-shared", "-fPIC", *folders, str(source), "-o", str(made)])
        self.library = ctypes.CDLL(str(made))
        self.library.error_of.restype = ctypes.c_char_p
        self.bundle = ctypes.create_string_buffer(self.library.bundle_bytes())
        self.passed = described(bundle, direction)
        kinds = {"i64": ctypes.c_int64, "f64": ctypes.c_double}
        fields = [(name, kinds[item["type"]]) for name, item in self.passed["inputs"].items()]
        fields += [(name, ctypes.c_uint64) for name in self.passed["pointers"]]
        self.call = type("Call", (ctypes.Structure,), {"_fields_": fields})()
        assert ctypes.sizeof(self.call) == self.library.call_bytes()
        self.library.init(ctypes.byref(self.call))

    @property
    def error(self) -> str:
        """What the header says went wrong."""
        return self.library.error_of(self.bundle).decode()

    def open(self, folder: Path) -> int:
        """attention_open."""
        return self.library.open_bundle(self.bundle, str(folder).encode())

    def values(self) -> dict[str, float]:
        """The call's numbers and addresses by name."""
        return {name: getattr(self.call, name) for name in (*self.passed["inputs"], *self.passed["pointers"])}

    def set(self, numbers: Mapping[str, float]) -> None:
        """Change some of them."""
        for name, value in numbers.items():
            setattr(self.call, name, value)

    def contiguous(self) -> None:
        """attention_..._contiguous."""
        self.library.contiguous(ctypes.byref(self.call))

    def workspace_bytes(self) -> int:
        """attention_..._workspace; -1 where it refuses."""
        found = ctypes.c_int64()
        code = self.library.workspace(self.bundle, ctypes.byref(self.call), ctypes.byref(found))
        return found.value if code == 0 else -1

    def launch(self, workspace: int = WORKSPACE) -> int:
        """attention_forward or attention_backward."""
        return self.library.launch(
            self.bundle, ctypes.byref(self.call), ctypes.c_uint64(workspace), ctypes.c_void_p(STREAM)
        )


def header_calls(
    log: fake_driver.FakeDriver, host: HeaderHost, bundle: Bundle, problem: Problem
) -> tuple[list[tuple[Any, ...]], int]:
    """Of the C header."""
    given = numbers_of(bundle, problem)
    with device(0).current():
        assert host.open(bundle.path) == 0, host.error
        host.set({**given.inputs, **given.addresses})
        log.clear()
        assert host.launch() == 0, host.error
        return compared(log), host.workspace_bytes()
