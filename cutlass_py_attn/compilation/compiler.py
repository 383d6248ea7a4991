"""Compiles a Build to its Artifact with the CuTe DSL, on any machine.

`report` checks what ptxas reports; a spill makes `compile` try the next register allocation.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
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

from cutlass_py_attn import extras
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import registry, report
from cutlass_py_attn.compilation.cache import Cache
from cutlass_py_attn.compilation.cubin import Cubin, read
from cutlass_py_attn.errors import AttentionError, BreaksPlan, CompileError
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.score_terms.registry import source_digest

_DSL: Final = "nvidia-cutlass-dsl"
_NO_DSL: Final = f"{_DSL} is not installed, so nothing can be compiled: {extras.remedy('compile')}"

# The DSL keeps the options of a compilation in a singleton, so a process compiles one kernel at a time.
_LOCK: Final = threading.RLock()
_artifacts: dict[tuple[Build, str], Artifact] = {}


@dataclass(frozen=True)
class CompilerOutput:
    """PTX, cubin and ptxas's report of one compilation."""

    ptx: str
    cubin: bytes
    report: str

    @functools.cached_property
    def spills(self) -> dict[str, int]:
        """Bytes of spill stores and loads of each kernel."""
        return report.spilled_bytes(self.report)


def artifact_for(build: Build, folder: str | os.PathLike[str] | None = None) -> Artifact:
    """Returns the artifact of `build` from this process, else from the disk cache, else compiles and caches it.

    folder: of the disk cache; None for the user's. If the folder cannot be written, nothing is cached on disk.
    """
    key = build, source_digest(build.features)
    if key in _artifacts:
        return _artifacts[key]
    with _LOCK:
        if key not in _artifacts:
            _artifacts[key] = _from_disk_cache(build, Cache(folder))
        return _artifacts[key]


def compile(plan_or_build: Plan | Build) -> Artifact:
    """Compiles without looking in a cache; CompileError lists every finding in ptxas's report and cubin."""
    build = plan_or_build.build if isinstance(plan_or_build, Plan) else plan_or_build
    errors: list[BreaksPlan] = []
    for attempt in allocations(build):
        output = compile_unchecked(attempt)
        try:
            return checked_artifact(build, attempt, output)
        except BreaksPlan as error:
            errors.append(error)
        if not any(output.spills.values()):
            break
    raise errors[0]


def checked_artifact(build: Build, attempt: Build, output: CompilerOutput) -> Artifact:
    """Returns the artifact of a compilation; BreaksPlan lists every finding in ptxas's report and cubin.

    attempt: the build with the register allocation that was compiled
    """
    cubin = _read(build, output.cubin)
    findings = report.findings(build, output.ptx, cubin, output.report, output.spills)
    if findings:
        raise BreaksPlan("\n".join([f"{build.symbol} for {build.arch} breaks its plan:", *findings]))
    kernels = report.kernels(build, cubin, output.spills)
    return Artifact(build, output.ptx, output.cubin, kernels, toolchain(), allocation_of(attempt))


def allocations(build: Build) -> list[Build]:
    """Returns the build, then the variations of its register allocation to try when it spills.

    By default ptxas aims at an occupancy and spills a few bytes to reach it. One guaranteed block per SM removes that
    aim. The usage level changes how far ptxas hoists loads. If the dV and dK accumulators are square, their warps may
    be arranged the other way round. Which variation fits does not follow from any known number, so all are tried.
    """
    levels_and_blocks = ((3, 0), (5, 1), (3, 1), (7, 1))
    attempts = [
        replace(build, register_usage_level=level, min_blocks_per_sm=blocks) for level, blocks in levels_and_blocks
    ]
    if build.kind == "backward" and build.tile_n == build.columns_value == build.columns:
        attempts += [
            replace(build, warps_grad_v=build.warps_grad_v[::-1]),
            replace(build, warps_grad_k=build.warps_grad_k[::-1]),
        ]
    return [build, *(attempt for attempt in attempts if attempt != build)]


def allocation_of(build: Build) -> str:
    """Returns the register allocation of a build as text, for `Artifact.allocation`."""
    return (
        f"register usage level {build.register_usage_level}, min blocks per SM {build.min_blocks_per_sm or 'unset'}, "
        f"grad_v warps {build.warps_grad_v}, grad_k warps {build.warps_grad_k}"
    )


