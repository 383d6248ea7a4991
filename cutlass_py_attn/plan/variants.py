"""Variants: the kernel bodies of each (kind, family), with their features and the sequence lengths they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.score_terms import registry

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
# Options of a kernel body, which a tile names beside its variant; tile_options.py says when the planner has them.
SPECULATIVE: Final = "speculative"
HALVES: Final = "halves"
SHARED_END: Final = "shared_end"
BITS: Final = "bits"
OPTIONS: Final = (SPECULATIVE, HALVES, SHARED_END, BITS)
CLUSTER: Final = 2  # thread blocks of a cluster, in the variants that have clusters


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel body.

    kind, family, name: the fields `kind`, `family` and `variant` of a Build
    module: module below cutlass_py_attn.kernels that traces the body
    summary: how thread blocks divide the work
    layouts: layouts of the operands that the body implements, a part of registry.LAYOUTS
    score_terms: the name, one of `score_terms.term.KERNELS`, by which a score term says that the body implements it;
        "" for a body without score terms
    lengths: "any"; "short", "long" or "few_queries" when the planner chooses the variant for short or long sequences
        alone, or for few queries and many keys, so that a kernel set for run-time lengths cannot rely on it
    cluster: thread blocks of a cluster of the main kernel
    """

    kind: str
    family: str
    name: str
    module: str
    summary: str
    score_terms: str = ""
    layouts: tuple[str, ...] = registry.LAYOUTS
    lengths: str = "any"
    cluster: int = 1

    @property
    def features(self) -> tuple[str, ...]:
        """Features of a Problem that the body implements: its layouts and score terms, sorted."""
        return tuple(sorted((*self.layouts, *registry.supported(self.score_terms))))


