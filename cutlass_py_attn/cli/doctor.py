"""Doctor: what this machine has for compiling, launching and inspecting, and how to get what is missing."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from cutlass_py_attn import __version__, extras
from cutlass_py_attn.cli.artifacts import console
from cutlass_py_attn.cli.target import Gpu, first_gpu
from cutlass_py_attn.compilation import cache_folder
from cutlass_py_attn.compilation.compiler import toolchain
from cutlass_py_attn.errors import CompileError, DriverError, NoDevice, NotSupported
from cutlass_py_attn.inspection import sass
from cutlass_py_attn.runtime import driver

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. found: "" if there is a problem, which is named in a word; remedy: what to do then."""

    name: str
    found: str
    remedy: str = ""
    problem: str = "missing"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(*, as_json: bool) -> None:
    """Show what is installed and which GPU there is, with the remedy for what is missing."""
    findings = list(examine())
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        return
    table = Table("", "what", box=None, pad_edge=False)
    table.add_column("found, or what to do", overflow="fold")
    for finding in findings:
        state = "[green]ok[/]" if finding.found else f"[yellow]{finding.problem}[/]"
        table.add_row(state, finding.name, escape(finding.found or finding.remedy))
    console().print(table)


def examine() -> Iterator[Finding]:
    """Yields a finding for everything that the package can use, in the order in which it uses it."""
    yield Finding("Python", platform.python_version())
    yield Finding("cutlass-py-attn", f"{__version__} in {Path(__file__).parents[1]}")
    for requirement in extras.REQUIRED:
        name = re.split("[<>=]", requirement)[0]
        yield Finding(name, extras.version(name), extras.install(requirement))
    yield Finding("compiler", _compiler(), f"{extras.remedy('compile')}, or launch prebuilt kernels")
    yield _driver()
    yield from _gpu()
    yield _cache()
    yield _jax_handler()
    yield Finding("nvdisasm", sass.tool() or "", f"{extras.remedy('inspect')} shows SASS")
    yield Finding("JAX", extras.version("jax"), f"{extras.remedy('jax')}, which cutlass_py_attn.jax needs")
    yield Finding(
        "nccl4py", extras.version("nccl4py"), f"{extras.remedy('nccl')}, which cutlass_py_attn.distributed needs"
    )


def _gpu() -> Iterator[Finding]:
    """Yields the GPU and its compile target, or the reason why there is none."""
    remedy = "launching needs an NVIDIA GPU of compute capability 8.0+"
    try:
        gpu = first_gpu()
    except NotSupported as error:
        gpu, remedy = None, str(error)
    yield Finding("GPU", _shown(gpu) if gpu else "", remedy)
    yield Finding("compile target", gpu.arch if gpu else "", "none without a GPU: name one with --arch")


def _compiler() -> str:
    try:
        return toolchain()
    except CompileError:
        return ""


def _driver() -> Finding:
    minimum = "{}.{}".format(*driver.MINIMUM_CUDA)
    try:
        found = "CUDA {}.{}, and at least {} is needed".format(*driver.driver_version(), minimum)
    except (NoDevice, DriverError) as error:
        problem = "too old" if isinstance(error, driver.OldDriver) else "missing"
        return Finding("driver", "", f"{error}; compiling works without it", problem)
    return Finding("driver", found)


def _shown(gpu: Gpu) -> str:
    major, minor = gpu.compute_capability
    more = f", the first of {gpu.count}" if gpu.count > 1 else ""
    return f"{gpu.name}, compute capability {major}.{minor}, {gpu.num_sms} SMs{more}"


def _cache() -> Finding:
    """Returns the folder and size of the kernel cache; the reason if no kernel can be cached there."""
    try:
        folder = cache_folder.user_folder()
        reason = cache_folder.objection(folder)
    except NotSupported as error:
        reason = str(error)
    if reason:
        return Finding("kernel cache", "", f"{reason}; until then each process compiles its kernels again", "unusable")
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return Finding("kernel cache", f"{folder} ({sum(sizes) / MIB:.1f} MiB)")


def _jax_handler() -> Finding:
    """Returns which handler launches the calls of JAX programs, and why."""
    try:
        from cutlass_py_attn.jax import native_library
    except ModuleNotFoundError:
        return Finding("JAX handler", "", extras.remedy("jax"))
    except NotSupported as error:
        return Finding("JAX handler", "", str(error), "unusable")
    choice = native_library.choice()
    return Finding("JAX handler", f"{choice.name}: {choice.reason}")
