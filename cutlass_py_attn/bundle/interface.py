"""Interface: the structs and constants of the C library, for its C header and its Rust crate.

A call is one struct for every kernel. It grows at its end only, so that a program and a library of different versions
understand each other: a program says with `bytes` how much of it it knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.bundle.rules import ALL_DIRECTIONS
from cutlass_py_attn.problem.masks import FORMS, RANGES
from cutlass_py_attn.problem.tensors import BIASES, BMHK, FLOAT8, ITEM_BYTES, ROW_STRIDES
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.bias import AXES as BIAS_STRIDES

ABI: Final = 1  # changes if a struct changes other than at its end, or a function goes
ERROR_BYTES: Final = 512  # of the struct of an error
STATUSES: Final = (
    ("OK", ""),
    ("INVALID", "the call, or an argument, is refused"),
    ("NO_KERNEL", "no kernel of this library takes the call on this device"),
    ("NO_DRIVER", "there is no NVIDIA driver, or it is too old"),
    ("DRIVER", "a call of the driver failed; error.driver_code is its CUresult"),
    ("WORKSPACE", "the workspace is missing, too small or not aligned"),
    ("WRONG_ABI", "the program was compiled for another version of this header"),
    ("NO_MEMORY", "the host is out of memory"),
)
_DTYPE_WORDS: Final = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", FLOAT8: "E4M3"}
DTYPES: Final = tuple((number, _DTYPE_WORDS[name], name) for number, name in enumerate((*ITEM_BYTES, FLOAT8), 1))
MASKS: Final = (*FORMS, RANGES)
# Features that a program asks for by a flag. The others follow from numbers: grouped, softcap, dropout.
FLAGS: Final = (
    ("VARLEN", 1, "varlen", "sequences of different lengths, concatenated: cu_seqlens_q and _k, tokens_q and _k"),
    ("SEQUSED", 2, "seqused", "seqused_k says how many of its keys each sequence uses"),
    ("BIAS", 4, "bias", "bias is added to the scores"),
    ("ALIBI", 8, "alibi", "alibi_slopes"),
    ("SINKS", 16, "sinks", "sinks join the denominator of every row"),
    ("DETERMINISTIC", 32, "", "backward: the gradients have the same bits in every run"),
    ("PAGED", 64, "paged", "key and value are pools of pages, found through page_table; seqused_k has the lengths"),
    ("INVARIANT", 128, "invariant", "PAGED: the bits of a sequence's results do not depend on the other sequences"),
    ("PAGE_INDPTR", 256, "page_indptr", "PAGED: page_table is a list, in which page_indptr says where sequences start"),
    ("E4M3_CACHE", 512, "e4m3_cache", "e4m3 codes: in key_cache, value_cache of APPEND, in key and value of FORWARD"),
    ("ROW_SCALES", 1024, "row_scales", "E4M3_CACHE: each row has a scale; APPEND computes it, and writes the scales"),
    ("FLOAT16_OUTPUT", 2048, registry.FLOAT16_OUTPUT, "dtype E4M3: output is float16; it is bfloat16 without the flag"),
    ("VALUE_IN_KEY", 4096, "value_in_key", "FORWARD: value is the first head_dim_value columns of key, not an array"),
    ("TILE_SCALES", 8192, "tile_scales", "E4M3_CACHE: scales of each 128 columns of codes. FORWARD: VALUE_IN_KEY too; "
     "key_rope has the columns of key without codes. APPEND: computes the scales; value_cache has no codes"),
    ("KEY_RANGES", 16384, "", "a query sees the keys from its key_start on that are before its key_end"),
    ("VISIBLE_BLOCKS", 32768, "", "a query sees keys where visible_blocks has a 1 for the blocks of both"),
)  # fmt: skip
# All that these may have.
DIRECTION_FLAGS: Final = {"append": ("E4M3_CACHE", "ROW_SCALES", "TILE_SCALES"), "merge": ("VARLEN",)}
# That a backward may not have.
FORWARD_FLAGS: Final = ("E4M3_CACHE", "ROW_SCALES", "FLOAT16_OUTPUT", "VALUE_IN_KEY", "TILE_SCALES")
DERIVED: Final = (
    ("grouped", 1 << 16),
    ("softcap", 1 << 17),
    ("dropout", 1 << 18),
)  # bits of features inside the library
GRADIENTS: Final = (("QUERY", 1, "query"), ("KEY", 2, "key"), ("VALUE", 4, "value"), ("BIAS", 8, "bias"),
                    ("SINKS", 16, "sinks"))  # fmt: skip
MOST_BYTES: Final = 1 << 16  # of the call of any version: one that says more was not initialised
FEATURE_BITS: Final = {name: bit for _, bit, name, _ in FLAGS if name} | dict(DERIVED)
# Features of attention problems whose flags, which appends may have too, have other names.
_CACHE_FEATURES: Final = {
    registry.KV8: "e4m3_cache",
    registry.KV8_ROW: "row_scales",
    registry.KV8_TILE: "tile_scales",
}
FIRST_BYTES: Final = 584  # of the call of this ABI's first version: a program that knows less than this is refused


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a struct. kind: u32, i32, u64, i64, f64, array or bias. default: of attention_call_init."""

    name: str
    kind: str
    meaning: str
    default: str = "0"


