"""sm90 family (wgmma, TMA): which problems it takes, its warps, grids and tensor maps, and when variants are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from cutlass_py_attn import integers
from cutlass_py_attn.plan import decode, shared_tiles, tile_order, tile_time
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.entry_points import mapped_field
from cutlass_py_attn.plan.expressions import ONE, Expr, Grid, Name, ceil_div, maximum, minimum, round_up, times
from cutlass_py_attn.plan.gemm_spec import WARPGROUP_WARPS
from cutlass_py_attn.plan.grad_bias_mode import has_wgmma, unsupported_sm90
from cutlass_py_attn.plan.names import (
    BATCH,
    GROUP,
    NUM_HEADS,
    NUM_HEADS_KEY,
    NUM_KEYS,
    NUM_QUERIES,
    NUM_SMS,
    NUM_SPLITS_KEY,
    WORK_TILES,
)
from cutlass_py_attn.plan.sm90_mla import ROPE_COLUMNS, WARP_ROWS
from cutlass_py_attn.plan.sm90_smem import (
    DQ_WARPGROUPS,
    LOAD_WARPGROUPS,
    RAGGED_ROWS,
    RAGGED_STRIDE_BYTES,
    WARPGROUP_ROWS,
    deals_last_rounds,
    most_box_rows,
    stored_tiles,
    tma_tiles,
)
from cutlass_py_attn.plan.sm90_wide import WARPGROUPS
from cutlass_py_attn.plan.smem import swizzle_bytes
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.plan.tile_options import with_options
from cutlass_py_attn.plan.tile_rules import NARROW_HEAD_DIM, SM90_MAX_HEAD_DIM, WIDE_MAX_HEAD_DIM
from cutlass_py_attn.plan.tiles import is_mla, splits_score_rows
from cutlass_py_attn.plan.variants import (
    DS_REGISTERS,
    E4M3,
    E4M3_CACHE,
    KEEPS_DS,
    KEY_REGISTERS,
    MLA,
    MULTICAST,
    PER_HEAD,
    QUERY_HEADS,
    SHARED_END,
    SPLIT_KV,
    STANDARD,
    TWO_CTA,
    VARIANTS,
    WIDE,
)
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import has_codes
from cutlass_py_attn.problem.tensors import (
    BIASES,
    F32_BYTES,
    FLOAT8,
    ITEM_BYTES,
    KEY_ROPE,
    OPERAND_BYTES,
    OPERANDS,
    ROW_ALIGNMENT_BYTES,
    WORD_BYTES,
    Shape,
    Tensor,
)
from cutlass_py_attn.score_terms import registry

# Variant per_head: bytes of Q, dO and dQ sums that all blocks read at a time, which the L2 cache should hold, and how
# many times the key tiles of the busiest block may exceed those of the standard variant.
PER_HEAD_L2_BYTES, PER_HEAD_IMBALANCE = 36 << 20, 1.15
# Variant query_heads: work tiles of the standard variant per SM from which on the standard one is faster. Causal,
# d 128, one H200: query_heads gains 9 to 12 % at 3.9 and loses 0 to 7 % at 7.8; full: it loses 3 to 5 %.
QUERY_HEADS_WORK_TILES: Final = 5
# The same for full masks: query_heads gains 40 to 75 % at 0.06 to 0.5.
QUERY_HEADS_WORK_TILES_FULL: Final = 0.5
# Head dims up to which backwards with a bias are faster in the sm80 kernels: d 32, s 2048, full, 5 %; at d 64 the sm90
# kernels are 1.39 times as fast. With rows aligned to 2 bytes the sm80 kernels are 1.47 to 1.55 times as fast, at 4
# bytes the sm90 ones 1.60 times. With a gradient of the bias that wgmma sums, d 32 is 1.04 to 2.60 times as fast.
SM80_BIAS_HEAD_DIM: Final = 32
LEAST_PAGE_SIZE: Final = 16  # rows; smaller boxes would be no whole swizzled blocks of shared memory
# Rounds at the end of a forward whose tiles the GPU deals to blocks, from so many queries and so many rounds on: a
# block of its own costs a tile about 2 us.
LAST_ROUNDS, LAST_ROUNDS_LENGTH, LAST_ROUNDS_LEAST = 3, 4096, 16
# Queries that a block must save for parts of few key tiles of 128 keys to be faster than blocks of 64 keys: at 256 and
# 384 they lose 18 and 8 %, at 512 to 960 they gain 8 to 30 %. Full, b 1, one H200.
LEAST_SAVED_QUERIES: Final = 512
DV_FIRST_HEAD_DIM: Final = 96  # up to here variant ds_registers starts S^T from 0 and issues dV before dP^T
MULTICAST_LENGTH: Final = 4096  # queries and keys from which on variant multicast is faster
LONG_CAUSAL_TILE: Final = 192, 112  # of d 96, full at any length; causal: 2 % faster at s 8192, 2 % slower at s 2048
# Queries of d 64 by mask, up to which backward tiles of 64 queries and keys are faster: 3 to 8 %; causal, s 384 and
# 448: 15 and 21 %, s 512: 0 to 8 %.
SHORT_QUERIES: Final = {"full": 256, "causal": 512}


def unsupported_features(problem: Problem) -> tuple[str, ...]:
    """Returns what the problem has that the family does not take; empty if it takes the problem."""
    shape = problem.shape
    backward, has_latent_cache = problem.direction == "backward", is_mla(problem)
    is_wide = not has_latent_cache and max(shape.head_dim, shape.head_dim_value) > SM90_MAX_HEAD_DIM
    is_2cta = backward and not is_wide and _needs_2cta(shape)
    if backward and splits_score_rows(shape):
        features: tuple[str, ...] = (*registry.LAYOUTS, *registry.supported("sm90 backward score_rows"))
    else:
        variant = TWO_CTA if is_2cta else MLA if has_latent_cache else WIDE if is_wide else STANDARD
        variant = E4M3 if problem.dtype == FLOAT8 else variant
        variant = E4M3_CACHE if problem.has_e4m3_cache and not has_latent_cache else variant
        features = VARIANTS[problem.direction, "sm90", variant].features
    missing = [name for name in problem.features if name not in features]
    widest = SM90_MAX_HEAD_DIM if has_codes(problem) else WIDE_MAX_HEAD_DIM
    present = {
        "num_splits_key": backward and problem.num_splits_key is not None,
        "choice of gradients": backward and not {*OPERANDS} <= {*problem.gradients},
        "a scale below 0": not backward and problem.scale_value < 0,
        "float32": problem.dtype == "float32",
        f"head dims beyond {widest}": max(shape.head_dim, shape.head_dim_value) > widest and not has_latent_cache,
        "e4m3 codes of keys that contain the values without key_rope": has_latent_cache
        and problem.has_e4m3_cache
        and problem.key_rope is None,
        f"key_rope of other than {ROPE_COLUMNS} columns": problem.key_rope is not None
        and problem.key_rope.shape[3] != ROPE_COLUMNS,
        "variable lengths of keys that contain the values": has_latent_cache and problem.sequences is not None,
        "deterministic gradients with these head dims": is_2cta and problem.deterministic,
        "rows aligned to less than 16 bytes": any(
            tensor.vector_bytes < ROW_ALIGNMENT_BYTES
            for name, tensor in problem.tensors().items()
            if name not in BIASES
        ),
        "axes without an index": any(0 in getattr(problem, name).shape for name in _tma_operands(problem)),
        "strides of 0 or less": any(
            stride <= 0 for name in _tma_operands(problem) for stride in _strides(getattr(problem, name))
        ),
        f"variable lengths with row strides of {RAGGED_STRIDE_BYTES} bytes or more": problem.has_ragged_rows
        and any(_has_far_rows(getattr(problem, name)) for name in _ragged_operands(problem)),
    }
    found = (name for name, is_present in present.items() if is_present)
    return *missing, *found, *unsupported_sm90(problem), *_unsupported_pages(problem)


def _unsupported_pages(problem: Problem) -> tuple[str, ...]:
    """Returns what the pools have that the tensor maps of pages cannot describe.

    The map of the tile with the last key counts the rows of value from its first page on, so that a page starts at a
    whole number of rows.
    """
    loads_codes = problem.has_e4m3_cache and problem.key_rope is None  # threads load these
    if problem.pages is None or loads_codes:
        return ()
    num_pages, page_size, *_ = problem.value.shape
    page, row, *_ = problem.value.strides
    is_described = num_pages < 2 or row <= 0 or page % row == 0 or is_mla(problem)
    last_row = (num_pages - 1) * value_page_rows(problem) + page_size
    present = {
        f"pages of fewer than {LEAST_PAGE_SIZE} rows": page_size < LEAST_PAGE_SIZE,
        "pages of value whose stride is no multiple of its row stride": not is_described,
        "2^30 rows of value or more": is_described and last_row >= RAGGED_ROWS and not is_mla(problem),
    }
    return tuple(name for name, is_present in present.items() if is_present)


def value_page_rows(problem: Problem) -> int:
    """Returns the row strides from one page of value to the next; 0 if there is one page."""
    page, row, *_ = problem.value.strides
    return page // row if problem.value.shape[0] > 1 and row > 0 else 0


def _needs_2cta(shape: Shape) -> bool:
    """Returns whether dK and dV of these head dims need two thread blocks."""
    return max(shape.head_dim, shape.head_dim_value) > NARROW_HEAD_DIM and not splits_score_rows(shape)


def _tma_operands(problem: Problem) -> tuple[str, ...]:
    if problem.key_rope is not None:
        return (*OPERANDS, KEY_ROPE)
    if problem.has_e4m3_cache:  # threads load its codes
        return ("query",)
    return OPERANDS if problem.direction == "forward" else (*OPERANDS, "grad_output")


def _ragged_operands(problem: Problem) -> tuple[str, ...]:
    """Returns the operands whose rows belong to sequences of several lengths, rather than to pages."""
    return _tma_operands(problem) if problem.pages is None else ("query",)


def _has_far_rows(tensor: Tensor) -> bool:
    """Returns whether the last axis of the tensor map of several lengths would have no step above 0."""
    return tensor.shape[1] > 1 and tensor.strides[1] * OPERAND_BYTES[tensor.dtype] >= RAGGED_STRIDE_BYTES


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides of every axis with more than one index: a tensor map steps forward along these."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1)


@dataclass(frozen=True, slots=True)
class _Choice:
    """When a variant may and should be chosen.

    objection: why the variant would compute a problem wrongly; "" if it computes the problem
    is_faster: whether the planner prefers the variant to the standard one
    """

    objection: Callable[[Problem, TileConfig], str]
    is_faster: Callable[[Problem, TileConfig, int], bool]


def objections(problem: Problem, tile: TileConfig) -> list[str]:
    """Returns why the tile's variant would compute this problem wrongly; tile_rules.py has the other rules."""
    choice = _CHOICES.get((problem.direction, tile.variant))
    found = choice.objection(problem, tile) if choice else ""
    return [f"variant = {tile.variant!r}: {found}; use the standard variant"] if found else []


