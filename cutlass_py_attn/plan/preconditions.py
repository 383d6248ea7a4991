"""Preconditions: what sizes and strides other than the exported ones must satisfy, as expressions with sentences.

A host computes with 64-bit integers. `conditions` bound its inputs before any other expression is computed; `limits`
bound what follows from them, so that no field, grid or workspace is narrowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from cutlass_py_attn.kernels.backward_parts.layout import starts_from_logsumexp
from cutlass_py_attn.kernels.catalogue import fused_kernel_of, kernel_of
from cutlass_py_attn.kernels.common.layout import RAGGED_ROWS
from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.kernels.decode import layout as decode_smem
from cutlass_py_attn.kernels.families import FAMILIES
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Expr, Name, Number, Term, call, maximum, step
from cutlass_py_attn.launch.names import (
    BATCH,
    GROUP,
    MASK_BLOCK_COLUMNS,
    MASK_BLOCK_HEADS,
    MASK_BLOCK_ROWS,
    MAX_PAGES,
    NUM_HEADS,
    NUM_HEADS_KEY,
    NUM_KEYS,
    NUM_PAGES,
    NUM_QUERIES,
    PAGE_SIZE,
    TABLE_ENTRIES,
    TOKENS_K,
    TOKENS_Q,
)
from cutlass_py_attn.launch.variants import PERSISTENT
from cutlass_py_attn.plan.launch_rules import (
    COUNTED,
    MAX_GRID_YZ,
    MAX_INT32,
    VALUE_PAGE_ROWS,
    edges_of,
    grids_of,
    shape,
    strides,
    total_tiles,
)
from cutlass_py_attn.problem.masks import UNLIMITED
from cutlass_py_attn.problem.operands import Operand, of_tensor
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.scalars import MIN_SCALE
from cutlass_py_attn.problem.tensors import BIASES, BMHK, KEY_ROPE, OPERAND_BYTES, VISIBLE_BLOCKS, WORD_BYTES
from cutlass_py_attn.problem.validation import LARGEST_SOFTCAP, MAX_LENGTH, MAX_RATIO, MAX_SCALE
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.softcap import MIN_SOFTCAP

Condition = tuple[Expr, str]  # (expression, the condition in words)

MAX_WORKSPACE_BYTES: Final = 2**48  # of one buffer; more than any device has, and a sum of them fits in 64 bits
MAX_MAP_STRIDE_BYTES: Final = 2**40 - 16  # of cuTensorMapEncodeTiled: a multiple of 16 below 2^40


def conditions(problem: Problem, build: Build) -> list[Condition]:
    """Returns every condition on the inputs; each expression is 1 (true) for the exported problem.

    The expressions use inputs alone. They are computed in this order, up to the first that is false.
    """
    return [
        *_sizes(problem, build),
        *_edges(build),
        *(block_sizes(build) if problem.visible_blocks is not None else ()),
        *_term_sizes(problem),
        *_factors(problem, build),
        *_strides(problem, build),
        *_biases(problem, build),
        *(distinct(operand) for operand in problem.operands().values() if operand.is_written and operand.strides),
        *fused_kernel_of(build).conditions(build),
    ]


def limits(problem: Problem, build: Build) -> list[Condition]:
    """Returns every condition on numbers that follow from the inputs, by the names of `launch_rules.definitions`."""
    slices = "call once for each slice"
    found: list[Condition] = []
    if build.shares_chunks:
        found += _chunks(build)
    elif build.family == "decode":
        found += _decode()
    if build.kind == "backward":
        for name in total_tiles(problem, build):
            found.append((Name(name) <= MAX_INT32, f"{name} must be at most {MAX_INT32}; {slices}"))
    grids = grids_of(problem, build)
    for role in entry_points.entries(build):
        blocks, _, _ = grids[role]
        if not isinstance(blocks, Number | Name):
            says = f"the {role} kernel would have more than {MAX_INT32} blocks; {slices}"
            found.append((blocks <= MAX_INT32, says))
    for buffer in fused_kernel_of(build).workspace(build):
        if buffer.name in COUNTED:
            says = f"{buffer.name} would have more than {MAX_INT32} numbers; {slices}"
            found.append((buffer.bytes <= MAX_INT32 * WORD_BYTES, says))
        elif not isinstance(buffer.bytes, Number):
            says = f"{buffer.name} would have more than 2^48 bytes of the workspace; {slices}"
            found.append((buffer.bytes <= MAX_WORKSPACE_BYTES, says))
    return found


def mapped(build: Build) -> tuple[str, ...]:
    """Returns the tensors that the main kernel reads or writes through a tensor map, in the order of its parameters."""
    return tuple(kernel_of(build).tensor_maps(build))


def _sizes(problem: Problem, build: Build) -> Iterator[Condition]:
    for name in (BATCH, NUM_QUERIES, NUM_KEYS, NUM_HEADS, NUM_HEADS_KEY):
        yield name >= 1, f"{name} must be at least 1; with none there is nothing to launch"
    for name, largest in (
        (BATCH, MAX_GRID_YZ),
        (NUM_HEADS, MAX_GRID_YZ),
        (NUM_QUERIES, MAX_LENGTH),
        (NUM_KEYS, MAX_LENGTH),
    ):
        yield name <= largest, f"{name} must be at most {largest}; call once for each slice"
    if build.has("grouped"):
        yield (NUM_HEADS % maximum(NUM_HEADS_KEY, 1)).equals(0), "num_heads must be a multiple of num_heads_key"
    else:
        yield NUM_HEADS.equals(NUM_HEADS_KEY), "num_heads must be num_heads_key; export a problem with grouped heads"
    if problem.pages is not None:
        yield from _page_sizes(problem)
        yield from _page_maps(build) if {"key", KEY_ROPE} & {*mapped(build)} else ()
    if problem.sequences is not None:
        yield NUM_QUERIES <= TOKENS_Q, "num_queries, of the longest sequence, must be at most tokens_q"
        yield NUM_KEYS <= TOKENS_K, "num_keys, of the longest sequence, must be at most tokens_k"
        for name in (TOKENS_Q, TOKENS_K):
            yield name <= MAX_LENGTH, f"{name} must be at most {MAX_LENGTH}; cu_seqlens are 32-bit"


def _page_sizes(problem: Problem) -> Iterator[Condition]:
    is_csr = problem.pages is not None and problem.pages.page_indptr
    entries = MAX_PAGES if is_csr else BATCH * MAX_PAGES
    yield PAGE_SIZE >= 1, "page_size must be at least 1"
    yield (2**30 % PAGE_SIZE).equals(0), "page_size must be a power of two"
    yield NUM_KEYS.equals(MAX_PAGES * PAGE_SIZE), "num_keys must be max_pages * page_size"
    yield TABLE_ENTRIES.equals(entries), f"table_entries must be {entries}"
    yield NUM_PAGES >= 1, "num_pages must be at least 1"
    yield NUM_PAGES <= MAX_INT32, f"num_pages must be at most {MAX_INT32}: entries of a table are 32-bit"
    if problem.has_ragged_rows:
        yield NUM_QUERIES <= TOKENS_Q, "num_queries, of the longest sequence, must be at most tokens_q"
        yield TOKENS_Q <= MAX_LENGTH, f"tokens_q must be at most {MAX_LENGTH}; cu_seqlens_q is 32-bit"


def _page_maps(build: Build) -> Iterator[Condition]:
    """Boxes of the tensor maps divide pages, and the map of the last tile counts the rows of value."""
    least = FAMILIES[build.family].least_page_size
    is_latent = build.has(registry.KV8_TILE)
    others = "no kernel reads smaller pages of such a cache" if is_latent else "smaller pages need an sm80 kernel"
    yield least <= PAGE_SIZE, f"page_size must be at least {least}: {others}"
    if build.reads_value_in_key:
        return
    page = step(NUM_PAGES, Name("value_page"), 0)
    is_whole = (page % maximum(Name("value_row"), 1)).equals(0)
    yield is_whole, "value_page must be a multiple of value_row: a page starts at a whole number of rows"
    last_row = (NUM_PAGES - 1) * VALUE_PAGE_ROWS + PAGE_SIZE
    yield last_row <= RAGGED_ROWS - 1, "the pages of value must have fewer than 2^30 rows; use smaller pools"


def _edges(build: Build) -> Iterator[Condition]:
    for name in edges_of(build):
        yield Name(name) >= 0, f"{name} must be at least 0"
        yield Name(name) <= UNLIMITED, f"{name} must be at most {UNLIMITED}, which stands for no limit"
    if edges_of(build):
        is_bottom_right = Name("bottom_right")
        yield (is_bottom_right * (1 - is_bottom_right)).equals(0), "bottom_right must be 0 or 1"


def block_sizes(build: Build, has_blocks: Expr = ONE) -> Iterator[Condition]:
    """Yields the conditions on the queries and keys of a block of visible blocks, which whole tiles must fill.

    has_blocks: 1 if there are such blocks, else 0
    """
    for name, tile in ((MASK_BLOCK_ROWS, build.tile_m), (MASK_BLOCK_COLUMNS, build.tile_n)):
        rest = name % tile
        yield name >= has_blocks, f"{name} must be at least 1"
        yield name <= MAX_INT32, f"{name} must be at most {MAX_INT32}"
        yield (
            (rest if has_blocks == ONE else rest * has_blocks).equals(0),
            f"{name} must be a multiple of {tile}, of which a tile is; export a problem with such a block_size",
        )


def block_heads(build: Build, has_blocks: Expr) -> Iterator[Condition]:
    """Yields the conditions on the query heads that have the same visible blocks; has_blocks: as for `block_sizes`."""
    of_group = (MASK_BLOCK_HEADS * NUM_HEADS_KEY).equals(NUM_HEADS)
    says = f"{MASK_BLOCK_HEADS} must be num_heads / num_heads_key"
    if build.kind == "forward":
        yield MASK_BLOCK_HEADS.equals(1) + of_group >= has_blocks, f"{says}, or 1"
    else:
        shared = Name(f"{VISIBLE_BLOCKS}_head").equals(0) * MASK_BLOCK_HEADS.equals(1)
        yield of_group + shared >= has_blocks, f"{says}, or 1 with visible_blocks.head = 0"


def _strides(problem: Problem, build: Build) -> Iterator[Condition]:
    """Strides are multiples of the elements of one load, and above 0 along the axes of a tensor map."""
    operands, of_maps = problem.operands(), mapped(build)
    for name in (name for name in (*BMHK, KEY_ROPE) if name in operands):
        unit = build.vector_bytes // OPERAND_BYTES[operands[name].tensor.dtype]
        for size, stride in list(zip(shape(operands[name]), strides(operands[name]), strict=True))[:3]:
            yield from multiple(size, stride, unit)
            if name in of_maps:
                yield from _map_stride(build, size, stride)
    if build.reads_value_in_key:
        for of_value, of_key in zip(operands["value"].strides, operands["key"].strides, strict=True):
            yield Name(of_value).equals(Name(of_key)), f"{of_value} must be {of_key}: value is the first columns of key"
    if build.vector_bytes > build.item_bytes and problem.grad_output is not None:
        yield (
            Name("grad_output_column").equals(1),
            "grad_output_column must be 1: rows are read several elements at a time",
        )


def multiple(size: Expr, stride: Expr, unit: int) -> Iterator[Condition]:
    """Yields the condition that a stride is a multiple of `unit` elements."""
    if unit > 1:
        yield (step(size, stride, 0) % unit).equals(0), f"{stride} must be a multiple of {unit} elements"


def distinct(operand: Operand) -> Condition:
    """Returns the condition that no two indices of a result have the same element.

    For sizes that were changed without the strides they may.
    """
    pairs = chain.from_iterable(zip(shape(operand), strides(operand), strict=True))
    says = (
        f"rows of {operand.name} overlap: its strides must be those of an array of these sizes; set them with the sizes"
    )
    return call("distinct", *pairs).equals(1), says


def _map_stride(build: Build, size: Expr, stride: Expr) -> Iterator[Condition]:
    most = MAX_MAP_STRIDE_BYTES // build.item_bytes
    yield step(size, stride, 1) > 0, f"{stride} must be above 0: a tensor map steps forward"
    yield step(size, stride, 1) <= most, f"{stride} must be at most {most}, as in any tensor map"


def _biases(problem: Problem, build: Build) -> Iterator[Condition]:
    access = {"bias": build.bias_vector_bytes, "grad_bias": build.grad_bias_vector_bytes}
    for name in (name for name in BIASES if access[name] > build.item_bytes):
        unit = access[name] // build.item_bytes
        *others, column = map(Name, of_tensor(problem, name).strides)
        for other in others:
            yield (other % unit).equals(0), f"{other} must be a multiple of {unit} elements"
        yield column.equals(1), f"{column} must be 1: rows are read {unit} elements at a time"
        yield (NUM_KEYS % unit).equals(0), f"num_keys must be a multiple of {unit}, for {name}"
    if problem.grad_bias is None:
        return
    grad_bias = of_tensor(problem, "grad_bias")
    sizes = shape(grad_bias)
    if "grad_bias" in mapped(build):
        for size, stride in list(zip(sizes, strides(grad_bias), strict=True))[:3]:
            yield from _map_stride(build, size, stride)
    summed = "" if build.grad_bias_mode in ("main", "none") else build.grad_bias_mode
    for letter, size, whole in zip("bhqk", sizes, (BATCH, NUM_HEADS, NUM_QUERIES, NUM_KEYS), strict=True):
        if size == ONE and letter not in summed:
            yield whole.equals(1), f"{whole} must be 1: grad_bias is not summed over it; export a problem with more"


def _term_sizes(problem: Problem) -> Iterator[Condition]:
    for name in (name for term in registry.present(problem) for name in term.struct.sizes):
        says = f"{name} must be from {-MAX_INT32 - 1} to {MAX_INT32}"
        yield Name(name) >= -MAX_INT32 - 1, says
        yield Name(name) <= MAX_INT32, says


def _factors(problem: Problem, build: Build) -> Iterator[Condition]:
    """What validation.py demands of scale and softcap: the kernels compute in float32."""
    scale = Name("scale")
    yield _is_zero_or(scale, MIN_SCALE), f"scale must be 0 or have a magnitude of at least {MIN_SCALE}"
    yield _is_at_most(scale, MAX_SCALE), "scale must have a magnitude of at most 2**127"
    for name in (name for term in registry.present(problem) for name in term.struct.factors):
        says = f"{name} must be a number that float32 holds"
        yield Name(name) >= -MAX_SCALE, says
        yield Name(name) <= MAX_SCALE, says
    if not fused_kernel_of(build).takes_negative_scales:
        yield scale >= 0, "scale must not be below 0; export a problem with such a scale"
    if starts_from_logsumexp(build):
        yield scale.equals(0).equals(0), "scale must not be 0; export a problem with such a scale"
    if build.has("softcap"):
        largest = LARGEST_SOFTCAP[problem.dtype]
        softcap = Name("softcap")
        yield softcap >= MIN_SOFTCAP, "softcap must be above 0, and at least 2**-126"
        yield softcap <= largest, f"softcap must be at most {largest:g} for {problem.dtype}"
        ratio = "scale / softcap must be 0 or have a magnitude from 2**-126 to 2**126"
        yield _is_at_most(scale, softcap * MAX_RATIO), ratio
        yield _is_zero_or(scale, softcap * (1 / MAX_RATIO)), ratio


def _is_at_most(factor: Expr, limit: Term) -> Expr:
    """Returns an expression that is 1 if a factor has at most this magnitude."""
    return ((factor <= limit) * (0 - factor <= limit)).equals(1)


def _is_zero_or(factor: Expr, least: Term) -> Expr:
    """Returns an expression that is 1 if a factor is 0 or has at least this magnitude; not for NaN."""
    return factor.equals(0) + (factor >= least) + (0 - factor >= least) >= 1


def _chunks(build: Build) -> Iterator[Condition]:
    if build.variant == PERSISTENT:
        most = decode.PERSISTENT_MAX_ROWS
        yield most >= NUM_QUERIES * GROUP, f"num_queries * group must be at most {most}"
    yield (
        Name("chunks") <= MAX_INT32,
        f"the sequences would have more than {MAX_INT32} chunks; call once for each slice",
    )


def _decode() -> Iterator[Condition]:
    yield NUM_QUERIES <= decode_smem.MAX_QUERIES, f"num_queries must be at most {decode_smem.MAX_QUERIES}"
    yield NUM_QUERIES * GROUP <= decode.MAX_ROWS, f"num_queries * group must be at most {decode.MAX_ROWS}"
    yield NUM_KEYS >= decode.MIN_KEYS, f"num_keys must be at least {decode.MIN_KEYS}"
