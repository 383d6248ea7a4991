"""Suite: the cases of single tests of tests/gpu, and every kernel that the whole of tests/gpu needs."""

from __future__ import annotations

import itertools
from typing import Final

from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import DIRECTIONS
from cutlass_py_attn.testing.cases import ARCH, Case, builds_of
from tests.cases import (
    block_masks,
    context_cases,
    covering_cases,
    decode_cases,
    kv8_cases,
    matrix,
    mla_cases,
    paged_cases,
    paged_forward_cases,
    random_cases,
    serving_cases,
)
from tests.cases.grouped_cases import GROUPED


def _cases(*lines: str) -> tuple[Case, ...]:
    return tuple(map(Case.parse, lines))


# The sm90 backward runs one block per head. Every mask and feature appears, and heads have several key tiles.
MANY_HEADS: Final = _cases(
    *(
        f"backward bf16_d128_q200_s300_b8_h16_{mask}"
        for mask in ("full", "causal", "causal_br", "causal_window50", "window_left40_right70")
    ),
    "backward f16_d32_q200_s300_b8_h16_full",
    "backward f16_d32_q200_s300_b8_h16_causal_window50",
    "backward bf16_d96v72_q200_s300_b8_h16_causal",
    "backward f16_d64_q200_s300_b8_h16_causal_softcap4_alibi",
    "backward bf16_d128_q200_s300_b8_h16_causal_alibib_deterministic",
    "backward bf16_d128_q200_s300_b8_h16_causal_dropout0.3 philox_seed=42 philox_offset=3",
    "backward bf16_d64_q200_s300_b8_h16_full_dropout0.5_softcap2 philox_seed=1",
    "backward bf16_d128_q200_s300_b8_h16_full_sinks",
    "backward bf16_d128_s300_b8_h16_causal layout=packed",
    "backward f16_d128_q129_s200_b16_h16k8_causal",
    "backward bf16_d128_q65_s129_b24_h16_full",  # several heads for each block
    # Up to 64 queries of narrow heads, whose tile is smaller.
    "backward bf16_d64_q64_s60_b24_h16_causal_br",
    "backward f16_d64_q60_s128_b8_h16_full",
    "backward bf16_d64_s64_b8_h16_causal_deterministic",
    "backward bf16_d64_q64_s100_b8_h16_causal_softcap4_alibi_sinks",
    "backward f16_d40v64_q33_s100_b8_h16_window_left40_right20_dropout0.3 philox_seed=3",
)

# As many work tiles as multiprocessors or more: the sm90 family has other kernels for fewer of them. Heads are no
# multiple of the multiprocessors, so that no backward runs one block per head.
MANY_TILES: Final = _cases(
    *(
        f"{direction} {name}"
        for direction in DIRECTIONS
        for name in (
            "bf16_d128_q200_s256_b2_h67_full",
            "bf16_d128_q256_s201_b2_h67_causal",
            "f16_d128_q200_s256_b2_h134k67_causal_br",
            "bf16_d64_q200_s256_b2_h67_full",
            "f16_d64_q256_s201_b2_h67_causal",
            "bf16_d96_q200_s256_b2_h67_full",
            "bf16_d96v72_q256_s201_b2_h67_causal",
        )
    )
)

# Variants ds_registers and key_registers: scales below 0, rows without keys, padded head dims, unused rows.
DS_IN_REGISTERS: Final = _cases(
    "backward bf16_d128_q400_s300_b2_h67_causal_br_scale-0.05",
    "backward f16_d128_q200_s300_b2_h67_full_scale-0.05",
    "backward bf16_d120v104_q200_s300_b2_h67_full layout=padded",
    "backward bf16_d128_n70x200u30,130x190u190,0x40u40,257x300u290,65x0u0_h67_causal_scale-0.05",
    "backward bf16_d128_s300_b2_h67_causal_gradlse inputs=needle",
    "backward bf16_d64_q400_s300_b2_h67_causal_br_scale-0.05",
    "backward f16_d64_q200_s300_b2_h67_window_left40_right20",
    "backward f16_d48v40_q200_s300_b2_h67_full layout=padded",
    "backward bf16_d64_n70x200u30,130x190u190,0x40u40,257x300u290,65x0u0_h134k67_full",
    "backward bf16_d64_s300_b2_h67_full_gradlse inputs=needle",
)

