"""Docs: writes what is generated in docs/ (pictures, reference, index, plots, microbenchmarks), or compares it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import jax_table, record
from tools.check_verified import benchmark_table, with_block
from tools.pictures import pictures
from tools.reference import reference

ROOT = Path(__file__).resolve().parent.parent
INDEX, REFERENCE, PERFORMANCE = "docs/README.md", "docs/reference.md", "docs/performance.md"
JAX = "docs/jax.md"
SUSTAINED = "tools/bench/results/sustained.json"
MICROBENCH = "tools/bench/results/microbench.jsonl"
NOT_MEASURED = (
    f"Not measured yet: `python -m tools.microbench --kernels FOLDER --record {MICROBENCH}` on an H100 or H200."
)
# The order in which a newcomer reads; pages that are not named here come behind.
ORDER = ("quick_start", "concepts", "arrays", "jax", "bundles", "inspect", "reference", "performance", "extending")
PLOTS = (
    *(f"{direction}_{dtype}" for direction in ("forward", "backward") for dtype in ("bf16", "f16", "f32")),
    *("forward_features", "backward_features", "decode"),
)


def generated(root: Path) -> dict[str, str]:
    """Every generated file by its path from the root."""
    found = {**pictures(root), REFERENCE: reference()}
    plotted = with_block((root / PERFORMANCE).read_text(), "plots", plots_of(found))
    sustained = with_block(plotted, "sustained", benchmark_table(json.loads((root / SUSTAINED).read_text())))
    found[PERFORMANCE] = with_block(sustained, "microbench", microbenchmarks(record.read_log(root / MICROBENCH)))
    measured = json.loads((root / jax_table.RESULTS).read_text())
    found[JAX] = with_block((root / JAX).read_text(), "jax", jax_table.table(measured))
    found[INDEX] = with_block((root / INDEX).read_text(), "pages", index(root))
    return found


def plots_of(pages: dict[str, str]) -> str:
    """A line for each plot."""
    missing = [name for name in PLOTS if f"docs/pictures/{name}.svg" not in pages]
    if missing:
        raise ValueError(f"no picture of {', '.join(missing)}")
    return "\n\n".join(f"![{name.replace('_', ', ')}](pictures/{name}.svg)" for name in PLOTS)


def microbenchmarks(lines: Sequence[record.Json]) -> str:
    """A row for each case of the newest run, and what it ran on; a sentence where there was none."""
    if not lines:
        return NOT_MEASURED
    date = max(line["date"] for line in lines)
    run = [line for line in lines if line["date"] == date]
    rows = ["| case | blocks | ms | rate | of one SM, a clock | MHz | read beside, B a clock |", f"|{' --- |' * 7}"]
    for line in run:
        beside = line["beside_per_clock"]
        cells = [line["name"], line["blocks"], line["median_ms"], f"{line['rate']:.1f} {line['rate_unit']}"]
        cells += [line["per_clock"], line["mhz"], "" if beside is None else beside]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    last = run[-1]
    return "\n".join([f"On {last['gpu']} ({last['driver']}), {date[:10]}, commit {last['commit'][:12]}.", "", *rows])


def index(root: Path) -> str:
    """A row for each page: its title, and the first sentence below it."""
    pages = {path.stem: path for path in (root / "docs").glob("*.md") if path.name != "README.md"}
    pages.setdefault("reference", root / REFERENCE)
    names = [name for name in ORDER if name in pages] + sorted(set(pages) - set(ORDER))
    return "\n".join(["| page | what it says |", "| --- | --- |", *(_row(name, pages[name]) for name in names)])


def _row(name: str, path: Path) -> str:
    text = reference() if name == "reference" else path.read_text()
    title, _, rest = text.partition("\n")
    paragraph = " ".join(rest.strip().partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".")
    return f"| [{title.lstrip('# ')}]({name}.md) | {sentence} |"


def main() -> int:
    """Write the files, or compare them; exit code 1 when --check finds a difference."""
    parser = argparse.ArgumentParser(prog="docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with docs/; writes nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree whose docs/ is meant")
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
    verb = "is not what tools/docs.py writes" if given.check else "written"
    print("\n".join(f"{name}: {verb}" for name in stale) or "docs/: as generated")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
