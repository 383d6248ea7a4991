"""Cases of e4m3 caches: NaN in every row, every scale and 2**30 in every entry that is not used."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.testing.cases import ARCH, Case, builds_of

# Every granularity of scales, page sizes from 1, tables with rows and with page_indptr, pools in any layout, sequences
# without keys, several tiles of query rows, every mask and score term, head dims that are padded, and no pages at all.
DECODE: Final = tuple(
    map(
        Case.parse,
        (
            "forward bf16_d128_q1_s1000_b5_h32k8_full_paged16_kv8_descalehead seed=1",
            "forward bf16_d128_q1_s1000_b5_h32k8_full_paged1_kv8_descalehead seed=2",
            "forward bf16_d128_q1_s1000_b5_h32k8_full_paged8_kv8_descaletensor seed=2 layout=heads_first",
            "forward bf16_d128_q1_s5000_b2_h8k2_full_paged64_kv8_descalebatch seed=3 layout=packed",
            "forward bf16_d128_q1_s130_b150_h8k2_full_paged16_kv8_descalehead seed=4 table=csr",
            "forward bf16_d128_q1_s0_b3_h8k2_full_paged256_kv8_descalehead seed=4",
            "forward bf16_d128_q1_s3000_b3_h8k2_full_paged32_kv8_descalehead seed=4 inputs=gaussian_x3 layout=padded",
            "forward bf16_d128_n3x900u900,3x70u0,3x4000u3999,3x20u1_h6k2_full_paged256_kv8 seed=4 invariant=1",
            "forward bf16_d128_q1_s1000_b5_h32k8_full_paged2_kv8_descalerow seed=1 table=csr",
            "forward bf16_d128_q1_s5000_b3_h8k2_full_paged32_kv8_descalerow seed=4 inputs=needle",
            "forward bf16_d128_q4_s700_b9_h32k8_causal_br_paged16_kv8_descalehead seed=5 layout=padded",
            "forward bf16_d128_q4_s3_b2_h32k8_causal_br_paged1_kv8_descalehead seed=6",
            "forward f16_d64_n1x900u333,4x64u0,0x20u20,3x5u2,4x2000u1999_h8k2_window_left100_right0_paged8_kv8_"
            "descalebatch seed=7 table=csr",
            "forward bf16_d128_q1_s900_b4_h8k2_full_softcap4_alibi_sinks_paged16_kv8_descalehead seed=8",
            "forward bf16_d128_q1_s0_b4_h8k2_full_softcap4_alibi_sinks_paged16_kv8_descalehead seed=8",
            "forward f16_d256_q1_s700_b3_h4_full_paged32_kv8_descalehead seed=10",
            "forward bf16_d128_q8_s900_b3_h8k2_causal_br_paged16_kv8_descalerow seed=12",
            "forward bf16_d128_q16_s900_b3_h8k2_causal_br_paged8_kv8_descalehead seed=12",
            "forward bf16_d128_q32_s900_b2_h8k2_causal_br_paged16_kv8_descalehead seed=13 inputs=needle",
            "forward bf16_d96v64_q1_s900_b3_h8k2_full_paged16_kv8_descalerow seed=14",
            "forward bf16_d100v36_q1_s900_b3_h8k2_full_paged4_kv8_descalehead seed=15",
            "forward f16_d32_q2_s900_b3_h8_causal_br_paged16_kv8_descalehead seed=16",
            "forward bf16_d32_q16_s300_b2_h8k2_causal_br_paged16_kv8_descalerow seed=16",
            "forward bf16_d32_q16_s300_b2_h8k2_causal_br_paged4_kv8_descalerow seed=16",
            "forward bf16_d128_q1_s1000_b5_h32k8_full_kv8 seed=1",
            "forward bf16_d128_q1_s77_b5_h32k8_full_kv8_descaletensor seed=3",
            "forward bf16_d64_q2_s300_b2_h8k2_causal_br_kv8_descalerow seed=17",
            "forward bf16_d64_n1x900u333,4x64u0,0x20u20,3x5u2,4x2000u1999_h8k2_causal_br_kv8_descalerow seed=18",
        ),
    )
)

# Prompts over a cache, and terms that the decode kernels do not have: the forwards.
PREFILL: Final = tuple(
    map(
        Case.parse,
        (
            "forward bf16_d128_q200_s700_b2_h8k2_causal_br_paged16_kv8_descalehead seed=1",
            "forward bf16_d128_n150x900u900,150x300u0,150x400u333_h8k2_full_paged2_kv8_descalerow seed=2 table=csr",
            "forward f16_d64_n257x900u333,64x300u200,0x20u20_h8k2_window_left100_right0_paged64_kv8_descalebatch "
            "seed=3",
            "forward bf16_d64_q300_s300_b2_h4_causal_kv8 seed=4 inputs=needle",
            "forward f16_d40v36_q129_s500_b1_h2_full_softcap4_alibi_sinks_kv8_descalerow seed=5 layout=padded",
            "forward bf16_d256_q140_s300_b1_h2_full_kv8_descaletensor seed=6 layout=heads_first",
            "forward f16_d64_q5_s300_b2_h2_full_bias_dropout0.1_kv8_descalehead seed=7",
        ),
    )
)

# The lengths of one captured launch after another, those of paged_cases.REPLAYED_LENGTHS.
REPLAYED: Final = Case.parse(
    "forward bf16_d128_n1x2048u1,1x2048u700,1x2048u0,1x2048u2048,1x2048u33_h8k2_full_paged16_kv8_descalehead"
)

# The same bits alone as in the batch.
INVARIANT: Final = Case.parse(
    "forward bf16_d128_n2x4100u4100,2x4100u1,2x4100u1024,2x4100u0,2x4100u2600_h8k2_causal_br_paged16_kv8 invariant=1"
)

# Rows of which tests sample some: the errors of codes with outliers and needles.
LONG: Final = tuple(
    Case.parse(f"forward bf16_d128_q{queries}_s32768_b1_h1_full_kv8_descale{grain}")
    for queries in (1, 300)
    for grain in ("batch", "row")
)


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that these cases need, once; each with its fallbacks if ptxas spills."""
    return builds_of((*DECODE, *PREFILL, REPLAYED, INVARIANT, *LONG), arch)
