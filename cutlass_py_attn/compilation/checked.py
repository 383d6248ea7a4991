"""The public functions of the compiler: they check their arguments before they load anything."""

from __future__ import annotations

import os

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import compiler, turns
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.scalars import path_refusals
from cutlass_py_attn.refusals import refuse


def artifact_for(build: Build, folder: str | os.PathLike[str] | None = None) -> Artifact:
    """Returns the artifact of `build` from this process, else from the disk cache, else compiles and caches it.

    folder: of the disk cache; None for the user's. If the folder cannot be written, nothing is cached on disk.

    NotSupported lists every wrong argument. CompileError lists every finding in ptxas's report and cubin.
    """
    refusals = [] if folder is None else path_refusals("folder", folder)
    if not isinstance(build, Build):
        refusals.append(refuse("build", build, "must be a Build", "pass the field `build` of a plan"))
    if refusals:
        raise NotSupported(refusals)
    return turns.artifact_for(build, folder)


def compile(plan_or_build: Plan | Build) -> Artifact:
    """Compiles without looking in a cache; CompileError lists every finding in ptxas's report and cubin.

    NotSupported: the argument is neither a Plan nor a Build.
    """
    if not isinstance(plan_or_build, (Plan, Build)):
        raise NotSupported(refuse("plan_or_build", plan_or_build, "must be a Plan or a Build", "pass a plan"))
    return compiler.compile(plan_or_build)
