"""ABI: the parameters of every kernel, as one C struct that the launch packs and the kernels read.

A field is (name, kind): "i64" is a device address, a stride in elements or a 64-bit number, "i32" a size, "f32" a
factor. The fields of the built-in score terms are in every struct. At the end of the struct are the fields of a
variant, of variable lengths and of registered terms, each only in kernels that have them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.grad_bias import uses_wgmma
from cutlass_py_attn.launch.variants import (
    E4M3,
    E4M3_TILE,
    LAST,
    MLA,
    PERSISTENT,
    QUERY_HEADS,
    SHARED_END,
    STANDARD,
    SUM,
    SUM_LAST,
    TOTAL,
)
from cutlass_py_attn.problem.mask_program import MASK_SCALARS, MaskProgram
from cutlass_py_attn.problem.quantization import CACHE_AXES, CACHE_SCALES, OPERAND_AXES, SCALES, TILE_AXES
from cutlass_py_attn.problem.tensors import (
    BLOCK_AXES,
    F32_BYTES,
    KEY_ROPE,
    MASK_ARRAY_AXES,
    MASK_ARRAYS,
    RANGE_AXES,
    RANGE_EDGES,
    ROW_ALIGNMENT_BYTES,
    ROW_STRIDES,
    VISIBLE_BLOCKS,
)
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.bias import AXES as BIAS_AXES
from cutlass_py_attn.score_terms.dropout import PHILOX

if TYPE_CHECKING:
    from cutlass_py_attn.launch.build import Build

Fields = tuple[tuple[str, str], ...]

_NUMPY: Final = {"i64": "<i8", "i32": "<i4", "f32": "<f4"}


def _strided(*names: str, axes: tuple[str, ...] = ROW_STRIDES) -> Fields:
    """Returns the address of each array and its strides (elements) along these axes."""
    return tuple((field, "i64") for name in names for field in (name, *(f"{name}_{axis}" for axis in axes)))


SEED: Final = PHILOX


def _of_terms(kind: str, *names: str) -> Fields:
    """Returns the fields of that kind of some built-in score terms, or of all of them."""
    terms = [term for term in registry.BUILT_IN if not names or term.name in names]
    return tuple((field, field_kind) for term in terms for field, field_kind in term.struct.kinds if field_kind == kind)


# The address of an array that a problem does not have is 0. cu_seqlens_q, cu_seqlens_k, seqused_k: int32 arrays.
_ADDRESSES: Fields = (
    *_of_terms("i64", "bias"),
    *((name, "i64") for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")),
    *_of_terms("i64", "alibi", "sinks", "dropout"),
)

# batch: number of sequences. num_queries, num_keys: lengths of the longest sequence. group: query heads that share a
# key head. first_batch, first_head: batch and head of grid position 0; y and z of a grid end at 65535, so that larger
# problems need several launches. window_left, window_right: keys seen before and behind the diagonal, which
# bottom_right (0 or 1) moves by num_keys - num_queries. scale_log2: scale * log2(e), as exponentials are in base 2.
_SIZES: Fields = (
    *((name, "i32") for name in ("batch", "num_heads", "num_queries", "num_keys", "group")),
    *((name, "i32") for name in ("first_batch", "first_head", "window_left", "window_right", "bottom_right")),
    *_of_terms("i32"),
)
_FACTORS: Fields = (("scale", "f32"), ("scale_log2", "f32"), *_of_terms("f32"))

# tokens_q, tokens_k: rows of query and key, of all sequences together. Kernels clamp what they read from cu_seqlens_q
# and cu_seqlens_k to these, so that a wrong value cannot lead outside of the tensors.
VARLEN: Fields = (("tokens_q", "i32"), ("tokens_k", "i32"))

# page_table: int32 entries; page_indptr: int32 array of where each sequence's entries start, 0 for a table with rows.
# page_table_row: entries from one row to the next. key_page, value_page: elements from one page to the next; row and
# head strides are key_row, key_head ... max_pages: entries of a sequence; table_entries: of all. num_pages: pages of a
# pool. Kernels clamp lengths, bounds and entries to these, so that a wrong value cannot lead outside of the pools.
PAGED: Fields = (
    *((name, "i64") for name in ("page_table", "page_indptr", "page_table_row", "key_page", "value_page")),
    *((name, "i32") for name in ("page_size", "max_pages", "table_entries", "num_pages")),
)

# value_page_rows: row strides from one page of value to the next, for the tensor map of the tile with the last key.
PAGED_SM90: Fields = (("value_page_rows", "i32"),)

FORWARD: Fields = (
    *_strided("query", "key", "value", "output"),
    ("logsumexp", "i64"),
    *_ADDRESSES,
    *_SIZES,
    *_FACTORS,
)

# partial_output: (batch, num_heads_key, num_queries * group, num_splits_key, columns) float32; partial_logsumexp: the
# same without columns, in base 2. Both addresses are 0 when num_splits_key is 1.
DECODE: Fields = (
    *_strided("query", "key", "value", "output"),
    ("logsumexp", "i64"),
    ("partial_output", "i64"),
    ("partial_logsumexp", "i64"),
    *_ADDRESSES,
    *_SIZES,
    ("num_splits_key", "i32"),
    *_FACTORS,
)

# kernels/decode/chunk_schedule.py. partial_output: (slots, tile_m, columns) float32; partial_logsumexp: the same
# without columns, in base 2. schedule: int32, where teams cut rows. num_teams: teams of
# team_rows thread blocks that share the chunks, each at least least_chunks of them. chunk_tiles: key tiles of a chunk.
# fixed_chunks: whether (0 or 1) each chunk has partial results of its own.
PERSISTENT_DECODE: Fields = (
    *_strided("query", "key", "value", "output"),
    ("logsumexp", "i64"),
    ("partial_output", "i64"),
    ("partial_logsumexp", "i64"),
    ("schedule", "i64"),
    *_ADDRESSES,
    *_SIZES,
    *((name, "i32") for name in ("num_teams", "team_rows", "chunk_tiles", "least_chunks", "fixed_chunks")),
    *_FACTORS,
)

# total_tiles: query tiles of all sequences of one head. grad_query_accum: (num_heads, total_tiles, tile_m * head_dim)
# float32 in the kernel's own element order. delta, logsumexp_log2: (num_heads, total_tiles * tile_m) float32;
# logsumexp_log2 is logsumexp * log2(e), +inf on rows without keys and past the end. dq_semaphore: (num_heads,
# total_tiles) int32, one semaphore for each query tile of a deterministic backward. tile_count_semaphore: (num_heads,
# batch) int32, thread blocks that have started; in the sm90 family (1,) int32, key tiles that have started.
# grad_logsumexp: laid out like logsumexp; 0 if only the output has a gradient. The same kernels serve both.
BACKWARD: Fields = (
    *_strided("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value"),
    ("grad_output_column", "i64"),
    ("logsumexp", "i64"),
    ("grad_query_accum", "i64"),
    ("delta", "i64"),
    ("logsumexp_log2", "i64"),
    ("dq_semaphore", "i64"),
    ("tile_count_semaphore", "i64"),
    *_strided("grad_bias", axes=BIAS_AXES),
    ("grad_sinks", "i64"),
    *_ADDRESSES,
    *_SIZES,
    ("num_splits_key", "i32"),
    ("total_tiles", "i32"),
    *_FACTORS,
    ("grad_logsumexp", "i64"),
)

# Only in kernels whose work tiles are those of query heads. total_key_tiles: key tiles of all sequences of one head.
# grad_key_accum, grad_value_accum: (num_heads_key, total_key_tiles, tile_n * head_dim) float32 in the kernel's own
# element order.
QUERY_HEADS_FIELDS: Fields = (
    ("grad_key_accum", "i64"),
    ("grad_value_accum", "i64"),
    ("total_key_tiles", "i32"),
)

# Only in forwards with option shared_end and of variant split_kv. num_splits_key: blocks that share the keys of a tile;
# 1 for none. partial_output: (shared tiles, tile_m, num_splits_key, columns) float32; partial_logsumexp: the same
# without columns, in base 2. Both addresses are 0 when num_splits_key is 1.
SHARED_END_FIELDS: Fields = (
    ("partial_output", "i64"),
    ("partial_logsumexp", "i64"),
    ("num_splits_key", "i32"),
)

# Only in backwards with option shared_end. shared_key_tiles: how many of the last work tiles blocks share.
# num_splits_query: blocks that share the queries of each. shared_sums: for each of these tiles its dK and dV, (tile_n *
# head_dim) float32 in the kernel's own element order, and the parts that each warp of the consumers has added, int32; 0
# when no tile is shared.
SHARED_QUERIES_FIELDS: Fields = (
    ("shared_sums", "i64"),
    ("num_splits_query", "i32"),
    ("shared_key_tiles", "i32"),
)

# Only in backwards whose grad_bias is summed by the kernel of wgmma. grad_bias_counts: (tiles, 8) int32, the parts that
# each warp of the consumers has stored. grad_bias_parts: (tiles, blocks that share a tile, 128 * 128) float32 in the
# kernel's own element order. Both are 0 if no blocks share a tile.
GRAD_BIAS_FIELDS: Fields = (("grad_bias_counts", "i64"), ("grad_bias_parts", "i64"))

# Addresses of the scales of e4m3 codes, 0 for scales of 1, and their strides (elements), 0 along an axis that a scale
# does not have: those of e4m3 operands, which have none along rows, and those of key and value of an e4m3 cache.
OPERAND_SCALES: Fields = _strided(*SCALES, axes=OPERAND_AXES)
E4M3_CACHE_SCALES: Fields = _strided(*CACHE_SCALES, axes=CACHE_AXES)

# The columns of a latent cache behind its codes, and the scales of the codes' tiles of columns, with their strides
# (elements). key_rope_page: of a pool; key_rope_batch: of other caches.
LATENT_CODES: Fields = (
    *_strided(KEY_ROPE),
    (f"{KEY_ROPE}_page", "i64"),
    *_strided("key_scale", axes=TILE_AXES),
)

# Only in kernels of mask form "ranges": the ranges of keys, whose strides (elements) are 0 along an axis that they do
# not have, and the arrays of launch/tile_lists.py. ranges_batch, ranges_heads: sizes of the axes of the ranges.
# device_sms: multiprocessors of the device. mask_block_rows, mask_block_columns: queries and keys of a block of
# visible_blocks; mask_block_heads: query heads that have the same blocks.
LISTED_TILES: Fields = (
    *_strided(*RANGE_EDGES, axes=RANGE_AXES),
    *_strided(VISIBLE_BLOCKS, axes=BLOCK_AXES),
    *((name, "i64") for name in ("key_ranges", "tile_states", "tile_entries", "list_sizes", "work_list")),
    *((name, "i32") for name in ("ranges_batch", "ranges_heads", "device_sms")),
    *((f"mask_block_{name}", "i32") for name in ("rows", "columns", "heads")),
)


# Only in kernels with the program of a mask function: its integers, and its arrays with their strides and sizes.
def _mask_program(program: MaskProgram) -> Fields:
    fields = [(name, "i32") for name in MASK_SCALARS[: program.scalars]]
    for name, (_, rank) in zip(MASK_ARRAYS, program.arrays, strict=False):
        fields += _strided(name, axes=MASK_ARRAY_AXES[:rank])
        fields += ((f"{name}_size_{axis}", "i32") for axis in range(rank))
    return tuple(fields)


# A standalone component GEMM reads tiles of A and B and writes float32 tiles of C, all contiguous.
COMPONENT_GEMM: Fields = (("a", "i64"), ("b", "i64"), ("c", "i64"), ("tiles", "i32"))

# Rows of new tokens and the pages of a cache, with their strides (elements); num_rows: rows of all tokens and heads.
# num_slots: rows of the cache, each of all heads.
APPEND: Fields = (
    *((name, "i64") for name in ("key", "value", "key_cache", "value_cache", "slots")),
    *((f"{name}_{axis}", "i64") for name in ("key", "value") for axis in ("row", "head")),
    *((f"{name}_cache_{axis}", "i64") for name in ("key", "value") for axis in ("page", "row", "head")),
    *((name, "i32") for name in ("page_size", "num_slots", "num_heads_key", "num_rows")),
)

# Only in kernels that store e4m3. A stride is 0 along an axis that a scale does not have.
APPEND_SCALES: Fields = _strided(*CACHE_SCALES, axes=CACHE_AXES[1:])

# Only in kernels that store a latent cache.
APPEND_TILE_SCALES: Fields = _strided("key_scale", axes=TILE_AXES[1:])

# num_rows: rows of all batches and heads. cu_seqlens_q: 0 if the outputs are not packed. The logsumexps are 0 in a sum.
MERGE: Fields = (
    *_strided("output_a", "output_b", "output"),
    *((name, "i64") for name in ("logsumexp_a", "logsumexp_b", "logsumexp", "cu_seqlens_q")),
    *((name, "i32") for name in ("num_heads", "num_queries", "num_rows")),
)

# Outputs of a merge that are float32 whatever the dtype of the build, by Build.variant.
FLOAT32_OUTPUTS: Final[dict[str, tuple[str, ...]]] = {
    STANDARD: (),
    TOTAL: ("output_a", "output"),
    LAST: ("output_a",),
    SUM: ("output_a", "output"),
    SUM_LAST: ("output_a",),
}

# By Build.kind, or by Build.family or Build.variant if it has a struct of its own.
FIELDS: Final[dict[str, Fields]] = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "component_gemm": COMPONENT_GEMM,
    "decode": DECODE,
    "append": APPEND,
    "merge": MERGE,
    PERSISTENT: PERSISTENT_DECODE,
    MLA: PERSISTENT_DECODE,
}

TENSOR_MAP_BYTES: Final = 128


def fields_of(build: Build) -> Fields:
    """Returns the struct of a build's kernels; NotSupported when a registered term has a field of another name."""
    fields = next(FIELDS[key] for key in (build.variant, build.family, build.kind) if key in FIELDS)
    if build.variant == QUERY_HEADS:
        fields = (*fields, *QUERY_HEADS_FIELDS)
    if build.shares_query_tiles:
        fields = (*fields, *SHARED_END_FIELDS)
    elif SHARED_END in build.options:
        fields = (*fields, *SHARED_QUERIES_FIELDS)
    if uses_wgmma(build):
        fields = (*fields, *GRAD_BIAS_FIELDS)
    if build.form.has_ranges:
        fields = (*fields, *LISTED_TILES)
        fields += _mask_program(MaskProgram.parse(build.form.program)) if build.form.program else ()
    if build.kind == "append" and build.variant:
        fields = (*fields, *(APPEND_TILE_SCALES if build.variant == E4M3_TILE else APPEND_SCALES))
    if build.kind == "forward" and build.variant == E4M3:
        fields = (*fields, *OPERAND_SCALES)
    if build.has("varlen"):
        fields = (*fields, *VARLEN)
    if build.has("paged"):
        fields = (*fields, *PAGED, *(PAGED_SM90 if build.maps_value else ()))
    if build.has(registry.KV8_TILE):
        fields = (*fields, *LATENT_CODES)
    elif build.has(registry.KV8):
        fields = (*fields, *E4M3_CACHE_SCALES)
    terms = registry.registered_among(build.features)
    if not terms:
        return fields
    added = tuple(field for term in terms for field in term.struct.kinds)
    if shared := sorted({name for name, _ in fields} & {name for name, _ in added}):
        names = ", ".join(term.name for term in terms)
        raise NotSupported(f"score terms {names}: the kernels have other fields {', '.join(shared)}; rename them")
    return (*fields, *added)


