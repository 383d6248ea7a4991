"""Tile rules: with which tile, warps and stages each kernel body can be built, beside the rules of build_rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cutlass_py_attn import refusals
from cutlass_py_attn.plan.arch import architecture
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.decode_smem import team_warps
from cutlass_py_attn.plan.gemm_spec import MMA_ROWS, WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.plan.sm90_e4m3 import TILE_N as E4M3_TILE_N
from cutlass_py_attn.plan.sm90_e4m3_cache import MOST_VECTORS, rows_at_once, vectors_of_tile
from cutlass_py_attn.plan.sm90_e4m3_cache import REGISTERS as E4M3_CACHE_REGISTERS
from cutlass_py_attn.plan.sm90_smem import (
    CONSUMER_WARPGROUPS,
    DQ_WARPGROUPS,
    E4M3_REGISTERS,
    FORWARD_REGISTERS,
    LOAD_WARPGROUPS,
    WARPGROUP_ROWS,
)
from cutlass_py_attn.plan.sm90_wide import WARPGROUPS
from cutlass_py_attn.plan.smem import rows_copied_at_once
from cutlass_py_attn.plan.split_d import HEAD_DIM_SPLIT_MULTIPLE, copyable_rows
from cutlass_py_attn.plan.variants import (
    DS_REGISTERS,
    E4M3,
    E4M3_CACHE,
    KEEPS_DS,
    KEY_REGISTERS,
    MULTICAST,
    PER_HEAD,
    PERSISTENT,
    QUERY_HEADS,
    SPLIT_KV,
    STANDARD,
    WIDE,
)
from cutlass_py_attn.problem.tensors import E4M3_BYTES, FLOAT8, OPERANDS, ROW_ALIGNMENT_BYTES
from cutlass_py_attn.refusals import Refusal
from cutlass_py_attn.score_terms import registry

SM80_TILE_M: Final = (32, 64, 128)
SM80_TILE_N: Final = (32, 64, 96, 128)
SM80_WARPS: Final = (4, 8)
SPLIT_D_WARPS: Final = 8
SPLIT_D_TILE_M: Final = {"forward": (64,), "backward": (32, 64)}
SPLIT_D_TILE_N: Final = {"forward": (64, 128), "backward": (64,)}
MAX_HEAD_DIM_SPLIT: Final = 512
SM90_MAX_HEAD_DIM: Final = 256
WIDE_MAX_HEAD_DIM: Final = 512  # of the sm90 kernels of variant wide
# tile_m by columns
KEEPS_DS_TILES: Final = {DS_REGISTERS: {32: 128, 64: 128, 96: 64, 128: 64}, KEY_REGISTERS: {64: 128}}
NARROW_HEAD_DIM: Final = 128  # beyond, the sm90 backward has no registers for the scores of a whole query tile
BIAS_WITH_TERMS_HEAD_DIM: Final = 64  # the widest with which the sm90 backward has registers for a bias and any terms
SCORE_ROWS_HEAD_DIMS: Final = (192, 128)  # the widest (head_dim, head_dim_value) with which score_rows leave registers
SM90_BACKWARD_TILE_M: Final = (64, 128)
WGMMA_DEPTH: Final = 16  # elements that one 16-bit wgmma sums over
SM90_TILE_N: Final = (64, 256)  # least and most keys of the forward; wgmma has up to 256 columns
DECODE_TILE_M: Final = (16, 32, 64)
DECODE_WARPS: Final = (2, 4, 8)  # more would leave threads without an element of the narrowest output
DECODE_SHARED_ROWS: Final = 32  # of a warp that shares a team: the outputs of 16 rows would not be aligned
DECODE_MAX_HEAD_DIM: Final = {2: 256, 4: 128}  # by bytes per element
DECODE_LEAST_COPY: Final = 4  # bytes: the least that cp.async copies
_CODE_TILE_M: Final = {E4M3: tuple(E4M3_REGISTERS), E4M3_CACHE: tuple(E4M3_CACHE_REGISTERS)}

Refusals = Iterator[Refusal]


def refuse(build: Build, field: str, rule: str, remedy: str) -> Refusal:
    """Returns the refusal of a field of a Build."""
    return refusals.refuse(field, getattr(build, field), rule, remedy)


def listed(choices: tuple[object, ...]) -> str:
    """Returns the choices as words: "a, b or c"."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def sm80_forward(build: Build) -> Refusals:
    """Yields the rules of the standard sm80 forward."""
    yield from _sm80_tile(build)
    if build.query_stages != 1:
        yield refuse(build, "query_stages", "the standard sm80 forward has one key and value stage", "use 1")
    if build.tile_m % (build.warps * MMA_ROWS):
        rule = f"each of {build.warps} warps owns rows of S in multiples of {MMA_ROWS}"
        yield refuse(build, "tile_m", rule, "use such rows")
    yield from _copies(build)


