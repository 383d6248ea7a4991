"""Compile: from a Build to its Artifact with the CuTe DSL, on any machine, and what ptxas may not do."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn import budget, kernels
from cutlass_py_attn.artifact import Artifact, Kernel, Parameter
from cutlass_py_attn.cache import Cache
from cutlass_py_attn.cubin import Cubin, CubinKernel, read
from cutlass_py_attn.device import architecture
from cutlass_py_attn.errors import AttentionError, BreaksPlan, CompileError
from cutlass_py_attn.plan import Build, Plan

_DSL: Final = "nvidia-cutlass-dsl"
_NO_DSL: Final = f'{_DSL} is not installed, so nothing can be compiled: pip install "cutlass-py-attn[compile]"'

# The DSL keeps the options of a compile in a singleton: one at a time per process.
_LOCK: Final = threading.RLock()
_made: dict[Build, Artifact] = {}

_ENTRY: Final = re.compile(r"\.entry\s+(\S+?)\s*\((.*?)\)", re.DOTALL)
_PARAMETER: Final = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)\s[^,]*?(\w+)(?:\[(\d+)\])?\s*(?:,|$)")
_FUNCTION: Final = re.compile(r"Function properties for (\S+)")
_MEMORY: Final = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REMARK: Final = re.compile(r"[^\n]*\bC75\d\d\b[^\n]*")


@dataclass(frozen=True, slots=True)
class Output:
    """What the DSL gave for one Build: PTX, cubin, and the text of ptxas's report."""

    ptx: str
    cubin: bytes
    report: str


def artifact_for(build: Build, folder: str | os.PathLike[str] | None = None) -> Artifact:
    """The artifact of `build`: from this process, else from the disk cache, else compiled and kept there.

    folder: of the disk cache; None takes the user's. One that cannot be written keeps nothing.
    """
    if build in _made:
        return _made[build]
    with _LOCK:
        if build not in _made:
            _made[build] = _cached(build, Cache(folder))
        return _made[build]


def compile(plan_or_build: Plan | Build) -> Artifact:
    """Compile now, whatever is cached; CompileError lists every finding about what ptxas made."""
    build = plan_or_build.build if isinstance(plan_or_build, Plan) else plan_or_build
    findings: list[str] = []
    for attempt in allocations(build):
        output = run(attempt)
        found = _read(build, output.cubin)
        spills = spilled_bytes(output.report)
        objections = _objections(build, output, found, spills)
        if not objections:
            made = tuple(_kernel(build, found.kernels[name], spills[name]) for name in kernels.entry_symbols(build))
            return Artifact(build, output.ptx, output.cubin, made, toolchain(), allocation_of(attempt))
        findings = findings or objections
        if not any(spills.values()):
            break
    raise BreaksPlan("\n".join([f"{build.symbol} for {build.arch} breaks its plan:", *findings]))


def allocations(build: Build) -> list[Build]:
    """The build, then what to try where the plan's register allocation spills.

    Left alone, ptxas aims at some occupancy and spills a few bytes to reach it. One guaranteed block lifts that
    aim; the usage level moves how far it hoists loads; a square product may as well spread its warps the other
    way round. Which of them fits is not monotonic in anything known.
    """
    settings = ((3, 0), (5, 1), (3, 1), (7, 1))
    tried = [replace(build, register_usage_level=level, min_blocks_per_sm=blocks) for level, blocks in settings]
    if build.kind == "backward" and build.tile_n == build.columns_value == build.columns:
        tried += [replace(build, grad_v=build.grad_v[::-1]), replace(build, grad_k=build.grad_k[::-1])]
    return [build, *(other for other in tried if other != build)]


def allocation_of(build: Build) -> str:
    """The register allocation that a build asks for, as an artifact keeps it."""
    return (
        f"register usage level {build.register_usage_level}, min blocks per SM {build.min_blocks_per_sm or 'unset'}, "
        f"grad_v warps {build.grad_v}, grad_k warps {build.grad_k}"
    )


def _objections(build: Build, output: Output, found: Cubin, spills: dict[str, int]) -> list[str]:
    objections = [*remarks(output.report), *_entry_objections(build, found)]
    for kernel in found.kernels.values():
        objections += _kernel_objections(build, kernel, spills)
    return [*objections, *parameter_objections(build, output.ptx, found)]


