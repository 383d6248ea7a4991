"""Check verified: which committed kernels passed on a GPU, and whether README's tables say just that.

It also says which of the Hopper family's rows of the plan table no kept measurement stands behind.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cutlass_py_attn.bench_timing import SUSTAINED_MS
from tests.gpu import features
from tools import build_ptx, gallery, plan_rows, record

README = "README.md"
BENCHMARK = "tools/bench/results/h200.json"
FEATURES = "ptx/features.json"
FEW_QUERIES = " GB/s count query, key, value and output once, in forwards of few queries (q)."
SUSTAINED = f" behind others for {SUSTAINED_MS:.0f} ms"
FAILING = ("TAMPERED", "DRIFTED", "UNLISTED")


def kernel_table(manifest: record.Json, log: Sequence[record.Json]) -> str:
    """One row for each kernel that passed on a GPU; a kernel that did not is not in README."""
    latest = {line["cubin_sha256"]: line for line in log}
    rows = []
    for name, kernel in manifest["kernels"].items():
        line = latest.get(kernel["cubin_sha256"])
        if line is None:
            continue
        arch, _, symbol = name.partition("/")
        main = next(item for item in kernel["kernels"] if item["symbol"] == f"{symbol}_0")
        worst = ", ".join(f"{tensor} {value:.2f}" for tensor, value in line["worst"].items())
        memory = f"{main['shared_memory_bytes'] / 1024:.0f} KiB"
        date = line["date"][:10]
        rows.append(f"| `{symbol}` | {arch} | {main['registers']} | {memory} | {worst} | {line['gpu']}, {date} |")
    if not rows:
        return ""
    return "\n".join(
        [
            "Worst is error / allowed over all cases: 1 or less passes.",
            "",
            "| kernel | arch | registers | shared memory | worst | verified on |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
        ]
    )


def benchmark_table(rows: Sequence[record.Json]) -> str:
    """One row for each case and direction: our TFLOP/s, and how many times a peer's and a baseline's rate ours is."""
    if not rows:
        return ""
    peers = list(dict.fromkeys(row["peer"] for row in rows if row["peer"]))
    grouped: dict[tuple[str, str], dict[str, record.Json]] = {}
    for row in rows:
        grouped.setdefault((row["case"], row["direction"]), {})[row["peer"]] = row
    compared = ["of baseline"] if any(row.get("baseline") for row in rows) else []
    heads = ["case", "direction", "ours", *peers, *compared]
    lines = [
        f"TFLOP/s on {rows[0]['gpu']}, medians of CUDA graph replays{SUSTAINED if rows[0].get('sustained') else ''}; "
        "in brackets ours / peer." + (FEW_QUERIES if any(row.get("ours_gb_s") for row in rows) else ""),
        "",
        f"| {' | '.join(heads)} |",
        f"| {' | '.join('---' for _ in heads)} |",
    ]
    for (case, direction), found in grouped.items():
        first = next(iter(found.values()))
        cells = [f"{found[p]['peer_tflops']:.0f} ({found[p]['ratio']:.2f})" if p in found else "" for p in peers]
        rate, baseline = first.get("baseline_ratio"), first.get("baseline")
        cells += [f"{rate:.2f} of `{baseline}`" if rate else "" for _ in compared]
        ours = f"{first['ours_tflops']:.0f}"
        ours += f", {first['ours_gb_s']:.0f} GB/s" if first.get("ours_gb_s") else ""
        lines.append(f"| {' | '.join([f'`{case}`', direction, ours, *cells])} |")
    return "\n".join(lines)


def with_block(text: str, name: str, content: str) -> str:
    """The text with what lies between the two marks of that name replaced; ValueError without the marks."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{README} lacks {begin.strip()} or {end}")
    return f"{before}{begin}{content}{chr(10) if content else ''}{end}{after}"