_ALL: Final = (
    Variant(
        "forward",
        "sm80",
        STANDARD,
        "sm80.forward",
        "one block per query tile",
        "sm80 forward",
        layouts=(*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.KV8_ROW),
    ),
    Variant(
        "backward",
        "sm80",
        STANDARD,
        "sm80.backward",
        "one block per key tile or split of the key tiles",
        "sm80 backward",
    ),
    Variant(
        "forward",
        "sm80",
        SPLIT_D,
        "sm80_split_d.forward",
        "head_dim_value split over blocks",
        "sm80 forward",
        layouts=(*registry.LAYOUTS, registry.PAGED),
    ),
    Variant("backward", "sm80", SPLIT_D, "sm80_split_d.backward", "head dims split over blocks", "sm80 backward"),
    Variant(
        "forward",
        "sm90",
        STANDARD,
        "sm90.forward",
        "persistent blocks over query tiles",
        "sm90 forward",
        layouts=(*registry.LAYOUTS, registry.PAGED),
    ),
    Variant(
        "forward",
        "sm90",
        MULTICAST,
        "sm90.forward",
        "clusters of two blocks over neighbouring query tiles; each block loads half of every key and value tile",
        layouts=("grouped",),
        lengths="long",
        cluster=CLUSTER,
    ),
    Variant(
        "forward",
        "sm90",
        SPLIT_KV,
        "sm90.forward",
        "blocks share the keys of each query tile; a second kernel joins their results",
        "sm90 forward split_kv",
        layouts=(*registry.LAYOUTS, registry.PAGED),
        lengths="few_queries",
    ),
    Variant(
        "forward",
        "sm90",
        WIDE,
        "sm90.wide_forward",
        "head dims beyond 256: clusters of two blocks over neighbouring query tiles; each block loads half of every "
        "key and value tile, and two warpgroups divide the columns of O",
        "sm90 wide forward",
        cluster=CLUSTER,
    ),
    Variant(
        "forward",
        "sm90",
        E4M3,
        "sm90.e4m3_forward",
        "persistent blocks over query tiles of 8-bit operands; two warps transpose every value tile",
        layouts=(*registry.LAYOUTS, registry.FLOAT16_OUTPUT),
    ),
    Variant(
        "forward",
        "sm90",
        E4M3_CACHE,
        "sm90.e4m3_cache_forward",
        "persistent blocks over query tiles; one warpgroup converts every key and value tile of e4m3 codes to 16 bits",
        "sm90 forward",
        layouts=(*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.KV8_ROW),
    ),
    Variant(
        "backward",
        "sm90",
        STANDARD,
        "sm90.backward",
        "persistent blocks over key tiles",
        "sm90 backward",
    ),
    Variant(
        "backward",
        "sm90",
        PER_HEAD,
        "sm90.backward",
        "one block per head: each block computes all key tiles of a head and sums dQ without atomics",
        "sm90 backward",
        layouts=("grouped",),
        lengths="short",
    ),
    Variant(
        "backward",
        "sm90",
        QUERY_HEADS,
        "sm90.backward",
        "persistent blocks over key tiles of every query head; dK and dV of a group are added in float32",
        "sm90 backward",
        lengths="short",
    ),
    Variant(
        "backward",
        "sm90",
        DS_REGISTERS,
        "sm90.backward",
        "persistent blocks over key tiles; dK is multiplied from dS in registers",
        "sm90 backward ds_registers",
    ),
    Variant(
        "backward",
        "sm90",
        KEY_REGISTERS,
        "sm90.backward",
        "persistent blocks over key tiles; dK is multiplied from dS in registers, dQ from the key tile in registers",
        "sm90 backward key_registers",
    ),
    Variant(
        "backward",
        "sm90",
        TWO_CTA,
        "sm90.backward_2cta",
        "clusters of two blocks over neighbouring key tiles; one warpgroup has dV, one dK, one dQ of both blocks",
        "sm90 backward 2cta",
        layouts=("grouped",),
        cluster=CLUSTER,
    ),
    Variant(
        "backward",
        "sm90",
        WIDE,
        "sm90.wide_backward",
        "head dims beyond 256: clusters of two blocks over neighbouring query tiles for dQ, and over neighbouring key "
        "tiles for dK and for dV; each block loads half of every other tile, and two warpgroups divide the columns",
        "sm90 backward wide",
        cluster=CLUSTER,
    ),
    Variant(
        "forward",
        "decode",
        STANDARD,
        "decode.forward",
        "split-KV: the keys of a head split over blocks",
        "decode",
    ),
    Variant("append", "sm80", STANDARD, "decode.append", "a few threads per row", layouts=()),
    Variant("append", "sm80", E4M3, "decode.append", "a few threads per row, which they scale", layouts=()),
    Variant("append", "sm80", E4M3_ROW, "decode.append", "a few threads per row, which find its scale", layouts=()),
    Variant(
        "append",
        "sm80",
        E4M3_TILE,
        "decode.append",
        "a few threads per row, which find the scales of its tiles of columns; the row of value is copied",
        layouts=(),
    ),
    Variant("merge", "sm80", STANDARD, "decode.merge", "a few threads per row", layouts=("varlen",)),
    Variant("merge", "sm80", TOTAL, "decode.merge", "a few threads per row, into a float32 total", layouts=("varlen",)),
    Variant("merge", "sm80", LAST, "decode.merge", "a few threads per row, of a float32 total", layouts=("varlen",)),
    Variant("merge", "sm80", SUM, "decode.merge", "a few threads per row, added to a float32 total", layouts=()),
    Variant("merge", "sm80", SUM_LAST, "decode.merge", "a few threads per row, added and rounded", layouts=()),
    Variant(
        "forward",
        "decode",
        PERSISTENT,
        "decode.persistent",
        "persistent blocks over chunks of the keys of all sequences, whose lengths are in device memory",
        "decode persistent",
        layouts=(*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.KV8_ROW),
    ),
    Variant(
        "forward",
        "sm90",
        MLA,
        "sm90_mla.decode",
        "keys that contain the values: persistent blocks over chunks of the keys of all sequences, in which two "
        "warpgroups compute S of alternate key tiles and divide the columns of O",
        layouts=("grouped", registry.PAGED, "varlen", registry.KV8, registry.KV8_TILE),
    ),
    Variant("component_gemm", "sm80", STANDARD, "component_gemms.standalone_sm80", "one block per tile", layouts=()),
    Variant("component_gemm", "sm90", STANDARD, "component_gemms.standalone_sm90", "one block per tile", layouts=()),
)
VARIANTS: Final[dict[tuple[str, str, str], Variant]] = {(it.kind, it.family, it.name): it for it in _ALL}
