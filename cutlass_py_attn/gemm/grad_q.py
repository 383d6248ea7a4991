"""GradQ: dQ = dS K.

(tile_m, columns) = (tile_m, tile_n) (tile_n, columns); dS along k and K across k, from shared memory; starts from
zero: the sum over the key tiles is kept in float32 in global memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.gemm.gemm import Gemm
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.plan import Build

NAME = "grad_q"
EQUATION = "dQ = dS K"


def spec(build: Build) -> Gemm:
    """The product in numbers."""
    return Gemm(
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
        warps=build.grad_q,
    )


def operands(product: Any, s_ds: Any, s_k: Any, thread: Any) -> Any:
    """This thread's part of both tiles, as `product` (mma.sync or wgmma) reads them."""
    return product.operands(s_ds, transposed(s_k), thread)


def issue(product: Any, accumulator: Any, parts: Any) -> None:
    """dQ = dS K: one k loop of matrix instructions into `accumulator`."""
    product.issue(accumulator, parts)


def reference(ds: npt.NDArray[np.float64], k: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """dQ = dS K of one tile."""
    return ds @ k
