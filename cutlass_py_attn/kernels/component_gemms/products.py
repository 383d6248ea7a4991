"""The products of attention's forward and backward as component GEMMs, named by what they compute.

All start from zero but dV, dK and O, which accumulate over the tiles of a loop; the sum of dQ over key tiles is a
float32 array in global memory. Warps of doivj are those of matmul_qk, because dS = P (dP - delta) pairs the elements of
both accumulators. The softmax scale is applied once, when dK is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec


@dataclass(frozen=True)
class ComponentGemm:
    """One product C = A B or C += A B of a tile, with A (m, k) and B (n, k) in shared memory.

    m, n, k, warps: fields of a Build
    a_transposed, b_transposed: whether the operand is stored as (k, m) or (k, n), MN-major
    transposed_equation: what it computes with swap A/B
    """

    name: str
    equation: str
    m: str
    n: str
    k: str
    warps: str
    a_transposed: bool = False
    b_transposed: bool = False
    accumulate: bool = False
    transposed_equation: str = ""

    def spec(self, build: Build, swap_ab: bool = False, **changes: Any) -> GemmSpec:
        """Returns the GEMM of one tile; with `swap_ab` the GEMM of the transposed tile.

        changes: fields of the GemmSpec that a kernel's tile differs in.
        """
        normal = GemmSpec(
            name=self.name,
            equation=self.equation,
            m=getattr(build, self.m),
            n=getattr(build, self.n),
            k=getattr(build, self.k),
            a_transposed=self.a_transposed,
            b_transposed=self.b_transposed,
            accumulate=self.accumulate,
            item_bytes=build.item_bytes,
            family=build.family,
            warps=getattr(build, self.warps),
        )
        normal = replace(normal, **changes)
        return normal.swap_ab(self.transposed_equation) if swap_ab else normal

    def operands(self, mma: Any, s_a: Any, s_b: Any, thread: Any) -> Any:
        """Returns this thread's partition of both tiles in shared memory, as `mma` (MmaSync or Wgmma) reads them."""
        a = transposed(s_a) if self.a_transposed else s_a
        b = transposed(s_b) if self.b_transposed else s_b
        return mma.operands(b, a, thread) if mma.spec.is_swapped else mma.operands(a, b, thread)

    def a_operand(self, mma: Any, s_a: Any, thread: Any) -> Any:
        """Returns A in shared memory as an operand."""
        return mma.a_operand(transposed(s_a) if self.a_transposed else s_a, thread)

    def b_operand(self, mma: Any, s_b: Any, *thread: Any) -> Any:
        """Returns B in shared memory as an operand; `thread` for mma.sync alone."""
        return mma.b_operand(transposed(s_b) if self.b_transposed else s_b, *thread)

    def issue(self, mma: Any, accumulator: Any, operands: Any) -> None:
        """Issues the product, transposed if `mma` has swapped operands: one loop over k into `accumulator`."""
        mma.issue(accumulator, operands)

    def reference(self, a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the product of one tile, of operands as they are stored."""
        return (a.T if self.a_transposed else a) @ (b if self.b_transposed else b.T)


matmul_qk: Final = ComponentGemm(
    "matmul_qk", "S = Q K^T", "tile_m", "tile_n", "columns", "warps_scores", transposed_equation="S^T = K Q^T"
)
doivj: Final = ComponentGemm(
    "doivj", "dP = dO V^T", "tile_m", "tile_n", "columns_value", "warps_scores", transposed_equation="dP^T = V dO^T"
)
grad_v: Final = ComponentGemm(
    "grad_v", "dV += P^T dO", "tile_n", "block_columns_value", "tile_m", "warps_grad_v", True, True, True
)
grad_k: Final = ComponentGemm(
    "grad_k", "dK += dS^T Q", "tile_n", "block_columns", "tile_m", "warps_grad_k", True, True, True
)
grad_q: Final = ComponentGemm(
    "grad_q", "dQ = dS K", "tile_m", "block_columns", "tile_n", "warps_grad_q", b_transposed=True
)
matmul_pv: Final = replace(
    grad_q, name="output", equation="O += P V", n="columns_value", warps="warps_scores", accumulate=True
)
BY_NAME: Final = {gemm.name: gemm for gemm in (matmul_qk, doivj, grad_v, grad_k, grad_q)}