ARRAY: Final = (Field("address", "u64", ""), *(Field(axis, "i64", "") for axis in ROW_STRIDES))
BIAS: Final = (Field("address", "u64", ""), *(Field(axis, "i64", "") for axis in BIAS_STRIDES))
_KEYS: Final = "int32 on the device"
CALL: Final = (
    Field("bytes", "u32", "of this struct as the program knows it"),
    Field("abi", "u32", "of the header that the program was compiled with"),
    Field("direction", "i32", "FORWARD, BACKWARD, APPEND or MERGE"),
    Field("dtype", "i32", "F16, BF16 or F32: of all rows and biases, or E4M3: of query, key and value of FORWARD"),
    Field("head_dim", "i32", "columns of query and key; MERGE does not read it"),
    Field("head_dim_value", "i32", "columns of value and output"),
    Field("flags", "u32", "a sum of the flags above"),
    Field("gradients", "u32", "that a backward writes: GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_BIAS, GRAD_SINKS", "7"),
    Field("batch", "i64", "batch size, or the number of sequences"),
    Field("num_queries", "i64", "queries of each sequence, or of the longest one"),
    Field("num_keys", "i64", "keys of each sequence, or of the longest one"),
    Field("num_heads", "i64", "heads of query"),
    Field("num_heads_key", "i64", "heads of key and value, a divisor of num_heads"),
    Field("tokens_q", "i64", "VARLEN: rows of query, of all sequences together"),
    Field("tokens_k", "i64", "VARLEN: rows of key, of all sequences together; APPEND: new tokens"),
    Field("window_left", "i64", "visible keys before the diagonal; -1: no limit", "-1"),
    Field("window_right", "i64", "visible keys after the diagonal; -1: no limit, 0: causal", "-1"),
    Field("bottom_right", "i32", "1: the diagonal ends in the last query and key; 0: it starts in the first", "1"),
    Field("num_splits_key", "i32", "backward: blocks that share the keys of a head; 0: the library chooses"),
    Field("grad_bias_axes", "u32", "axes that grad_bias has in full: batch 1, heads 2, queries 4, keys 8; it is summed "
          "over the others", "15"),
    Field("reserved", "u32", "0"),
    Field("scale", "f64", "factor of Q K^T, usually 1 / sqrt(head_dim); it has no default", "NAN"),
    Field("softcap", "f64", "bound of the scores: softcap * tanh(scale Q K^T / softcap); 0: none"),
    Field("dropout_p", "f64", "probability that a weight is dropped; 0: no dropout"),
    Field("philox_seed", "u64", "key of the random numbers of dropout"),
    Field("philox_offset", "u64", "index of the first random word"),
    Field("philox_seed_address", "u64", "of an int64 on the device that is the seed instead; 0: none"),
    Field("philox_offset_address", "u64", "of an int64 on the device that is added to the offset; 0: none"),
    *(Field(name, "array", "") for name in BMHK),
    Field("grad_output_column", "i64", "elements from one column of grad_output to the next", "1"),
    *(Field(name, "bias", "") for name in BIASES),
    Field("logsumexp", "u64", "float32 [batch, num_heads, num_queries rounded up to a multiple of 32], contiguous"),
    Field("cu_seqlens_q", "u64", f"VARLEN: {_KEYS} [batch + 1], where the queries of each sequence start"),
    Field("cu_seqlens_k", "u64", f"VARLEN: {_KEYS} [batch + 1], where the keys of each sequence start"),
    Field("seqused_k", "u64", f"SEQUSED: {_KEYS} [batch], the keys that each sequence uses"),
    Field("alibi_slopes", "u64", "ALIBI: float32 [num_heads] or [batch, num_heads]"),
    Field("alibi_batch", "i64", "elements from one batch of alibi_slopes to the next; 0: all have the same"),
    Field("sinks", "u64", "SINKS: float32 [num_heads]"),
    Field("grad_sinks", "u64", "GRAD_SINKS: float32 [num_heads]"),
    Field("page_table", "u64", f"PAGED: {_KEYS} [batch, max_pages], pages of each sequence; PAGE_INDPTR: [max_pages]"),
    Field("page_indptr", "u64", f"PAGE_INDPTR: {_KEYS} [batch + 1], where the pages of each sequence start"),
    Field("page_table_row", "i64", "PAGED: entries from one row of page_table to the next; 0 with PAGE_INDPTR"),
    Field("page_size", "i64", "PAGED: rows of a page, a power of two; APPEND: any number"),
    Field("max_pages", "i64", "PAGED: pages of a sequence, num_keys is max_pages * page_size; PAGE_INDPTR: of all"),
    Field("num_pages", "i64", "PAGED, APPEND: pages of the pools, which are [page, row, head, column]"),
    Field("key_cache", "array", "APPEND: pool to which the rows of key, [token, head, column], are stored"),
    Field("value_cache", "array", "APPEND: pool to which the rows of value are stored"),
    Field("slots", "u64", "APPEND: int64 [tokens_k] on the device, page * page_size + row; others are skipped"),
    Field("key_scale", "array", "E4M3_CACHE, E4M3: float32, see above; strides of 0 where one serves all"),
    Field("value_scale", "array", "E4M3_CACHE, E4M3: likewise of value"),
    Field("output_a", "array", "MERGE: attention over some keys, as output"),
    Field("output_b", "array", "MERGE: attention over other keys, as output"),
    Field("logsumexp_a", "u64", "MERGE: logsumexp of output_a, laid out as logsumexp"),
    Field("logsumexp_b", "u64", "MERGE: logsumexp of output_b"),
    Field("grad_logsumexp", "u64", "backward: gradient of logsumexp, laid out as logsumexp; 0: none"),
    Field("query_scale", "array", "E4M3: likewise of query, for the heads that read a head of key"),
    Field("key_rope", "array", "TILE_SCALES: the head_dim - head_dim_value columns of key behind its codes, of dtype"),
    Field("key_scale_tile", "i64", "TILE_SCALES: elements from one scale of a row to the next", "1"),
    Field("key_start", "array", f"KEY_RANGES: {_KEYS} [batch, head, query], see above"),
    Field("key_end", "array", "KEY_RANGES: likewise"),
    Field("visible_blocks", "bias", "VISIBLE_BLOCKS: bytes, 0 or 1, [batch, head, block of queries, block of keys]"),
    Field("mask_block_rows", "i64", "VISIBLE_BLOCKS: queries of a block, a multiple of the tile's", "128"),
    Field("mask_block_columns", "i64", "VISIBLE_BLOCKS: keys of a block, a multiple of the tile's", "128"),
    Field("mask_block_heads", "i64", "VISIBLE_BLOCKS: heads of query for each head of visible_blocks, see above", "1"),
)  # fmt: skip
C_TYPES: Final = {"u32": "uint32_t", "i32": "int32_t", "u64": "uint64_t", "i64": "int64_t", "f64": "double"}
RUST_TYPES: Final = {
    "u32": "u32",
    "i32": "i32",
    "u64": "u64",
    "i64": "i64",
    "f64": "f64",
    "array": "Array",
    "bias": "Bias",
}

