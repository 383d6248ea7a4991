"""GradV: dV += P^T dO.

(tile_n, columns_value) += (tile_n, tile_m) (tile_m, columns_value). P and dO are in shared memory, both MN-major;
accumulates over the query tiles. The sm90 backward reads P^T from the registers in which S^T = K Q^T left it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec

NAME = "grad_v"
EQUATION = "dV += P^T dO"


def spec(build: Build) -> GemmSpec:
    """Returns the GEMM of one tile."""
    return GemmSpec(
        name=NAME,
        equation=EQUATION,
        m=build.tile_n,
        n=build.block_columns_value,
        k=build.tile_m,
        a_transposed=True,
        b_transposed=True,
        accumulate=True,
        item_bytes=build.item_bytes,
        family=build.family,
        warps=build.warps_grad_v,
    )


def operands(mma: Any, s_p: Any, s_do: Any, thread: Any) -> Any:
    """Returns this thread's partition of both tiles in shared memory, as `mma` (MmaSync or Wgmma) reads them."""
    return mma.operands(transposed(s_p), transposed(s_do), thread)


def a_operand(mma: Any, s_p: Any, thread: Any) -> Any:
    """Returns P in shared memory as the A operand."""
    return mma.a_operand(transposed(s_p), thread)


def b_operand(mma: Any, s_do: Any, *thread: Any) -> Any:
    """Returns dO in shared memory as the B operand; `thread` for mma.sync alone."""
    return mma.b_operand(transposed(s_do), *thread)


def register_operands(mma: Any, r_p: Any, b: Any) -> Any:
    """Returns the operands of wgmma with P^T in registers, in the layout of the accumulator of P^T."""
    return mma.register_operands(r_p, b)


def issue(mma: Any, accumulator: Any, parts: Any) -> None:
    """Issues dV += P^T dO: one loop over k into `accumulator`."""
    mma.issue(accumulator, parts)


def wait(mma: Any, pending: int = 0) -> None:
    """Waits until at most `pending` of the wgmma groups issued so far are in flight."""
    mma.wait(pending)


def reference(p: npt.NDArray[np.float64], do: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns dV += P^T dO of one tile, without the sum over query tiles."""
    return p.T @ do
