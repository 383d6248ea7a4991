"""GradK: dK += dS^T Q.

(tile_n, columns) += (tile_n, tile_m) (tile_m, columns). dS and Q are in shared memory, both MN-major; accumulates over
the query tiles. The 2-CTA backward reads dS^T from registers. The softmax scale is applied once, when dK is stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec

NAME = "grad_k"
EQUATION = "dK += dS^T Q"


def spec(build: Build) -> GemmSpec:
    """Returns the GEMM of one tile."""
    return GemmSpec(
        name=NAME,
        equation=EQUATION,
        m=build.tile_n,
        n=build.block_columns,
        k=build.tile_m,
        a_transposed=True,
        b_transposed=True,
        accumulate=True,
        item_bytes=build.item_bytes,
        family=build.family,
        warps=build.warps_grad_k,
    )


def operands(mma: Any, s_ds: Any, s_q: Any, thread: Any) -> Any:
    """Returns this thread's partition of both tiles in shared memory, as `mma` (MmaSync or Wgmma) reads them."""
    return mma.operands(transposed(s_ds), transposed(s_q), thread)


def a_operand(mma: Any, s_ds: Any, thread: Any) -> Any:
    """Returns dS in shared memory as the A operand."""
    return mma.a_operand(transposed(s_ds), thread)


def b_operand(mma: Any, s_q: Any, *thread: Any) -> Any:
    """Returns Q in shared memory as the B operand; `thread` for mma.sync alone."""
    return mma.b_operand(transposed(s_q), *thread)


def register_operands(mma: Any, r_ds: Any, b: Any) -> Any:
    """Returns the operands of wgmma with dS^T in registers, in the layout of the accumulator of dS^T."""
    return mma.register_operands(r_ds, b)


def issue(mma: Any, accumulator: Any, parts: Any) -> None:
    """Issues dK += dS^T Q: one loop over k into `accumulator`."""
    mma.issue(accumulator, parts)


def wait(mma: Any, pending: int = 0) -> None:
    """Waits until at most `pending` of the wgmma groups issued so far are in flight."""
    mma.wait(pending)


def reference(ds: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns dK += dS^T Q of one tile, without the sum over query tiles."""
    return ds.T @ q