def sm80_backward(build: Build) -> Refusals:
    """Yields the rules of the standard sm80 backward."""
    yield from _equal_stages(build)
    yield from _sm80_tile(build)
    if build.query_stages not in (1, 2):
        yield refuse(build, "query_stages", "the sm80 backward loads at most one query tile ahead", "use 1 or 2")
    yield from _copies(build)


def _equal_stages(build: Build) -> Refusals:
    if build.grad_output_stages != build.query_stages:
        rule = f"must be query_stages = {build.query_stages}: the sm80 backward advances both together"
        yield refuse(build, "grad_output_stages", rule, "set it so")


def _sm80_tile(build: Build) -> Refusals:
    for field, allowed in (("tile_m", SM80_TILE_M), ("tile_n", SM80_TILE_N)):
        if getattr(build, field) not in allowed:
            yield refuse(build, field, f"the standard sm80 kernels have {listed(allowed)} rows", "use those")
    if build.warps not in SM80_WARPS:
        yield refuse(build, "warps", f"the sm80 kernels divide their tiles among {listed(SM80_WARPS)} warps", "use one")


def _copies(build: Build) -> Refusals:
    """The threads of a block copy several rows of a tile at once, so a tile has a multiple of these rows."""
    widths: list[tuple[int, tuple[str, ...]]]
    widths = [(columns * build.item_bytes, ("tile_m", "tile_n")) for columns in (build.columns, build.columns_value)]
    if build.has(registry.KV8):
        widths += [(columns * E4M3_BYTES, ("tile_n",)) for columns in (build.columns, build.columns_value)]
    for row_bytes, fields in sorted(set(widths)):
        at_once = rows_copied_at_once(build.threads, row_bytes, build.vector_bytes)
        for field in fields:
            # Fewer threads than one row needs copy no whole row; _sm80_tile refuses so few warps.
            if at_once and getattr(build, field) % at_once:
                rule = f"{build.threads} threads copy {at_once} rows at once"
                yield refuse(build, field, rule, "use a multiple of that")


def split_d_forward(build: Build) -> Refusals:
    """Yields the rules of the forward of variant split_d."""
    return _split_d(build, [("tile_n", build.block_columns_value)])


def split_d_backward(build: Build) -> Refusals:
    """Yields the rules of the backward of variant split_d."""
    yield from _equal_stages(build)
    yield from _split_d(build, [("tile_m", build.block_columns), ("tile_m", build.block_columns_value)])


def _split_d(build: Build, tiles: list[tuple[str, int]]) -> Refusals:
    """Rules of variant split_d; tiles: fields with the rows of column blocks that threads copy, and their columns."""
    for field, allowed in (("tile_m", SPLIT_D_TILE_M), ("tile_n", SPLIT_D_TILE_N)):
        if getattr(build, field) not in allowed[build.kind]:
            yield refuse(build, field, f"the split-D {build.kind} has {listed(allowed[build.kind])} rows", "use those")
    if build.warps != SPLIT_D_WARPS:
        yield refuse(build, "warps", f"{SPLIT_D_WARPS} warps divide the column blocks", f"use {SPLIT_D_WARPS}")
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "one step is loaded while another is multiplied", "use 2 or more")
    if build.head_dim_split % HEAD_DIM_SPLIT_MULTIPLE or not 0 < build.head_dim_split <= MAX_HEAD_DIM_SPLIT:
        rule = (
            f"must be a multiple of {HEAD_DIM_SPLIT_MULTIPLE} up to {MAX_HEAD_DIM_SPLIT}, so that the warps divide it"
        )
        yield refuse(build, "head_dim_split", rule, "use one")
        return
    for field, columns in tiles:
        if not copyable_rows(build, getattr(build, field), columns):
            rule = f"{build.threads} threads copy more rows of {columns} columns at once"
            yield refuse(build, field, rule, "use 64, or the standard variant")


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