# Fewer key tiles of 64 keys than multiprocessors, several for each head, and blocks that get none of several heads.
FEW_TILES: Final = _cases(
    *(
        f"{direction} {name}"
        for direction in DIRECTIONS
        for name in (
            "bf16_d128_q200_s300_b1_h3_full",
            "bf16_d128_q333_s257_b2_h4k2_causal",
            "f16_d128v104_q129_s65_b1_h2_causal_br",
            "bf16_d64_q200_s300_b1_h3_causal",
            "f16_d64_q65_s400_b1_h2_full",
            "bf16_d96v72_q300_s130_b1_h3_causal_br",
            "f16_d32_q130_s200_b2_h2_full",
        )
    ),
    "backward bf16_d128_q200_s300_b1_h3_causal_deterministic",
    "backward f16_d64_q200_s300_b1_h3_full_deterministic",
    "forward bf16_d256_q200_s300_b1_h2_causal",
    "forward bf16_d256v200_q65_s64_b1_h2_full",
    "forward bf16_d64_s64_b64_h5_causal",
)

# Lengths off the tiles, a sequence without queries, one without keys, and a tile of keys that are not used.
_LENGTHS: Final = "n70x200u30,130x190u190,0x40u40,257x300u290,65x0u0,5x333u333,200x129u129"
VARIABLE_LENGTH: Final = _cases(
    f"backward bf16_d128_{_LENGTHS}_h2_causal_deterministic",
    f"backward f16_d64_{_LENGTHS}_h2_full_deterministic",
    f"backward bf16_d96_{_LENGTHS}_h4k2_causal_br_window50_deterministic",
    f"backward bf16_d512_{_LENGTHS}_h4k2_causal_deterministic",
    f"backward f16_d320v64_{_LENGTHS}_h2_causal_br_window50_deterministic",
)

# The backward of wide heads beside its dense cases: grouped heads, score terms and sequences, with several tiles of
# queries and of keys, and more blocks than multiprocessors in the last one.
WIDE_BACKWARD: Final = _cases(
    "backward bf16_d512_q300_s515_b2_h8k2_causal",
    "backward f16_d320_q515_s300_b1_h6k2_window_left200_right70",
    "backward bf16_d512_q1_s300_b2_h8k2_causal_br",
    "backward bf16_d448v512_q200_s330_b2_h4k1_causal_softcap4_alibi_sinks",
    "backward f16_d384_q200_s330_b1_h2_full_softcap4",
    "backward bf16_d264_q333_s200_b2_h2_causal_alibib",
    f"backward bf16_d512_{_LENGTHS}_h8k4_causal_br",
    f"backward f16_d40v512_{_LENGTHS}_h2_window_left40_right30_softcap30_alibi_sinks",
    "backward bf16_d512_q700_s900_b2_h6_causal layout=packed",
)

# Launched with wrong lengths: every kernel that reads lengths, in every family. Sequences have several tiles, or none.
_USED_LENGTHS: Final = "n100x130u30,0x40u40,290x60u0,70x256u256"
WRONG_LENGTHS: Final = _cases(
    *(
        f"forward {name}"
        for name in (
            "bf16_d128_n100x130,0x40,290x60,70x257_h2_causal",
            f"bf16_d64_{_USED_LENGTHS}_h4k2_full_bias_alibi",
            f"f16_d128_{_USED_LENGTHS}_h2_window_left40_right7_sinks",
            f"f32_d64_{_USED_LENGTHS}_h2_causal_br_dropout0.2",
            f"bf16_d320_{_USED_LENGTHS}_h1_causal_bias",
            f"bf16_d512_{_USED_LENGTHS}_h2_causal_br_window50",
            "bf16_d128_n1x400,2x257,0x90,16x513_h4k2_full",
            "f16_d64_n1x400u300,2x257u257,1x90u0,16x513u200_h8k2_causal_br",
        )
    ),
    *(
        f"backward {name}"
        for name in (
            "bf16_d128_n100x130,0x40,290x60,70x257_h2_causal",
            f"bf16_d64_{_USED_LENGTHS}_h4k2_full_deterministic",
            f"bf16_d128_{_USED_LENGTHS}_h2_causal_br_window50_deterministic",
            f"bf16_d192v128_{_USED_LENGTHS}_h2_causal",
            f"bf16_d64_{_USED_LENGTHS}_h2_causal_biasgrad_sinks",
            f"bf16_d64_{_USED_LENGTHS}_h2_full_biassum_dropout0.2",
            f"f32_d64_{_USED_LENGTHS}_h2_causal_deterministic",
            f"bf16_d320_{_USED_LENGTHS}_h1_causal_deterministic",
            f"bf16_d512_{_USED_LENGTHS}_h4k2_full",
            f"bf16_d320_{_USED_LENGTHS}_h1_full_biasgrad",
        )
    ),
)

# Called with arrays of lengths that change between calls.
CHANGED_LENGTHS: Final = _cases(
    *(f"{direction} f16_d64_n100x130u30,0x40u40,290x60u60,70x256u256_h2_causal" for direction in DIRECTIONS)
)

