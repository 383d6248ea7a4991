"""Numbers: the numbers and the addresses that a host passes to a launch, each with its meaning."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.bundle.inputs import Input, Pointer
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.names import MASK_BLOCK_COLUMNS, MASK_BLOCK_ROWS
from cutlass_py_attn.plan import launch_rules
from cutlass_py_attn.problem.operands import Operand
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.tensors import KEY_ROPE, RANGE_EDGES, VISIBLE_BLOCKS
from cutlass_py_attn.runtime import params
from cutlass_py_attn.score_terms import registry

MASK_OPERANDS: Final = (*RANGE_EDGES, VISIBLE_BLOCKS)  # masks in memory
_SIZES: Final = {
    "batch": "batch size",
    "num_queries": "queries of one sequence",
    "num_keys": "keys of one sequence",
    "num_heads": "heads of query",
    "num_heads_key": "heads of key and value, a divisor of num_heads",
}
_TOKENS: Final = {
    "tokens_q": "rows of query: the queries of all sequences together, or more",
    "tokens_k": "rows of key: the keys of all sequences together, or more",
}
_LONGEST: Final = {
    "batch": "number of sequences",
    "num_queries": "queries of the longest sequence, or more",
    "num_keys": "keys of the longest sequence, or more",
    **_TOKENS,
}
_PAGES: Final = {
    "batch": "number of sequences",
    "num_keys": "keys that the pages of a sequence hold: max_pages * page_size",
    "page_size": "rows of a page, a power of two",
    "max_pages": "pages of one sequence; with page_indptr those of all sequences",
    "table_entries": "entries of page_table: batch * max_pages; with page_indptr max_pages",
    "num_pages": "pages of the pools of key and value",
    "tokens_q": _TOKENS["tokens_q"],
}
_OTHERS: Final = {
    "page_table_row": "entries from one sequence's row of page_table to the next; 0 with page_indptr",
    "window_left": "visible keys before the diagonal",
    "window_right": "visible keys after the diagonal; 0 is causal",
    "bottom_right": "1: the diagonal ends in the last query and key; 0: it starts in the first",
    "scale": "factor of Q K^T",
    KEY_ROPE: "columns of key behind its e4m3 codes, in the dtype of query",
}
_WORKSPACE: Final = {
    "grad_query_accum": "float32 sum of the query gradient, in the kernel's own order",
    "dq_semaphore": "int32 semaphore of each query tile",
    "tile_count_semaphore": "int32 count of blocks, or of key tiles, that have started",
    "delta": "float32 rowsum(grad_output * output)",
    "logsumexp_log2": "float32 logsumexp in base 2",
    "partial_output": "float32 partial output of each key split",
    "partial_logsumexp": "float32 partial logsumexp of each key split, in base 2",
    "schedule": "int32 places where teams of blocks cut the keys of a row",
    "key_ranges": "int32 ranges of keys, cut to the mask",
    "tile_states": "int32 bits of the tiles that queries visit, and of those of which they see every pair",
    "tile_entries": "int32 tiles that each work tile visits",
    "list_sizes": "int32 sizes of these lists",
    "work_list": "int32 records of the work tiles, in the order of execution",
    "shared_sums": "float32 sums of the gradients of key tiles that blocks share, and int32 counts of their parts",
}
_DERIVED: Final = {
    "group": "query heads that share a key head",
    "num_splits_key": "blocks that split the keys of one head",
    "num_splits_query": "blocks that share the queries of each of the last key tiles",
    "shared_key_tiles": "how many of the last key tiles blocks share",
    "total_tiles": "query tiles of one head over the whole batch",
    "first_batch": "batch index of grid position 0",
    "first_head": "head index of grid position 0",
    "scale_log2": "scale * log2(e)",
    "ranges_batch": "sequences with ranges of keys, or blocks, of their own: batch, or 1",
    "ranges_heads": "query heads with ranges of keys, or blocks, of their own: num_heads, or 1",
    "device_sms": "multiprocessors of the device",
    "mask_block_rows": "queries of a block of visible_blocks",
    "mask_block_columns": "keys of a block of visible_blocks",
    "mask_block_heads": "query heads that have the same visible_blocks",
    "num_teams": "teams of blocks that share the keys of all sequences",
    "team_rows": "blocks of a team, one for each tile of query rows of a key head",
    "chunk_tiles": "key tiles of a chunk",
    "least_chunks": "chunks of a team, at least, if there are so many",
    "fixed_chunks": "1: each chunk has partial results of its own; 0: teams have equal shares",
}
_VECTORS: Final = {
    "cu_seqlens_q": "where the queries of each sequence start; the last entry is where they end",
    "cu_seqlens_k": "where the keys of each sequence start; the last entry is where they end",
    "seqused_k": "keys that each sequence uses",
    "page_table": "pages of each sequence in the order of its keys",
    "key_start": "first key that each query sees",
    "key_end": "one past the last key that each query sees",
    "visible_blocks": "whether a block of queries sees a block of keys",
    **{name: f"scales of {name.removesuffix('_scale')}'s e4m3 codes" for name in SCALES},
    "page_indptr": "where the entries of each sequence in page_table start; the last entry is where they end",
    "philox_seed": "key of the random numbers, in device memory",
    "philox_offset": "index of the first random word, in device memory",
}


def inputs(problem: Problem, build: Build) -> dict[str, Input]:
    """Returns sizes, strides (in elements), edges of the mask and factors, by name."""
    operands = problem.operands()
    given = params.numbers(problem, operands)
    lengths = _LONGEST if problem.sequences is not None else _PAGES if problem.pages is not None else {}
    found = {name: Input("i64", value, {**_SIZES, **lengths}[name]) for name, value in sizes(problem).items()}
    terms = registry.present(problem)
    planned = dict(launch_rules.params(problem, build))
    edges = launch_rules.edges_of(build)
    numbers = [
        *(field for name in problem.tensors() for field in operands[name].strides),
        *(("page_table_row",) if problem.pages is not None else ()),
        *(field for name in problem.scales for field in operands[name].strides),
        *(term.vector.batch_field for term in terms if term.vector is not None and term.vector.batch_field),
        *edges,
        *(("bottom_right",) if edges else ()),
        *(name for term in terms for name in term.struct.sizes),
        *(field for name in MASK_OPERANDS if name in operands for field in operands[name].strides),
        *(map(str, (MASK_BLOCK_ROWS, MASK_BLOCK_COLUMNS)) if problem.visible_blocks is not None else ()),
    ]
    found |= {name: Input("i64", int({**given, **planned}.get(name, 0)), meaning(name)) for name in numbers}
    factors = ("scale", *(name for term in terms for name in term.struct.factors))
    found |= {name: Input("f64", given[name], meaning(name)) for name in factors}
    immediate = (name for term in terms for name in term.immediate_numbers(problem))
    return found | {name: Input("i64", 0, meaning(name)) for name in immediate}


def sizes(problem: Problem) -> dict[str, int]:
    """Returns the sizes of the problem by the names that rules use; no row of a pool belongs to a sequence alone."""
    found = launch_rules.sizes(problem)
    names = (*_SIZES, *_PAGES, *(() if problem.pages is not None else _TOKENS))
    return {name: found[name] for name in names if name in found}


def pointers(problem: Problem) -> dict[str, Pointer]:
    """Returns every array of the pass, in the order of `Bound.tensor_names`."""
    return {
        name: pointer(operand, operand.tensor.alignment, meaning(name)) for name, operand in problem.operands().items()
    }


def pointer(operand: Operand, alignment: int, meaning: str) -> Pointer:
    """Returns the pointer of an array."""
    return Pointer(
        operand.tensor.dtype,
        launch_rules.shape(operand),
        launch_rules.strides(operand),
        alignment,
        "write" if operand.is_written else "read",
        meaning,
    )


def meaning(name: str) -> str:
    """Returns the meaning of an input or struct field in a few words."""
    if found := registry.meaning(name):
        return found
    for table in (_SIZES, _TOKENS, _PAGES, _OTHERS, _WORKSPACE, _DERIVED, _VECTORS):
        if name in table:
            return table[name]
    if name.endswith("_address"):
        return f"address of {name.removesuffix('_address')}, which is in device memory"
    tensor, _, axis = name.rpartition("_")
    if axis in ("batch", "page", "row", "head", "column", "tile"):
        return f"elements from one {axis} of {tensor} to the next"
    gradient = name.removeprefix("grad_")
    return f"gradient of {gradient}" if gradient != name else name