def _sm90_head_dims(build: Build, kernels: str, widest: int, other: str) -> Refusals:
    for field in ("head_dim", "head_dim_value"):
        if getattr(build, field) > widest:
            yield refuse(build, field, f"{kernels} at {widest}", f"use {other}")


def _sm90_standard(build: Build) -> Refusals:
    """Rules of operands and head dims of every sm90 kernel but those of variants wide and mla."""
    yield from sm90_operands(build)
    kernels, other = "the sm90 kernels of narrower heads end", f"variant {WIDE} or family sm80"
    yield from _sm90_head_dims(build, kernels, SM90_MAX_HEAD_DIM, other)


def consumers(build: Build, others: int, allowed: tuple[int, ...]) -> Refusals:
    """Yields the rule of warps: `others` warpgroups load or compute dQ, and the kernel has registers for the rest."""
    count, rest = divmod(build.warps - others * WARPGROUP_WARPS, WARPGROUP_WARPS)
    if rest or count not in allowed:
        warps = tuple((others + number) * WARPGROUP_WARPS for number in allowed)
        rule = f"the kernel has registers for {listed(allowed)} warpgroups beside {others} that load or compute dQ"
        yield refuse(build, "warps", rule, f"use {listed(warps)}")


def sm90_forward(build: Build) -> Refusals:
    """Yields the rules of the sm90 forwards whose warpgroups have query rows each."""
    yield from _sm90_standard(build)
    row_choices = _CODE_TILE_M.get(build.variant, tuple(FORWARD_REGISTERS))
    wrong_warps = [*consumers(build, LOAD_WARPGROUPS, tuple(rows // WARPGROUP_ROWS for rows in row_choices))]
    yield from wrong_warps
    rows = (build.warps // WARPGROUP_WARPS - LOAD_WARPGROUPS) * WARPGROUP_ROWS
    if not wrong_warps and build.tile_m != rows:
        yield refuse(build, "tile_m", f"each warpgroup owns {WARPGROUP_ROWS} rows", f"use {rows}, or other warps")
    least, most = SM90_TILE_N
    if build.variant == E4M3:
        if build.tile_n not in E4M3_TILE_N:
            rule = "a transposed value tile has whole strips"
            yield refuse(build, "tile_n", rule, f"use {listed(E4M3_TILE_N)}")
    elif build.tile_n % WGMMA_DEPTH or not least <= build.tile_n <= most:
        rule = f"wgmma sums over {WGMMA_DEPTH} keys at once"
        yield refuse(build, "tile_n", rule, f"use a multiple of that from {least} to {most}")
    if build.has("dropout") and build.tile_n % WARPGROUP_ROWS:
        rule = "each thread has whole words of dropout bits"
        yield refuse(build, "tile_n", rule, f"use a multiple of {WARPGROUP_ROWS}")
    if build.variant == E4M3_CACHE:
        yield from _e4m3_cache(build)
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "the next key tile is loaded while this one is multiplied", "use 2 or more")
    if build.variant == MULTICAST and not build.form.grows:
        yield refuse(build, "mask", "variant multicast is built for causal masks", "use the standard variant")
    if build.variant == SPLIT_KV and build.form.has_left:
        yield refuse(build, "mask", "windows have few key tiles to share", "use the standard variant")
    if build.variant == MULTICAST and build.tile_m != 2 * WARPGROUP_ROWS:
        yield refuse(build, "tile_m", "variant multicast has two warpgroups that compute", f"use {2 * WARPGROUP_ROWS}")


def _e4m3_cache(build: Build) -> Refusals:
    if not build.has(registry.KV8):
        rule = f"variant {E4M3_CACHE} converts keys and values of e4m3 codes"
        yield refuse(build, "variant", rule, "use the standard variant")
    at_once, most = rows_at_once(build), MOST_VECTORS
    if build.tile_n % at_once:
        yield refuse(build, "tile_n", f"a warpgroup converts {at_once} rows at once", "use a multiple of that")
    elif build.tile_n > WARPGROUP_THREADS:
        yield refuse(build, "tile_n", f"each of {WARPGROUP_THREADS} threads copies the scales of one row", "use fewer")
    elif vectors_of_tile(build) > most:
        rule = f"a thread has registers for {most} vectors of codes, not {vectors_of_tile(build)}"
        yield refuse(build, "tile_n", rule, "use fewer keys")


def wide(build: Build) -> Refusals:
    """Yields the rules of the forward and backward of variant wide."""
    yield from sm90_operands(build)
    yield from _sm90_head_dims(build, f"variant {WIDE} ends", WIDE_MAX_HEAD_DIM, "family sm80")
    if build.kind == "backward":
        yield from _all_gradients(build)
    for field, reason in (("tile_m", "both warpgroups have the same queries"), ("tile_n", "one warpgroup has S of")):
        if getattr(build, field) != WARPGROUP_ROWS:
            yield refuse(build, field, f"in variant wide {reason}, {WARPGROUP_ROWS} rows", f"use {WARPGROUP_ROWS}")
    yield from consumers(build, LOAD_WARPGROUPS, (WARPGROUPS,))
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "the next key tile is loaded while this one is multiplied", "use 2 or more")
    if build.kind == "backward" and build.grad_output_stages != build.query_stages:
        rule = f"must be query_stages = {build.query_stages}: one ring has chunks of all tiles"
        yield refuse(build, "grad_output_stages", rule, "set it so")
    if build.key_stages != 1:
        yield refuse(build, "key_stages", "variant wide has no stages of the key tile", "use 1")
    if build.score_rows:
        yield refuse(build, "score_rows", "variant wide computes all rows of a tile at once", "use 0")
    if max(build.head_dim, build.head_dim_value) <= SM90_MAX_HEAD_DIM:
        rule = f"variant wide is for head dims beyond {SM90_MAX_HEAD_DIM}"
        yield refuse(build, "head_dim", rule, "use the standard variant")


def sm90_backward(build: Build) -> Refusals:
    """Yields the rules of the sm90 backwards whose warpgroups have keys each."""
    yield from _sm90_standard(build)
    yield from _all_gradients(build)
    with_one = build.variant == STANDARD and not build.score_rows and not build.has("dropout")
    yield from _backward_warps(build, (1, CONSUMER_WARPGROUPS) if with_one else (CONSUMER_WARPGROUPS,))
    yield from _sm90_backward_tile(build)


def _all_gradients(build: Build) -> Refusals:
    if not {*OPERANDS} <= {*build.gradients}:
        yield refuse(build, "gradients", f"the sm90 backward computes all of {', '.join(OPERANDS)}", "use family sm80")


def _backward_warps(build: Build, allowed: tuple[int, ...]) -> Refusals:
    """Rules of the warps, and of the stages that they share; allowed: warpgroups that compute S and dP."""
    yield from consumers(build, LOAD_WARPGROUPS + DQ_WARPGROUPS, allowed)
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "a stage is in use until the next tile is multiplied", "use 2 or more")
    if build.key_stages > 2:
        yield refuse(build, "key_stages", "the kernel has at most two key tiles in flight", "use 1 or 2")


def two_cta(build: Build) -> Refusals:
    """Yields the rules of the backward of variant 2cta."""
    yield from _sm90_standard(build)
    yield from _all_gradients(build)
    yield from _backward_warps(build, (CONSUMER_WARPGROUPS,))
    for field, reason in (("tile_m", "dQ of both blocks has"), ("tile_n", "one warpgroup has one gradient of")):
        if getattr(build, field) != WARPGROUP_ROWS:
            yield refuse(build, field, f"in variant 2cta {reason} {WARPGROUP_ROWS} rows", f"use {WARPGROUP_ROWS}")
    if max(build.head_dim, build.head_dim_value) <= NARROW_HEAD_DIM:
        rule = f"variant 2cta is for head dims beyond {NARROW_HEAD_DIM}"
        yield refuse(build, "head_dim", rule, "use the standard variant")
    if build.grad_output_stages < 2:
        rule = "a stage is in use until the next tile is multiplied"
        yield refuse(build, "grad_output_stages", rule, "use 2 or more")
    if build.key_stages != 1:
        yield refuse(build, "key_stages", "variant 2cta has one key tile in flight", "use 1")
    if build.score_rows:
        yield refuse(build, "score_rows", "variant 2cta computes all rows of a tile at once", "use 0")
    if build.deterministic:
        yield refuse(build, "deterministic", "variant 2cta adds dQ in any order", "use family sm80")


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


def decode_forward(build: Build) -> Refusals:
    """Yields the rules of the decode kernels."""
    widest = DECODE_MAX_HEAD_DIM[build.item_bytes]
    for field in ("head_dim", "head_dim_value"):
        if getattr(build, field) > widest:
            yield refuse(build, field, f"the decode kernels of {build.dtype} end at {widest}", "use family sm80")
    if build.vector_bytes < DECODE_LEAST_COPY:
        yield refuse(build, "vector_bytes", f"cp.async copies at least {DECODE_LEAST_COPY} bytes", "align rows to that")
        return
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "one key tile is loaded while another is multiplied", "use 2 or more")
    if build.tile_m not in DECODE_TILE_M:
        yield refuse(build, "tile_m", "query rows of all heads of a group", f"use {listed(DECODE_TILE_M)}")
        return
    warps_of_team = team_warps(build.tile_m, build.columns_value, build.item_bytes)
    if warps_of_team > 1 and build.tile_m // warps_of_team < DECODE_SHARED_ROWS:
        yield refuse(build, "tile_m", f"a warp holds {MMA_ROWS} rows of this head_dim_value", f"use {MMA_ROWS}")
        return
    if build.warps not in DECODE_WARPS or build.warps % warps_of_team or build.warps * WARP_THREADS < build.tile_m:
        allowed = [
            warps for warps in DECODE_WARPS if warps % warps_of_team == 0 and warps * WARP_THREADS >= build.tile_m
        ]
        yield refuse(build, "warps", f"{build.tile_m} rows need teams of {warps_of_team}", f"use {listed((*allowed,))}")
        return
    teams = build.warps // warps_of_team
    if build.tile_n % (teams * MMA_ROWS):
        rule = f"each of {teams} teams has multiples of {MMA_ROWS} keys"
        yield refuse(build, "tile_n", rule, f"use a multiple of {teams * MMA_ROWS}")
        return
    if build.variant == PERSISTENT and not (build.has(registry.PAGED) or build.has(registry.KV8)):
        rule = "variant persistent reads caches in pages or of e4m3 codes"
        yield refuse(build, "variant", rule, "use the standard variant")
    if build.has(registry.KV8):
        yield from _kv8(build, build.tile_n // teams)
        return
    for columns in sorted({build.columns, build.columns_value}):
        threads = warps_of_team * WARP_THREADS
        at_once = rows_copied_at_once(threads, columns * build.item_bytes, build.vector_bytes)
        if build.tile_n // teams % at_once:
            rule = f"a team copies {at_once} rows at once"
            yield refuse(build, "tile_n", rule, f"use a multiple of {teams * at_once}")


def _kv8(build: Build, keys: int) -> Refusals:
    """An e4m3 cache; keys: of a team, of which each lane of a warp has the scales of one."""
    if build.variant != PERSISTENT:
        yield refuse(build, "variant", "of the decode kernels, variant persistent alone reads e4m3 codes", "use that")
    if build.item_bytes != 2:
        yield refuse(build, "dtype", "the query of an e4m3 cache has 16 bits", "use float16 or bfloat16")
    if keys > WARP_THREADS:
        yield refuse(build, "tile_n", f"a team has at most {WARP_THREADS} keys", "use fewer keys or more warps")