# All bitwise repeatable: a deterministic backward, a 2-CTA backward with one tile of keys, and one of wide heads.
LAUNCHERS: Final = {
    "forward": Case.parse("forward bf16_d128_q515_s640_b1_h2_causal seed=5"),
    "backward": Case.parse("backward bf16_d128_q515_s640_b1_h2_causal_deterministic seed=5"),
    "2-CTA backward": Case.parse("backward bf16_d192_q515_s64_b1_h2_causal seed=5"),
    "wide backward": Case.parse("backward bf16_d512_q515_s640_b1_h2_causal seed=5"),
}

# Dropout over more tiles than the sm90 kernels hold mask bits for at once.
LONG_DROPOUT: Final = _cases(
    "forward bf16_d128_q130_s2500_b1_h2_full_dropout0.2 philox_seed=7",
    "forward f16_d64_q200_s4301_b1_h4k2_causal_br_dropout0.3 philox_offset=3",
    "forward bf16_d256_q150_s2121_b1_h1_window_left2100_right10_dropout0.1 philox_seed=9",
    "forward bf16_d128_n90x2300,3x1,7x2049_h2_causal_dropout0.3",
    "backward bf16_d128_q2500_s130_b1_h1_full_dropout0.2 philox_seed=7",
    "backward bf16_d128_q1100_s201_b1_h4k1_causal_dropout0.3 philox_offset=5",
    "backward f16_d64_q1300_s203_b1_h2_causal_br_dropout0.1 philox_seed=3",
    "backward f16_d96_q2400_s70_b1_h1_window_left2200_right60_dropout0.4_deterministic",
)

# Causal forwards with tiles of 192 query rows, from 4096 queries and 16 rounds of 132 blocks on: the last rounds have a
# block for each tile. Without the last query of a tile, with grouped heads, and with queries that see no key.
LAST_ROUNDS: Final = _cases(
    "forward bf16_d64_q4096_s128_b1_h96_causal",
    "forward bf16_d96_q4223_s200_b2_h48k16_causal",
    "forward f16_d64_q4096_s333_b3_h32_causal_br",
)

# Forwards with option speculative, of each tile and with several key tiles: rows whose scores exceed the maxima before
# a key tile by far, in some tiles and some warpgroups. The last four repeat few tiles, or none.
SPECULATIVE: Final = _cases(
    *(
        f"forward {name} inputs=rising"
        for name in (
            "bf16_d32_q700_s2300_b2_h9_full",
            "bf16_d64_q2100_s2300_b2_h4_full",
            "bf16_d64_q2100_s2300_b2_h4k2_causal_br",
            "bf16_d96_q4200_s4300_b1_h4_causal",
            "bf16_d96_q2200_s2300_b1_h6_full",
            "bf16_d128_s2300_b2_h4k2_full",
            "bf16_d128_q4200_s4400_b1_h3_causal_br",
            "bf16_d128_n2200x2300,1500x900,64x1100_h4k2_causal_br",
            "bf16_d64_n2200x2300,1500x900,64x1100_h4_causal",
            "bf16_d128_q600_s2300_b2_h8k2_causal_br_paged16",
            "bf16_d64_s1000_b1_h8_causal",
            "bf16_d128_s1000_b1_h8_causal",
            "bf16_d256_s1000_b1_h8_causal",
            "bf16_d192v128_q4200_s4400_b1_h2_causal_br",
            "bf16_d192v128_q2100_s2300_b1_h4_full",
            "bf16_d192_q1100_s2300_b1_h8_full",
            "bf16_d256_q1100_s2300_b1_h8_causal_br",
            "bf16_d64_q2200_s2300_b1_h4k2_causal_br_window700",
            "bf16_d96_q2200_s2300_b1_h4_causal_br_window700",
            "bf16_d128_q2200_s2300_b1_h4_causal_br_window700",
            "bf16_d128_q2200_s2300_b1_h4_causal_br_window700_sinks",
            "bf16_d256_q1200_s2300_b1_h4_causal_br_window700",
            "bf16_d64_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalehead",
            "bf16_d128_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalehead",
            "e4m3_d64_q2100_s2300_b1_h4_full",
            "e4m3_d64_q2100_s2300_b1_h4_causal_br",
            "e4m3_d64_q2200_s2300_b1_h4_causal_br_window700",
            "e4m3_d128_q2100_s2300_b1_h4_full",
            "e4m3_d128_q2100_s2300_b1_h4k2_causal_br",
            "e4m3_d192_q2100_s2300_b1_h4_causal_br",
            "e4m3_d256_q2100_s2300_b1_h4_full",
            "e4m3_d256_q2100_s2300_b1_h4_causal_br_window700",
        )
    ),
    "forward bf16_d64_q2100_s2300_b2_h4_full inputs=gaussian_x3",
    "forward bf16_d128_q2300_s2300_b2_h4_causal inputs=needle",
    "forward e4m3_d128_q2100_s2300_b2_h4_full inputs=gaussian_x3",
    "forward e4m3_d256_q1100_s2300_b1_h4_causal inputs=needle",
)

