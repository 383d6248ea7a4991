"""DOIVJ: dP = dO V^T.

(tile_m, tile_n) = (tile_m, columns_value) (columns_value, tile_n); dO and V from shared memory, both along k;
starts from zero. Same warps as MatmulQK: dS = P (dP - delta) pairs their elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.gemm.gemm import Gemm
from cutlass_py_attn.plan import Build

NAME = "doivj"
EQUATION = "dP = dO V^T"


def spec(build: Build) -> Gemm:
    """The product in numbers."""
    return Gemm(
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
        warps=build.scores,
    )


def operands(product: Any, s_do: Any, s_v: Any, thread: Any) -> Any:
    """This thread's part of both tiles, as `product` (mma.sync or wgmma) reads them."""
    return product.operands(s_do, s_v, thread)


def issue(product: Any, accumulator: Any, parts: Any) -> None:
    """dP = dO V^T: one k loop of matrix instructions into `accumulator`."""
    product.issue(accumulator, parts)


def reference(do: npt.NDArray[np.float64], v: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """dP = dO V^T of one tile."""
    return do @ v.T
