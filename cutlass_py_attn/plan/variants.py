"""Variants: the kernel bodies of each (kind, family), with their features and the sequence lengths they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.score_terms import registry

STANDARD: Final = ""
SPLIT_D: Final = "split_d"
MULTICAST: Final = "multicast"
PER_HEAD: Final = "per_head"
QUERY_HEADS: Final = "query_heads"
TWO_CTA: Final = "2cta"
E4M3: Final = "e4m3"
E4M3_ROW: Final = "e4m3_row"
WIDE: Final = "wide"
PERSISTENT: Final = "persistent"
CLUSTER: Final = 2  # thread blocks of a cluster, in the variants that have clusters

# Options of the sm90 backward with blocks of 128 keys. Each is a part of a variant of `_TRIALS`.
DELTA_START: Final = "delta_start"  # dP^T = V dO^T starts from -delta, which the delta kernel stores
LSE_START: Final = "lse_start"  # S^T = K Q^T starts from -logsumexp / scale, which the delta kernel stores
DS_REGISTERS: Final = "ds_registers"  # dK += dS^T Q reads dS^T from registers
PACKED_DS: Final = "packed_ds"  # dS = P (dP - delta) in pairs of the operands' type
DV_FIRST: Final = "dv_first"  # beside ds_registers: dV is issued before dP^T and ends with it
KEY_REGISTERS: Final = "key_registers"  # dQ^T = K^T dS^T, with K^T in registers


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel body.

    kind, family, name: the fields `kind`, `family` and `variant` of a Build
    module: module below cutlass_py_attn.kernels that traces the body
    summary: how thread blocks divide the work
    layouts: layouts of the operands that the body implements, a part of registry.LAYOUTS
    score_terms: the name, one of `score_terms.term.KERNELS`, by which a score term says that the body implements it;
        "" for a body without score terms
    lengths: "any"; "short" or "long" when the planner chooses the variant for short or long sequences alone, so that
        a kernel set for run-time lengths cannot rely on it
    cluster: thread blocks of a cluster of the main kernel
    options: options of the sm90 backward that the body has
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
    options: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """Features of a Problem that the body implements: its layouts and score terms, sorted."""
        return tuple(sorted((*self.layouts, *registry.supported(self.score_terms))))


# Variants of the sm90 backward that no tile table has: each is measured against the standard one.
_TRIALS: Final[dict[str, tuple[str, ...]]] = {
    "d": (DELTA_START,),
    "dp": (DELTA_START, PACKED_DS),
    "dsr": (DELTA_START, LSE_START, DS_REGISTERS),
    "rf": (DS_REGISTERS, DV_FIRST),
    "drf": (DELTA_START, DS_REGISTERS, DV_FIRST),
    "drfp": (DELTA_START, DS_REGISTERS, DV_FIRST, PACKED_DS),
    "rfk": (DS_REGISTERS, DV_FIRST, KEY_REGISTERS),
    "drfk": (DELTA_START, DS_REGISTERS, DV_FIRST, KEY_REGISTERS),
    "drfkp": (DELTA_START, DS_REGISTERS, DV_FIRST, KEY_REGISTERS, PACKED_DS),
}
TRIALS: Final[dict[str, tuple[str, ...]]] = {f"trial_{name}": options for name, options in _TRIALS.items()}

_ALL: Final = (
    Variant(
        "forward",
        "sm80",
        STANDARD,
        "sm80.forward",
        "one block per query tile",
        "sm80 forward",
        layouts=(*registry.LAYOUTS, registry.PAGED),
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
        WIDE,
        "sm90.wide_forward",
        "head dims beyond 256: clusters of two blocks over neighbouring query tiles; each block loads half of every "
        "key and value tile, and two warpgroups divide the columns of O",
        "sm90 wide forward",
        cluster=CLUSTER,
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
        TWO_CTA,
        "sm90.backward_2cta",
        "clusters of two blocks over neighbouring key tiles; one warpgroup has dV, one dK, one dQ of both blocks",
        "sm90 backward 2cta",
        layouts=("grouped",),
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
    Variant("merge", "sm80", STANDARD, "decode.merge", "a few threads per row", layouts=("varlen",)),
    Variant(
        "forward",
        "decode",
        PERSISTENT,
        "decode.persistent",
        "persistent blocks over chunks of the keys of all sequences, whose lengths are in device memory",
        "decode persistent",
        layouts=("grouped", registry.PAGED, "varlen"),
    ),
    *(
        Variant("backward", "sm90", name, "sm90.backward", "persistent blocks over key tiles", options=options)
        for name, options in TRIALS.items()
    ),
    Variant("component_gemm", "sm80", STANDARD, "component_gemms.standalone_sm80", "one block per tile", layouts=()),
    Variant("component_gemm", "sm90", STANDARD, "component_gemms.standalone_sm90", "one block per tile", layouts=()),
)
VARIANTS: Final[dict[tuple[str, str, str], Variant]] = {(it.kind, it.family, it.name): it for it in _ALL}