# Forwards with option shared_end, of a round of 132 blocks and a few query tiles more: blocks share the keys of these.
SHARED_END: Final = _cases(
    "forward bf16_d128_q1100_s1500_b1_h16_full",
    "forward bf16_d128_q1100_s1500_b2_h8k2_full inputs=rising layout=padded",
    "forward f16_d128_q1057_s1501_b1_h16k4_full inputs=needle",
    "forward f16_d120_q1000_s1672_b3_h6_full inputs=gaussian_x3",
)

# Forwards with fewer query tiles than SMs, whose keys blocks share: masks, layouts and score terms, and parts that have
# no keys. Sinks belong to one part of a tile, also of one whose rows see no key.
FEW_QUERY_TILES: Final = _cases(
    "forward bf16_d128_q300_s2300_b1_h4_causal_br inputs=rising",
    "forward bf16_d64_q300_s2300_b2_h4k2_full inputs=gaussian_x3 layout=padded",
    "forward f16_d128_q2500_s2500_b1_h2_causal inputs=needle",
    "forward bf16_d96_q200_s3000_b1_h3_causal_br",
    "forward f16_d256_q200_s2300_b1_h4_full inputs=rising",
    "forward bf16_d128_n300x2300,40x1500,5x100,1x3_h4k2_causal_br",
    "forward f16_d64_n100x2300u2200,100x2300u5,100x2300u0_h4_causal_br",
    "forward bf16_d128_q300_s2300_b2_h4k2_causal_br_paged16",
    "forward f16_d64_n300x2300,200x90,64x1100_h4k2_causal_br_paged64 table=csr",
    "forward bf16_d64_q60_s4000_b1_h4_full inputs=rising",
    "forward bf16_d128_q100_s9000_b1_h1_causal_br inputs=needle",
    "forward bf16_d64_q300_s2300_b1_h4k2_causal_br_sinks inputs=rising",
    "forward bf16_d64_n300x2300,200x90,200x0,64x1100_h4k2_causal_br_paged16_sinks",
    "forward f16_d128_q2500_s1500_b1_h2_causal_br_sinks",
    "forward bf16_d256_q200_s2300_b1_h4_causal_br_softcap30",
    "forward f16_d128_n100x2300u2200,100x2300u5,100x2300u0_h4_full_alibi_sinks",
    "forward bf16_d128_q300_s2304_b1_h4_causal_br_bias_sinks",
    "forward f16_d96_q200_s2302_b1_h4k2_full_bias_softcap4_alibi bias_inputs=hidden_rows",
)

# Backwards with fewer key tiles than SMs, whose queries blocks share.
FEW_KEY_TILES: Final = _cases(
    "backward bf16_d128_q2100_s500_b1_h4_full inputs=rising",
    "backward f16_d64_q2100_s300_b1_h4k2_full layout=padded",
    "backward bf16_d96_q1500_s300_b2_h2_full_sinks inputs=needle",
    "backward f16_d128_q9000_s100_b1_h1_full",
)

# sm90 backwards with a bias: rows aligned to 16, 8 and 4 bytes, and with features that use registers or shared memory.
BIAS_BACKWARD: Final = _cases(
    "backward bf16_d128_q300_s304_b2_h4k2_causal_br_bias",
    "backward bf16_d128_n260x520,0x70,129,300x10_h2_causal_bias",
    "backward f16_d64_n260x520,0x70,129,300x10_h4k2_full_bias",
    "backward f16_d96_q257_s300_b2_h3_full_bias11qk bias_inputs=hidden_rows",
    "backward bf16_d128_q129_s302_b1_h3_causal_br_bias inputs=rising",
    "backward bf16_d64_q200_s302_b2_h3_causal_br_window100_bias",
    "backward bf16_d128_q200_s304_b2_h4_full_bias_dropout0.1 philox_seed=3",
    "backward f16_d64_q200_s304_b2_h4k2_causal_bias_dropout0.1_alibi philox_seed=4",
    "backward bf16_d64_n200,70x300_h2_causal_br_bias_dropout0.1 philox_seed=5 bias_inputs=lowest",
    "backward bf16_d192v128_q200_s304_b1_h2k1_causal_br_bias",
    "backward bf16_d128_q300_s304_b1_h2_causal_bias_deterministic",
    "backward f16_d128_q300_s304_b1_h2_full_bias_sinks_alibi",
    "backward bf16_d64_q128_s128_b64_h4_full_bias",
    "backward f16_d64_q300_s304_b2_h2_full_bias_softcap4",
)

