"""Chunk shares: how the persistent decode kernel divides chunks of keys among blocks, as plain integer functions.

Every function takes Python ints or traced integers: tests call it with ints, kernels trace it. Chunks are numbered from
0; kernels/decode/chunk_schedule.py says what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass_py_attn.integers import choose, larger, smaller


@dataclass(frozen=True)
class Shares:
    """The chunks of all rows, divided among blocks: the first `more` blocks have share + 1 chunks, the others share.

    active: blocks that have chunks.
    """

    active: Any
    share: Any
    more: Any

    def begin(self, block: Any) -> Any:
        """Returns the first chunk of a block; for blocks behind the last active one the number of all chunks."""
        block = smaller(block, self.active)
        return block * self.share + smaller(block, self.more)

    def block_of(self, chunk: Any) -> Any:
        """Returns the block that has a chunk."""
        cut = self.more * (self.share + 1)
        behind = self.more + (chunk - cut) // larger(self.share, 1)
        return choose(chunk < cut, chunk // (self.share + 1), behind)


def shares(chunks: Any, blocks: Any, least: Any) -> Shares:
    """Returns the shares of at most `blocks` blocks; a block has `least` chunks or more, unless there are fewer."""
    active = larger(smaller(blocks, chunks // least), 1)
    share = chunks // active
    return Shares(active, share, chunks - share * active)


def slot_of_block(block: Any, begins_block: Any) -> Any:
    """Returns the slot of a piece's partial results, of the two that a block has.

    begins_block: whether the piece starts where the block starts. Another piece that is not a whole row is the block's
    last.
    """
    return block * 2 + choose(begins_block, 0, 1)
