"""MatmulPV: O += P V of the forward. It is GradQ's form with (P, V) in place of (dS, K), not a sixth component GEMM.

(tile_m, columns_value) += (tile_m, tile_n) (tile_n, columns_value). P is K-major in registers or shared memory, V is
MN-major in shared memory; accumulates over the key tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.kernels.component_gemms import grad_q
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec

NAME = "output"
EQUATION = "O += P V"


def spec(build: Build, **changes: Any) -> GemmSpec:
    """Returns the GEMM of one tile.

    changes: fields of the GemmSpec that a kernel's tile differs in.
    """
    fields = {"n": build.columns_value, "warps": build.warps_scores} | changes
    return replace(grad_q.spec(build), name=NAME, equation=EQUATION, accumulate=True, **fields)


def v_operand(mma: Any, s_v: Any, *thread: Any) -> Any:
    """Returns V in shared memory as the B operand.

    thread: this thread's number, for mma.sync; none for wgmma.
    """
    return mma.b_operand(transposed(s_v), *thread)


def issue(mma: Any, accumulator: Any, p_operand: Any, v_operand: Any) -> None:
    """Issues O += P V: one loop over k into `accumulator`."""
    # The specs of the GEMMs are used where the compiler is not installed.
    from cutlass_py_attn.kernels.common.mma_sync import Operands

    mma.issue(accumulator, Operands(p_operand, v_operand))
