"""Paged cases: key and value in pages, with NaN in every row and 2**30 in every entry of the table that is not used."""

from __future__ import annotations

import dataclasses
from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.testing.cases import ARCH, Case, builds_of

# Few queries: page sizes from 1, tables with rows and with page_indptr, pools in any layout, sequences without keys or
# without queries, several tiles of query rows, and every mask and score term that the persistent decode kernel has.
DECODE: Final = tuple(
    map(
        Case.parse,
        (
            "forward bf16_d128_q1_s1000_b5_h32k8_full_paged16 seed=1",
            "forward bf16_d128_q1_s1000_b5_h32k8_full_paged1 seed=2",
            "forward bf16_d128_q1_s1000_b5_h32k8_full_paged8 seed=2 layout=heads_first",
            "forward bf16_d128_q1_s5000_b2_h32k8_full_paged64 seed=3 layout=packed",
            "forward bf16_d128_q1_s130_b300_h8k2_full_paged16 seed=4 table=csr",
            "forward bf16_d128_q1_s0_b3_h8k2_full_paged256 seed=4",
            "forward bf16_d128_n3x900u900,3x70u0,3x4000u3999,3x20u1_h12k4_full_paged256 seed=4 invariant=1",
            "forward bf16_d128_q4_s700_b9_h32k8_causal_br_paged16 seed=5 layout=padded",
            "forward bf16_d128_q4_s3_b2_h32k8_causal_br_paged1 seed=6",
            "forward f16_d64_n1x900u333,4x64u0,0x20u20,3x5u2,4x2000u1999_h8k2_window_left100_right0_paged8 seed=7 "
            "table=csr",
            "forward bf16_d128_q1_s900_b4_h8k2_full_softcap4_alibi_sinks_paged16 seed=8",
            "forward bf16_d128_q1_s0_b4_h8k2_full_softcap4_alibi_sinks_paged16 seed=8",
            "forward bf16_d128_q3_s4000_b2_h8k2_full_softcap4_alibib_sinks_paged2 seed=9",
            "forward f16_d256_q1_s700_b3_h4_full_paged32 seed=10",
            "forward f32_d64_q2_s500_b3_h4k2_causal_br_paged4 seed=11",
            "forward bf16_d128_q16_s900_b3_h8k2_causal_br_paged16 seed=12",
            "forward bf16_d128_q16_s900_b3_h8k2_causal_br_paged8 seed=12",
            "forward bf16_d128_q32_s900_b2_h8k2_causal_br_paged16 seed=13 inputs=needle",
            "forward bf16_d128_n5x900u900,0x20u20,7x40u0,4x1000u17_h8k2_causal_br_sinks_paged16 seed=14",
        ),
    )
)

# The lengths of one captured launch after another.
REPLAYED: Final = Case.parse("forward bf16_d128_n1x2048u1,1x2048u700,1x2048u0,1x2048u2048,1x2048u33_h32k8_full_paged16")
REPLAYED_LENGTHS: Final = ((1, 700, 0, 2048, 33), (2048,) * 5, (0,) * 5, (1, 1, 1, 1, 1999))

# The same bits alone as in the batch.
INVARIANT: Final = Case.parse(
    "forward bf16_d128_n2x4100u4100,2x4100u1,2x4100u1024,2x4100u0,2x4100u2600_h32k8_causal_br_paged16 invariant=1"
)


def with_lengths(case: Case, used: tuple[int, ...]) -> Case:
    """Returns the case with other numbers of keys."""
    pairs = zip(case.spec.sequences, used, strict=True)
    return case.replace(sequences=tuple(dataclasses.replace(each, used_keys=keys) for each, keys in pairs))


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that these cases need, once; each with its fallbacks if ptxas spills."""
    return builds_of((*DECODE, REPLAYED, INVARIANT), arch)