@functools.cache
def toolchain() -> str:
    """Returns version, CUDA flavour and hash of the DSL that this process would use, without loading the DSL."""
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
    """Returns the CUDA major version that the DSL chooses: the newest one installed that the driver supports."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1").cuDriverGetVersion(
            ctypes.byref(version)
        )
    except (OSError, AttributeError):
        return max(installed)
    usable = [flavour for flavour in installed if flavour <= version.value // 1000]
    return max(usable or installed)


def _from_disk_cache(build: Build, cache: Cache) -> Artifact:
    """Returns the artifact from the disk cache, or compiles and caches it; a finding of `compile` is cached too."""
    compiler = toolchain()
    artifact = cache.get(build, compiler)
    if artifact is None:
        findings = cache.get_findings(build, compiler)
        if findings is not None:
            raise BreaksPlan(findings)
        try:
            artifact = compile(build)
        except BreaksPlan as error:
            cache.put_findings(build, compiler, str(error))
            raise
        cache.put(artifact)
    return artifact


def compile_unchecked(build: Build, *, lines: AbstractContextManager[None] | None = None) -> CompilerOutput:
    """Traces and compiles `build`, and ignores ptxas's report. Leaves no files.

    lines: context manager for the trace that sets source locations; PTX and cubin then have line info. None for none.

    CompileError: the DSL is missing or fails.
    """
    name = f"{build.symbol} for {build.arch}"
    return compile_trace(name, build.arch, lambda: registry.trace(build), build.register_usage_level, lines)


def compile_trace(
    name: str,
    arch: str,
    trace: Callable[[], registry.Trace],
    register_usage_level: int = 5,
    lines: AbstractContextManager[None] | None = None,
) -> CompilerOutput:
    """Compiles any host function; see `compile_unchecked`.

    name: start of every error text. trace: function that returns the host function and its arguments.

    The source location of each operation takes up to a third of the time of a trace, and without line info only error
    texts have it. So a trace that fails is repeated with locations.
    """
    with _LOCK, _no_garbage_collection():
        if lines is None:
            try:
                return _compile_trace(name, arch, trace, register_usage_level, None, has_locations=False)
            except CompileError:
                pass
        return _compile_trace(name, arch, trace, register_usage_level, lines, has_locations=True)


def _compile_trace(
    name: str,
    arch: str,
    trace: Callable[[], registry.Trace],
    register_usage_level: int,
    lines: AbstractContextManager[None] | None,
    *,
    has_locations: bool,
) -> CompilerOutput:
    cute = _import_dsl(name)
    options = importlib.import_module("cutlass.base_dsl.compiler")
    with (
        tempfile.TemporaryDirectory(prefix="cutlass_py_attn.") as folder,
        _default_dsl_settings(arch, has_locations),
        _no_unused_steps(),
    ):
        ptxas_report = Path(folder, "ptxas.yaml")
        compile_options = (
            options.KeepPTX(True),
            options.KeepCUBIN(True),
            options.GPUArch(arch),
            options.PtxasOptions(f"--register-usage-level={register_usage_level}"),
            options.GenerateLineInfo(lines is not None),
            options.DumpDir(folder),
            options.RemarkFilter("ptxas"),
            options.RemarkOutput(str(ptxas_report)),
        )
        try:
            with lines or nullcontext():
                host, arguments = trace()
                compiled = cute.compile[compile_options](host, *arguments)
        except AttentionError:
            raise
        except Exception as error:
            raise CompileError(f"{name}: {_message(error)}") from error
        text = ptxas_report.read_text() if ptxas_report.exists() else ""
        return CompilerOutput(compiled.__ptx__, compiled.__cubin__, text)


def _import_dsl(name: str) -> Any:
    if importlib.util.find_spec("cutlass") is None:
        raise CompileError(_NO_DSL)
    try:
        return importlib.import_module("cutlass.cute")
    except Exception as error:
        raise CompileError(f"{name}: the DSL does not load: {_message(error)}") from error


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Context manager without Python's collection of cycles, which visits the DSL's modules again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _default_dsl_settings(arch: str, has_locations: bool) -> Iterator[None]:
    """Context manager that gives the DSL its default settings, whatever CUTE_DSL_* variables the environment has.

    has_locations: whether each operation gets its line of Python, as the DSL does wherever it keeps ptxas's report.

    The DSL reads its settings once, into an object. An object for a prefix that no variable has holds the defaults.
    The host's architecture is set to one other than the target, so that the DSL builds no engine to launch the kernel
    here. The DSL also reads -diagnostic, and abbreviations such as -d, from the program's command line.
    """
    dsl = importlib.import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl()
    base: Any = importlib.import_module("cutlass.base_dsl.dsl")
    preprocessor = importlib.import_module("cutlass.base_dsl.ast_preprocessor").DSLPreprocessor
    previous = dsl.envar, dsl.preprocessor, sys.argv
    set_locations = base._set_enable_frame_filtering
    defaults = type(dsl.envar)("CUTLASS_PY_ATTN_UNSET")
    defaults.arch = "sm_80" if arch.startswith("sm_1") else "sm_100a"
    dsl.envar, dsl.preprocessor, sys.argv = defaults, preprocessor(dsl.package_name), sys.argv[:1]
    base._set_enable_frame_filtering = lambda enable: set_locations(enable and has_locations)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dsl.envar, dsl.preprocessor, sys.argv = previous
        base._set_enable_frame_filtering = set_locations


@contextmanager
def _no_unused_steps() -> Iterator[None]:
    """Context manager without three steps of a trace that grow with its operations and whose results nothing reads.

    The DSL writes the text of all kernels traced so far for a log that is off. It looks for GPU modules without
    kernels, and there are none. It looks in every argument for references of PyIR, a frontend that is not used here.
    """
    dsl = importlib.import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl()
    ir = importlib.import_module("cutlass._mlir.ir")
    operations: Any = importlib.import_module("cutlass._mlir_helpers.op")
    load_argument = operations._pyir_auto_load_arg
    dsl._enter_gpu_module = lambda: ir.InsertionPoint(dsl.gpu_module.bodyRegion.blocks[0])
    dsl._should_remove_empty_gpu_modules = lambda: False
    operations._pyir_auto_load_arg = lambda argument: argument
    try:
        yield
    finally:
        operations._pyir_auto_load_arg = load_argument
        del dsl._enter_gpu_module, dsl._should_remove_empty_gpu_modules


def _message(error: Exception) -> str:
    """Returns the error's text without ANSI colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__


def _read(build: Build, cubin: bytes) -> Cubin:
    try:
        return read(cubin)
    except ValueError as error:
        raise CompileError(f"{build.symbol} for {build.arch}: {error}") from error
