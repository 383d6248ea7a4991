"""GradV: dV += P^T dO.

(tile_n, columns_value) += (tile_n, tile_m) (tile_m, columns_value); P and dO from shared memory, both across k;
accumulates over the query tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.gemm.gemm import Gemm
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.plan import Build

NAME = "grad_v"
EQUATION = "dV += P^T dO"


def spec(build: Build) -> Gemm:
    """The product in numbers."""
    return Gemm(
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
        warps=build.grad_v,
    )


def operands(product: Any, s_p: Any, s_do: Any, thread: Any) -> Any:
    """This thread's part of both tiles, as `product` (mma.sync or wgmma) reads them."""
    return product.operands(transposed(s_p), transposed(s_do), thread)


def issue(product: Any, accumulator: Any, parts: Any) -> None:
    """dV += P^T dO: one k loop of matrix instructions into `accumulator`."""
    product.issue(accumulator, parts)


def reference(p: npt.NDArray[np.float64], do: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """dV += P^T dO of one tile."""
    return p.T @ do
