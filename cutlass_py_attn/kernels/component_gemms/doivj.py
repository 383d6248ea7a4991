"""DOIVJ: dP = dO V^T.

(tile_m, tile_n) = (tile_m, columns_value) (columns_value, tile_n). dO and V are in shared memory, both K-major; starts
from zero. With swap A/B the GEMM computes dP^T = V dO^T, (tile_n, tile_m). The warps are those of MatmulQK, because
dS = P (dP - delta) pairs the elements of both accumulators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec

NAME = "doivj"
EQUATION = "dP = dO V^T"
TRANSPOSED_EQUATION = "dP^T = V dO^T"


def spec(build: Build, swap_ab: bool = False) -> GemmSpec:
    """Returns the GEMM of one tile; with `swap_ab` the GEMM of the transposed tile."""
    normal = GemmSpec(
        name=NAME,
        equation=EQUATION,
        m=build.tile_m,
        n=build.tile_n,
        k=build.columns_value,
        a_transposed=False,
        b_transposed=False,
        accumulate=False,
        item_bytes=build.item_bytes,
        family=build.family,
        warps=build.warps_scores,
    )
    return normal.swap_ab(TRANSPOSED_EQUATION) if swap_ab else normal


def operands(mma: Any, s_do: Any, s_v: Any, thread: Any) -> Any:
    """Returns this thread's partition of both tiles in shared memory, as `mma` (MmaSync or Wgmma) reads them."""
    return mma.operands(s_v, s_do, thread) if mma.spec.is_swapped else mma.operands(s_do, s_v, thread)


def issue(mma: Any, accumulator: Any, parts: Any) -> None:
    """Issues dP = dO V^T, or dP^T = V dO^T if `mma` has swapped operands: one loop over k into `accumulator`."""
    mma.issue(accumulator, parts)


def wait(mma: Any, pending: int = 0) -> None:
    """Waits until at most `pending` of the wgmma groups issued so far are in flight."""
    mma.wait(pending)


def reference(do: npt.NDArray[np.float64], v: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns dP = dO V^T of one tile."""
    return do @ v.T