@functools.cache
def toolchain() -> str:
    """Version, flavour and hash of the compiler that this process would use, without loading it."""
    package = importlib.util.find_spec("cutlass")
    try:
        version = importlib.metadata.version(_DSL)
    except importlib.metadata.PackageNotFoundError as error:
        raise CompileError(_NO_DSL) from error
    if package is None or package.origin is None:
        raise CompileError(_NO_DSL)
    folder = Path(package.origin).parent / "_mlir" / "_mlir_libs"
    files = folder.glob("_cutlass_ir_version_cu*.py")
    flavours = {int(path.stem.rpartition("_cu")[2]): path for path in files}
    if not flavours:
        return f"{_DSL} {version}"
    flavour = _flavour(list(flavours))
    digest = re.search(r"[0-9a-f]{64}", flavours[flavour].read_text())
    return f"{_DSL} {version} cu{flavour} {digest.group(0)[:16] if digest else 'unknown'}"


def _flavour(installed: list[int]) -> int:
    """The DSL's own choice: the newest flavour installed, but none newer than the driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1").cuDriverGetVersion(
            ctypes.byref(version)
        )
    except (OSError, AttributeError):
        return max(installed)
    usable = [flavour for flavour in installed if flavour <= version.value // 1000]
    return max(usable or installed)


def _cached(build: Build, cache: Cache) -> Artifact:
    names = toolchain()
    found = cache.get(build, names)
    if found is None:
        refusal = cache.refusal(build, names)
        if refusal is not None:
            raise BreaksPlan(refusal)
        try:
            found = compile(build)
        except BreaksPlan as error:
            cache.refuse(build, names, str(error))
            raise
        cache.put(found)
    return found


def run(build: Build, *, lines: AbstractContextManager[None] | None = None) -> Output:
    """Trace and compile `build`, whatever ptxas makes of it; nothing is left on disk. CompileError where there is no
    DSL, or with what it says.

    lines: a context for the trace that says where operations come from; PTX and cubin then have line info.
    """
    name = f"{build.symbol} for {build.arch}"
    return run_trace(name, build.arch, lambda: kernels.trace(build), build.register_usage_level, lines)


def run_trace(
    name: str,
    arch: str,
    trace: Callable[[], kernels.Trace],
    register_usage_level: int = 5,
    lines: AbstractContextManager[None] | None = None,
) -> Output:
    """The same of any host function and its arguments, which `trace` gives; errors begin with `name`."""
    cute = _import_dsl(name)
    options = importlib.import_module("cutlass.base_dsl.compiler")
    with _LOCK, tempfile.TemporaryDirectory(prefix="cutlass_py_attn.") as folder, _own_settings(arch):
        report = Path(folder, "ptxas.yaml")
        chosen = (
            options.KeepPTX(True),
            options.KeepCUBIN(True),
            options.GPUArch(arch),
            options.PtxasOptions(f"--register-usage-level={register_usage_level}"),
            options.GenerateLineInfo(lines is not None),
            options.DumpDir(folder),
            options.RemarkFilter("ptxas"),
            options.RemarkOutput(str(report)),
        )
        try:
            with lines or nullcontext():
                host, arguments = trace()
                made = cute.compile[chosen](host, *arguments)
        except AttentionError:
            raise
        except Exception as error:
            raise CompileError(f"{name}: {_message(error)}") from error
        return Output(made.__ptx__, made.__cubin__, report.read_text() if report.exists() else "")


def _import_dsl(name: str) -> Any:
    if importlib.util.find_spec("cutlass") is None:
        raise CompileError(_NO_DSL)
    try:
        return importlib.import_module("cutlass.cute")
    except Exception as error:
        raise CompileError(f"{name}: the DSL does not load: {_message(error)}") from error


@contextmanager
def _own_settings(arch: str) -> Iterator[None]:
    """The DSL with its defaults, whatever CUTE_DSL_* the environment held when it was first imported.

    Its settings are read once, into an object; one made for a prefix that no variable has holds the defaults.
    The host is said to be another target than ours, so that the DSL builds no engine to launch the kernel
    here. It also reads -diagnostic, and any abbreviation such as -d, from the program's own command line.
    """
    dsl = importlib.import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl()
    preprocessor = importlib.import_module("cutlass.base_dsl.ast_preprocessor").DSLPreprocessor
    kept = dsl.envar, dsl.preprocessor, sys.argv
    defaults = type(dsl.envar)("CUTLASS_PY_ATTN_UNSET")
    defaults.arch = "sm_80" if arch.startswith("sm_1") else "sm_100a"
    dsl.envar, dsl.preprocessor, sys.argv = defaults, preprocessor(dsl.package_name), sys.argv[:1]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dsl.envar, dsl.preprocessor, sys.argv = kept


def _message(error: Exception) -> str:
    """The error's text without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__


def _read(build: Build, cubin: bytes) -> Cubin:
    try:
        return read(cubin)
    except ValueError as error:
        raise CompileError(f"{build.symbol} for {build.arch}: {error}") from error


def _plain(report: str) -> str:
    """ptxas's own text: the report is YAML, which doubles quotes and may escape line ends."""
    return report.replace("''", "'").replace("\\n", "\n")


