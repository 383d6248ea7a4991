"""Compiling: the cubin of a microbenchmark; refuses spills and remarks of ptxas."""

from __future__ import annotations

import importlib

from cutlass_py_attn.compilation import compiler, report
from cutlass_py_attn.compilation.cubin import read
from cutlass_py_attn.errors import CompileError
from tools.lab.microbench.cases import ARCH, Micro


def compiled(micro: Micro) -> compiler.CompilerOutput:
    """Returns PTX, cubin and ptxas's report. Raises CompileError for a stack frame or a ptxas remark on wgmma."""
    trace = importlib.import_module("tools.lab.microbench.kernels").trace
    output = compiler.compile_trace(micro.symbol, ARCH, lambda: trace(micro))
    frames = [kernel.frame_bytes for kernel in read(output.cubin).kernels.values()]
    objections = report.remarks(output.report)
    objections += [f"stack frame = {size} bytes a thread: 0 allowed" for size in frames if size]
    if objections:
        raise CompileError(f"{micro.symbol}: {'; '.join(objections)}")
    return output
