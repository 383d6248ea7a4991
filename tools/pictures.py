"""Pictures: the drawings of docs/, each from the code or from the committed benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from cutlass_py_attn import masks
from cutlass_py_attn.inspection.drawing import FAINT, INK, Svg, colour_of, shared_memory_svg
from cutlass_py_attn.inspection.facts import shared_memory_rows
from cutlass_py_attn.planner import plan_backward
from cutlass_py_attn.problem import Problem, Shape
from cutlass_py_attn.shared_memory import STEPS
from tools import record

BENCHMARK = "tools/bench/results/h200.json"
PEERS = {"ours": "#4477aa", "cudnn": "#9aa5b1", "flash": "#c3c8ce", "mem_efficient": "#dfe3e7"}
NAMES = {"ours": "cutlass_py_attn", "cudnn": "cuDNN", "flash": "FlashAttention-2", "mem_efficient": "memory-efficient"}
PLAIN_WORDS = 5  # of the name of a case without features: dtype, head dim, length, batch, heads; the mask ends it

Groups = Sequence[tuple[str, dict[str, float]]]


def pictures(root: Path) -> dict[str, str]:
    """Every picture by its path from the root."""
    build = plan_backward(_problem(), "sm_90a").build
    found = {
        "data_flow": data_flow(),
        "backward_schedule": backward_schedule(),
        "backward_shared_memory": shared_memory_svg(
            shared_memory_rows(build), STEPS[build.kind], f"Shared memory of {build.symbol}"
        ),
        **dict(plots(json.loads((root / BENCHMARK).read_text()))),
    }
    return {f"docs/pictures/{name}.svg": text for name, text in found.items()}


def _problem() -> Problem:
    shape = Shape(1, 128, 128, 1, 128, 128)
    return Problem.dense("backward", shape, "bfloat16", masks.Causal())


def data_flow() -> str:
    """Five objects, what makes one from the other, and which of it needs what."""
    objects = {
        "Problem": "what to compute",
        "Plan": "every number",
        "Artifact": "PTX, cubin",
        "Bound": "packed",
        "results": "in your arrays",
    }
    verbs = ("plan", "compile", "bind", "call")
    width, gap, left, top = 132, 76, 16, 56
    svg = Svg(2 * left + 5 * width + 4 * gap, 210, "The flow of data")
    for index, (name, what) in enumerate(objects.items()):
        x = left + index * (width + gap)
        svg.rect((x, top), (width, 58), colour_of(str(index + 1)))
        svg.text((x + width / 2, top + 25), name, size=15, anchor="middle", fill="#ffffff", weight="bold")
        svg.text((x + width / 2, top + 44), what, size=11, anchor="middle", fill="#ffffff")
        if index < len(verbs):
            svg.line((x + width + 4, top + 29), (x + width + gap - 4, top + 29), INK, 2, arrow=True)
            svg.text((x + width + gap / 2, top + 20), verbs[index], size=12, anchor="middle")
    spans = ((0, 2, "any machine: no GPU, no driver"), (2, 2, "or from a folder or bundle"), (3, 4, "the CUDA driver"))
    for row, (first, last, text) in enumerate(spans):
        start, end = left + first * (width + gap), left + last * (width + gap) + width
        y = top + 80 + (24 if row == 1 else 0)
        svg.line((start, y), (end, y), FAINT, 2)
        svg.text(((start + end) / 2, y + 16), text, size=11, anchor="middle")
    svg.text((left, 26), "Compiling takes no addresses, launching takes no shapes", size=13, weight="bold")
    return str(svg)


def backward_schedule() -> str:
    """Who does which step of the Hopper backward when; the steps are those of fused/hopper_backward.py."""
    unit, left, top, row, period = 42, 190, 70, 44, 12
    rows = ("one warp: TMA", "2 warpgroups: tensor cores", "2 warpgroups: registers", "1 warpgroup: dQ")
    # (row, step, text, begin, length) of one round, in units of no particular time.
    items = (
        (0, "0", "Q, dO of a later round", 0, 11.7),
        (1, "6", "6 dK of n - 1", 0, 2.9),
        (1, "3", "3 dP", 3, 2.9),
        (1, "5", "5 dV", 6, 2.9),
        (1, "1", "1 S of n + 1", 9, 2.9),
        (2, "2", "2 P", 0, 2.9),
        (2, "4", "4 dS", 6, 2.9),
        (3, "7", "7 dQ of n - 1", 0, 2.9),
        (3, "7", "7 dQ", 9.1, 2.8),
    )
    svg = Svg(left + 2 * period * unit + 20, top + row * len(rows) + 40, "The schedule of the Hopper backward")
    svg.text((16, 24), "Two rounds of the Hopper backward; widths are not times", size=13, weight="bold")
    for number in range(2):
        x = left + number * period * unit
        svg.text((x + period * unit / 2, top - 12), f"query tile {'n' if number == 0 else 'n + 1'}", anchor="middle")
        svg.line((x, top - 28), (x, top + row * len(rows)), FAINT)
        for line, step, text, begin, length in items:
            at = x + begin * unit + 1, top + line * row + 4
            svg.rect(at, (length * unit - 2, row - 10), colour_of(step))
            fill = INK if step == "0" else "#ffffff"
            shown = text.replace("n - 1", "n").replace("n + 1", "n + 2") if number else text
            svg.text((at[0] + 6, at[1] + 21), shown, size=11, fill=fill, weight="bold")
        handed = x + 9 * unit
        svg.line((handed, top + 2 * row + 20), (handed, top + 3 * row + 4), INK, 2, arrow=True)
    for line, name in enumerate(rows):
        svg.text((left - 10, top + line * row + 25), name, size=11, anchor="end")
    y = top + row * len(rows) + 22
    svg.text(
        (left, y), "the arrow: dS through shared memory. dK and dV stay in registers until all rounds are done", size=11
    )
    return str(svg)


def plots(rows: Sequence[record.Json]) -> Iterator[tuple[str, str]]:
    """(name, picture) of each plot of a benchmark's rows."""
    gpu = rows[0]["gpu"]
    for direction in ("forward", "backward"):
        for dtype in ("bf16", "f16", "f32"):
            chosen = [row for row in rows if row["direction"] == direction and _is_plain(row) and _dtype(row) == dtype]
            yield f"{direction}_{dtype}", bars(f"{direction}, {dtype}, {gpu}", "TFLOP/s", _groups(chosen, "tflops"))
        chosen = [row for row in rows if row["direction"] == direction and not _is_plain(row) and not row["ours_gb_s"]]
        yield f"{direction}_features", bars(f"{direction}, features and other shapes, {gpu}", "TFLOP/s",
                                            _groups(chosen, "tflops"))  # fmt: skip
    chosen = [row for row in rows if row["ours_gb_s"]]
    yield "decode", bars(f"few queries against many keys, {gpu}", "GB/s", _groups(chosen, "gb_s"))