# Inputs and pointers of the rules that the request, not the call, has: what follows from the call's fields.
_REQUEST: Final = (
    *("window_left", "window_right", "dropout_threshold", "keep_scale", "table_entries"),
    *("has_key_ranges", "has_visible_blocks", "ranges_batch", "ranges_heads"),
)
_CAST: Final = ("philox_seed", "philox_offset")
_AXES: Final = {
    **{each.name: ROW_STRIDES for each in CALL if each.kind == "array"},
    **{each.name: BIAS_STRIDES for each in CALL if each.kind == "bias"},
}


def field(name: str) -> str:
    """Returns the C expression of an input or a pointer of the rules, for a request `c`."""
    if name in _REQUEST:
        return f"c->{name}"
    if name in _CAST:
        return f"(int64_t)c->call.{name}"
    if name in _AXES:
        return f"c->call.{name}.address"
    tensor, _, axis = name.rpartition("_")
    if axis == "page":  # of a pool, whose first axis is that of pages
        axis = "batch"
    if axis in _AXES.get(tensor, ()):
        return f"c->call.{tensor}.{axis}"
    if name == "grad_output_column" or name in {each.name for each in CALL}:
        return f"c->call.{name}"
    raise KeyError(f"{name}: the call of the library has no such field; add it to the end of CALL")


def feature_bit(name: str) -> int:
    """Returns the bit of a kernel's feature, or of an option of its launches, in the flags of a call."""
    return FEATURE_BITS[_CACHE_FEATURES.get(name, name)]


def direction_number(direction: str) -> int:
    """Returns the number of a direction in a call."""
    return ALL_DIRECTIONS.index(direction)
