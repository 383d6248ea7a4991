"""Split-KV: over how many thread blocks a decode kernel splits the keys of the same query rows."""

from __future__ import annotations

from cutlass_py_attn.integers import ceil_div

SPLIT_OVERHEAD_TILES = 1  # time to start a block and to combine its results, in key tiles
MAX_SPLITS = 256


def fewest_splits(row_blocks: int, key_tiles: int, num_sms: int) -> int:
    """Returns the number of splits of the keys: the fewest for which the busiest SM has the least work.

    row_blocks: thread blocks with different query rows or key heads
    key_tiles: key tiles that the splits share
    num_sms: multiprocessors of the device

    The work of a block is its key tiles plus SPLIT_OVERHEAD_TILES. How many blocks an SM runs at the same time does
    not matter, because they share its bandwidth.
    """

    def busiest_sm_tiles(splits: int) -> int:
        return ceil_div(max(row_blocks, 1) * splits, num_sms) * (ceil_div(key_tiles, splits) + SPLIT_OVERHEAD_TILES)

    return min(range(1, max(min(key_tiles, MAX_SPLITS), 1) + 1), key=busiest_sm_tiles)
