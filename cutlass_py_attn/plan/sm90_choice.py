"""Choice of kernels of the sm90 family: which problems it takes, and which variants and tiles are faster for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from cutlass_py_attn.plan import backward_choice, sm90, sm90_mla_kernel, tile_time
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.grad_bias_mode import has_wgmma, unsupported_sm90
from cutlass_py_attn.plan.kernel import Family
from cutlass_py_attn.plan.sm90_mla import ROPE_COLUMNS
from cutlass_py_attn.plan.sm90_smem import RAGGED_ROWS, RAGGED_STRIDE_BYTES, WARPGROUP_ROWS
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.plan.tile_options import with_options
from cutlass_py_attn.plan.tile_rules import NARROW_HEAD_DIM, SM90_MAX_HEAD_DIM, WIDE_MAX_HEAD_DIM
from cutlass_py_attn.plan.tiles import is_mla, sm90_tiles, splits_score_rows
from cutlass_py_attn.plan.variants import (
    DS_REGISTERS,
    MULTICAST,
    PER_HEAD,
    SPLIT_KV,
    STANDARD,
)
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import has_codes
from cutlass_py_attn.problem.tensors import (
    BIASES,
    FLOAT8,
    KEY_ROPE,
    OPERAND_BYTES,
    OPERANDS,
    ROW_ALIGNMENT_BYTES,
    WORD_BYTES,
    Shape,
    Tensor,
)
from cutlass_py_attn.refusals import Refusal, refuse

# Head dims up to which backwards with a bias are faster in the sm80 kernels: d 32, s 2048, full, 5 %; at d 64 the sm90
# kernels are 1.39 times as fast. With rows aligned to 2 bytes the sm80 kernels are 1.47 to 1.55 times as fast, at 4
# bytes the sm90 ones 1.60 times. With a gradient of the bias that wgmma sums, d 32 is 1.04 to 2.60 times as fast.
SM80_BIAS_HEAD_DIM: Final = 32
LEAST_PAGE_SIZE: Final = 16  # rows; smaller boxes would be no whole swizzled blocks of shared memory
DV_FIRST_HEAD_DIM: Final = 96  # up to here variant ds_registers starts S^T from 0 and issues dV before dP^T
MULTICAST_LENGTH: Final = 4096  # queries and keys from which on variant multicast is faster
LONG_CAUSAL_TILE: Final = 192, 112  # of d 96, full at any length; causal: 2 % faster at s 8192, 2 % slower at s 2048
# Direction and variant of the kernels that are not for sequences of any length.
_FOR_SOME_LENGTHS: Final = {(kernel.kind, kernel.variant) for kernel in sm90.KERNELS if kernel.lengths != "any"}


def unsupported_features(problem: Problem) -> tuple[str, ...]:
    """Returns what the problem has that the family does not take; empty if it takes the problem."""
    shape = problem.shape
    backward, has_latent_cache = problem.direction == "backward", is_mla(problem)
    is_wide = not has_latent_cache and max(shape.head_dim, shape.head_dim_value) > SM90_MAX_HEAD_DIM
    is_2cta = backward and not is_wide and _needs_2cta(shape)
    if backward and splits_score_rows(shape):
        kernel = sm90.SCORE_ROWS_BACKWARD
    elif backward:
        kernel = sm90.TWO_CTA_BACKWARD if is_2cta else sm90.WIDE_BACKWARD if is_wide else sm90.BACKWARD
    elif problem.dtype == FLOAT8:
        kernel = sm90.E4M3_FORWARD
    elif has_latent_cache:
        kernel = sm90_mla_kernel.FORWARD
    elif problem.has_e4m3_cache:
        kernel = sm90.E4M3_CACHE_FORWARD
    else:
        kernel = sm90.WIDE_FORWARD if is_wide else sm90.FORWARD
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
    return *kernel.lacks(problem.features), *found, *unsupported_sm90(problem), *_unsupported_pages(problem)


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
    last_row = (num_pages - 1) * sm90.value_page_rows(problem) + page_size
    present = {
        f"pages of fewer than {LEAST_PAGE_SIZE} rows": page_size < LEAST_PAGE_SIZE,
        "pages of value whose stride is no multiple of its row stride": not is_described,
        "2^30 rows of value or more": is_described and last_row >= RAGGED_ROWS and not is_mla(problem),
    }
    return tuple(name for name, is_present in present.items() if is_present)


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
    is_faster: whether the planner prefers the variant to the standard one, whatever `backward_choice` says
    """

    objection: Callable[[Problem, TileConfig], str]
    is_faster: Callable[[Problem, TileConfig], bool]


def refusals(problem: Problem, tile: TileConfig) -> list[Refusal]:
    """Returns why the tile's variant would compute this problem wrongly; tile_rules.py has the other rules."""
    choice = _CHOICES.get((problem.direction, tile.variant))
    rule = choice.objection(problem, tile) if choice else ""
    return [refuse("variant", tile.variant, rule, "use the standard variant")] if rule else []


def applying(problem: Problem, tiles: Iterable[TileConfig], num_sms: int) -> list[TileConfig]:
    """Returns the tiles whose variants compute this problem and are faster, in their order."""
    if problem.direction == "forward":
        is_short_causal = _is_short_causal(problem)
        faster = [tile for tile in tiles if not (is_short_causal and (tile.tile_m, tile.tile_n) == LONG_CAUSAL_TILE)]
    elif _bias_is_faster_on_sm80(problem):
        return []
    else:
        kind, sizes = backward_choice.BackwardKind.of(problem), backward_choice.sizes(problem, num_sms)
        faster = [tile for tile in tiles if backward_choice.is_faster(kind, tile).evaluate(sizes)]
    return [tile for tile in faster if _is_chosen(problem, tile)]


