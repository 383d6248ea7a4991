"""Choice of kernels of the sm90 family: which problems it takes, and which variants and tiles are faster for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.backward_parts.kernel import has_wgmma, unsupported_sm90
from cutlass_py_attn.kernels.common.layout import RAGGED_ROWS, RAGGED_STRIDE_BYTES
from cutlass_py_attn.kernels.kernel import FusedKernel
from cutlass_py_attn.kernels.problem_kind import NARROW_HEAD_DIM, ProblemKind, is_mla, sizes
from cutlass_py_attn.kernels.sm90_backward import kernel as sm90_backward
from cutlass_py_attn.kernels.sm90_backward_2cta import kernel as sm90_backward_2cta
from cutlass_py_attn.kernels.sm90_common.rules import SM90_MAX_HEAD_DIM
from cutlass_py_attn.kernels.sm90_e4m3 import kernel as sm90_e4m3
from cutlass_py_attn.kernels.sm90_e4m3_cache import kernel as sm90_e4m3_cache
from cutlass_py_attn.kernels.sm90_family import backward_choice, tile_time
from cutlass_py_attn.kernels.sm90_family.backward_choice import PARTS_ARE_FASTER, parts_of_key_tiles
from cutlass_py_attn.kernels.sm90_family.row import NEVER, Row
from cutlass_py_attn.kernels.sm90_family.tile_options import with_options
from cutlass_py_attn.kernels.sm90_family.tiles import nearest_row, sm90_rows, splits_score_rows
from cutlass_py_attn.kernels.sm90_forward import kernel as sm90_forward
from cutlass_py_attn.kernels.sm90_mla import kernel as sm90_mla
from cutlass_py_attn.kernels.sm90_mla.layout import ROPE_COLUMNS
from cutlass_py_attn.kernels.sm90_wide import kernel as sm90_wide
from cutlass_py_attn.kernels.sm90_wide.kernel import WIDE_MAX_HEAD_DIM
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import Expr
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import DS_REGISTERS, MULTICAST, PER_HEAD, QUERY_HEADS, SPLIT_KV, STANDARD, TWO_CTA
from cutlass_py_attn.problem.block_sparse import undivided
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


def kernel_of_dims(direction: str, dims: Shape | Build) -> FusedKernel:
    """Returns the kernel of the family for these head dims, of 16-bit operands that are no latent cache."""
    is_wide = max(dims.head_dim, dims.head_dim_value) > SM90_MAX_HEAD_DIM
    if direction == "forward":
        return sm90_wide.FORWARD if is_wide else sm90_forward.FORWARD
    if splits_score_rows(dims):
        return sm90_backward.SCORE_ROWS_BACKWARD
    if is_wide:
        return sm90_wide.BACKWARD
    return sm90_backward_2cta.BACKWARD if _needs_2cta(dims) else sm90_backward.BACKWARD


def unsupported_features(problem: Problem) -> tuple[str, ...]:
    """Returns what the problem has that the family does not take; empty if it takes the problem."""
    shape = problem.shape
    backward, has_latent_cache = problem.direction == "backward", is_mla(problem)
    kernel = kernel_of_dims(problem.direction, shape)
    if not backward and problem.dtype == FLOAT8:
        kernel = sm90_e4m3.FORWARD
    elif not backward and has_latent_cache:
        kernel = sm90_mla.FORWARD
    elif not backward and problem.has_e4m3_cache:
        kernel = sm90_e4m3_cache.FORWARD
    widest = SM90_MAX_HEAD_DIM if has_codes(problem) else WIDE_MAX_HEAD_DIM
    present = {
        "num_splits_key": backward and problem.num_splits_key is not None,
        "choice of gradients": backward and not {*OPERANDS} <= {*problem.gradients},
        "a scale below 0": problem.scale_value < 0 and not kernel.takes_negative_scales,
        "float32": problem.dtype == "float32",
        f"head dims beyond {widest}": max(shape.head_dim, shape.head_dim_value) > widest and not has_latent_cache,
        "e4m3 codes of keys that contain the values without key_rope": has_latent_cache
        and problem.has_e4m3_cache
        and problem.key_rope is None,
        f"key_rope of other than {ROPE_COLUMNS} columns": problem.key_rope is not None
        and problem.key_rope.shape[3] != ROPE_COLUMNS,
        "variable lengths of keys that contain the values": has_latent_cache and problem.sequences is not None,
        "deterministic gradients with these head dims": kernel.variant == TWO_CTA and problem.deterministic,
        "deterministic gradients with ranges of keys": problem.deterministic and problem.form.has_ranges,
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
    return *kernel.lacks(problem), *found, *unsupported_sm90(problem), *_unsupported_pages(problem)


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
    page_rows = page // row if num_pages > 1 and row > 0 else 0
    last_row = (num_pages - 1) * page_rows + page_size
    present = {
        f"pages of fewer than {LEAST_PAGE_SIZE} rows": page_size < LEAST_PAGE_SIZE,
        "pages of value whose stride is no multiple of its row stride": not is_described,
        "2^30 rows of value or more": is_described and last_row >= RAGGED_ROWS and not is_mla(problem),
    }
    return tuple(name for name, is_present in present.items() if is_present)


def _needs_2cta(shape: Shape | Build) -> bool:
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


def refusals(problem: Problem, tile: TileConfig) -> list[Refusal]:
    """Returns why the tile's variant would compute this problem wrongly; its `kernel.py` has the other rules."""
    objection = _OBJECTIONS.get((problem.direction, tile.variant))
    rule = objection(problem, tile) if objection else ""
    found = [refuse("variant", tile.variant, rule, "use the standard variant")] if rule else []
    if problem.visible_blocks is not None:
        found += undivided(problem.block_size, tile.tile_m, tile.tile_n)
    return found