def generated_readme(root: Path, manifest: record.Json, log: Sequence[record.Json]) -> str:
    """README as manifest, log and benchmark have it."""
    path = root / BENCHMARK
    rows = json.loads(path.read_text()) if path.is_file() else []
    text = with_block((root / README).read_text(), "kernels", kernel_table(manifest, log))
    text = with_block(text, "benchmark", benchmark_table(rows))
    recorded = feature_record(root)
    return with_block(text, "features", features.table(recorded) if recorded else "")


def feature_record(root: Path) -> record.Json | None:
    """What tools/fuzz.py wrote on a GPU."""
    path = root / FEATURES
    return json.loads(path.read_text()) if path.is_file() else None


def rows_without_measurement(root: Path) -> list[str]:
    """A line for each Hopper row of the plan table that no kept measurement of today's kernels stands behind."""
    lines = record.read_log(root / plan_rows.LOG)
    found = plan_rows.states(lines, record.sources_digest(root) if lines else "")
    return [f"{name}: {state}" for name, state in found.items() if not state.startswith("measured")]


def stress_line(manifest: record.Json, log: Sequence[record.Json]) -> str:
    """Which shown kernels tools/stress.py has passed, by their very cubins."""
    shown, passed = manifest["kernels"], record.stressed(manifest, log)
    line = f"check_verified: {len(passed)} of {len(shown)} kernels passed tools/stress.py"
    missing = [name for name in shown if name not in passed] if passed else []
    return f"{line}, not {', '.join(missing)}" if missing else line


def main() -> int:
    """Print a line for each kernel that is not verified and each row that is not measured, and counts."""
    parser = argparse.ArgumentParser(prog="check_verified", description=__doc__)
    parser.add_argument(
        "--strict",
        action="store_true",
        help="STALE, UNVERIFIED and rows without a measurement fail too: for a release; says as well which kernels "
        "have been under stress",
    )
    parser.add_argument("--rebuild", action="store_true", help="compile every kernel, to see DRIFTED ones")
    parser.add_argument(
        "--write-readme", action="store_true", help="bring the tables of README and ptx/README.md up to date"
    )
    parser.add_argument("--root", type=Path, default=build_ptx.ROOT, help="the tree that is checked")
    given = parser.parse_args()
    root: Path = given.root
    manifest, log = record.read_manifest(root), record.read_log(root / record.LOG)
    plans = build_ptx.committed_plans()
    rebuilt = None
    if given.rebuild:
        made = list(build_ptx.compile_all([(plan.build,) for plan in plans], fresh=True))
        rebuilt = build_ptx.entries_of(plans, made)
    found = record.states(root, manifest, log, [record.name_of(plan.build) for plan in plans], rebuilt)
    for name, state in found.items():
        if not state.startswith("verified"):
            print(f"{name}: {state}")
    if given.strict:
        print(stress_line(manifest, record.read_log(root / record.STRESS_LOG)))
    words = Counter(state.split(":")[0].split()[0] for state in found.values())
    recorded = feature_record(root)
    if recorded and recorded["sources"] != record.sources_digest(root):
        print(f"{FEATURES}: STALE, the kernels' sources have changed since: tools/fuzz.py --record on a GPU")
        words["STALE"] += 1
    unmeasured = rows_without_measurement(root)
    print("".join(f"{line}\n" for line in unmeasured), end="")
    failed = any(words[word] for word in FAILING)
    failed |= given.strict and (set(words) != {"verified"} or bool(unmeasured))
    if not words["TAMPERED"]:
        texts = {README: generated_readme(root, manifest, log), gallery.GALLERY: gallery.gallery(root)}
        for name, text in texts.items():
            path = root / name
            if given.write_readme:
                path.write_text(text)
            elif not path.is_file() or text != path.read_text():
                print(f"{name}: its tables are not what the record gives: tools/check_verified.py --write-readme")
                failed = True
    counts = f"{', '.join(f'{count} {word}' for word, count in sorted(words.items()))}"
    print(f"check_verified: {counts}; {len(unmeasured)} plan rows without a measurement")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
