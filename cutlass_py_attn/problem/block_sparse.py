"""Block-sparse masks: a mask in memory, which blocks of queries see which blocks of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.key_ranges import (
    FULL,
    KeyRanges,
    expect,
    integer_refusals,
    is_array,
    length_refusals,
    library_of,
)
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.tensors import VISIBLE_BLOCKS
from cutlass_py_attn.refusals import Refusal, refuse

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class BlockSparse:
    """The mask with which a query sees a key if their blocks see each other, and `within` lets it see the key too.

    visible_blocks: (batch, num_heads_key, blocks of queries, blocks of keys) bool array, or uint8 of zeros and ones;
        the last blocks may be cut by the lengths, and the first two sizes may be 1. In a forward alone the query heads
        of a group may differ, (batch, num_heads, ...). A CUDA array is read in place when kernels run, so that other
        values need no other kernel
    block_size: (queries, keys) of a block, multiples of 64; kernels of sm_90a compute (128, 128) the fastest
    within: a Mask, such as Causal(), or KeyRanges
    """

    visible_blocks: Any
    block_size: tuple[int, int] = (128, 128)
    within: Mask | KeyRanges = FULL

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # calls with other values are other calls

    @property
    def band(self) -> Mask:
        """The mask of numbers alone with which the blocks are intersected."""
        return self.within.band if isinstance(self.within, KeyRanges) else self.within

    def refusals(self) -> Iterator[Refusal]:
        """Yields what is no array, and what is no mask; `Problem.refusals` checks shapes, dtypes and the block size."""
        if not is_array(self.visible_blocks):
            rule = "must be a bool array (batch, num_heads, blocks of queries, blocks of keys)"
            yield refuse(VISIBLE_BLOCKS, self.visible_blocks, rule, "pass one; the first two sizes may be 1")
        yield from block_size_refusals(self.block_size)
        if isinstance(self.within, KeyRanges):
            yield from self.within.refusals()
        elif not isinstance(self.within, Mask):
            yield refuse("within", self.within, "must be a Mask or KeyRanges", "create one, such as Causal()")

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays by their names in a Problem, NumPy integers as bool."""
        ranges = self.within.arrays() if isinstance(self.within, KeyRanges) else {}
        blocks = self.visible_blocks
        has_integers = isinstance(blocks, np.ndarray) and blocks.dtype.kind in "iu"
        return {VISIBLE_BLOCKS: blocks != 0 if has_integers else blocks, **ranges}

    def numbers(self) -> dict[str, Any]:
        """Returns the other fields of a Problem that the mask decides."""
        return {"block_size": self.block_size}

    @staticmethod
    def lists(
        counts: Any,
        indices: Any,
        num_key_blocks: int,
        block_size: tuple[int, int] = (128, 128),
        within: Mask | KeyRanges = FULL,
    ) -> BlockSparse:
        """Returns the mask of lists of key blocks, as FlashAttention-4 and FlexAttention have them.

        counts: (batch, num_heads, blocks of queries) integers: how many key blocks each block of queries sees
        indices: (batch, num_heads, blocks of queries, most blocks) integers: which; those from the count on are unused
        num_key_blocks: blocks of keys

        Blocks that a mask function cuts there, and whole ones, are two pairs of lists: pass the lists of both in one
        mask, `a | b` of their `visible_blocks`, and the cut in `within`.
        """
        shape = "(batch, num_heads, blocks of queries, most blocks)"
        wrong = [
            *integer_refusals("counts", counts, shape.replace(", most blocks", "")),
            *integer_refusals("indices", indices, shape),
            *length_refusals("num_key_blocks", num_key_blocks),
        ]
        if not wrong and tuple(np.shape(counts)) != tuple(np.shape(indices))[:3]:
            rule = f"must be that of indices, {tuple(np.shape(indices))}, without the last"
            wrong.append(refuse("counts.shape", tuple(np.shape(counts)), rule, "reshape them"))
        expect(wrong)
        xp = library_of(indices)
        indices, counts = xp.asarray(indices), xp.asarray(counts)
        is_used = xp.arange(indices.shape[3]) < counts[..., None]
        expect(_block_refusals("indices", indices, is_used, num_key_blocks))
        place = xp.where(is_used & (indices >= 0) & (indices < num_key_blocks), indices, num_key_blocks)
        rows = [xp.arange(size).reshape([-1 if axis == own else 1 for axis in range(4)])
                for own, size in enumerate(indices.shape[:3])]  # fmt: skip
        visible = xp.zeros((*indices.shape[:3], num_key_blocks + 1), dtype=bool)
        return BlockSparse(_marked(visible, (*rows, place))[..., :num_key_blocks], block_size, within)

    @staticmethod
    def csr(
        indptr: Any,
        indices: Any,
        num_key_blocks: int,
        block_size: tuple[int, int] = (128, 128),
        within: Mask | KeyRanges = FULL,
    ) -> BlockSparse:
        """Returns the mask of a sparse matrix of blocks in the CSR format, for every sequence and head.

        indptr: (blocks of queries + 1,) ascending integers: where the key blocks of each block of queries begin
        indices: (entries,) integers: key blocks
        num_key_blocks: blocks of keys
        """
        wrong = [
            *integer_refusals("indptr", indptr, "(blocks of queries + 1,)"),
            *integer_refusals("indices", indices, "(entries,)"),
            *length_refusals("num_key_blocks", num_key_blocks),
        ]
        expect(wrong)
        xp = library_of(indices)
        indptr, indices = xp.asarray(indptr), xp.asarray(indices)
        if isinstance(indptr, np.ndarray) and (np.diff(indptr, prepend=0, append=len(indices)) < 0).any():
            rule = f"must ascend from 0 to the {len(indices)} entries of indices"
            raise NotSupported(refuse("indptr", indptr.tolist(), rule, "correct it"))
        number = xp.arange(indices.shape[0])
        row = xp.searchsorted(indptr, number, side="right") - 1
        is_used = (row >= 0) & (row < indptr.shape[0] - 1)
        expect(_block_refusals("indices", indices, is_used, num_key_blocks))
        is_used = is_used & (indices >= 0) & (indices < num_key_blocks)
        place = xp.where(is_used, row, indptr.shape[0] - 1), xp.where(is_used, indices, num_key_blocks)
        visible = _marked(xp.zeros((indptr.shape[0], num_key_blocks + 1), dtype=bool), place)
        return BlockSparse(visible[:-1, :num_key_blocks][None, None], block_size, within)

    def resolved(self, num_heads: int, num_queries: int, num_keys: int) -> BlockSparse:
        """Returns the mask in NumPy, with blocks of every query head, within ranges without a band."""
        blocks = np.asarray(self.visible_blocks)
        blocks = blocks if blocks.shape[1] == 1 else np.repeat(blocks, num_heads // blocks.shape[1], axis=1)
        ranges = self.within if isinstance(self.within, KeyRanges) else KeyRanges.of(self.within, num_queries, num_keys)
        return replace(self, visible_blocks=blocks, within=ranges.within(num_keys))

    def reach(self, batch: Any, head: Any, query: Any, key: Any) -> Array:
        """Returns whether a query of a head of a sequence sees a key, of index arrays; for a `resolved` mask."""
        blocks: Array = self.visible_blocks
        rows, columns = self.block_size
        last = blocks.shape[3] - 1
        at = batch % blocks.shape[0], head % blocks.shape[1], query // rows, np.minimum(key // columns, last)
        assert isinstance(self.within, KeyRanges)
        seen: Array = (blocks[at] != 0) & self.within.reach(batch, head, query, key)
        return seen

    def materialise(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> Array:
        """Returns the mask as a (batch, num_heads, num_queries, num_keys) bool array; slow, for tests."""
        sizes = batch, num_heads, num_queries, num_keys
        of_batch, head, query, key = np.ogrid[tuple(slice(size) for size in sizes)]
        return self.resolved(num_heads, num_queries, num_keys).reach(of_batch, head, query, key)


def block_size_refusals(sizes: object) -> Iterator[Refusal]:
    """Yields why these are no (queries, keys) of a block."""
    if not (isinstance(sizes, tuple) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
        yield refuse("block_size", sizes, "must be two ints above 0: queries and keys of a block", "correct it")


def undivided(block_size: tuple[int, int], tile_m: int, tile_n: int) -> Iterator[Refusal]:
    """Yields why tiles of (tile_m, tile_n) compute a mask of such blocks wrongly: pairs of a tile would differ."""
    for field, own, size in zip(("tile_m", "tile_n"), (tile_m, tile_n), block_size, strict=True):
        if size % own:
            yield refuse(field, own, f"must divide the {size} of block_size", "use a divisor")


def _marked(visible: Any, place: tuple[Any, ...]) -> Any:
    """Returns a bool array with True at places, changed in place where its library allows that."""
    if hasattr(visible, "at"):
        return visible.at[place].set(True)
    visible[place] = True
    return visible


def _block_refusals(name: str, indices: Any, is_used: Any, num_key_blocks: int) -> Iterator[Refusal]:
    """Yields NumPy indices that are no blocks of keys; those on a device are not read, and mark nothing."""
    if isinstance(indices, np.ndarray) and (is_used & ((indices < 0) | (indices >= num_key_blocks))).any():
        yield refuse(name, indices.tolist(), f"must be from 0 to {num_key_blocks - 1}", "correct them")