def tried(problem: Problem, num_sms: int) -> list[Row]:
    """Returns the rows whose tiles compute this problem and are tried for its sizes, in the order of their table."""
    if problem.direction == "backward" and _bias_is_faster_on_sm80(problem):
        return []
    kind, values = ProblemKind.of(problem), values_of(problem, num_sms)
    rows = sm90_rows(kind)
    return [row for row in rows if row.when_for(kind).evaluate(values) and not refusals(problem, row.tile)]


def values_of(problem: Problem, num_sms: int) -> dict[str, int]:
    """Returns the values of the names in the rules of rows."""
    values = sizes(problem, num_sms)
    if problem.direction == "backward":
        values[PARTS_ARE_FASTER.name] = parts_of_key_tiles(ProblemKind.of(problem)).evaluate(values)
    return values


def applies(problem: Problem, tile: TileConfig, num_sms: int) -> bool:
    """Returns whether the planner tries a tile for this problem: by the rule of the nearest row."""
    if refusals(problem, tile) or (problem.direction == "backward" and _bias_is_faster_on_sm80(problem)):
        return False
    kind = ProblemKind.of(problem)
    row = nearest_row(kind, tile)
    return bool(row.when(kind, tile).evaluate(values_of(problem, num_sms)))


def _bias_is_faster_on_sm80(problem: Problem) -> bool:
    """Returns whether the bias takes more time than the products: of narrow heads, or loaded by single elements."""
    if problem.bias is None:
        return False
    is_narrow = max(problem.shape.head_dim, problem.shape.head_dim_value) <= SM80_BIAS_HEAD_DIM
    return (is_narrow and not has_wgmma(problem)) or problem.bias.vector_bytes < WORD_BYTES


def applicable(problem: Problem, num_sms: int, *, any_length: bool = False) -> list[TileConfig]:
    """Returns the tiles that the planner tries for this problem, the fastest first.

    any_length: only those that are for sequences of any length, in the order for long ones
    """
    kind, rows = ProblemKind.of(problem), tried(problem, num_sms)
    if any_length or problem.direction == "backward":
        return [row.tile_for(kind) for row in rows if row.any_length or not any_length]
    values = values_of(problem, num_sms)
    usual = tile_time.fastest_first(kind, sm90_rows(kind), rows, values)
    tiles = [row.tile_for(kind) for row in usual]
    if not usual or problem.is_empty or split_kv_objection(problem):
        return tiles
    faster = tile_time.faster_in_parts(kind, rows, usual, values)
    return [*(in_parts(kind, row) for row in faster), *tiles]


