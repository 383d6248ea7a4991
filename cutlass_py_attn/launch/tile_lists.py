"""Tile lists: what the kernels of mask form "ranges" read in place of the order of tiles that a band has.

    array          shape                            contents
    work_list      (work tiles, RECORD_WORDS)       a record of every work tile, in the order of execution
    tile_entries   (entries,)                       the lists of tiles that work tiles visit, one after another
    key_ranges     (batch, num_heads, padded, 2)    start and end of the keys that each query sees

All are int32. A work tile is a query tile of the forward, which visits key tiles, or a key tile of the backward, which
visits query tiles. The words of its record, and the order of its tiles in tile_entries:

    word    0     1     2      3      4            5    6
            tile  head  batch  begin  partial_end  end  key_tile
    entries [begin, partial_end) have a pair that the mask hides; entries [partial_end, end) have none

The head is that of the query in the forward, that of key and value in the backward. A list has at least one entry: a
work tile that no pair reaches visits tile 0 in the first part. key_tile is the key tile as which the first entry of a
forward, or every entry of a backward, is masked: one behind all keys for a list without a tile. Several records may
name one list.

Ranges are inside the keys. Their rows are padded to a multiple of RANGES_PADDING queries; an axis of size 1 has stride
0.
"""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.problem.tensors import WORD_BYTES

RECORD_WORDS: Final = 8
RANGES_PADDING: Final = 128  # queries; the largest query tile of a kernel that copies the ranges of a tile
RANGE_WORDS: Final = 2
RANGE_BYTES: Final = RANGE_WORDS * WORD_BYTES