def applies(problem: Problem, tile: TileConfig, num_sms: int) -> bool:
    """Returns whether the planner tries the tile for this problem: its variant computes it, and is faster."""
    if problem.direction == "forward":
        if (tile.tile_m, tile.tile_n) == LONG_CAUSAL_TILE and _is_short_causal(problem):
            return False
    elif _bias_is_faster_on_sm80(problem) or (
        has_few_rows(problem.direction, tile) and not _few_keys_are_faster(problem, tile, num_sms)
    ):
        return False
    choice = _CHOICES.get((problem.direction, tile.variant))
    return choice is None or (choice.is_faster(problem, tile, num_sms) and not choice.objection(problem, tile))


def _bias_is_faster_on_sm80(problem: Problem) -> bool:
    """Returns whether the bias takes more time than the products: of narrow heads, or loaded by single elements."""
    if problem.bias is None:
        return False
    is_narrow = max(problem.shape.head_dim, problem.shape.head_dim_value) <= SM80_BIAS_HEAD_DIM
    return (is_narrow and not has_wgmma(problem)) or problem.bias.vector_bytes < WORD_BYTES


def applicable(
    problem: Problem, tiles: Iterable[TileConfig], num_sms: int, *, any_length: bool = False
) -> list[TileConfig]:
    """Returns the tiles that the planner tries for this problem, the fastest first.

    any_length: only those that are for sequences of any length, in the order for long ones
    """
    found = [tile for tile in tiles if applies(problem, tile, num_sms)]
    if not any_length:
        usual = tile_time.fastest_first(problem, found, num_sms)
        if not usual or _split_kv_objection(problem, usual[0]):
            return usual
        standard = (tile for tile in found if tile.variant == STANDARD)
        faster = tile_time.faster_in_parts(problem, standard, usual, num_sms)
        in_parts = (replace(tile, variant=SPLIT_KV) for tile in faster)
        return [*(with_options(problem, tile) for tile in in_parts), *usual]
    lengths = {tile: VARIANTS[problem.direction, "sm90", tile.variant].lengths for tile in found}
    return [
        tile
        for tile in found
        if lengths[tile] == "any" and not tile_time.is_single(tile) and not has_few_rows(problem.direction, tile)
    ]


