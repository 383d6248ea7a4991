"""Tile shares: how many tiles of a plan a mask leaves to visit, and how many of these it cuts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import ArrayMask
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.refusals import refuse

if TYPE_CHECKING:
    from cutlass_py_attn.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class TileShares:
    """What a mask leaves of the scores of one query head of a sequence.

    pairs: share of the pairs of a query and a key that it leaves
    visited: share of the tiles that have such a pair, which kernels compute
    partial: share of the visited tiles that have another pair as well, in which kernels mask scores
    """

    pairs: float
    visited: float
    partial: float

    def __str__(self) -> str:
        partial = f", {self.partial:.1%} of these partial" if self.visited else ""
        return f"{self.visited:.1%} of the tiles visited{partial}; {self.pairs:.1%} of the pairs visible"


def tile_shares(plan: Plan, mask: Mask | ArrayMask, batch: int = 0, head: int = 0) -> TileShares:
    """Returns the shares of a mask in the tiles of a forward or a backward, for one query head of a sequence.

    mask: with NumPy arrays, or arrays that NumPy converts. Every pair is computed in NumPy, query tile by query tile

    Raises NotSupported for what is no mask, and for arrays of other sizes than the plan's.
    """
    if not isinstance(mask, (Mask, ArrayMask)):
        raise NotSupported(refuse("mask", mask, "must be a mask", "create one, such as Causal()"))
    sizes = dict(plan.params)
    num_heads, num_queries, num_keys = (sizes[name] for name in ("num_heads", "num_queries", "num_keys"))
    ranges = KeyRanges.of(mask, num_queries, num_keys) if isinstance(mask, Mask) else mask
    resolved = ranges.resolved(num_heads, num_queries, num_keys)
    tile_m, tile_n = plan.build.tile_m, plan.build.tile_n
    starts = np.arange(0, num_keys, tile_n)
    keys = np.arange(num_keys)
    pairs = visited = whole = 0
    for first in range(0, num_queries, tile_m):
        queries = np.arange(first, min(first + tile_m, num_queries))
        try:
            reached = resolved.reach(batch, head, queries[:, None], keys)
        except IndexError as error:
            sizes_of_plan = f"{num_queries} queries, {num_keys} keys and {num_heads} heads"
            rule = f"must be of the plan's {sizes_of_plan} ({error})"
            raise NotSupported(refuse("mask", mask, rule, "plan the problem of the call")) from error
        seen = np.broadcast_to(reached, (len(queries), num_keys))
        of_tiles = np.add.reduceat(seen.sum(axis=0, dtype=np.int64), starts)
        pairs += int(of_tiles.sum())
        visited += int((of_tiles > 0).sum())
        whole += int((of_tiles == len(queries) * tile_n).sum())
    tiles = ceil_div(num_queries, tile_m) * len(starts)
    return TileShares(
        pairs / max(num_queries * num_keys, 1), visited / max(tiles, 1), (visited - whole) / max(visited, 1)
    )
