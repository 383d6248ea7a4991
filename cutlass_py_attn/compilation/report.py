"""Checks ptxas's report, PTX and cubin against the plan: spills, remarks, entries, limits and parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from cutlass_py_attn.artifact import Kernel, Parameter
from cutlass_py_attn.compilation.cubin import Cubin, CubinKernel
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import entry_parameters

_ENTRY: Final = re.compile(r"\.entry\s+(\S+?)\s*\((.*?)\)", re.DOTALL)
_PARAMETER: Final = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)\s[^,]*?(\w+)(?:\[(\d+)\])?\s*(?:,|$)")
_FUNCTION: Final = re.compile(r"Function properties for (\S+)")
_MEMORY: Final = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REMARK: Final = re.compile(r"[^\n]*\bC75\d\d\b[^\n]*")


def findings(build: Build, ptx: str, cubin: Cubin, report: str, spills: dict[str, int]) -> list[str]:
    """Returns every way in which the compiled kernels break the plan; none for sound kernels. spills: of the report."""
    found = [*remarks(report), *_entry_findings(build, cubin)]
    for kernel in cubin.kernels.values():
        found += _kernel_findings(build, kernel, spills)
    return [*found, *parameter_findings(build, ptx, cubin)]


def kernels(build: Build, cubin: Cubin, spills: dict[str, int]) -> tuple[Kernel, ...]:
    """Returns the kernels of sound output in the order of the plan's launches. spills: bytes per symbol."""
    symbols = entry_points.entry_symbols(build)
    return tuple(_kernel(build, cubin.kernels[symbol], spills[symbol]) for symbol in symbols)


def spilled_bytes(report: str) -> dict[str, int]:
    """Returns the bytes of spill stores and loads of each kernel in ptxas's report."""
    spills: dict[str, int] = {}
    symbol = ""
    for line in _unescape(report).splitlines():
        if function := _FUNCTION.search(line):
            symbol = function.group(1)
        elif memory := _MEMORY.search(line):
            spills[symbol] = int(memory.group(2)) + int(memory.group(3))
    return spills


def remarks(report: str) -> list[str]:
    """Returns a finding for each C75xx remark: ptxas added waits for wgmma, which serialise the products."""
    return [f"ptxas remark, none allowed: {line.strip()}" for line in _REMARK.findall(_unescape(report))]


def parameter_findings(build: Build, ptx: str, cubin: Cubin) -> Iterator[str]:
    """Yields each difference between the parameters of PTX, cubin and ABI in number, order or size."""
    declared = _ptx_parameters(ptx)
    for symbol, kernel in cubin.kernels.items():
        numbers = range(len(kernel.parameters))
        names = [f"{symbol}_param_{number}" for number in numbers]
        sizes = [parameter.size for parameter in kernel.parameters]
        if declared.get(symbol) != list(zip(names, sizes, strict=True)):
            yield f"{symbol}: PTX parameters = {declared.get(symbol)}: the cubin has sizes {sizes}"
        offsets = [parameter.offset for parameter in kernel.parameters]
        ordinals = [parameter.ordinal for parameter in kernel.parameters]
        if ordinals != list(numbers) or offsets != sorted(set(offsets)):
            yield f"{symbol}: cubin parameters {ordinals} at {offsets}: must be numbered from 0 and ascend"
        expected = [size for _, size in entry_parameters.parameters(build, _role(build, symbol))]
        if sizes != expected:
            yield f"{symbol}: parameter sizes = {sizes}: the ABI has {expected}"


def _unescape(report: str) -> str:
    """Returns ptxas's text: the report is YAML, which doubles quotes and may escape line ends."""
    return report.replace("''", "'").replace("\\n", "\n")


def _entry_findings(build: Build, cubin: Cubin) -> Iterator[str]:
    """Yields missing and unknown entries, and a wrong target."""
    expected = set(entry_points.entry_symbols(build))
    if expected != set(cubin.kernels):
        yield f"entries = {', '.join(sorted(cubin.kernels)) or 'none'}: must be {', '.join(sorted(expected))}"
    target = int(build.arch.removeprefix("sm_").rstrip("af"))
    if cubin.sm != target:
        yield f"cubin is for sm_{cubin.sm}: must be for {build.arch}"


def _kernel_findings(build: Build, kernel: CubinKernel, spills: dict[str, int]) -> Iterator[str]:
    """Yields each limit that a kernel exceeds."""
    limits = architecture(build.arch)
    threads = entry_parameters.entry_threads(build, _role(build, kernel.symbol))
    registers = limits.register_limit(threads)
    limited = (
        ("stack frame", "bytes per thread", kernel.frame_bytes, 0),
        ("spills", "bytes per thread", spills.get(kernel.symbol, 0), 0),
        ("registers", "per thread", kernel.registers, registers),
        (
            "static shared memory",
            "bytes per block",
            kernel.static_shared_memory_bytes,
            limits.reserved_shared_memory,
        ),
    )
    for resource, unit, number, allowed in limited:
        if number > allowed:
            yield f"{kernel.symbol}: {resource} = {number} {unit}: {allowed} allowed"
    if kernel.symbol not in spills:
        yield f"{kernel.symbol}: ptxas reported no spill count: one is needed"
    if kernel.reqntid != (threads, 1, 1):
        yield f"{kernel.symbol}: block = {kernel.reqntid or 'not fixed'}: must be fixed to ({threads}, 1, 1)"


def _role(build: Build, symbol: str) -> str:
    """Returns the role of an entry; "main" for the only entry of a component GEMM."""
    return {name: role for role, name in entry_points.entries(build).items()}.get(symbol, "main")


def _ptx_parameters(ptx: str) -> dict[str, list[tuple[str, int]]]:
    """Returns (name, bytes) of each parameter of each entry, in PTX order."""
    return {
        symbol: [(name, int(bits) // 8 * int(count or 1)) for _, bits, name, count in _PARAMETER.findall(body)]
        for symbol, body in _ENTRY.findall(ptx)
    }


def _kernel(build: Build, kernel: CubinKernel, spill_bytes: int) -> Kernel:
    names = [name for name, _ in entry_parameters.parameters(build, _role(build, kernel.symbol))]
    return Kernel(
        symbol=kernel.symbol,
        registers=kernel.registers,
        frame_bytes=kernel.frame_bytes,
        spill_bytes=spill_bytes,
        static_shared_memory_bytes=kernel.static_shared_memory_bytes,
        threads=math.prod(kernel.reqntid or ()),
        parameters=tuple(
            Parameter(name, parameter.offset, parameter.size)
            for name, parameter in zip(names, kernel.parameters, strict=True)
        ),
    )
