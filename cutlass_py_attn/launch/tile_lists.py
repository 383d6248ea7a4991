"""Tile lists: what the kernels of mask form "ranges" read in place of the order of tiles that a band has.

    array          shape                         contents
    work_list      (work tiles, RECORD_WORDS)    a record of every work tile, in the order of execution
    tile_entries   (entries,)                    the lists of tiles that work tiles visit, one after another

Both are int32. A work tile is a query tile of the forward, which visits key tiles, or a key tile of the backward, which
visits query tiles. The words of its record, and the order of its tiles in tile_entries:

    word    0     1     2      3      4            5    6
            tile  head  batch  begin  partial_end  end  key_tile
    entries [begin, partial_end) have a pair that the mask hides; entries [partial_end, end) have none

The head is that of the query in the forward, that of key and value in the backward. A list has at least one entry: a
work tile that no pair reaches visits tile 0 in the first part. key_tile is the key tile as which the first entry of a
forward, or every entry of a backward, is masked: one behind all keys for a list without a tile. Several records may
name one list.
"""

from __future__ import annotations

from typing import Final

RECORD_WORDS: Final = 8
