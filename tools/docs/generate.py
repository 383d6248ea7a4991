"""Generates files of docs/ (pictures, reference, tables of measurements and of faults, list of pages), or compares."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.docs import (
    attempts,
    faults_table,
    front_tables,
    jax_table,
    kernel_map,
    slower_rows,
)
from tools.docs.benchmark_plots import BENCHMARK, plots
from tools.docs.reference import reference
from tools.docs.schematics import schematics
from tools.lab import context_plots, short_map_plots
from tools.lab.mutation import tables
from tools.lab.race import soak_table
from tools.release import record
from tools.release.check_verified import benchmark_table, with_block

ROOT = Path(__file__).resolve().parents[2]
DATA = "docs/data"
INDEX, REFERENCE = "docs/README.md", "docs/reference.md"
SUSTAINED = "tools/bench/results/sustained.json"
H100, H100_SUSTAINED = "tools/bench/results/h100.json", "tools/bench/results/h100_sustained.json"
MICROBENCH = "tools/bench/results/microbench.jsonl"
NOT_MEASURED = (
    f"Not measured yet: `python -m tools.lab.microbench --kernels FOLDER --record {MICROBENCH}` on an H100 or H200."
)
# The order in which a newcomer reads; pages that are not listed follow.
ORDER = (
    "quick_start",
    "support",
    "concepts",
    "masks",
    "mask_functions",
    "arrays",
    "faults",
    "jax",
    "jax_ranges",
    "jax_devices",
    "paged",
    "serving",
    "fp8",
    "several_gpus",
    "distributed",
    "bundles",
    "c_library",
    "c_library_calls",
    "inspect",
    "reference",
    "performance",
    "architecture",
    "extending",
    "score_terms",
    "records",
    "testing",
)


def generated(root: Path) -> dict[str, str]:
    """Returns the text of every generated file by its path from the root."""
    charts = plots(json.loads((root / BENCHMARK).read_text()))
    short_map, context = short_map_plots.read(root), context_plots.read(root)
    pictures = schematics() | charts | short_map_plots.pictures(short_map) | context_plots.pictures(context)
    found = {f"docs/pictures/{name}.svg": text for name, text in pictures.items()}
    found[REFERENCE] = reference()
    blocks = {
        "docs/performance.md": performance_tables(root),
        "docs/architecture.md": {"kernels": kernel_map.table(root)},
        "docs/faults.md": {"faults": faults_table.table()},
        f"{DATA}/charts.md": {"plots": plot_links(charts)},
        f"{DATA}/short_sequences.md": {"short_map": short_map_plots.block(short_map)},
        f"{DATA}/several_gpus.md": {"context": context_plots.block(context)},
        f"{DATA}/jax.md": {"jax": jax_table.table(json.loads((root / jax_table.RESULTS).read_text()))},
        f"{DATA}/microbenchmarks.md": {"microbench": microbenchmarks(record.read_log(root / MICROBENCH))},
        f"{DATA}/tests.md": testing_tables(root),
        **machine_tables(root),
    }
    for page, contents in blocks.items():
        text = (root / page).read_text()
        for name, content in contents.items():
            text = with_block(text, name, content)
        found[page] = text
    pages = {path.stem: path.read_text() for path in (root / "docs").glob("*.md") if path.name != "README.md"}
    pages["reference"] = found[REFERENCE]
    found[INDEX] = with_block((root / INDEX).read_text(), "pages", index(pages))
    return found


def performance_tables(root: Path) -> dict[str, str]:
    """Returns the tables of docs/performance.md by the names of their markers."""
    bursts, sustained = (json.loads((root / name).read_text()) for name in (BENCHMARK, SUSTAINED))
    return {
        "forward": front_tables.rates(bursts, "forward", front_tables.FORWARD),
        "backward": front_tables.rates(bursts, "backward", front_tables.BACKWARD),
        "decode": front_tables.steps(bursts, front_tables.DECODE),
        "slower_rows": slower_rows.table(bursts, sustained),
    }


def machine_tables(root: Path) -> dict[str, dict[str, str]]:
    """Returns the tables of the other runs of the benchmark, by page and marker."""
    sustained, h100, h100_sustained = (
        json.loads((root / name).read_text()) for name in (SUSTAINED, H100, H100_SUSTAINED)
    )
    return {
        f"{DATA}/h200_sustained.md": {"sustained": benchmark_table(sustained)},
        f"{DATA}/h100.md": {"h100": f"{slower_rows.summary(h100)}\n\n{benchmark_table(h100)}"},
        f"{DATA}/h100_sustained.md": {"h100_sustained": benchmark_table(h100_sustained)},
    }


def testing_tables(root: Path) -> dict[str, str]:
    """Returns the tables of the mutation run, of the kernel faults, the soak runs and the attempts, by marker."""
    return {
        "mutants": tables.mutants(root),
        "survivors": tables.survivors(root),
        "kernel_faults": tables.kernel_faults(root),
        "soak": soak_table.table(root),
        "attempts": attempts.table(root),
    }


def plot_links(charts: Mapping[str, str]) -> str:
    """Returns a Markdown image for each plot."""
    return "\n\n".join(f"![{name.replace('_', ', ')}](../pictures/{name}.svg)" for name in charts)


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
