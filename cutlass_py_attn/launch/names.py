"""Names: the sizes of problems and devices, and what launches define, as expressions."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.launch.expressions import Name

# Sizes of a problem: num_keys and num_queries of the longest sequence, tokens_q and tokens_k of all together.
BATCH: Final = Name("batch")
NUM_HEADS: Final = Name("num_heads")
NUM_HEADS_KEY: Final = Name("num_heads_key")
NUM_QUERIES: Final = Name("num_queries")
NUM_KEYS: Final = Name("num_keys")
TOKENS_Q: Final = Name("tokens_q")
TOKENS_K: Final = Name("tokens_k")
# Pools of pages.
NUM_PAGES: Final = Name("num_pages")
PAGE_SIZE: Final = Name("page_size")
MAX_PAGES: Final = Name("max_pages")
TABLE_ENTRIES: Final = Name("table_entries")
# Queries and keys of a block of visible blocks, and query heads that have the same blocks.
MASK_BLOCK_ROWS: Final = Name("mask_block_rows")
MASK_BLOCK_COLUMNS: Final = Name("mask_block_columns")
MASK_BLOCK_HEADS: Final = Name("mask_block_heads")
# Multiprocessors of a device.
NUM_SMS: Final = Name("num_sms")
# Definitions.
GROUP: Final = Name("group")
NUM_SPLITS_KEY: Final = Name("num_splits_key")
TOTAL_TILES: Final = Name("total_tiles")
TOTAL_KEY_TILES: Final = Name("total_key_tiles")
WORK_TILES: Final = Name("work_tiles")
