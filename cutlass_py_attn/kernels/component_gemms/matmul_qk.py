"""MatmulQK: S = Q K^T.

(tile_m, tile_n) = (tile_m, columns) (columns, tile_n). Q and K are in shared memory, both K-major; starts from zero.
With swap A/B the GEMM computes S^T = K Q^T, (tile_n, tile_m): the sm90 backward uses this form, so that the rows of an
accumulator are keys and P^T is a register operand of dV.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec

NAME = "matmul_qk"
EQUATION = "S = Q K^T"
TRANSPOSED_EQUATION = "S^T = K Q^T"


def spec(build: Build, swap_ab: bool = False) -> GemmSpec:
    """Returns the GEMM of one tile; with `swap_ab` the GEMM of the transposed tile."""
    normal = GemmSpec(
        name=NAME,
        equation=EQUATION,
        m=build.tile_m,
        n=build.tile_n,
        k=build.columns,
        a_transposed=False,
        b_transposed=False,
        accumulate=False,
        item_bytes=build.item_bytes,
        family=build.family,
        warps=build.warps_scores,
    )
    return normal.swap_ab(TRANSPOSED_EQUATION) if swap_ab else normal


def operands(mma: Any, s_q: Any, s_k: Any, thread: Any) -> Any:
    """Returns this thread's partition of both tiles in shared memory, as `mma` (MmaSync or Wgmma) reads them."""
    return mma.operands(s_k, s_q, thread) if mma.spec.is_swapped else mma.operands(s_q, s_k, thread)


def issue(mma: Any, accumulator: Any, parts: Any) -> None:
    """Issues S = Q K^T, or S^T = K Q^T if `mma` has swapped operands: one loop over k into `accumulator`."""
    mma.issue(accumulator, parts)


def wait(mma: Any, pending: int = 0) -> None:
    """Waits until at most `pending` of the wgmma groups issued so far are in flight."""
    mma.wait(pending)


def reference(q: npt.NDArray[np.float64], k: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns S = Q K^T of one tile."""
    return q @ k.T