def _is_short_causal(problem: Problem) -> bool:
    """Returns whether a causal mask hides much of the key tiles on the diagonal, compared with all of them."""
    shape = problem.shape
    return problem.mask.form == "causal" and min(shape.num_queries, shape.num_keys) < MULTICAST_LENGTH


def has_few_rows(kind: str, tile: TileConfig | Build) -> bool:
    """Returns whether a tile of this kind of kernel is for problems with few work tiles: it divides them further.

    Blocks have one consumer warpgroup, whose 64 query rows (forward) or key rows (backward) have the tensor cores of an
    SM for themselves.
    """
    rows = tile.tile_m if kind == "forward" else tile.tile_n
    return tile.variant == STANDARD and rows == WARPGROUP_ROWS


def _few_keys_are_faster(problem: Problem, tile: TileConfig, num_sms: int) -> bool:
    """Blocks of 64 keys are faster if each SM has at most one, and under a causal mask at most two.

    Narrow heads have 64 queries a tile up to SHORT_QUERIES, and 128 beyond. Wide heads of one tile of 128 keys are
    faster in one block per head, unless SMs idle. Windows and score terms were not measured.
    """
    shape = problem.shape
    if {*problem.features} - {"grouped"} or problem.mask.form == "local":
        return False
    is_narrow = max(shape.head_dim, shape.head_dim_value) <= WARPGROUP_ROWS
    if is_narrow and tile.tile_m == WARPGROUP_ROWS and shape.num_queries > SHORT_QUERIES[problem.mask.form]:
        return False
    if _parts_of_key_tiles_are_faster(problem, num_sms):
        return False
    tiles = shape.batch * shape.num_heads_key * integers.ceil_div(shape.num_keys, WARPGROUP_ROWS)
    if shape.group > 1 and _query_heads_is_faster(problem, replace(tile, tile_n=2 * WARPGROUP_ROWS), num_sms):
        return False
    if not is_narrow and shape.num_keys <= 2 * WARPGROUP_ROWS:
        return shape.num_keys > WARPGROUP_ROWS and 2 * tiles <= num_sms
    has_rounds = problem.mask.form == "causal" and shape.num_keys > 2 * WARPGROUP_ROWS  # else one block per head
    return tiles <= (2 if has_rounds else 1) * num_sms


