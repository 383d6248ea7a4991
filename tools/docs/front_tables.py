"""Tables of docs/performance.md: rows of the committed benchmark for a first look; docs/data/h200.md has all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tools.release import record

TRAINING: Final = (
    "bf16_d64_s2048_b16_h32_causal",
    "bf16_d64_s8192_b4_h32_full",
    "bf16_d64_s8192_b4_h32_causal",
    "bf16_d128_s512_b64_h16_causal",
    "bf16_d128_s2048_b16_h16_causal",
    "bf16_d128_s8192_b4_h16_full",
    "bf16_d128_s8192_b4_h16_causal",
    "bf16_d128_s16384_b2_h16_causal",
    "bf16_d128_s8192_b2_h32k4_causal",
    "bf16_d128_s8192_t65536_h16_causal",
    "bf16_d192v128_s8192_b4_h16_causal",
    "bf16_d256_s8192_b4_h8_causal",
    "bf16_d512_s8192_b1_h16_causal",
)
BACKWARD: Final = (
    *TRAINING,
    "bf16_d128_s8192_b4_h16_causal_deterministic",
    "bf16_d128_s4096_b4_h16_full_bias",
    "bf16_d128_s2048_b16_h16_full_dropout0.1",
)
DECODE: Final = (
    "bf16_d128_q1_s8192_b64_h32k8_full",
    "bf16_d128_q1_s8192_b8_h32k8_full",
    "bf16_d128_q1_s8192_b1_h32k8_full",
    "bf16_d128_q1_s131072_b1_h32k8_full",
    "bf16_d128_q16_s8192_b64_h32k8_full",
    "bf16_d128_q1_s8192_b64_h32k8_full_paged16",
    "bf16_d128_q1_s8192_b64_h32k8_full_paged16_kv8",
    "bf16_d128_q8_s8192_b64_h32k8_causal_br_paged16",
    "bf16_d576v512_q1_s8192_b64_h128k1_full_paged64_mla",
    "bf16_d576v512_q1_s8192_b64_h16k1_full_mla",
)
FORWARD: Final = (
    *TRAINING,
    "bf16_d128_s16384_b2_h16_causal_window1024",
    "bf16_d128_q2048_s16384_b2_h32k8_causal_br_paged64",
    "e4m3_d128_s8192_b4_h16_causal",
)
# A column has the fastest of its peers.
PEERS: Final[dict[str, tuple[str, ...]]] = {
    "FlashAttention-4": ("fa4",),
    "cuDNN": ("cudnn", "cudnn_frontend"),
    "FlashAttention-2": ("flash",),
    "memory-efficient": ("mem_efficient",),
}
Rows = Sequence[record.Json]


def rates(rows: Rows, direction: str, cases: Sequence[str]) -> str:
    """Returns a table of TFLOP/s: ours, and each peer's with ours / peer in brackets."""
    heads = ["case", "ours", *PEERS]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for case, found in _found(rows, direction, cases).items():
        cells = [f"{next(iter(found.values()))['ours_tflops']:.0f}"]
        cells += [_cell(found, names, "{peer_tflops:.0f} ({ratio:.2f})") for names in PEERS.values()]
        lines.append(f"| {' | '.join([f'`{case}`', *cells])} |")
    return "\n".join(lines)


def steps(rows: Rows, cases: Sequence[str]) -> str:
    """Returns a table of decode steps: our time and bandwidth, and each peer's time with peer / ours in brackets."""
    heads = ["case", "us", "GB/s", *(f"{peer}, us" for peer in PEERS)]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for case, found in _found(rows, "forward", cases).items():
        ours = next(iter(found.values()))
        cells = [f"{1000 * ours['ours_ms']:.1f}", f"{ours['ours_gb_s']:.0f}"]
        cells += [_cell(found, names, "{peer_us:.1f} ({ratio:.2f})") for names in PEERS.values()]
        lines.append(f"| {' | '.join([f'`{case}`', *cells])} |")
    return "\n".join(lines)


def _found(rows: Rows, direction: str, cases: Sequence[str]) -> dict[str, dict[str, record.Json]]:
    """Returns the rows of these cases by case and peer, in the order of `cases`."""
    found: dict[str, dict[str, record.Json]] = {case: {} for case in cases}
    for row in rows:
        if row["direction"] == direction and row["case"] in found:
            found[row["case"]][row["peer"]] = row
    return {case: peers for case, peers in found.items() if peers}


def _cell(found: Mapping[str, record.Json], names: Sequence[str], form: str) -> str:
    """Returns the row of the fastest of these peers in `form`; "" if none took the case."""
    taken = [found[name] for name in names if name in found and found[name]["peer_tflops"]]
    if not taken:
        return ""
    fastest = max(taken, key=lambda row: float(row["peer_tflops"]))
    return form.format(**fastest, peer_us=1000 * fastest["peer_ms"])
