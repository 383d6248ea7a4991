D64, D64C, D128 = "128x128x16:3,2@5k2", "128x128x16:3,2@5", "64x128x16:3,2@5k2"
CASES = {
    "bf16_d64_s8192_b4_h32_full": (D64, ["base", "d", "rf", "drf", "dsr", "drfp", "drfk", "drfkp"]),
    "bf16_d64_s8192_b4_h32_causal": (D64C, ["base", "d", "rf", "drf", "rfk", "drfk", "drfkp"]),
    "bf16_d128_s8192_b4_h16_full": (D128, ["base", "d", "dp", "dsr", "drf", "drfp"]),
    "bf16_d128_s8192_b4_h16_causal": (D128, ["base", "d", "dsr", "rf", "drf", "drfp"]),
    "f16_d128_s8192_b4_h16_full": (D128, ["base", "d", "dsr", "drf"]),
}
