"""Component GEMM cases: each standalone component GEMM, its operands, and its product in float64.

The shapes and products are written out from the equations, independently of the kernels' own files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.kernels.component_gemms import COMPONENT_GEMMS
from cutlass_py_attn.plan.component_gemms import FAMILIES, HEAD_DIMS, plan_component_gemm
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.reference.numpy_reference import DTYPES

Array = npt.NDArray[Any]

# t numbers the tiles. A is stored (k, m) where a sum over query rows gives dV or dK.
PRODUCTS: Final = {
    "matmul_qk": "tmk,tnk->tmn",
    "doivj": "tmk,tnk->tmn",
    "grad_v": "tkm,tkn->tmn",
    "grad_k": "tkm,tkn->tmn",
    "grad_q": "tmk,tkn->tmn",
}
# Relative L2 error: fp32 sums of exact products, and sums of three TF32 products.
ALLOWED: Final = {"float16": 1e-6, "bfloat16": 1e-6, "float32": 3e-6}


@dataclass(frozen=True, slots=True)
class ComponentGemm:
    """One standalone component GEMM."""

    name: str
    family: str
    dtype: str
    head_dim: int

    def __str__(self) -> str:
        return f"{self.name}_{self.family}_{self.dtype}_{self.head_dim}"

    @property
    def arch(self) -> str:
        """The target of its family."""
        return "sm_90a" if self.family == "sm90" else "sm_90"

    def plan(self, tiles: int, arch: str | None = None) -> Plan:
        """Its plan for that many tiles."""
        return plan_component_gemm(self.name, self.family, self.dtype, self.head_dim, arch or self.arch, tiles)


_SHOWN_KINDS: Final = (
    ("sm80", "bfloat16", 128),
    ("sm80", "float32", 128),
    ("sm90", "bfloat16", 64),
    ("sm90", "bfloat16", 128),
)
SHOWN_COMPONENT_GEMMS: Final = tuple(ComponentGemm(name, *kind) for kind in _SHOWN_KINDS for name in COMPONENT_GEMMS)
ALL_COMPONENT_GEMMS: Final = tuple(
    ComponentGemm(name, family, dtype, head_dim)
    for family, dtypes in FAMILIES.items()
    for dtype in dtypes
    for head_dim in HEAD_DIMS
    for name in COMPONENT_GEMMS
)


def shapes(plan: Plan) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns (tiles, rows, columns) of A and of B as stored."""
    build, tiles = plan.build, dict(plan.params)["tiles"]
    m, n = build.tile_m, build.tile_n
    found = {
        "matmul_qk": ((m, build.columns), (n, build.columns)),
        "doivj": ((m, build.columns_value), (n, build.columns_value)),
        "grad_v": ((m, n), (m, build.columns_value)),
        "grad_k": ((m, n), (m, build.columns)),
        "grad_q": ((m, n), (n, build.columns)),
    }[build.component_gemm]
    return (tiles, *found[0]), (tiles, *found[1])


def product_shape(plan: Plan) -> tuple[int, int]:
    """Returns (rows, columns) of C."""
    build = plan.build
    rows = build.tile_n if build.component_gemm in ("grad_v", "grad_k") else build.tile_m
    columns = {"grad_v": build.columns_value, "grad_k": build.columns, "grad_q": build.columns}
    return rows, columns.get(build.component_gemm, build.tile_n)


def operands(plan: Plan, family: str, seed: int) -> dict[str, Array]:
    """Returns A and B. family: "integers" from -2 to 2, whose sums are exact in float32, or "gaussian"."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in zip(("a", "b"), shapes(plan), strict=True):
        values = rng.integers(-2, 3, shape) if family == "integers" else rng.standard_normal(shape)
        found[name] = values.astype(DTYPES[plan.build.dtype])
    return found


def product(plan: Plan, given: dict[str, Array]) -> Array:
    """Returns C in float64."""
    a, b = (given[name].astype(np.float64) for name in ("a", "b"))
    if PRODUCTS[plan.build.component_gemm].startswith("tkm"):
        a = a.transpose(0, 2, 1)
    if PRODUCTS[plan.build.component_gemm].split(",")[1].startswith("tnk"):
        b = b.transpose(0, 2, 1)
    return a @ b


def relative_error(found: Array, truth: Array) -> float:
    """Returns the relative L2 error."""
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
