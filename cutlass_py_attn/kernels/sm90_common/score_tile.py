"""ScoreTile: which queries and keys one product of transposed scores of the sm90 backward has."""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32

from cutlass_py_attn.kernels.common import seqlen_info
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import Band


@dataclass(frozen=True)
class ScoreTile:
    """One tile of scores: (block_queries, tile_n).

    seqlen, band: the sequence and its mask
    head: query head
    query_block: index of the query block; a query block is a query tile, or a part of one
    key_tile: index of the key tile
    """

    seqlen: seqlen_info.SeqlenInfo
    band: Band
    head: Any
    query_block: Any
    key_tile: Any

    def origin(self, build: Build) -> tuple[Int32, Int32]:
        """Returns the first query and the first key."""
        return self.query_block * build.block_queries, self.key_tile * build.tile_n
