"""Attempts: how many programs, sequences, plans and attacks were tried, for the table of docs/data/tests.md.

Every JSON file of the folder RECORDS is one row. `write` writes one; a recorder adds fields of its own.

what: what was tried, in the plural, such as "sequences of calls"
count, wrong: how many were tried, and how many of them gave a wrong result
gpu: name of the GPU, or what took its place
date, commit: when it ran, and of which commit
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

RECORDS: Final = "tools/docs/attempts"
FIELDS: Final[dict[str, type]] = {"what": str, "count": int, "wrong": int, "gpu": str, "date": str, "commit": str}
COLUMNS: Final = ("what was tried", "how many", "wrong", "where")
NONE: Final = f"Nothing recorded yet: `python -m tools.lab.race.sequences --help` writes a record into `{RECORDS}`."


def objections(found: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with a record."""
    return [
        f"{name} = {found.get(name)!r}: must be {kind.__name__}; write it with tools.docs.attempts.write"
        for name, kind in FIELDS.items()
        if type(found.get(name)) is not kind
    ]


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Writes a record; its date is now if it has none. ValueError for a record without the fields of FIELDS."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    dated = {"date": date, **found}
    if wrong := objections(dated):
        raise ValueError("; ".join(wrong))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dated, indent=1) + "\n")


def read(root: Path) -> list[dict[str, Any]]:
    """Returns the records by file name; ValueError names a file without the fields of FIELDS."""
    found = []
    for path in sorted((root / RECORDS).glob("*.json")):
        line = json.loads(path.read_text())
        if wrong := objections(line):
            raise ValueError(f"{path.name}: {'; '.join(wrong)}")
        found.append(line)
    return found


def table(root: Path) -> str:
    """Returns a row for each record; a sentence if there is none."""
    lines = read(root)
    rows = [f"| {line['what']} | {line['count']} | {line['wrong']} | {_where(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}", *rows]) if rows else NONE


def _where(line: Mapping[str, Any]) -> str:
    return f"{line['gpu']}, {line['date'][:10]}, commit {line['commit'][:12]}"
