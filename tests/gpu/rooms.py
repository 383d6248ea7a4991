"""Rooms: operands of a room alone and its product in float64, written out from the equations."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.plan import Plan
from cutlass_py_attn.reference import DTYPES

Array = npt.NDArray[Any]

# A is stored (k, m) where a sum over query rows makes dV or dK; t numbers the tiles.
PRODUCTS: Final = {
    "matmul_qk": "tmk,tnk->tmn",
    "doivj": "tmk,tnk->tmn",
    "grad_v": "tkm,tkn->tmn",
    "grad_k": "tkm,tkn->tmn",
    "grad_q": "tmk,tkn->tmn",
}
# Relative L2: fp32 sums of exact products, and sums of three TF32 products.
ALLOWED: Final = {"float16": 1e-6, "bfloat16": 1e-6, "float32": 3e-6}


def shapes(plan: Plan) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """[tiles, rows, columns] of A and of B as stored."""
    build, tiles = plan.build, dict(plan.sizes)["tiles"]
    m, n = build.tile_m, build.tile_n
    found = {
        "matmul_qk": ((m, build.columns), (n, build.columns)),
        "doivj": ((m, build.columns_value), (n, build.columns_value)),
        "grad_v": ((m, n), (m, build.columns_value)),
        "grad_k": ((m, n), (m, build.columns)),
        "grad_q": ((m, n), (n, build.columns)),
    }[build.room]
    return (tiles, *found[0]), (tiles, *found[1])


def operands(plan: Plan, family: str, seed: int) -> dict[str, Array]:
    """A and B: "integers" in -2..2, whose sums float32 holds exactly, or "gaussian"."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in zip(("a", "b"), shapes(plan), strict=True):
        values = rng.integers(-2, 3, shape) if family == "integers" else rng.standard_normal(shape)
        made[name] = values.astype(DTYPES[plan.build.dtype])
    return made


def product(plan: Plan, given: dict[str, Array]) -> Array:
    """C in float64."""
    a, b = (given[name].astype(np.float64) for name in ("a", "b"))
    if PRODUCTS[plan.build.room].startswith("tkm"):
        a = a.transpose(0, 2, 1)
    if PRODUCTS[plan.build.room].split(",")[1].startswith("tnk"):
        b = b.transpose(0, 2, 1)
    return a @ b


def relative_error(found: Array, truth: Array) -> float:
    """Relative L2."""
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