def _dtype(row: record.Json) -> str:
    return str(row["case"].partition("_")[0])


def _is_plain(row: record.Json) -> bool:
    """Masked attention alone, of head dims 64 and 128, as every dtype has it."""
    words = row["case"].split("_")
    is_shaped = len(words) == PLAIN_WORDS + 1 and words[1] in ("d64", "d128") and words[2] in ("s2048", "s8192")
    return is_shaped and words[3].startswith("b") and "k" not in words[4]


def _groups(rows: Sequence[record.Json], what: str) -> Groups:
    """(case, rate by name) of each case; a peer's GB/s follow from its share of our time."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        rates = found.setdefault(row["case"], {"ours": row[f"ours_{what}"]})
        if row["peer"]:
            rates[row["peer"]] = row["peer_tflops"] if what == "tflops" else row["ours_gb_s"] / row["ratio"]
    return list(found.items())


def bars(title: str, unit: str, groups: Groups) -> str:
    """A group of bars for each case, the longest rate the whole width."""
    left, top, bar, gap, wide = 330, 64, 15, 12, 460
    present = [peer for peer in PEERS if any(peer in rates for _, rates in groups)]
    most = max(max(rates.values()) for _, rates in groups)
    height = sum(bar * len(rates) + gap for _, rates in groups)
    svg = Svg(left + wide + 70, top + height + 8, title)
    svg.text((16, 24), f"{title}: {unit}, longer is better", size=13, weight="bold")
    for index, peer in enumerate(present):
        svg.rect((16 + 150 * index, 36), (11, 11), PEERS[peer])
        svg.text((32 + 150 * index, 46), NAMES[peer], size=11)
    y = top
    for case, rates in groups:
        svg.text((left - 10, y + bar * len(rates) / 2 + 4), case, size=11, anchor="end")
        for peer in (peer for peer in present if peer in rates):
            length = wide * rates[peer] / most
            svg.rect((left, y), (length, bar - 2), PEERS[peer], f"{NAMES[peer]}: {rates[peer]:.0f} {unit}")
            svg.text((left + length + 5, y + bar - 4), f"{rates[peer]:.0f}", size=10, fill=FAINT)
            y += bar
        y += gap
    return str(svg)
