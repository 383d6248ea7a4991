"""What is timed: (case, [(label, options or tile, family, folder of kernels)]), and what is checked for each kernel."""
S, H, E = "-speculative", "-speculative-halves", "-shared_end"
C, N, P = "-copied_queries", "-copied_queries-continuous", "-copied_queries-prefetched_table"
A = "-copied_queries-continuous-prefetched_table"
B = ("base", "", "sm90", "k24")
def sm90(*options, share=()):
    found = [B] + [(o.strip("-"), o, "sm90", "k24") for o in options]
    return found + [(f"{o.strip('-')} 1/{n}", o, "sm90", f"k{n}") for o, n in share]
def decode(*options):
    return [("base", "", "decode", "k24")] + [(o.strip("-"), o, "decode", "k24") for o in options]
PACKED = [("packed 64x128:3", "64x128x8:3@5+packed", "sm90", "k24"), ("packed speculative", "64x128x8:3@5+packed-speculative", "sm90", "k24"),
          ("packed 64x64:6", "64x64x8:6@5+packed", "sm90", "k24")]
ROWS = [
    ("bf16_d64_s8192_b4_h32_full", [*sm90(S, H, share=[(S, 8)]), ("speculative 3 stages", "192x128x16:3@5-speculative", "sm90", "k24s3")]),
    ("bf16_d64_s8192_b4_h32_full queries*3", sm90(S)),
    ("bf16_d64_s8192_b4_h32_causal", sm90(S, H, share=[(S, 8)])),
    ("bf16_d64_s16384_b2_h32_causal", sm90(S, share=[(S, 8)])),
    ("bf16_d128_s8192_b4_h16_full", sm90(S, H, E, S + E)),
    ("bf16_d128_s8192_b4_h16_full queries*6", sm90(S)),
    ("bf16_d128_s16384_b2_h16_full", sm90(S, E, S + E)),
    ("bf16_d128_s2048_b16_h16_full", sm90(S, E, S + E)),
    ("bf16_d128_s8192_b4_h16_causal", sm90(S, H)),
    ("bf16_d128_s16384_b2_h16_causal", sm90(S)),
    ("f16_d128_s8192_b4_h16_full", sm90(E)),
    ("bf16_d96_s8192_b4_h16_causal", sm90(S)),
    ("bf16_d32_s8192_b4_h32_causal", sm90(S)),
    ("bf16_d128_s8192_t65536_h16_causal", sm90(S)),
    ("bf16_d128_q16_s8192_b64_h32k8_full", [*decode(C), *PACKED]),
    ("bf16_d128_q1_s8192_b64_h32k8_full", decode(C)),
    ("bf16_d128_q1_s8192_b8_h32k8_full", decode(C)),
    ("bf16_d128_q1_s8192_b1_h32k8_full", decode(C)),
    ("bf16_d128_q1_s8192_b64_h32k8_full_paged16", decode(C, N, A)),
    ("bf16_d128_q1_s8192_b8_h32k8_full_paged16", decode(C, P, A)),
    ("bf16_d128_q1_s8192_b1_h32k8_full_paged16", decode(C, P, A)),
    ("bf16_d128_q1_s1024_b256_h32k8_full_paged16", decode(C, N, A)),
]
# Small problems with the builds above: (case line, tile of which row, num_sms)
def small(name):
    """Returns case lines whose plans with the tile of the row `name` have the same builds."""
    if "*" in name:
        return []
    d = name.split("_")[1]
    t = name.split("_")[0]
    if "paged" in name:
        return [(f"forward {t}_{d}_q1_s300_b3_h32k8_full_paged16", 9), (f"forward {t}_{d}_q1_s1500_b5_h8k2_full_paged16 inputs=needle", 7)]
    if "q16" in name:
        return [(f"forward {t}_{d}_q13_s700_b2_h8k2_full", 3), (f"forward {t}_{d}_q16_s1500_b1_h16k4_full inputs=gaussian_x3", 24)]
    if "q1_" in name:
        return [(f"forward {t}_{d}_q1_s900_b2_h8k2_full", 12)]
    mask = name.split("_")[-1]
    if "t65536" in name:
        return [(f"forward {t}_{d}_s700_t1500_h2_causal", 3), (f"forward {t}_{d}_s700_t1500_h2_causal inputs=gaussian_x3", 3)]
    return [(f"forward {t}_{d}_q450_s700_b1_h2_{mask}", 3), (f"forward {t}_{d}_q450_s700_b1_h1_{mask} inputs=gaussian_x3", 3)]
def plan_of(name_or_problem, tile, family, num_sms=132):
    """Returns the plan of a problem with the tile of a row's base plus options, or with a whole tile."""
    from cutlass_py_attn.plan import planner
    from cutlass_py_attn.plan.tile_config import TileConfig
    from cutlass_py_attn.problem.spec import parse
    name, problem = name_or_problem
    name = name.split()[0]
    base = TileConfig.of(planner.plan(parse(name).problem("forward"), "sm_90a", 132).build)
    chosen = TileConfig.parse(tile) if "x" in tile.split("-")[0] else TileConfig.parse(str(base) + tile)
    return planner.plan_with_tile(problem, "sm_90a", chosen, num_sms, family=family)
