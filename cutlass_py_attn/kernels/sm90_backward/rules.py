"""Rules of the sm90 backward: with which tile, warps and stages it can be built, beside those of build_rules.py."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.kernels.kernel import Refusals, listed, refuse
from cutlass_py_attn.kernels.problem_kind import NARROW_HEAD_DIM
from cutlass_py_attn.kernels.sm90_backward.layout import CONSUMER_WARPGROUPS, DQ_WARPGROUPS
from cutlass_py_attn.kernels.sm90_common.layout import LOAD_WARPGROUPS
from cutlass_py_attn.kernels.sm90_common.rules import WGMMA_DEPTH, consumers, sm90_standard
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS, WARPGROUP_WARPS
from cutlass_py_attn.launch.variants import DS_REGISTERS, KEEPS_DS, KEY_REGISTERS, PER_HEAD, QUERY_HEADS, STANDARD
from cutlass_py_attn.problem.tensors import OPERANDS, ROW_ALIGNMENT_BYTES

# tile_m by columns
KEEPS_DS_TILES: Final = {DS_REGISTERS: {32: 128, 64: 128, 96: 64, 128: 64}, KEY_REGISTERS: {64: 128}}
BIAS_WITH_TERMS_HEAD_DIM: Final = 64  # the widest with which the sm90 backward has registers for a bias and any terms
SCORE_ROWS_HEAD_DIMS: Final = (192, 128)  # the widest (head_dim, head_dim_value) with which score_rows leave registers
SM90_BACKWARD_TILE_M: Final = (64, 128)


def key_ranges(build: Build) -> Refusals:
    """Yields the rules of mask form "ranges" of backwards."""
    if build.form.has_ranges and build.deterministic:
        yield refuse(build, "deterministic", "work lists have no order in which dQ is added", "use another mask")
    if build.form.has_ranges and build.score_rows:
        yield refuse(build, "score_rows", "lists have whole query tiles", "use 0")


def sm90_backward(build: Build) -> Refusals:
    """Yields the rules of the sm90 backwards whose warpgroups have keys each."""
    yield from sm90_standard(build)
    yield from all_gradients(build)
    yield from key_ranges(build)
    with_one = build.variant == STANDARD and not build.score_rows and not build.has("dropout")
    yield from backward_warp_rules(build, (1, CONSUMER_WARPGROUPS) if with_one else (CONSUMER_WARPGROUPS,))
    yield from _sm90_backward_tile(build)


def all_gradients(build: Build) -> Refusals:
    """Yields the rule that a backward computes the gradients of all operands."""
    if not {*OPERANDS} <= {*build.gradients}:
        yield refuse(build, "gradients", f"the sm90 backward computes all of {', '.join(OPERANDS)}", "use family sm80")


def backward_warp_rules(build: Build, allowed: tuple[int, ...]) -> Refusals:
    """Yields the rules of the warps, and of the stages that they share; allowed: warpgroups that compute S and dP."""
    yield from consumers(build, LOAD_WARPGROUPS + DQ_WARPGROUPS, allowed)
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "a stage is in use until the next tile is multiplied", "use 2 or more")
    if build.key_stages > 2:
        yield refuse(build, "key_stages", "the kernel has at most two key tiles in flight", "use 1 or 2")


def _sm90_backward_tile(build: Build) -> Refusals:
    if build.tile_m not in SM90_BACKWARD_TILE_M:
        rule = f"dQ is stored by {WARPGROUP_ROWS} rows"
        yield refuse(build, "tile_m", rule, f"use {listed(SM90_BACKWARD_TILE_M)}")
    consumers = build.warps // WARPGROUP_WARPS - LOAD_WARPGROUPS - DQ_WARPGROUPS
    keys = min(max(consumers, 1), CONSUMER_WARPGROUPS) * WARPGROUP_ROWS
    if build.tile_n != keys:
        yield refuse(build, "tile_n", f"each warpgroup owns {WARPGROUP_ROWS} keys", f"use {keys}, or other warps")
    for field, widest in zip(("head_dim", "head_dim_value"), SCORE_ROWS_HEAD_DIMS, strict=True):
        if getattr(build, field) > widest:
            yield refuse(build, field, f"dK and dV leave registers for scores up to {widest}", "use variant 2cta")
    if build.variant == QUERY_HEADS:
        yield from _query_heads(build)
    if build.variant in KEEPS_DS:
        yield from _keeps_ds(build)
    if build.has("bias") and max(build.columns, build.columns_value) > BIAS_WITH_TERMS_HEAD_DIM:
        yield from _bias_with_terms(build)
    if not build.score_rows:
        if max(build.head_dim, build.head_dim_value) > NARROW_HEAD_DIM:
            rule = f"head dims beyond {NARROW_HEAD_DIM} leave registers for a part of a tile"
            yield refuse(build, "score_rows", rule, "use 32")
        return
    rows = build.score_rows
    if build.tile_m % rows or rows % WGMMA_DEPTH or rows == build.tile_m:
        rule = f"must divide tile_m = {build.tile_m}, be less, and be a multiple of {WGMMA_DEPTH}"
        yield refuse(build, "score_rows", rule, "change it")
    elif build.grad_output_stages * rows % build.tile_m:
        rule = "the stages of dS hold whole query tiles"
        yield refuse(build, "grad_output_stages", rule, f"use a multiple of {build.tile_m // rows}")
    if build.variant == PER_HEAD:
        yield refuse(build, "score_rows", "variant per_head loads the dQ sum where whole tiles stage dQ", "use 0")
    if build.key_stages != 1:
        yield refuse(build, "key_stages", "with score_rows there is one key tile in flight", "use 1")
    if build.has("dropout"):
        yield refuse(build, "score_rows", "dropout bits are generated for whole tiles", "use 0")


def _keeps_ds(build: Build) -> Refusals:
    """Registers of these variants are counted for one tile of each number of columns."""
    name = f"variant {build.variant}"
    tiles = KEEPS_DS_TILES[build.variant]
    for field, padded in (("head_dim", build.columns), ("head_dim_value", build.columns_value)):
        if padded not in tiles or build.columns != build.columns_value:
            both = " or ".join(map(str, tiles))
            rule = f"{name} has {both} columns of both, and this is padded to {padded}"
            yield refuse(build, field, rule, "use the standard variant")
    if build.tile_m != (tile_m := tiles.get(build.columns, build.tile_m)):
        yield refuse(build, "tile_m", f"{name} has registers for scores of {tile_m} queries", f"use {tile_m}")
    if build.score_rows:
        yield refuse(build, "score_rows", f"{name} computes all rows of a tile at once", "use 0")
    if build.has("bias") and build.bias_vector_bytes < ROW_ALIGNMENT_BYTES:
        rule = f"{name} has no registers to copy fewer bytes at once than {ROW_ALIGNMENT_BYTES}"
        yield refuse(build, "bias_vector_bytes", rule, "align the rows to that")
    # ptxas spills 44 bytes.
    is_f16_window = build.dtype == "float16" and build.form.has_left
    if build.variant == DS_REGISTERS and is_f16_window and build.columns == NARROW_HEAD_DIM:
        rule = f"{name} has no registers for the mask of a window in float16"
        yield refuse(build, "mask", rule, "use the standard variant")


def _bias_with_terms(build: Build) -> Refusals:
    """Terms that leave no registers for a bias: ptxas spills 8 to 116 bytes."""
    if build.has("softcap"):
        yield refuse(build, "features", "the derivative of a softcap leaves no registers for a bias", "use family sm80")
    is_dense = build.bias_vector_bytes == ROW_ALIGNMENT_BYTES and not build.has("varlen")
    if build.has("dropout") and (build.has("alibi") or not is_dense):
        rule = (
            "beside dropout there are registers for a bias of sequences of one length alone, copied "
            f"{ROW_ALIGNMENT_BYTES} bytes at once, and no ALiBi"
        )
        yield refuse(build, "features", rule, "use family sm80")


def _query_heads(build: Build) -> Refusals:
    if not build.has("grouped"):
        rule = "variant query_heads adds the gradients of query heads with one key head"
        yield refuse(build, "features", rule, "use the standard variant")
    if build.deterministic:
        rule = "variant query_heads adds dK and dV in any order"
        yield refuse(build, "deterministic", rule, "use the standard variant")
