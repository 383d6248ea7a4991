"""Generates files of docs/ (pictures, reference, tables of measurements and of faults, list of pages), or compares."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.docs import attempts, context_plots, faults_table, jax_table, short_map_plots, slower_rows
from tools.docs.benchmark_plots import BENCHMARK, plots
from tools.docs.reference import reference
from tools.docs.schematics import schematics
from tools.mutation import tables
from tools.race import soak_table
from tools.release import record
from tools.release.check_verified import benchmark_table, with_block

ROOT = Path(__file__).resolve().parents[2]
INDEX, REFERENCE, PERFORMANCE = "docs/README.md", "docs/reference.md", "docs/performance.md"
JAX, FAULTS, TESTING, TUNING = "docs/jax.md", "docs/faults.md", "docs/testing.md", "docs/tuning.md"
SEVERAL_GPUS = "docs/several_gpus.md"
SUSTAINED = "tools/bench/results/sustained.json"
H100, H100_SUSTAINED = "tools/bench/results/h100.json", "tools/bench/results/h100_sustained.json"
MICROBENCH = "tools/bench/results/microbench.jsonl"
NOT_MEASURED = (
    f"Not measured yet: `python -m tools.bench.microbench --kernels FOLDER --record {MICROBENCH}` on an H100 or H200."
)
# The order in which a newcomer reads; pages that are not listed follow.
ORDER = (
    "quick_start",
    "concepts",
    "arrays",
    "faults",
    "jax",
    "paged",
    "serving",
    "fp8",
    "several_gpus",
    "bundles",
    "c_library",
    "inspect",
    "reference",
    "performance",
    "tuning",
    "architecture",
    "extending",
    "testing",
)


def generated(root: Path) -> dict[str, str]:
    """Returns the text of every generated file by its path from the root."""
    records = (json.loads((root / name).read_text()) for name in (BENCHMARK, SUSTAINED, H100, H100_SUSTAINED))
    bursts, sustained, h100, h100_sustained = records
    charts = plots(bursts)
    short_map = short_map_plots.read(root)
    context = context_plots.read(root)
    pictures = schematics() | charts | short_map_plots.pictures(short_map) | context_plots.pictures(context)
    found = {f"docs/pictures/{name}.svg": text for name, text in pictures.items()}
    found[REFERENCE] = reference()
    performance = with_block((root / PERFORMANCE).read_text(), "plots", plot_links(charts))
    performance = with_block(performance, "sustained", benchmark_table(sustained))
    performance = with_block(performance, "slower_rows", slower_rows.table(bursts, sustained))
    performance = with_block(performance, "h100", f"{slower_rows.summary(h100)}\n\n{benchmark_table(h100)}")
    performance = with_block(performance, "h100_sustained", benchmark_table(h100_sustained))
    found[PERFORMANCE] = with_block(performance, "short_map", short_map_plots.block(short_map))
    microbench = microbenchmarks(record.read_log(root / MICROBENCH))
    found[TUNING] = with_block((root / TUNING).read_text(), "microbench", microbench)
    measured = json.loads((root / jax_table.RESULTS).read_text())
    found[JAX] = with_block((root / JAX).read_text(), "jax", jax_table.table(measured))
    found[SEVERAL_GPUS] = with_block((root / SEVERAL_GPUS).read_text(), "context", context_plots.block(context))
    found[FAULTS] = with_block((root / FAULTS).read_text(), "faults", faults_table.table())
    found[TESTING] = testing(root)
    pages = {path.stem: path.read_text() for path in (root / "docs").glob("*.md") if path.name != "README.md"}
    pages["reference"] = found[REFERENCE]
    found[INDEX] = with_block((root / INDEX).read_text(), "pages", index(pages))
    return found


def testing(root: Path) -> str:
    """Returns docs/testing.md with the tables of the mutation run, of the kernel faults, the soak runs and attempts."""
    text = (root / TESTING).read_text()
    for name, table in (
        ("mutants", tables.mutants(root)),
        ("survivors", tables.survivors(root)),
        ("kernel_faults", tables.kernel_faults(root)),
        ("soak", soak_table.table(root)),
        ("attempts", attempts.table(root)),
    ):
        text = with_block(text, name, table)
    return text


def plot_links(charts: Mapping[str, str]) -> str:
    """Returns a Markdown image for each plot."""
    return "\n\n".join(f"![{name.replace('_', ', ')}](pictures/{name}.svg)" for name in charts)


def microbenchmarks(lines: Sequence[record.Json]) -> str:
    """Returns a table of the newest run with the machine it ran on; a sentence if there was no run."""
    if not lines:
        return NOT_MEASURED
    date = max(line["date"] for line in lines)
    run = [line for line in lines if line["date"] == date]
    rows = [
        "| case | blocks | ms | rate | per SM and clock | MHz | concurrent shared reads, B per clock |",
        f"|{' --- |' * 7}",
    ]
    for line in run:
        beside = line["beside_per_clock"]
        cells = [line["name"], line["blocks"], line["median_ms"], f"{line['rate']:.1f} {line['rate_unit']}"]
        cells += [line["per_clock"], line["mhz"], "" if beside is None else beside]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    last = run[-1]
    return "\n".join([f"On {last['gpu']} ({last['driver']}), {date[:10]}, commit {last['commit'][:12]}.", "", *rows])


def index(pages: Mapping[str, str]) -> str:
    """Returns a table with a row for each page: its title and its first sentence."""
    names = [name for name in ORDER if name in pages] + sorted(set(pages) - set(ORDER))
    return "\n".join(["| page | subject |", "| --- | --- |", *(_row(name, pages[name]) for name in names)])


def _row(name: str, text: str) -> str:
    title, _, rest = text.partition("\n")
    paragraph = " ".join(rest.strip().partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".")
    return f"| [{title.lstrip('# ')}]({name}.md) | {sentence} |"


def main() -> int:
    """Writes the files, or compares them; exit code 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(prog="generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with docs/; writes nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout whose docs/ is generated")
    given = parser.parse_args()
    stale = []
    for name, text in generated(given.root).items():
        path = given.root / name
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    verb = "differs from what tools/docs/generate.py writes" if given.check else "written"
    print("\n".join(f"{name}: {verb}" for name in stale) or "docs/: current")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