def _parts_of_key_tiles_are_faster(problem: Problem, num_sms: int) -> bool:
    """Without a mask, few key tiles of 128 keys are faster in parts with some of the queries each, if they save enough.

    The parts are those of the tiles that have option shared_end.
    """
    shape = problem.shape
    has_equal_tiles = problem.mask.form == "full" and {*problem.features} <= {"grouped", "sinks"}
    work_tiles = shape.batch * shape.num_heads_key * integers.ceil_div(shape.num_keys, 2 * WARPGROUP_ROWS)
    if not has_equal_tiles or problem.deterministic or work_tiles >= num_sms:
        return False
    dims = shape.head_dim, shape.head_dim_value
    is_narrow = max(dims) <= WARPGROUP_ROWS
    if not is_narrow and (min(dims) <= WARPGROUP_ROWS or max(dims) > NARROW_HEAD_DIM):
        return False
    rows = 2 * WARPGROUP_ROWS if is_narrow else WARPGROUP_ROWS
    query_tiles = shape.group * integers.ceil_div(shape.num_queries, rows)
    saved = query_tiles - shared_tiles.time_of_few(work_tiles, query_tiles, num_sms)
    return saved * rows >= LEAST_SAVED_QUERIES


def _per_head_objection(problem: Problem, tile: TileConfig) -> str:
    """Every query tile must see a key, because nothing else writes its gradient."""
    shape = problem.shape
    if problem.sequences is not None:
        return "one block per head needs sequences of one length"
    band, tiles = problem.mask.band(shape.num_queries, shape.num_keys), (tile.tile_m, tile.tile_n)
    sees_keys = all(
        tile_order.key_tile_start(band, query_tile, *tiles) < tile_order.key_tile_end(band, query_tile, *tiles)
        for query_tile in range(integers.ceil_div(shape.num_queries, tile.tile_m))
    )
    return "" if sees_keys else "some query tiles see no key, and nothing writes their gradient"


