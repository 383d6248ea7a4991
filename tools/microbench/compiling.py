"""Compiling: the cubin of a microbenchmark, refused where ptxas spills or repairs it."""

from __future__ import annotations

import importlib

from cutlass_py_attn import compiler
from cutlass_py_attn.cubin import read
from cutlass_py_attn.errors import CompileError
from tools.microbench.cases import ARCH, Micro


def compiled(micro: Micro) -> compiler.Output:
    """PTX, cubin and ptxas's report; CompileError where a thread has a stack frame or ptxas remarks on wgmma."""
    trace = importlib.import_module("tools.microbench.kernels").trace
    output = compiler.run_trace(micro.symbol, ARCH, lambda: trace(micro))
    frames = [kernel.frame_bytes for kernel in read(output.cubin).kernels.values()]
    objections = compiler.remarks(output.report)
    objections += [f"stack frame = {size} bytes a thread: 0 allowed" for size in frames if size]
    if objections:
        raise CompileError(f"{micro.symbol}: {'; '.join(objections)}")
    return output
