"""MatmulQK: S = Q K^T.

(tile_m, tile_n) = (tile_m, columns) (columns, tile_n); Q and K from shared memory, both along k; starts from zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.gemm.gemm import Gemm
from cutlass_py_attn.plan import Build

NAME = "matmul_qk"
EQUATION = "S = Q K^T"


def spec(build: Build) -> Gemm:
    """The product in numbers."""
    return Gemm(
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
        warps=build.scores,
    )


def operands(product: Any, s_q: Any, s_k: Any, thread: Any) -> Any:
    """This thread's part of both tiles, as `product` (mma.sync or wgmma) reads them."""
    return product.operands(s_q, s_k, thread)


def issue(product: Any, accumulator: Any, parts: Any) -> None:
    """S = Q K^T: one k loop of matrix instructions into `accumulator`."""
    product.issue(accumulator, parts)


def reference(q: npt.NDArray[np.float64], k: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """S = Q K^T of one tile."""
    return q @ k.T