def applies(problem: Problem, tile: TileConfig, num_sms: int) -> bool:
    """Returns whether the planner tries the tile for this problem."""
    return bool(applying(problem, (tile,), num_sms))


def _is_chosen(problem: Problem, tile: TileConfig) -> bool:
    choice = _CHOICES.get((problem.direction, tile.variant))
    return choice is None or (choice.is_faster(problem, tile) and not choice.objection(problem, tile))


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
    found = applying(problem, tiles, num_sms)
    if not any_length:
        usual = tile_time.fastest_first(problem, found, num_sms)
        if not usual or _split_kv_objection(problem, usual[0]):
            return usual
        standard = (tile for tile in found if tile.variant == STANDARD)
        faster = tile_time.faster_in_parts(problem, standard, usual, num_sms)
        in_parts = (replace(tile, variant=SPLIT_KV) for tile in faster)
        return [*(with_options(problem, tile) for tile in in_parts), *usual]
    return [
        tile
        for tile in found
        if (problem.direction, tile.variant) not in _FOR_SOME_LENGTHS
        and not tile_time.is_single(tile)
        and not has_few_rows(problem.direction, tile)
    ]


def _is_short_causal(problem: Problem) -> bool:
    """Returns whether a causal mask hides much of the key tiles on the diagonal, compared with all of them."""
    shape = problem.shape
    return problem.mask.form.grows and min(shape.num_queries, shape.num_keys) < MULTICAST_LENGTH


def has_few_rows(kind: str, tile: TileConfig | Build) -> bool:
    """Returns whether a tile of this kind of kernel is for problems with few work tiles: it divides them further.

    Blocks have one consumer warpgroup, whose 64 query rows (forward) or key rows (backward) have the tensor cores of an
    SM for themselves.
    """
    rows = tile.tile_m if kind == "forward" else tile.tile_n
    return tile.variant == STANDARD and rows == WARPGROUP_ROWS


def _per_head_objection(problem: Problem, tile: TileConfig) -> str:
    """Every query tile must see a key, because nothing else writes its gradient."""
    shape = problem.shape
    if problem.sequences is not None:
        return "one block per head needs sequences of one length"
    left, right = problem.mask.edges
    values = {"num_queries": shape.num_queries, "num_keys": shape.num_keys, "window_left": left, "window_right": right}
    values |= {"bottom_right": int(problem.mask.bottom_right)}
    sees_keys = backward_choice.sees_keys(problem.mask.form, tile.tile_m).evaluate(values)
    return "" if sees_keys else "some query tiles see no key, and nothing writes their gradient"


def _has_work(problem: Problem, tile: TileConfig) -> bool:
    """Returns whether there is something to launch."""
    return not problem.is_empty


def _ds_registers_objection(problem: Problem, tile: TileConfig) -> str:
    """The rules of a Build do not see the scale."""
    is_wide = max(problem.shape.head_dim, problem.shape.head_dim_value) > DV_FIRST_HEAD_DIM
    return "S starts from -logsumexp / scale, and the scale is 0" if is_wide and problem.scale_value == 0 else ""


def _always_faster(problem: Problem, tile: TileConfig) -> bool:
    """Returns True: what is faster for some lengths is ahead of it in the table."""
    return True


def _multicast_objection(problem: Problem, tile: TileConfig) -> str:
    features = sm90.MULTICAST_FORWARD.features
    is_plain = {*problem.features} <= {*features} and problem.mask.form.grows
    return "" if is_plain else f"the kernel has causal masks and no features but {', '.join(features)}"


def _multicast_is_faster(problem: Problem, tile: TileConfig) -> bool:
    """The first block of a cluster waits for the other's last key tile, which costs little in long rows alone."""
    return min(problem.shape.num_queries, problem.shape.num_keys) >= MULTICAST_LENGTH


def _split_kv_objection(problem: Problem, tile: TileConfig) -> str:
    """How many blocks share the keys follows from the sizes of a call, and decides the bits of its results."""
    features = sm90.SPLIT_KV_FORWARD.features
    if problem.direction != "forward" or problem.mask.form.has_left or not {*problem.features} <= {*features}:
        return f"the kernel has no windows, and no features but {', '.join(features)}"
    is_invariant = problem.pages is not None and problem.pages.invariant
    return "results would depend on the other sequences of a call, and pages are invariant" if is_invariant else ""


_CHOICES: Final[dict[tuple[str, str], _Choice]] = {
    ("backward", PER_HEAD): _Choice(_per_head_objection, _has_work),
    ("backward", DS_REGISTERS): _Choice(_ds_registers_objection, _always_faster),
    ("forward", MULTICAST): _Choice(_multicast_objection, _multicast_is_faster),
    ("forward", SPLIT_KV): _Choice(_split_kv_objection, _always_faster),
}


def _tiles(problem: Problem, num_sms: int, any_length: bool) -> list[TileConfig]:
    return applicable(problem, sm90_tiles(problem), num_sms, any_length=any_length)


def _rejection(problem: Problem) -> str:
    unsupported = unsupported_features(problem)
    return f"; the sm90 family takes no {', '.join(unsupported)}" if unsupported else ""


FAMILY: Final = Family(
    name="sm90",
    needs_wgmma=True,
    unsupported_features=unsupported_features,
    tiles=_tiles,
    refusals=refusals,
    rejection=_rejection,
)
