"""MLA cases: keys that contain the values, dense and in pages with NaN in every row that no sequence uses."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.testing.cases import ARCH, Case, builds_of

# One to many latent tiles, odd and even; rows of few and many heads, in whole tiles and not; several queries; pages
# from 16 rows on, tables with rows and with page_indptr; sequences without keys or queries; every form of mask.
CASES: Final = tuple(
    map(
        Case.parse,
        (
            *(
                f"forward bf16_d576v512_q1_s{keys}_b3_h128k1_full_mla seed={keys}"
                for keys in (1, 64, 65, 129, 300, 1000)
            ),
            *(f"forward bf16_d576v512_q1_s700_b5_h{heads}k1_full_mla seed={heads}" for heads in (2, 16, 20, 96, 100)),
            "forward bf16_d576v512_q1_s300_b2_h8k2_full_mla seed=1",
            "forward bf16_d576v512_q5_s333_b3_h20k1_full_mla seed=2 layout=padded",
            "forward bf16_d576v512_q3_s300_b2_h40k1_causal_br_mla seed=3 layout=heads_first",
            "forward bf16_d576v512_q70_s40_b2_h3k1_causal_mla seed=4",
            "forward bf16_d576v512_q3_s900_b2_h32k1_window_left100_right0_mla seed=5 inputs=needle",
            "forward bf16_d576v512_q2_s257_b2_h16k1_full_scale0.1_mla seed=6 inputs=one_key",
            "forward f16_d576v512_q1_s500_b2_h1_full_mla seed=7",
            "forward f16_d576v512_q4_s333_b2_h128k1_causal_br_mla seed=8 inputs=gaussian_x3",
            "forward bf16_d576v512_q1_s1000_b5_h128k1_full_paged64_mla seed=9",
            "forward bf16_d576v512_q1_s1000_b5_h128k1_full_paged16_mla seed=9 table=csr",
            "forward bf16_d576v512_q1_s0_b3_h16k1_full_paged32_mla seed=10",
            "forward bf16_d576v512_q1_s130_b150_h16k1_full_paged64_mla seed=11",
            "forward bf16_d576v512_n2x900u900,2x70u0,2x4000u3999,2x20u1_h64k1_full_paged256_mla seed=12 invariant=1",
            "forward bf16_d576v512_n3x900u333,1x64u0,0x20u20,2x5u2,3x2000u1999_h20k1_causal_br_paged32_mla seed=13",
            "forward f16_d576v512_n2x700u1,2x700u65,2x700u700_h128k1_causal_br_paged128_mla seed=14 inputs=equal_keys",
            "forward f16_d576v512_q2_s400_b3_h16k1_window_left70_right0_paged16_mla seed=15 layout=packed table=csr",
            *(
                f"forward bf16_d576v512_q1_s{keys}_b3_h128k1_full_mla_kv8_descaletile seed={keys}"
                for keys in (1, 64, 65, 129, 300, 1000)
            ),
            "forward bf16_d576v512_q1_s300_b2_h8k2_full_mla_kv8_descaletile seed=1 layout=padded",
            "forward f16_d576v512_q4_s333_b2_h100k1_causal_br_mla_kv8_descaletile seed=2 inputs=gaussian_x3",
            "forward bf16_d576v512_q1_s1000_b5_h128k1_full_paged64_mla_kv8_descaletile seed=3",
            "forward bf16_d576v512_q1_s1000_b5_h16k1_full_paged16_mla_kv8_descaletile seed=3 table=csr",
            "forward bf16_d576v512_q1_s130_b150_h16k1_full_paged64_mla_kv8_descaletile seed=4 layout=padded",
            "forward bf16_d576v512_n2x900u900,2x70u0,2x4000u3999,2x20u1_h64k1_full_paged256_mla_kv8_descaletile seed=5 "
            "invariant=1",
            "forward bf16_d576v512_n3x900u333,1x64u0,0x20u20,2x5u2,3x2000u1999_h20k1_causal_br_paged32_mla_kv8_"
            "descaletile seed=6",
            "forward bf16_d576v512_q2_s400_b3_h16k1_window_left70_right0_paged16_mla_kv8_descaletile seed=7 "
            "inputs=needle layout=heads_first",
        ),
    )
)


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that these cases need, once; each with its fallbacks if ptxas spills."""
    return builds_of(CASES, arch)
