"""Quantised operands: e4m3 codes, the scales that turn codes into numbers, and every reason to refuse these.

A number is its code times its scale. Two kinds of problems have codes:

    e4m3 operands   query, key and value; kernels multiply codes, and the output has 16 bits
    e4m3 cache      key and value beside a query of 16 bits; kernels convert codes to 16 bits

In a latent cache, whose values are in its keys, the columns of the rotary embedding may have 16 bits: key_rope.

A scale is float32 and belongs to the whole operand, to a key head, to a key head of one batch element or sequence, or,
in a cache, to a row: one key of one head. In a latent cache with key_rope it belongs to each 128 columns of a row. The
scale of query belongs to the query heads that read the key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.problem.tensors import E4M3, F32_BYTES, FLOAT8, OPERANDS, Tensor
from cutlass_py_attn.refusals import Refusal, alignment_refusal, refuse

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

SCALES: Final = tuple(f"{name}_scale" for name in OPERANDS)
CACHE_SCALES: Final = SCALES[1:]  # of an e4m3 cache
# Along which a scale may have a stride: that of an e4m3 operand, that of an e4m3 cache.
OPERAND_AXES: Final = ("batch", "head")
CACHE_AXES: Final = ("batch", "page", "row", "head")
TILE_AXES: Final = (*CACHE_AXES, "tile")  # of key_scale of a latent cache with key_rope
SCALE_COLUMNS: Final = 128  # of a latent row that share a scale
TENSOR, HEAD, BATCH_HEAD, ROW = "tensor", "head", "batch_head", "row"
GRANULARITIES: Final = (TENSOR, HEAD, BATCH_HEAD, ROW)  # what has a scale of its own, by the axes of the scales
TILE: Final = "tile"  # of columns, of a row of a latent cache
OUTPUT_DTYPES: Final = ("bfloat16", "float16")  # of the output of e4m3 operands; the first is the default
QUERY_DTYPES: Final = ("float16", "bfloat16")  # of the query of an e4m3 cache


def output_dtype(query: str) -> str:
    """Returns the default dtype of the output, for the dtype of query."""
    return OUTPUT_DTYPES[0] if query in E4M3 else query


def has_codes(problem: Problem) -> bool:
    """Returns whether an operand has e4m3 codes."""
    return any(getattr(problem, name).dtype in E4M3 for name in OPERANDS)


def granularity(scale: Tensor) -> str:
    """Returns what has a scale of its own. (1,) may also be a scale of the only key head, which is the same."""
    return TENSOR if scale.shape == (1,) else (*GRANULARITIES, TILE)[min(len(scale.shape), len(GRANULARITIES))]


def shapes(problem: Problem, name: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes that an operand's scale may have, by what has a scale of its own; () stands for (1,) too.

    name: a member of SCALES.
    """
    if problem.key_rope is not None and name in CACHE_SCALES:
        return {TILE: (*problem.key.shape[:3], ceil_div(problem.key.shape[3], SCALE_COLUMNS))}
    heads = problem.shape.num_heads_key
    found: dict[str, tuple[int, ...]] = {TENSOR: (), HEAD: (heads,), BATCH_HEAD: (problem.shape.batch, heads)}
    if problem.has_e4m3_cache and name in CACHE_SCALES:
        found[ROW] = problem.key.shape[:3]
    return found


def refusals(problem: Problem) -> Iterator[Refusal]:
    """Yields every reason to refuse the dtypes of e4m3 codes and their scales."""
    yield from _dtypes(problem)
    coded = SCALES if problem.query.dtype in E4M3 else CACHE_SCALES if problem.has_e4m3_cache else ()
    if problem.key_rope is not None:
        yield from _rope(problem, problem.key_rope)
        coded = ("key_scale",)
    for name, operand in zip(SCALES, OPERANDS, strict=True):
        if name not in problem.scales:
            continue
        scale, dtype = problem.scales[name], getattr(problem, operand).dtype
        if problem.key_rope is not None and name == "value_scale":
            yield refuse(name, scale, "must be absent with key_rope, because value is in key", "leave it out")
        elif name not in coded:
            rule = f"only e4m3 codes are scaled, and {operand} has dtype {dtype}"
            yield refuse(name, scale, rule, "leave it out")
        else:
            yield from _scale(problem, name, scale)


def _dtypes(problem: Problem) -> Iterator[Refusal]:
    if not has_codes(problem):
        return
    query, key, value = (getattr(problem, name).dtype for name in OPERANDS)
    if problem.direction != "forward":
        rule = f"must be forward with operands of {FLOAT8}, because e4m3 codes have no gradients"
        yield refuse("direction", problem.direction, rule, "dequantise, each code times its scale")
    if value != key:
        yield refuse("value.dtype", value, f"must be {key} as key", "cast one of them")
    if query in E4M3 and key != query:
        yield refuse("key.dtype", key, f"must be {query} as query", "quantise key and value, or cast query")
    if query not in E4M3 and query not in QUERY_DTYPES:
        rule = f"must be {' or '.join(QUERY_DTYPES)} with key of {key}, or {FLOAT8} too"
        yield refuse("query.dtype", query, rule, "cast it")
    if query in E4M3 and problem.output.dtype not in OUTPUT_DTYPES:
        rule = f"must be {' or '.join(OUTPUT_DTYPES)} for {FLOAT8} operands"
        yield refuse("output.dtype", problem.output.dtype, rule, "pass such an array")


def _rope(problem: Problem, rope: Tensor) -> Iterator[Refusal]:
    """Yields why key and key_rope are no latent cache of e4m3 codes."""
    shape, (*rows, columns) = problem.shape, problem.key.shape
    wanted = (*rows, max(shape.head_dim - columns, 0))
    if rope.shape != wanted:
        rule = (
            f"must be {wanted}, the rows of key {problem.key.shape} and the columns of query {problem.query.shape} "
            "behind those of key"
        )
        yield refuse("key_rope.shape", rope.shape, rule, "slice or reshape it")
    if not problem.value_in_key or not problem.has_e4m3_cache:
        rule = (
            f"belongs to a latent cache of {FLOAT8} beside a query of 16 bits, not to key of {problem.key.dtype} and "
            f"query of {problem.query.dtype} with value_in_key = {problem.value_in_key}"
        )
        yield refuse("key_rope", rope, rule, "leave it out, with its columns in key")
    elif problem.key_scale is None:
        rule = (
            f"must be float32 {shapes(problem, 'key_scale')[TILE]} with key_rope, a scale of each {SCALE_COLUMNS} "
            "columns"
        )
        yield refuse("key_scale", None, rule, "pass it, of ones for codes without scales")


def _scale(problem: Problem, name: str, scale: Tensor) -> Iterator[Refusal]:
    first, *others = shapes(problem, name).values()
    allowed = [first, *([(1,)] if first == () else []), *others]
    if scale.dtype != "float32" or scale.shape not in allowed:
        rule = f"must be float32 {', '.join(dict.fromkeys(map(str, allowed)))}"
        yield refuse(name, scale, rule, "reshape or cast it")
    elif scale.alignment < F32_BYTES:
        yield alignment_refusal(name, scale.alignment, F32_BYTES)
