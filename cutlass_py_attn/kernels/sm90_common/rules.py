"""Rules that several sm90 kernels share: with which operands and warps they can be built."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.kernels.kernel import Refusals, listed, refuse
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_WARPS
from cutlass_py_attn.launch.variants import E4M3, WIDE
from cutlass_py_attn.problem.tensors import FLOAT8, ROW_ALIGNMENT_BYTES

SM90_MAX_HEAD_DIM: Final = 256
BESIDE_RANGES: Final = ("grouped", "sinks", "softcap")  # features with which the kernels read ranges of keys
WGMMA_DEPTH: Final = 16  # elements that one 16-bit wgmma sums over


def sm90_operands(build: Build) -> Refusals:
    """Yields the rules of the target, dtype and rows of every sm90 kernel."""
    if not architecture(build.arch).has_wgmma:
        yield refuse(build, "arch", "has no wgmma", "use sm_90a, or family sm80")
    if build.variant == E4M3 and build.dtype != FLOAT8:
        yield refuse(build, "dtype", f"variant {E4M3} multiplies {FLOAT8}", "use it, or another variant")
    elif build.variant != E4M3 and build.item_bytes != 2:
        yield refuse(build, "dtype", "the kernel multiplies 16-bit operands", "use float16 or bfloat16")
    if build.vector_bytes < ROW_ALIGNMENT_BYTES:
        yield refuse(build, "vector_bytes", f"TMA loads rows aligned to {ROW_ALIGNMENT_BYTES} bytes", "align them")


def sm90_head_dims(build: Build, kernels: str, widest: int, other: str) -> Refusals:
    """Yields the rule that head dims are at most `widest`; kernels: what ends there, other: what has wider ones."""
    for field in ("head_dim", "head_dim_value"):
        if getattr(build, field) > widest:
            yield refuse(build, field, f"{kernels} at {widest}", f"use {other}")


def sm90_standard(build: Build) -> Refusals:
    """Yields the rules of operands and head dims of every sm90 kernel but those of variants wide and mla."""
    yield from sm90_operands(build)
    kernels, other = "the sm90 kernels of narrower heads end", f"variant {WIDE} or family sm80"
    yield from sm90_head_dims(build, kernels, SM90_MAX_HEAD_DIM, other)


def consumers(build: Build, others: int, allowed: tuple[int, ...]) -> Refusals:
    """Yields the rule of warps: `others` warpgroups load or compute dQ, and the kernel has registers for the rest."""
    count, rest = divmod(build.warps - others * WARPGROUP_WARPS, WARPGROUP_WARPS)
    if rest or count not in allowed:
        warps = tuple((others + number) * WARPGROUP_WARPS for number in allowed)
        rule = f"the kernel has registers for {listed(allowed)} warpgroups beside {others} that load or compute dQ"
        yield refuse(build, "warps", rule, f"use {listed(warps)}")
