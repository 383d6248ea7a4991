"""Compiling: the cubin of a microbenchmark, refused where ptxas spills or repairs it."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

from cutlass_py_attn import compiler
from cutlass_py_attn.cubin import read
from cutlass_py_attn.errors import CompileError
from tools.microbench.cases import ARCH, Micro


def compiled(micro: Micro) -> compiler.Output:
    """PTX, cubin and ptxas's report; CompileError where a thread has a stack frame or ptxas remarks on wgmma."""
    cute = importlib.import_module("cutlass.cute")
    options = importlib.import_module("cutlass.base_dsl.compiler")
    with tempfile.TemporaryDirectory(prefix="microbench.") as folder, compiler._own_settings(ARCH):
        report = Path(folder, "ptxas.yaml")
        chosen = (
            options.KeepPTX(True),
            options.KeepCUBIN(True),
            options.GPUArch(ARCH),
            options.DumpDir(folder),
            options.RemarkFilter("ptxas"),
            options.RemarkOutput(str(report)),
        )
        host, arguments = importlib.import_module("tools.microbench.kernels").trace(micro)
        made = cute.compile[chosen](host, *arguments)
        output = compiler.Output(made.__ptx__, made.__cubin__, report.read_text() if report.exists() else "")
    frames = [kernel.frame_bytes for kernel in read(output.cubin).kernels.values()]
    objections = compiler._remarks(output.report)
    objections += [f"stack frame = {size} bytes a thread: 0 allowed" for size in frames if size]
    if objections:
        raise CompileError(f"{micro.symbol}: {'; '.join(objections)}")
    return output
