"""Check verified: which committed kernels passed on a GPU, and whether the generated tables follow the records.

The record of the random cases must be of today's sources, and the PTX hashes of kernels with features must be of that
record. With --rebuild, manifest and hashes must be of today's compilation too: what plan, sources and compiler do not
imply is compiled, and a sample.
It also lists the tiles of the sm90 family's tile table that have no recorded measurement of today's kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cutlass_py_attn.bench.timing import SUSTAINED_MS
from cutlass_py_attn.compilation import compiler
from tools.release import build_ptx, feature_ptx, features, gallery, record
from tools.tuning import plan_rows

BENCHMARK_PAGE, FEATURES_PAGE = "docs/data/h200.md", "docs/data/features.md"
BENCHMARK = "tools/bench/results/h200.json"
FEW_QUERIES = " GB/s count query, key, value and output once, in forwards of few queries (q)."
SUSTAINED = f" after {SUSTAINED_MS:.0f} ms of load"
FAILING = ("TAMPERED", "DRIFTED", "UNLISTED")


def benchmark_table(rows: Sequence[record.Json]) -> str:
    """Returns a table with a row for each case and direction: our TFLOP/s, and our rate / peers' and baseline's."""
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
        "in brackets ours / peer."
        + (FEW_QUERIES if any(row.get("ours_gb_s") for row in rows) else "")
        + _versions(rows),
        "",
        f"| {' | '.join(heads)} |",
        f"| {' | '.join('---' for _ in heads)} |",
    ]
    for (case, direction), found in grouped.items():
        first = next(iter(found.values()))
        cells = [_peer_cell(found[peer]) if peer in found else "" for peer in peers]
        rate, baseline = first.get("baseline_ratio"), first.get("baseline")
        cells += [f"{rate:.2f} of `{baseline}`" if rate else "" for _ in compared]
        ours = f"{first['ours_tflops']:.0f}"
        ours += f", {first['ours_gb_s']:.0f} GB/s" if first.get("ours_gb_s") else ""
        lines.append(f"| {' | '.join([f'`{case}`', direction, ours, *cells])} |")
    return "\n".join(lines)


def _versions(rows: Sequence[record.Json]) -> str:
    """Returns a sentence with what ran behind the peers' names; "" for a record without versions."""
    found = {row["peer"]: row["peer_version"] for row in rows if row.get("peer_version")}
    return f" Peers: {', '.join(f'{peer} is {version}' for peer, version in found.items())}." if found else ""


def _peer_cell(row: record.Json) -> str:
    """Returns a peer's TFLOP/s and our rate / its rate; "" if it refused the case."""
    return f"{row['peer_tflops']:.0f} ({row['ratio']:.2f})" if row["peer_tflops"] is not None else ""


def with_block(text: str, name: str, content: str) -> str:
    """Returns the text with `content` between the two markers of that name; ValueError if a marker is missing."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the page lacks {begin.strip()} or {end}; add both, each on its own line")
    return f"{before}{begin}{content}{chr(10) if content else ''}{end}{after}"


def generated_tables(root: Path) -> dict[str, str]:
    """Returns the pages of docs/data with the tables of the benchmark and of the random cases, by their paths."""
    path = root / BENCHMARK
    rows = json.loads(path.read_text()) if path.is_file() else []
    recorded = features.read(root)
    return {
        BENCHMARK_PAGE: with_block((root / BENCHMARK_PAGE).read_text(), "benchmark", benchmark_table(rows)),
        FEATURES_PAGE: with_block(
            (root / FEATURES_PAGE).read_text(), "features", features.table(recorded) if recorded else ""
        ),
    }


def rows_without_measurement(root: Path) -> list[str]:
    """Returns a line for each sm90 tile of the tile table without a recorded measurement of today's kernels."""
    lines = record.read_log(root / plan_rows.LOG)
    found = plan_rows.states(lines, record.sources_digest(root) if lines else "")
    return [f"{name}: {state}" for name, state in found.items() if not state.startswith("measured")]


def stress_line(manifest: record.Json, log: Sequence[record.Json]) -> str:
    """Returns a line that says which shown kernels passed tools/lab/race/stress.py, compared by cubin."""
    shown, passed = manifest["kernels"], record.stressed(manifest, log)
    line = f"check_verified: {len(passed)} of {len(shown)} kernels passed tools/lab/race/stress.py"
    missing = [name for name in shown if name not in passed] if passed else []
    return f"{line}, not {', '.join(missing)}" if missing else line


def main() -> int:
    """Prints a line for each kernel that is not verified or differs and each tile that is not measured, and counts."""
    parser = argparse.ArgumentParser(prog="check_verified", description=__doc__)
    parser.add_argument(
        "--strict",
        action="store_true",
        help="for a release: STALE, UNVERIFIED and tiles without a measurement fail too; also says which kernels "
        "passed tools/lab/race/stress.py",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="compile kernels to find DRIFTED ones: with --strict all of them, otherwise those whose plan, sources or "
        "compiler are others than those of the manifest or of the hashes, and a sample",
    )
    parser.add_argument(
        "--write-tables",
        action="store_true",
        help=f"write the tables of {BENCHMARK_PAGE}, {FEATURES_PAGE} and {gallery.GALLERY}",
    )
    parser.add_argument("--root", type=Path, default=build_ptx.ROOT, help="the tree that is checked")
    given = parser.parse_args()
    root: Path = given.root
    manifest, log = record.read_manifest(root), record.read_log(root / record.LOG)
    plans = build_ptx.committed_plans()
    rebuilt: dict[str, record.Json] = {}
    hashes = None
    if given.rebuild:
        needed = plans if given.strict else build_ptx.uncertain(plans, manifest, compiler.toolchain())
        made = list(build_ptx.compile_all([(plan.build,) for plan in needed], fresh=True))
        rebuilt = build_ptx.entries_of(needed, made)
        if kept := len(plans) - len(needed):
            print(f"{record.MANIFEST}: {kept} of {len(plans)} kernels are of today's plans, sources and compiler")
        if given.strict or not feature_ptx.is_current(root):
            hashes = feature_ptx.compiled(feature_ptx.builds(), build_ptx.PROCESSES)
        else:
            print(f"{feature_ptx.PATH}: of today's sources and compiler; its kernels are not compiled again")
    planned = {record.name_of(plan.build): plan.build for plan in plans}
    found = record.states(root, manifest, log, planned, rebuilt)
    for name, state in found.items():
        if not state.startswith("verified"):
            print(f"{name}: {state}")
    if given.strict:
        print(stress_line(manifest, record.read_log(root / record.STRESS_LOG)))
    words = Counter(state.split(":")[0].split()[0] for state in found.values())
    objections = [*features.objections(root), *feature_ptx.objections(root, hashes)]
    print("".join(f"{line}\n" for line in objections), end="")
    unmeasured = rows_without_measurement(root)
    print("".join(f"{line}\n" for line in unmeasured), end="")
    failed = bool(objections) or any(words[word] for word in FAILING)
    failed |= given.strict and (set(words) != {"verified"} or bool(unmeasured))
    if not words["TAMPERED"]:
        texts = {**generated_tables(root), gallery.GALLERY: gallery.gallery(root)}
        for name, text in texts.items():
            path = root / name
            if given.write_tables:
                path.write_text(text)
            elif not path.is_file() or text != path.read_text():
                print(f"{name}: its tables differ from the records; run tools/release/check_verified.py --write-tables")
                failed = True
    counts = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
    print(f"check_verified: {counts}; tiles without a measurement: {len(unmeasured)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