# sm90 backwards that write the full gradient of the bias: masks that leave query tiles unvisited, edges of tiles, heads
# of a group, and a bias that broadcasts although its gradient does not.
GRAD_BIAS: Final = _cases(
    "backward bf16_d128_q300_s304_b2_h4_full_biasgrad",
    "backward bf16_d128_q520_s520_b1_h3_causal_biasgrad inputs=rising",
    "backward f16_d128_q300_s520_b2_h4k2_causal_br_biasgrad bias_inputs=hidden_rows",
    "backward f16_d128_q700_s304_b2_h2_causal_br_biasgrad",
    "backward bf16_d128_q600_s616_b1_h4k1_causal_br_window100_biasgrad",
    "backward bf16_d96_q257_s304_b2_h3_full_bias11qkgrad",
    "backward f16_d96_q257_s312_b2_h3_causal_biasgrad",
    "backward bf16_d64_q200_s328_b2_h4_full_biasbhqkgrad inputs=needle",
    "backward f16_d64_q520_s304_b2_h4k2_causal_biasgrad_alibi_sinks",
    "backward bf16_d64_q520_s600_b2_h3_causal_br_window70_biasgrad",
    "backward bf16_d64_q128_s128_b64_h4_full_biasgrad",
    "backward bf16_d128_q100_s104_b40_h4_full_biasgrad",
    "backward bf16_d192v128_q200_s304_b1_h2k1_causal_br_biasgrad",
    "backward bf16_d128_q300_s304_b1_h2_causal_biasgrad_deterministic",
    "backward f16_d64_q300_s304_b1_h2_causal_br_biasgrad_deterministic",
    "backward bf16_d128_q200_s304_b2_h4_full_biasgrad_dropout0.1 philox_seed=3",
    "backward bf16_d128_s1032_b3_h12_full_biasbhqkgrad",
    "backward f16_d128_q264_s1032_b20_h8k4_causal_biasgrad",
    "backward bf16_d64_q520_s1032_b3_h16k8_full_biasgrad",
)

# sm90 backwards beside a kernel of its own for grad_bias, which is summed over some axes or has a softcap's derivative.
GRAD_BIAS_SUMS: Final = _cases(
    "backward bf16_d128_q300_s304_b3_h4k2_causal_br_bias1hqksum",
    "backward bf16_d128_q257_s520_b2_h3_full_bias1hqksum inputs=rising",
    "backward f16_d64_q257_s300_b2_h3_full_biasb1qksum bias_inputs=hidden_rows",
    "backward f16_d64_q400_s512_b5_h2_full_bias1hqksum",
    "backward bf16_d96_q200_s304_b2_h4k2_causal_bias11qksum inputs=rising",
    "backward bf16_d64_q300_s302_b2_h3k1_causal_br_window100_bias1hqksum",
    "backward f16_d128_q300_s304_b2_h2_full_biasbh1ksum",
    "backward bf16_d128_n260x520,0x70,129,300x10_h2_causal_bias1hqksum",
    "backward f16_d64_n260x520,0x70,129,300x10_h4k2_full_bias11qksum",
    "backward f16_d64_q300_s304_b2_h2_full_biasgrad_softcap4",
    "backward bf16_d128_q200_s304_b2_h4_full_bias1hqksum_dropout0.1 philox_seed=3",
    "backward bf16_d128_q300_s304_b2_h2_causal_bias1hqksum_deterministic",
    "backward f16_d128_q300_s304_b2_h2_full_bias1hqksum_sinks_alibi",
    "backward bf16_d40v64_q130_s200_b2_h3_full_bias11qksum layout=padded",
    "backward bf16_d192v128_q200_s304_b2_h2k1_causal_br_bias1hqksum",
    "backward bf16_d64_s256_b24_h4_full_bias1hqksum",
    "backward bf16_d32_s256_b24_h4_full_bias1hqksum inputs=rising",
    "backward f16_d24_q100_s136_b9_h4k2_causal_br_bias11qksum",
    "backward f16_d128_q100_s136_b9_h5_causal_bias11qksum layout=padded",
)

# Backwards with option shared_end, of more key tiles than a round of 132 blocks: blocks share the queries of the last.
SHARED_QUERIES: Final = _cases(
    "backward bf16_d128_q700_s500_b5_h7_full",
    "backward bf16_d128_q330_s500_b5_h14k7_full inputs=rising layout=padded",
    "backward f16_d128_q1037_s601_b3_h10_full_sinks inputs=needle",
    "backward f16_d64_q1100_s640_b5_h7_full inputs=gaussian_x3",
    "backward bf16_d64_q700_s500_b5_h14k7_full_scale-0.05",
    "backward bf16_d96_q700_s500_b5_h7_full inputs=rising",
)

