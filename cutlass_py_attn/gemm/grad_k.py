"""GradK: dK += dS^T Q.

(tile_n, columns) += (tile_n, tile_m) (tile_m, columns); dS and Q from shared memory, both across k;
accumulates over the query tiles. The softmax scale is applied once, when dK is stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.gemm.gemm import Gemm
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.plan import Build

NAME = "grad_k"
EQUATION = "dK += dS^T Q"


def spec(build: Build) -> Gemm:
    """The product in numbers."""
    return Gemm(
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
        warps=build.grad_k,
    )


def operands(product: Any, s_ds: Any, s_q: Any, thread: Any) -> Any:
    """This thread's part of both tiles, as `product` (mma.sync or wgmma) reads them."""
    return product.operands(transposed(s_ds), transposed(s_q), thread)


def issue(product: Any, accumulator: Any, parts: Any) -> None:
    """dK += dS^T Q: one k loop of matrix instructions into `accumulator`."""
    product.issue(accumulator, parts)


def reference(ds: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """dK += dS^T Q of one tile."""
    return ds.T @ q
