"""Variants: the names of the kernel bodies of each (kind, family), and of the options that a body can have."""

from __future__ import annotations

from typing import Final

STANDARD: Final = ""
SPLIT_D: Final = "split_d"
MULTICAST: Final = "multicast"
SPLIT_KV: Final = "split_kv"
PER_HEAD: Final = "per_head"
QUERY_HEADS: Final = "query_heads"
TWO_CTA: Final = "2cta"
DS_REGISTERS: Final = "ds_registers"
KEY_REGISTERS: Final = "key_registers"
E4M3: Final = "e4m3"
E4M3_ROW: Final = "e4m3_row"
E4M3_TILE: Final = "e4m3_tile"
E4M3_CACHE: Final = "e4m3_cache"
WIDE: Final = "wide"
PERSISTENT: Final = "persistent"
MLA: Final = "mla"
TOTAL: Final = "total"
LAST: Final = "last"
SUM: Final = "sum"
SUM_LAST: Final = "sum_last"
KEEPS_DS: Final = (DS_REGISTERS, KEY_REGISTERS)  # of the sm90 backward: dS^T stays in registers for dK += dS^T Q
# Options of a kernel body, which a tile names beside its variant; PLAIN is the word for none of them.
SPECULATIVE: Final = "speculative"
HALVES: Final = "halves"
SHARED_END: Final = "shared_end"
BITS: Final = "bits"
OPTIONS: Final = (SPECULATIVE, HALVES, SHARED_END, BITS)
PLAIN: Final = "plain"
# The variants of the sm90 family that can have options; those of backwards have SHARED_END alone.
WITH_OPTIONS: Final = {
    "forward": (STANDARD, MULTICAST, SPLIT_KV, E4M3, E4M3_CACHE),
    "backward": (STANDARD, DS_REGISTERS, KEY_REGISTERS),
}
MLA_HEAD_DIMS: Final = 576, 512  # of key and value: DeepSeek's 512 latent columns and 64 of the rotary embedding
CLUSTER: Final = 2  # thread blocks of a cluster, in the variants that have clusters
CLUSTERED: Final = (MULTICAST, TWO_CTA, WIDE)