def _per_head_is_faster(problem: Problem, tile: TileConfig, num_sms: int) -> bool:
    """One block per head keeps the SMs as busy as the standard variant, and its operands stay in the L2 cache."""
    shape = problem.shape
    if problem.is_empty or _parts_of_key_tiles_are_faster(problem, num_sms):
        return False
    # Of narrow heads, tiles of 64 queries were measured with one tile a head alone.
    is_narrow = max(shape.head_dim, shape.head_dim_value) <= WARPGROUP_ROWS
    has_one_tile = shape.num_queries <= tile.tile_m and shape.num_keys <= tile.tile_n
    if is_narrow and tile.tile_m == WARPGROUP_ROWS and not has_one_tile:
        return False
    heads, key_tiles = shape.batch * shape.num_heads_key, integers.ceil_div(shape.num_keys, tile.tile_n)
    busiest, shared = integers.ceil_div(heads, num_sms) * key_tiles, integers.ceil_div(heads * key_tiles, num_sms)
    width = shape.head_dim * F32_BYTES + (shape.head_dim + shape.head_dim_value) * ITEM_BYTES[problem.dtype]
    rows = max(min(num_sms, heads), 1) * shape.num_queries * shape.group
    # Under a causal mask a key tile is done with the queries before it.
    live = rows * width // (1 if problem.mask.form == "full" else 2)
    return busiest <= PER_HEAD_IMBALANCE * shared and live <= PER_HEAD_L2_BYTES


def _no_objection(problem: Problem, tile: TileConfig) -> str:
    """Returns "": the rules of a Build refuse what the variant would compute wrongly."""
    return ""


