"""Table of docs/data/tests.md: the recorded runs of soak.py."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tools.release import record

RECORD: Final = "tools/lab/race/results/soak.jsonl"
NOT_RUN: Final = f"Not run yet: `python -m tools.lab.race.soak --kernels FOLDER --record {RECORD}` on an H100 or H200."
COLUMNS: Final = ("run", "seconds", "threads", "problems", "calls", "wrong", "worst error / allowed", "growth in MiB")


def table(root: Path) -> str:
    """Returns a row for each run, the oldest first; a sentence if there was no run."""
    lines = record.read_log(root / RECORD)
    return (
        "\n".join([f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}", *map(_row, lines)])
        if lines
        else NOT_RUN
    )


def _row(line: record.Json) -> str:
    growth = line["memory"]["growth"]
    grown = ", ".join(f"{name} {growth[name]:.1f}" for name in sorted(growth)) or "too short"
    cells = [
        f"{line['gpu']}, {line['date'][:10]}, commit {line['commit'][:12]}",
        ", ".join([f"{line['seconds']:.0f}", *_notes(line)]),
        line["threads"],
        len(line["jobs"]),
        line["calls"],
        len(line["failures"]),
        f"{line['worst']:.2f}",
        grown,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _notes(line: record.Json) -> list[str]:
    """Returns what a reader must know of the run beside its numbers."""
    early = f"ended by {line['ended_by']} before {line['requested_seconds']:.0f}" if line["ended_early"] else ""
    shared = "shared GPU" if line["is_shared"] else ""
    failed = "" if line["passed"] else "failed"
    return list(filter(None, (early, shared, failed)))