# Ranges of keys: bands beside them, axes, memory layouts, head dims, grouped heads and sinks. Some queries see no key,
# whole query tiles among them, some keys no query, some heads nothing, and ranges leave the keys.
RANGES: Final = _cases(
    *(
        f"{direction} {name}"
        for direction in DIRECTIONS
        for name in (
            "bf16_d128_q515_s640_b2_h4_full_rangesbh",
            "bf16_d128_q300_s420_b2_h4k2_causal_rangesb1 range_layout=mixed inputs=needle",
            "f16_d128_q700_s700_b1_h3_full_ranges1hruns range_layout=rows_first",
            "bf16_d128_s640_b2_h2_causal_ranges11documents inputs=gaussian_x3",
            "bf16_d128_s640_b3_h2_causal_rangesb1documents128 range_layout=broadcast",
            "bf16_d128_q130_s2300_b1_h2_full_rangesb1lengths range_layout=broadcast inputs=rising",
            "bf16_d128_s515_b2_h6k2_causal_rangesb1prefix_sinks",
            "bf16_d64_q515_s640_b2_h4_full_rangesbh inputs=needle",
            "f16_d64_q700_s700_b1_h6k2_causal_br_rangesbhruns range_layout=interleaved",
            "bf16_d64_s640_b2_h3_full_ranges1hwindow layout=packed",
            "bf16_d64_s700_b1_h2_window_left200_right30_ranges11prefix300",
            "bf16_d64_q333_s257_b2_h4_full_rangesb1_sinks inputs=one_key",
            "bf16_d96_q300_s420_b2_h2_causal_rangesbhdocuments100",
            "f16_d32_q300_s420_b2_h4k1_full_rangesbh",
            "bf16_d8_q300_s420_b1_h2_full_ranges11runs",
            "f16_d104_q200_s130_b2_h2_full_rangesb1 layout=padded",
            "bf16_d128v64_q129_s300_b2_h3_full_rangesbhruns",
            "bf16_d64v128_q129_s300_b2_h3_causal_rangesbhruns",
            # Everything, nothing but the diagonal, a single query, a single key, and no key at all.
            "bf16_d128_q257_s385_b1_h2_full_ranges11all",
            "bf16_d64_s300_b1_h2_full_ranges11window1 inputs=zero_scores",
            "bf16_d128_q1_s300_b3_h2_full_rangesbh seed=3",
            "bf16_d64_q300_s1_b2_h2_full_rangesbh",
            # More work tiles than a slice of the list has records, and more heads than multiprocessors.
            "bf16_d64_q1100_s200_b10_h20_full_rangesbhruns",
            "bf16_d128_s300_b60_h3_causal_rangesb1documents",
        )
    ),
    "forward bf16_d192v128_q300_s420_b2_h4k2_full_rangesbh",
    "forward f16_d256_q300_s420_b2_h2_causal_ranges1hruns inputs=needle",
    "forward bf16_d192_q300_s420_b1_h2_full_rangesb1documents",
    "backward bf16_d128_q300_s420_b2_h4k2_causal_rangesbhruns_gradlse_sinks_scale-0.05",
    "backward f16_d64_q300_s420_b2_h2_full_rangesbh_gradlse",
)

# Mask functions: every one, within bands, ranges of keys and visible blocks, head dims, grouped heads and sinks.
FUNCTIONS: Final = _cases(
    *(
        f"{direction} {name}"
        for direction in DIRECTIONS
        for name in (
            "bf16_d128_q515_s640_b2_h4_causal_functionstripes",
            "bf16_d128_q300_s420_b2_h4k2_full_functiondocuments range_layout=mixed inputs=needle",
            "f16_d128_q700_s700_b1_h3_full_functionmarked range_layout=rows_first",
            "bf16_d128_s640_b2_h6k2_causal_br_functionweights_sinks inputs=gaussian_x3",
            "bf16_d64_q515_s640_b2_h2_full_functiontree range_layout=interleaved",
            "bf16_d64_s640_b1_h4_window_left300_right30_functiondilated inputs=one_key",
            "f16_d64_s700_b2_h2_full_functionimages layout=packed",
            "bf16_d64_q333_s257_b2_h4k2_full_functionprefix range_layout=rows_first",
            "bf16_d96_q300_s420_b2_h2_causal_rangesbh_functionstripes",
            "f16_d32_q300_s420_b2_h4k1_full_ranges1hruns_functiondocuments range_layout=mixed",
            "bf16_d128_q300_s420_b2_h4k2_full_blocks50bh_functionweights",
            "bf16_d64_q515_s640_b1_h2_causal_rangesb1documents_blocks80hx64_functiondilated range_layout=interleaved",
            "bf16_d8_q300_s420_b1_h2_full_functiontree",
            "bf16_d128v64_q129_s300_b2_h3_full_functionprefix",
            # A single query, a single key, more heads than multiprocessors, and more than 32 key tiles.
            "bf16_d128_q1_s300_b3_h2_full_functionweights",
            "bf16_d64_q300_s1_b2_h2_full_functionstripes",
            "bf16_d128_s129_b60_h3_causal_functiondilated",
            "bf16_d64_q130_s9000_b1_h2_full_functiondocuments inputs=rising",
        )
    ),
    "forward bf16_d192v128_q300_s420_b2_h4k2_full_functionimages",
    "forward f16_d256_q300_s420_b2_h2_causal_functiontree inputs=needle",
    "backward bf16_d128_q300_s420_b2_h4k2_causal_functionstripes_gradlse_sinks_scale-0.05",
)