def _query_heads_is_faster(problem: Problem, tile: TileConfig, num_sms: int) -> bool:
    """If work tiles of whole groups are few, some SMs idle; the more if a mask makes these tiles unequal."""
    shape = problem.shape
    if shape.group == 1 or problem.deterministic or _parts_of_key_tiles_are_faster(problem, num_sms):
        return False
    key_tiles = shape.batch * integers.ceil_div(shape.num_keys, tile.tile_n)
    if shape.tokens is not None:  # num_keys is that of the longest sequence
        key_tiles = min(key_tiles, shape.tokens[1] // tile.tile_n + shape.batch)
    most = QUERY_HEADS_WORK_TILES_FULL if problem.mask.form == "full" else QUERY_HEADS_WORK_TILES
    return key_tiles * shape.num_heads_key < most * num_sms


def _ds_registers_objection(problem: Problem, tile: TileConfig) -> str:
    """The rules of a Build do not see the scale."""
    is_wide = max(problem.shape.head_dim, problem.shape.head_dim_value) > DV_FIRST_HEAD_DIM
    return "S starts from -logsumexp / scale, and the scale is 0" if is_wide and problem.scale_value == 0 else ""


def _key_stages_are_faster(problem: Problem, tile: TileConfig, num_sms: int) -> bool:
    """Two key stages are faster, but were not measured with windows, unless their gradients are deterministic."""
    return tile.key_stages == 1 or problem.mask.form != "local" or problem.deterministic


def _always_faster(problem: Problem, tile: TileConfig, num_sms: int) -> bool:
    """Returns True: what is faster for some lengths is ahead of it in the table."""
    return True


def _multicast_objection(problem: Problem, tile: TileConfig) -> str:
    features = VARIANTS["forward", "sm90", MULTICAST].features
    is_plain = {*problem.features} <= {*features} and problem.mask.form == "causal"
    return "" if is_plain else f"the kernel has causal masks and no features but {', '.join(features)}"


def _multicast_is_faster(problem: Problem, tile: TileConfig, num_sms: int) -> bool:
    """The first block of a cluster waits for the other's last key tile, which costs little in long rows alone."""
    return min(problem.shape.num_queries, problem.shape.num_keys) >= MULTICAST_LENGTH


def _split_kv_objection(problem: Problem, tile: TileConfig) -> str:
    """How many blocks share the keys follows from the sizes of a call, and decides the bits of its results."""
    features = VARIANTS["forward", "sm90", SPLIT_KV].features
    if problem.direction != "forward" or problem.mask.form == "local" or not {*problem.features} <= {*features}:
        return f"the kernel has no windows, and no features but {', '.join(features)}"
    is_invariant = problem.pages is not None and problem.pages.invariant
    return "results would depend on the other sequences of a call, and pages are invariant" if is_invariant else ""


# What the first warpgroup of a forward does, by variant, if it is more than one warp that loads.
_LOADING: Final = {
    E4M3: "one warp loads, two transpose values",
    E4M3_CACHE: "one loads keys and values and converts them to 16 bits",
}
# How several blocks of a forward share work, by variant.
_SHARING: Final = {
    MULTICAST: "two blocks of a cluster load keys and values for both: ",
    SPLIT_KV: "blocks share the keys of each query tile, of which there are fewer than SMs: ",
}
_CHOICES: Final[dict[tuple[str, str], _Choice]] = {
    ("backward", PER_HEAD): _Choice(_per_head_objection, _per_head_is_faster),
    ("backward", QUERY_HEADS): _Choice(_no_objection, _query_heads_is_faster),
    ("backward", DS_REGISTERS): _Choice(_ds_registers_objection, _always_faster),
    ("backward", KEY_REGISTERS): _Choice(_no_objection, _key_stages_are_faster),
    ("forward", MULTICAST): _Choice(_multicast_objection, _multicast_is_faster),
    ("forward", SPLIT_KV): _Choice(_split_kv_objection, _always_faster),
}


def with_warps(build: Build) -> Build:
    """Returns the build with the warps of each product: warpgroups share rows of S, or of S^T, dV and dK."""
    if build.variant in (
        WIDE,
        MLA,
    ):  # the warpgroups compute S of alternate tiles, and divide the columns of O, dQ, dK, dV
        columns = WARPGROUP_WARPS, WARPGROUPS
        build = replace(build, warps_scores=(WARPGROUP_WARPS, 1), warps_grad_q=columns)
        return build if build.kind == "forward" else replace(build, warps_grad_v=columns, warps_grad_k=columns)
    if build.kind == "forward":
        return replace(build, warps_scores=(build.warps - LOAD_WARPGROUPS * WARPGROUP_WARPS, 1))
    key_warps = build.tile_n // WARPGROUP_ROWS * WARPGROUP_WARPS, 1
    return replace(
        build,
        warps_scores=key_warps,
        warps_grad_v=key_warps,
        warps_grad_k=key_warps,
        warps_grad_q=(DQ_WARPGROUPS * WARPGROUP_WARPS, 1),
    )


def main_grid(build: Build) -> Grid:
    """Returns the grid of the main kernel: persistent blocks, one for each SM, or whole clusters of them.

    Variant wide has a cluster for each pair of query tiles instead, and its backward two more for each pair of key
    tiles.

    Work tiles are query tiles in the forward, key tiles in the backward, of every key head or every query head, and
    heads with one block per head. A cluster computes as many neighbouring tiles as it has blocks.
    Blocks with y > 0 compute one query tile each, of the last rounds.
    """
    if build.variant == PER_HEAD:
        return _per_head_blocks(), ONE, ONE
    if build.shares_chunks:
        return decode.main_grid(build)
    cluster = build.body.cluster
    if build.variant == WIDE and build.kind == "backward":
        return _wide_backward_grid(build)
    if build.variant == WIDE:
        return cluster * ceil_div(NUM_QUERIES, build.tile_m * cluster), NUM_HEADS, BATCH
    if build.shares_query_tiles:
        return _up_to_sms(WORK_TILES * NUM_SPLITS_KEY), ONE, ONE
    if SHARED_END in build.options:
        return _up_to_sms(WORK_TILES * Name("num_splits_query")), ONE, ONE
    if build.kind == "forward":
        work_tiles = ceil_div(NUM_QUERIES, build.tile_m * cluster) * NUM_HEADS * BATCH
    else:
        heads = NUM_HEADS if build.variant == QUERY_HEADS else NUM_HEADS_KEY
        work_tiles = ceil_div(NUM_KEYS, build.tile_n * cluster) * heads * BATCH
    if deals_last_rounds(build):
        has_rounds = work_tiles >= LAST_ROUNDS_LEAST * NUM_SMS
        return _up_to_sms(work_tiles), 1 + LAST_ROUNDS * (NUM_QUERIES >= LAST_ROUNDS_LENGTH) * has_rounds, ONE
    if cluster == 1:
        return _up_to_sms(work_tiles), ONE, ONE
    return cluster * maximum(minimum(NUM_SMS // cluster, work_tiles), 1), ONE, ONE


def _up_to_sms(work_tiles: Expr) -> Expr:
    """Returns the persistent blocks that compute so many work tiles: at least one, and one for each SM at most."""
    return maximum(minimum(NUM_SMS, work_tiles), 1)


def _wide_backward_grid(build: Build) -> Grid:
    """Returns the grid: for each key head a cluster for each pair of key tiles, twice, and for each of query tiles."""
    cluster = build.body.cluster
    key_pairs = ceil_div(NUM_KEYS, cluster * build.tile_n)
    query_pairs = ceil_div(NUM_QUERIES, cluster * build.tile_m)
    return cluster * (2 * key_pairs + GROUP * query_pairs), NUM_HEADS_KEY, BATCH


def finish_kv_grid(build: Build) -> Grid:
    """Returns the grid of the kernel that converts dK and dV: a block for the rows of one warpgroup."""
    return times(ceil_div(NUM_KEYS, build.tile_n), build.tile_n // WARPGROUP_ROWS), NUM_HEADS_KEY, BATCH


def num_splits_key(build: Build) -> Expr:
    """Returns the key tiles of the backward: every one is a work tile of its own."""
    return ceil_div(NUM_KEYS, build.tile_n)


def per_head_accum_bytes(build: Build) -> Expr:
    """Returns the bytes of grad_query_accum with one block per head: dQ of one key head for each block."""
    rows = _per_head_blocks() * round_up(NUM_QUERIES, build.tile_m) * GROUP
    return rows * (build.columns * F32_BYTES)


def _per_head_blocks() -> Expr:
    return _up_to_sms(NUM_HEADS_KEY * BATCH)


def reason(build: Build) -> str:
    """Returns what the warpgroups of a block do."""
    consumers = build.warps_scores[0] // WARPGROUP_WARPS
    computing = "one warpgroup computes" if consumers == 1 else f"{consumers} warpgroups compute"
    if build.variant == WIDE and build.kind == "backward":
        roles = (
            "blocks of dQ keep Q and dO, blocks of dK keep K and V, blocks of dV keep K; two blocks of a cluster load "
            "the other tiles for both: two warpgroups compute the scores of alternate tiles and half of the columns of "
            "the gradient each, one warp loads"
        )
    elif build.variant == WIDE:
        roles = (
            "two blocks of a cluster load keys and values for both: two warpgroups compute S of alternate key tiles "
            "and half of the columns of O each, one warp loads"
        )
    elif build.variant == MLA:
        roles = (
            "blocks share the keys of all sequences: two warpgroups compute S of alternate key tiles and half of the "
            "columns of O each, one warp loads keys, whose first columns are the values"
        )
        if build.has(registry.KV8_TILE):
            roles = roles.replace("one warp loads keys,", "four warps load keys and convert their e4m3 codes,")
    elif build.kind == "forward":
        how = _SHARING.get(build.variant, "")
        loading = _LOADING.get(build.variant, "one warp loads")
        roles = f"{how}{computing} S and O, {loading}"
    elif build.variant == TWO_CTA:
        roles = "one warpgroup computes P and dV, one dS and dK, one dQ of both blocks of a cluster, one warp loads"
    else:
        how = _work_tiles(build)
        dk = "dK from dS in registers, and dV" if build.variant in KEEPS_DS else "dK and dV"
        dq = "dQ from keys in registers" if build.variant == KEY_REGISTERS else "dQ"
        roles = f"{how}{computing} {dk}, one computes {dq}, one warp loads"
    return f"sm90 family (wgmma, TMA): {roles}"


def _work_tiles(build: Build) -> str:
    """Returns how blocks divide key tiles and heads, if that is not a block for each key tile of a head."""
    if build.variant == PER_HEAD:
        return "one block per head: "
    if build.variant == QUERY_HEADS:
        return "a block computes a key tile of one query head and adds dK and dV in float32: "
    return "a block computes a key tile of all query heads of a group: " if build.has("grouped") else ""


def tensor_map_box(build: Build, name: str, rank: int, page_size: int | None) -> tuple[tuple[int, ...], int]:
    """Returns (box, swizzle width in bytes) of the tensor map `name`: a box is one strip of a tile, or of a page in it.

    rank: axes of the map
    page_size: rows of a page; None for no pages
    """
    field = mapped_field(name)
    tiles = tma_tiles(build) | stored_tiles(build)
    rows, columns = (WARP_ROWS, ROPE_COLUMNS) if field == KEY_ROPE else tiles[field]
    if page_size is not None and field in ("key", "value"):
        rows = min(page_size, most_box_rows(build))
    swizzle = swizzle_bytes(columns, build.item_bytes)
    return (swizzle // build.item_bytes, rows, *([1] * (rank - 2))), swizzle
