"""GradQ: dQ = dS K.

(tile_m, columns) = (tile_m, tile_n) (tile_n, columns). dS is K-major and K is MN-major, both in shared memory; starts
from zero, because the sum over the key tiles is a float32 array in global memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec

NAME = "grad_q"
EQUATION = "dQ = dS K"


def spec(build: Build) -> GemmSpec:
    """Returns the GEMM of one tile."""
    return GemmSpec(
        name=NAME,
        equation=EQUATION,
        m=build.tile_m,
        n=build.block_columns,
        k=build.tile_n,
        a_transposed=False,
        b_transposed=True,
        accumulate=False,
        item_bytes=build.item_bytes,
        family=build.family,
        warps=build.warps_grad_q,
    )


def operands(mma: Any, s_ds: Any, s_k: Any, thread: Any) -> Any:
    """Returns this thread's partition of both tiles in shared memory, as `mma` (MmaSync or Wgmma) reads them."""
    return mma.operands(s_ds, transposed(s_k), thread)


def issue(mma: Any, accumulator: Any, parts: Any) -> None:
    """Issues dQ = dS K: one loop over k into `accumulator`."""
    mma.issue(accumulator, parts)


def wait(mma: Any, pending: int = 0) -> None:
    """Waits until at most `pending` of the wgmma groups issued so far are in flight."""
    mma.wait(pending)


def reference(ds: npt.NDArray[np.float64], k: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns dQ = dS K of one tile, without the sum over key tiles."""
    return ds @ k