# The problems of JAX programs whose rows are split over simulated devices (tests/gpu/hosts/test_jax_context.py).
SPLIT_ROWS: Final = _cases(
    *(
        f"{direction} {name}"
        for direction in DIRECTIONS
        for name in (
            "f32_d128_s1024_b2_h8k4_causal",
            "bf16_d128_s1024_b2_h8k4_causal",
            "bf16_d128_s256_b8_h8k4_causal",
            "bf16_d128_s128_b16_h8k4_full",
            "bf16_d128_s1024_b2_h8k4_causal_window200_sinks",
            "bf16_d128_s199_b8_h8k4_window_left0",
        )
    )
)

# The problems of the programs that both handlers of JAX run (tests/gpu/hosts/test_jax_native.py).
JAX_HANDLERS: Final = _cases(
    *(
        f"{direction} {name}_deterministic"
        for direction in DIRECTIONS
        for name in ("bf16_d128_s203_b2_h4_causal", "bf16_d128_n90,110_h4_causal")
    )
)

# A quarter of a million tokens, whose sampled rows are compared (tests/gpu/long/test_long.py).
LONG: Final = _cases(
    "backward bf16_d128_s262144_b1_h2_causal seed=1",
    "backward f16_d128_s262144_b1_h1_causal seed=2",
    "backward bf16_d128_n262144,1,333_h1_causal seed=3",
)

# Every tensor has more than 2^31 elements: within one batch element, over many, and in packed sequences.
MANY_ELEMENTS: Final = _cases(
    "backward bf16_d128_s262400_b1_h64_window_left512_right0 seed=1",
    "backward bf16_d128_s257_b8200_h8_causal seed=2",
    "backward bf16_d128_n131072,131400_h64_window_left512_right0 seed=3",
)

# More heads of all batch elements than a grid has blocks in its second and third dimension.
BEYOND_GRID: Final = _cases(
    "backward bf16_d64_q17_s19_b4100_h16_causal seed=1",
    "backward f16_d128_q17_s19_b65600_h1_causal seed=2",
    "backward f16_d128_q17_s19_b1_h65600_causal seed=3",
)
DECODE_BEYOND_GRID: Final = _cases(
    "forward bf16_d64_q1_s300_b4100_h16_full seed=1",
    "forward bf16_d64_q1_s300_b65600_h1_full seed=2",
    "forward bf16_d64_q1_s300_b1_h65600_full seed=3",
)

# The problems of the calls in tests/gpu/test_torch_ops.py, forward and backward.
TORCH_OPS: Final = tuple(
    map(
        parse,
        (
            "f16_d64_q72_s136_b2_h4_full_biasbhqkgrad_dropout0.3",
            "f16_d64_q72_s136_b2_h4_causal_window20",
            "f16_d64_q72_s136_b2_h4_causal_br_window20",
            "f16_d64_n5x9,64,33x70_h4_causal",
            "f16_d64_n5x9,64,33x70_h4_causal_br",
            "f16_d64_n5x9,64,33x70_h4_window_right0",
            "f16_d64_s72_b2_h4_causal",
            "f16_d64_q72_s136_b2_h4_causal_dropout0.3",
            "f16_d64_q72_s136_b2_h4k2_window_left30_right0",
            "f16_d64_q72_s136_b2_h4_causal",
            "f16_d64_q72_s136_b2_h4_full_bias11qk",
            "f16_d64_q72_s136_b2_h4_full_bias11qksum",
            "f16_d64_q72_s136_b2_h4_full_biasb11k",
            "f16_d64_q72_s136_b2_h4_full_softcap2_alibi",
        ),
    )
)