def every_tile(problem: Problem, num_sms: int) -> Iterable[TileConfig]:
    """Returns the tiles that the planner tries for any sizes, those for the sizes of the problem first."""
    kind = ProblemKind.of(problem)
    rows = sm90_rows(kind)
    tiles = [row.tile_for(kind) for row in (*tried(problem, num_sms), *rows)]
    if not split_kv_objection(problem):
        tiles += [in_parts(kind, row) for row in rows if row.tile.variant == STANDARD]
    return dict.fromkeys(tiles)


def in_parts(kind: ProblemKind, row: Row) -> TileConfig:
    """Returns the tile of a row with which blocks share the keys of each query tile."""
    return with_options(kind, replace(row.tile, variant=SPLIT_KV), row.options_for(kind))


def order(build: Build) -> tuple[int, ...]:
    """Sort key of kernels that take the same calls: the planner's order.

    Variant split_kv is before multicast, which leaves SMs idle where both are preferred.
    """
    kind = ProblemKind.of(build)
    return build.variant != SPLIT_KV, sm90_rows(kind).index(nearest_row(kind, TileConfig.of(build)))


def preferred_when(build: Build, others: Sequence[Build]) -> Expr:
    """Returns the rule of a kernel's row: 1 for the first that is for calls of any sizes."""
    kind = ProblemKind.of(build)
    table = sm90_rows(kind)
    if build.variant == SPLIT_KV:
        return tile_time.preferred_in_parts(table, build, others)
    row = nearest_row(kind, TileConfig.of(build))
    when = backward_choice.in_sizes(kind, row.when_for(kind))
    moved = tile_time.is_first(kind, table, row)
    return when if moved == NEVER else moved


def sizes_in_words(build: Build) -> str:
    """Returns the sizes for which a kernel is; "" for any."""
    if build.variant == QUERY_HEADS or has_few_rows(build.kind, build):
        return "few query tiles" if build.kind == "forward" else "few key tiles"
    return ""


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
    if problem.is_empty:
        return "there is nothing to launch"
    if problem.sequences is not None:
        return "one block per head needs sequences of one length"
    left, right = problem.mask.edges
    values = {"num_queries": shape.num_queries, "num_keys": shape.num_keys, "window_left": left, "window_right": right}
    values |= {"bottom_right": int(problem.mask.bottom_right)}
    sees_keys = sm90_backward.sees_keys(problem.form, tile.tile_m).evaluate(values)
    return "" if sees_keys else "some query tiles see no key, and nothing writes their gradient"


def _ds_registers_objection(problem: Problem, tile: TileConfig) -> str:
    """The rules of a Build do not see the scale."""
    is_wide = max(problem.shape.head_dim, problem.shape.head_dim_value) > DV_FIRST_HEAD_DIM
    return "S starts from -logsumexp / scale, and the scale is 0" if is_wide and problem.scale_value == 0 else ""


def _multicast_objection(problem: Problem, tile: TileConfig) -> str:
    features = sm90_forward.MULTICAST_FORWARD.features
    is_plain = {*problem.features} <= {*features} and problem.form.grows
    return "" if is_plain else f"the kernel has causal masks and no features but {', '.join(features)}"


def split_kv_objection(problem: Problem) -> str:
    """How many blocks share the keys follows from the sizes of a call, and decides the bits of its results."""
    features = sm90_forward.SPLIT_KV_FORWARD.features
    if problem.direction != "forward" or problem.form.has_left or not {*problem.features} <= {*features}:
        return f"the kernel has no windows, and no features but {', '.join(features)}"
    is_invariant = problem.pages is not None and problem.pages.invariant
    return "results would depend on the other sequences of a call, and pages are invariant" if is_invariant else ""


_OBJECTIONS: Final[dict[tuple[str, str], Callable[[Problem, TileConfig], str]]] = {
    ("backward", PER_HEAD): _per_head_objection,
    ("backward", DS_REGISTERS): _ds_registers_objection,
    ("forward", MULTICAST): _multicast_objection,
    ("forward", SPLIT_KV): lambda problem, tile: split_kv_objection(problem),
}


def rejection_reason(problem: Problem) -> str:
    """Returns the end of a sentence: why the family does not take this problem; empty if it does."""
    unsupported = unsupported_features(problem)
    return f"; the sm90 family takes no {', '.join(unsupported)}" if unsupported else ""
