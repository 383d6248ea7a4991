"""Stress builds: a kernel's own PTX assembled again with delays for some of its warps, or with less optimisation.

A delay build has one more block of PTX after every instruction with which warps wait for each other or signal: the
warps of one role sleep there, all others do not. So no kernel source needs an option for delays. The ptxas of a wheel
assembles; it is the DSL's own version, and must first give the kernel's own machine code byte for byte.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import cubin
from cutlass_py_attn.compilation.report import spilled_bytes
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.kernels.sm90_backward.layout import DQ_WARPGROUPS, GRAD_BIAS_WARP
from cutlass_py_attn.kernels.sm90_common.layout import LOAD_WARPGROUPS
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_WARPS

PLAIN = "plain"
DELAY = "delay_"  # prefix of the names of delay builds
LEVELS = (1, 2)
OWN_LEVEL = 3  # ptxas's default
SLEEP_NANOSECONDS = 400  # nanosleep lasts up to twice as long

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")
_COMMENT = re.compile(r"//.*")
_USAGE = re.compile(r"register usage level (\d+)")
# Waits for copies, MMAs and other warps, and signals to other warps.
_PLACE = re.compile(
    r"^\s*(?:@!?%\w+\s+)?(?:"
    r"mbarrier\.(?:try_wait|test_wait|arrive)|bar\.(?:sync|arrive)|barrier\.|cp\.async\.(?:bulk\.)?wait_group|"
    r"wgmma\.wait_group|ld\.acquire|red\.release|atom\."
    r")"
)


@dataclass(frozen=True, slots=True)
class Delay:
    """The warps that sleep, and the kernel entries in which they do."""

    role: str
    entries: tuple[str, ...]
    warps: range

    @property
    def name(self) -> str:
        """The name of the build."""
        return DELAY + self.role

    @property
    def block(self) -> str:
        """PTX that makes these warps sleep, and all others for 0 ns. With a predicate ptxas would duplicate the code
        between two such blocks, once for each value. Thread blocks have one dimension."""
        return (
            "\t{\n\t.reg .pred %late;\n\t.reg .b32 %number;\n"
            "\tmov.u32 %number, %tid.x;\n\tshr.u32 %number, %number, 5;\n"
            f"\tsub.u32 %number, %number, {self.warps.start};\n"
            f"\tsetp.lt.u32 %late, %number, {len(self.warps)};\n"
            f"\tselp.u32 %number, {SLEEP_NANOSECONDS}, 0, %late;\n"
            "\tnanosleep.u32 %number;\n\t}\n"
        )


def roles(build: Build) -> dict[str, range]:
    """Returns the warps of the main kernel that sleep together: the sm90 family's roles, else first, last and half."""
    if build.family != "sm90" or build.kind == "component_gemm":
        return {
            "first_warp": range(1),
            "last_warp": range(build.warps - 1, build.warps),
            "first_half": range(build.warps // 2),
        }
    names = ["load"] * LOAD_WARPGROUPS + ["grad_query"] * (DQ_WARPGROUPS if build.kind == "backward" else 0)
    products = build.warps // WARPGROUP_WARPS - len(names)
    names += [f"products_{number}" for number in range(products)]
    found = {name: range(i * WARPGROUP_WARPS, (i + 1) * WARPGROUP_WARPS) for i, name in enumerate(names)}
    if build.maps_grad_bias:
        found["grad_bias"] = range(GRAD_BIAS_WARP, GRAD_BIAS_WARP + 1)
    return found


def delays(build: Build) -> list[Delay]:
    """Returns one delay for each role of the main kernel, and one for the first warp of the kernels around it."""
    entries = dict(entry_points.entries(build))
    main = entries.pop("main", None)
    found = [Delay(role, (main,), warps) for role, warps in roles(build).items()] if main else []
    return [*found, Delay("other_kernels", tuple(entries.values()), range(1))] if entries else found


def with_delay(ptx: str, delay: Delay) -> str:
    """Returns the PTX with the delay's block after every wait and signal of its entries; unchanged if there is none."""
    found: list[str] = []
    entry, depth, is_due = "", 0, False
    for line in ptx.splitlines(keepends=True):
        code = _COMMENT.sub("", line)
        if opened := _ENTRY.search(code):
            entry = opened[1]
        depth += code.count("{") - code.count("}")
        is_due |= entry in delay.entries and _PLACE.match(code) is not None
        found.append(line)
        # A wait that retries is a block of its own with labels; the delay follows the block.
        if is_due and depth == 1:
            found.append(delay.block)
            is_due = False
    return "".join(found)


def ptxas() -> Path:
    """Returns the path of the assembler; CompileError says how to install it."""
    from cuda.pathfinder import find_nvidia_binary_utility

    found = find_nvidia_binary_utility("ptxas")
    if found is None:
        raise CompileError('ptxas is not installed: pip install ".[stress]" in a checkout')
    return Path(found)


def assemble(ptx: str, artifact: Artifact, level: int = OWN_LEVEL) -> Artifact:
    """Returns the artifact with the machine code of this PTX, which has the same entries; CompileError quotes ptxas."""
    build = artifact.build
    usage = _USAGE.search(artifact.allocation)
    if usage is None:
        raise CompileError(f"{build.symbol}: allocation {artifact.allocation!r} names no register usage level")
    with tempfile.TemporaryDirectory(prefix="cutlass_py_attn.") as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        options = ["-v", f"-arch={build.arch}", f"-O{level}", f"--register-usage-level={usage[1]}"]
        done = subprocess.run([ptxas(), *options, "-o", target, source], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{build.symbol} for {build.arch}, ptxas -O{level}: {done.stderr.strip()}")
        code = target.read_bytes()
    spills, read = spilled_bytes(done.stderr), cubin.read(code).kernels
    made = tuple(
        replace(
            kernel,
            registers=read[kernel.symbol].registers,
            frame_bytes=read[kernel.symbol].frame_bytes,
            spill_bytes=spills[kernel.symbol],
            static_shared_memory_bytes=read[kernel.symbol].static_shared_memory_bytes,
        )
        for kernel in artifact.kernels
    )
    return replace(artifact, ptx=ptx, cubin=code, kernels=made)


def variants(artifact: Artifact) -> Iterator[tuple[str, Artifact]]:
    """Yields (name, artifact) of the kernel itself and of every stress build with other machine code.

    CompileError if this ptxas gives other machine code than the artifact has: a build would differ by more than its
    delay.
    """
    if assemble(artifact.ptx, artifact).cubin != artifact.cubin:
        raise CompileError(
            f"{artifact.build.symbol} for {artifact.build.arch}: {ptxas()} gives other machine code than the artifact "
            'has: pip install ".[stress]" in a checkout'
        )
    yield PLAIN, artifact
    for level in LEVELS:
        made = assemble(artifact.ptx, artifact, level)
        if made.cubin != artifact.cubin:
            yield f"O{level}", made
    for delay in delays(artifact.build):
        delayed = with_delay(artifact.ptx, delay)
        if delayed != artifact.ptx:
            yield delay.name, assemble(delayed, artifact)