# The problems of the C library that tests/gpu/hosts exports, each with one of other sizes for the same kernels.
LIBRARY: Final = tuple(
    (Case.parse(exported), Case.parse(other))
    for exported, other in (
        (
            "forward bf16_d128_q515_s640_b2_h4k2_causal seed=5",
            "forward bf16_d128_q33_s257_b3_h8k2_causal_br seed=6",
        ),
        (
            "backward bf16_d128_q515_s640_b2_h4k2_causal seed=5",
            "backward bf16_d128_q90_s257_b3_h8k2_causal_br seed=6",
        ),
        (
            "forward bf16_d128_q515_s640_b2_h4k2_full seed=5",
            "forward bf16_d128_q1100_s1500_b1_h16k4_full seed=6",
        ),
        (
            "forward bf16_d128_q1_s4096_b3_h16k4_full seed=5",
            "forward bf16_d128_q3_s999_b2_h8k2_full seed=6",
        ),
        (
            "forward bf16_d128_n100x130,1x40,290x60,70x257_h4k2_causal seed=5",
            "forward bf16_d128_n70x300,1x9_h8k4_causal seed=6",
        ),
        (
            "forward bf16_d128_q1_s5000_b3_h16k4_full_paged16 seed=5",
            "forward bf16_d128_n3x900u900,3x70u0,3x2000u1999,3x20u1_h8k2_full_paged64 seed=6",
        ),
        (
            "backward f16_d64_q200_s304_b2_h4_causal_biassum_dropout0.3_softcap4_alibi_sinks philox_seed=42",
            "backward f16_d64_q70_s136_b3_h5_causal_biassum_dropout0.1_softcap9_alibi_sinks philox_offset=3",
        ),
    )
)


# Every weight that counts is the largest code of e4m3, so that only the rounding of the output remains.
E4M3_EXACT: Final = _cases(
    "forward e4m3_d128_s700_b1_h2_causal inputs=zero_scores",
    "forward e4m3_d256_s300_b1_h2_full inputs=one_key",
    "forward e4m3_d64_s513_b2_h4k2_window_left70_right9_descalebatch inputs=equal_keys",
)
E4M3_LONG: Final = _cases(
    *(f"forward e4m3_d128_s{length}_b1_h1_{mask}_descalebatch" for length in (8192, 131072)
      for mask in ("full", "causal", "window_left4096_right0"))
)  # fmt: skip
E4M3_KERNELS, E4M3_RUNS = 6, 4  # numbers of random e4m3 problems


def e4m3_cases() -> list[Case]:
    """Returns every case of the e4m3 forward."""
    numbers = range(random_cases.E4M3_FROM, random_cases.E4M3_FROM + 2 * E4M3_KERNELS, 2)
    return [*E4M3_EXACT, *E4M3_LONG, *random_cases.cases(numbers, E4M3_RUNS)]


def library_builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that an export of LIBRARY has, once, each with its fallbacks; none for short sequences alone."""
    plans = (planner.plans(exported.problem(), arch, any_length=True) for exported, _ in LIBRARY)
    return list(dict.fromkeys(tuple(plan.build for plan in each) for each in plans))


def torch_ops_builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel of TORCH_OPS, once; each with its fallbacks if ptxas spills."""
    problems = (spec.problem(direction) for spec in TORCH_OPS for direction in DIRECTIONS)
    return list(dict.fromkeys(planner.builds(problem, arch) for problem in problems))


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """Every kernel that tests/gpu needs for a target, once; each with its fallbacks if ptxas spills."""
    both = (*VARIABLE_LENGTH, *LONG, *MANY_ELEMENTS, *BEYOND_GRID)
    forwards = (case.replace(direction="forward") for case in both)
    lengths = (*both, *forwards, *WRONG_LENGTHS, *CHANGED_LENGTHS)
    cases = (
        *MANY_HEADS,
        *MANY_TILES,
        *DS_IN_REGISTERS,
        *FEW_TILES,
        *GROUPED,
        *WIDE_BACKWARD,
        *lengths,
        *DECODE_BEYOND_GRID,
        *LAUNCHERS.values(),
        *LONG_DROPOUT,
        *LAST_ROUNDS,
        *SPECULATIVE,
        *SHARED_END,
        *FEW_QUERY_TILES,
        *FEW_KEY_TILES,
        *BIAS_BACKWARD,
        *GRAD_BIAS,
        *GRAD_BIAS_SUMS,
        *SHARED_QUERIES,
        *RANGES,
        *FUNCTIONS,
        *SPLIT_ROWS,
        *JAX_HANDLERS,
    )
    parts = (
        covering_cases.builds(arch),
        matrix.builds(arch),
        decode_cases.builds(arch),
        mla_cases.builds(arch),
        paged_cases.builds(arch),
        kv8_cases.builds(arch),
        paged_forward_cases.builds(arch),
        torch_ops_builds(arch),
        serving_cases.builds(arch),
        library_builds(arch),
        context_cases.builds(arch),
        builds_of(cases, arch),
        builds_of(e4m3_cases(), arch),
        block_masks.builds() if architecture(arch).has_wgmma else (),
    )
    return list(dict.fromkeys(itertools.chain.from_iterable(parts)))
