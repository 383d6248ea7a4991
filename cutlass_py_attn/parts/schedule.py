"""Schedule: which tiles a block visits and in which order, as plain integer functions.

Every function takes Python ints or traced integers; tests run them on ints, kernels trace them.
"""

from __future__ import annotations

from typing import Any

from cutlass_py_attn.masks import Mask
from cutlass_py_attn.parts.integers import ceil_div, choose, larger, smaller


def key_tile_end(mask: Mask, query_tile: Any, tile_m: int, tile_n: int, num_queries: Any, num_keys: Any) -> Any:
    """Number of key tiles that some row of `query_tile` sees: the forward visits tiles [0, end)."""
    last_query = smaller((query_tile + 1) * tile_m, num_queries) - 1
    return ceil_div(mask.key_end(last_query, num_queries, num_keys), tile_n)


def full_key_tiles(mask: Mask, query_tile: Any, tile_m: int, tile_n: int, num_queries: Any, num_keys: Any) -> Any:
    """Key tiles [0, full) that every row of `query_tile` sees completely: they need no mask."""
    inside = num_keys // tile_n
    if not mask.bounded:
        return inside
    visible = larger(query_tile * tile_m + mask.diagonal(num_queries, num_keys) + 1, 0)
    return smaller(inside, visible // tile_n)


def query_tile_start(mask: Mask, key_tile: Any, tile_m: int, tile_n: int, num_queries: Any, num_keys: Any) -> Any:
    """First query tile that sees a key of `key_tile`; the backward visits [start, query_tiles).

    The number of query tiles when no query sees one: the first that would may lie in the last tile's padding.
    """
    first = mask.query_start(key_tile * tile_n, num_queries, num_keys)
    return choose(first < num_queries, first // tile_m, ceil_div(num_queries, tile_m))


def needs_mask(
    mask: Mask, query_tile: Any, key_tile: Any, tile_m: int, tile_n: int, num_queries: Any, num_keys: Any
) -> Any:
    """Whether tile (query_tile, key_tile) has a pair that is not seen, rows past the end aside."""
    return key_tile >= full_key_tiles(mask, query_tile, tile_m, tile_n, num_queries, num_keys)


def contributions(mask: Mask, query_tile: Any, tile_m: int, tile_n: int, num_queries: Any, num_keys: Any) -> Any:
    """How many key tiles add to the query gradient of `query_tile`: as many as the forward visits."""
    return key_tile_end(mask, query_tile, tile_m, tile_n, num_queries, num_keys)
