"""Gradient of the bias: whether the separate kernel that sums it multiplies with wgmma."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import KEEPS_DS, PER_HEAD, QUERY_HEADS, STANDARD
from cutlass_py_attn.problem.tensors import ROW_ALIGNMENT_BYTES

WGMMA_MODES: Final = ("b", "h", "bh", "none")
WGMMA_FEATURES: Final = frozenset(("bias", "grouped", "varlen", "seqused", "sinks"))
WGMMA_HEAD_DIM: Final = 128  # the widest
WGMMA_VARIANTS: Final = (STANDARD, PER_HEAD, QUERY_HEADS, *KEEPS_DS)  # of the main kernel


def uses_wgmma(build: Build) -> bool:
    """Returns whether the separate grad_bias kernel multiplies with wgmma."""
    if build.family != "sm90" or build.variant not in WGMMA_VARIANTS:
        return False
    is_possible = suits_wgmma(build.grad_bias_mode, build.features, build.grad_bias_vector_bytes)
    return is_possible and max(build.columns, build.columns_value) <= WGMMA_HEAD_DIM


def suits_wgmma(mode: str, features: tuple[str, ...], vector_bytes: int) -> bool:
    """Returns whether the kernel of wgmma computes a grad_bias of this mode, alignment and features beside it."""
    return mode in WGMMA_MODES and {*features} <= WGMMA_FEATURES and vector_bytes == ROW_ALIGNMENT_BYTES