def address_alignments(build: Build) -> dict[str, int]:
    """Returns the alignment (bytes) of each address of a kernel whose plan alone says how it is launched.

    These are the kinds "component_gemm", "append" and "merge". Their other i64 fields are among the plan's params.
    """
    if build.kind == "append":
        rows = dict.fromkeys(("key", "value", "key_cache", "value_cache"), build.vector_bytes)
        coded = [] if not build.variant else ["key"] if build.variant == E4M3_TILE else ["key", "value"]
        codes = {f"{name}_cache": build.vector_bytes // build.item_bytes for name in coded}
        return {**rows, **codes, "slots": 8, **{f"{name}_scale": F32_BYTES for name in coded}}
    if build.kind == "merge":
        wide = build.vector_bytes // build.item_bytes * F32_BYTES
        rows = {
            name: wide if name in FLOAT32_OUTPUTS[build.variant] else build.vector_bytes
            for name in ("output_a", "output_b", "output")
        }
        lengths = {"cu_seqlens_q": 4} if build.has("varlen") else {}
        is_sum = build.variant in (SUM, SUM_LAST)
        return {**rows, **dict.fromkeys(() if is_sum else ("logsumexp_a", "logsumexp_b", "logsumexp"), 4), **lengths}
    return {name: ROW_ALIGNMENT_BYTES for name, kind in fields_of(build) if kind == "i64"}


def numpy_struct(fields: Fields) -> np.dtype[np.void]:
    """Returns the struct as an aligned NumPy dtype: the same bytes as the kernel's C struct."""
    return np.dtype([(name, _NUMPY[kind]) for name, kind in fields], align=True)


def layout(fields: Fields) -> tuple[tuple[str, int, int], ...]:
    """Returns (name, offset, size) in bytes of every field of the struct."""
    struct = numpy_struct(fields)
    assert struct.fields is not None
    return tuple((name, struct.fields[name][1], struct.fields[name][0].itemsize) for name, _ in fields)