def spilled_bytes(report: str) -> dict[str, int]:
    """Bytes of spill stores and loads of each kernel that ptxas's report names."""
    found: dict[str, int] = {}
    symbol = ""
    for line in _plain(report).splitlines():
        if name := _FUNCTION.search(line):
            symbol = name.group(1)
        elif memory := _MEMORY.search(line):
            found[symbol] = int(memory.group(2)) + int(memory.group(3))
    return found


def remarks(report: str) -> list[str]:
    """ptxas's C75xx remarks: it waits for wgmma where the kernel does not, and serialises the products."""
    return [f"ptxas remark, none allowed: {line.strip()}" for line in _REMARK.findall(_plain(report))]


def _entry_objections(build: Build, found: Cubin) -> Iterator[str]:
    expected = set(kernels.entry_symbols(build))
    if expected != set(found.kernels):
        yield f"entries = {', '.join(sorted(found.kernels)) or 'none'}: must be {', '.join(sorted(expected))}"
    target = int(build.arch.removeprefix("sm_").rstrip("af"))
    if found.sm != target:
        yield f"cubin is for sm_{found.sm}: must be for {build.arch}"


def _role(build: Build, symbol: str) -> str:
    """The role of an entry; of a room's, main."""
    return {name: role for role, name in kernels.entries(build).items()}.get(symbol, "main")


def _kernel_objections(build: Build, kernel: CubinKernel, spills: dict[str, int]) -> Iterator[str]:
    limits = architecture(build.arch)
    threads = kernels.entry_threads(build, _role(build, kernel.symbol))
    registers = budget.register_limit(replace(build, warps=threads // 32), limits)
    limited = (
        ("stack frame", "bytes a thread", kernel.frame_bytes, 0),
        ("spills", "bytes a thread", spills.get(kernel.symbol, 0), 0),
        ("registers", "a thread", kernel.registers, registers),
        (
            "static shared memory",
            "bytes a block",
            kernel.static_shared_memory_bytes,
            limits.reserved_shared_memory,
        ),
    )
    for what, unit, number, allowed in limited:
        if number > allowed:
            yield f"{kernel.symbol}: {what} = {number} {unit}: {allowed} allowed"
    if kernel.symbol not in spills:
        yield f"{kernel.symbol}: ptxas reported no spill count: one is needed"
    if kernel.reqntid != (threads, 1, 1):
        yield f"{kernel.symbol}: block = {kernel.reqntid or 'not fixed'}: must be fixed to ({threads}, 1, 1)"


def parameter_objections(build: Build, ptx: str, found: Cubin) -> Iterator[str]:
    """Where the parameters of PTX, cubin and ABI differ in number, order or size."""
    declared = _ptx_parameters(ptx)
    for symbol, kernel in found.kernels.items():
        numbers = range(len(kernel.parameters))
        names = [f"{symbol}_param_{number}" for number in numbers]
        sizes = [parameter.size for parameter in kernel.parameters]
        if declared.get(symbol) != list(zip(names, sizes, strict=True)):
            yield f"{symbol}: PTX parameters = {declared.get(symbol)}: the cubin has sizes {sizes}"
        offsets = [parameter.offset for parameter in kernel.parameters]
        ordinals = [parameter.ordinal for parameter in kernel.parameters]
        if ordinals != list(numbers) or offsets != sorted(set(offsets)):
            yield f"{symbol}: cubin parameters {ordinals} at {offsets}: must be numbered from 0 and ascend"
        expected = [size for _, size in kernels.parameters(build, _role(build, symbol))]
        if sizes != expected:
            yield f"{symbol}: parameter sizes = {sizes}: the ABI has {expected}"


def _ptx_parameters(ptx: str) -> dict[str, list[tuple[str, int]]]:
    """(name, bytes) of each parameter of each entry, in PTX order."""
    return {
        symbol: [(name, int(bits) // 8 * int(count or 1)) for _, bits, name, count in _PARAMETER.findall(body)]
        for symbol, body in _ENTRY.findall(ptx)
    }


def _kernel(build: Build, kernel: CubinKernel, spilled: int) -> Kernel:
    names = [name for name, _ in kernels.parameters(build, _role(build, kernel.symbol))]
    return Kernel(
        symbol=kernel.symbol,
        registers=kernel.registers,
        frame_bytes=kernel.frame_bytes,
        spill_bytes=spilled,
        static_shared_memory_bytes=kernel.static_shared_memory_bytes,
        threads=math.prod(kernel.reqntid or ()),
        parameters=tuple(
            Parameter(name, parameter.offset, parameter.size)
            for name, parameter in zip(names, kernel.parameters, strict=True)
        ),
    )
