"""Grouped cases: backwards of grouped heads whose work tiles are key tiles of query heads."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.testing.cases import Case

# Several key tiles, the last one partial; groups of 2, 3, 4 and 8; heads that share a sum start at any query tile.
_DENSE: Final = (
    "backward bf16_d128_q515_s700_b2_h8k2_causal",
    "backward bf16_d128_s1030_b2_h8k1_causal",
    "backward bf16_d128_q300_s520_b3_h6k2_causal_br inputs=needle",
    "backward bf16_d128_q900_s650_b1_h4k2_window_left200_right70",
    "backward f16_d128_q650_s900_b2_h8k4_causal layout=packed",
    "backward f16_d64_q700_s1000_b2_h8k2_causal",
    "backward f16_d64_q1000_s700_b2_h6k2_causal layout=padded",
    "backward bf16_d64_q600_s600_b2_h4k1_causal_br_window150",
    "backward bf16_d96_q515_s700_b2_h8k2_causal",
    "backward f16_d96_q515_s700_b2_h8k2_window_left300_right100",
    "backward bf16_d80v40_q400_s515_b2_h8k2_causal",
    "backward f16_d32_q300_s515_b2_h8k2_causal_br",
    "backward bf16_d40v96_q300_s515_b2_h8k2_causal_br",
    "backward bf16_d192v128_q300_s515_b2_h8k2_causal",
    "backward f16_d136v64_q515_s300_b2_h4k2_causal",
    "backward bf16_d128_q1_s300_b2_h8k2_causal_br",
)
_TERMS: Final = (
    "backward bf16_d128_q400_s515_b2_h8k2_causal_softcap4_alibi",
    "backward f16_d64_q400_s515_b2_h8k2_causal_sinks",
    "backward bf16_d128_q400_s515_b2_h8k2_causal_dropout0.3 philox_seed=42 philox_offset=3",
    "backward f16_d64_q400_s515_b2_h8k2_causal_dropout0.5 philox_seed=7",
)
# Lengths off the tiles, a sequence without queries, one without keys, and a tile of keys that are not used.
_LENGTHS: Final = "n70x200u30,130x190u190,0x40u40,257x300u290,65x0u0,5x333u333,200x129u129"
_VARIABLE_LENGTH: Final = (
    f"backward bf16_d128_{_LENGTHS}_h8k2_causal",
    f"backward f16_d64_{_LENGTHS}_h6k2_causal",
    f"backward bf16_d96_{_LENGTHS}_h4k1_causal_br_window50",
    f"backward bf16_d192v128_{_LENGTHS}_h8k4_causal",
    "backward bf16_d128_n600,70,1,129,513_h8k2_causal",
)
GROUPED: Final = tuple(map(Case.parse, (*_DENSE, *_TERMS, *_VARIABLE_LENGTH)))
