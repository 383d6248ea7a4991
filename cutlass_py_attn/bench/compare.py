"""Bench comparison: our rates in two records of the benchmark, by case and direction, and which of them dropped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.bench.harness import Row
from cutlass_py_attn.errors import AttentionError

TOLERANCE: Final = 0.03  # part of the earlier rate; a rate that is lower by more has dropped
_FIELDS: Final = {each.name: each for each in dataclasses.fields(Row)}
_KEYS: Final = ("case", "direction")
_REQUIRED: Final = [name for name, each in _FIELDS.items() if each.default is dataclasses.MISSING]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our TFLOP/s of one case and direction in both records; None where a record lacks it."""

    case: str
    direction: str
    before: float | None
    now: float | None

    @property
    def ratio(self) -> float | None:
        """Rate now / rate before."""
        return self.now / self.before if self.before and self.now is not None else None

    @property
    def finding(self) -> str:
        """What is to be looked at: "dropped" by more than TOLERANCE, "missing" now; otherwise "new" or ""."""
        if self.now is None:
            return "missing"
        if self.ratio is None:
            return "new"
        return "dropped" if self.ratio < 1 - TOLERANCE else ""

    @property
    def is_worse(self) -> bool:
        """Whether the row dropped or is missing."""
        return self.finding in ("dropped", "missing")


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a record that `bench -o` wrote; AttentionError if the file is no such record."""
    try:
        listed: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AttentionError(f"{path}: cannot be read ({error}); name a file that `bench -o` wrote") from error
    problem = _objection(listed)
    if problem:
        raise AttentionError(f"{path}: {problem}; name a file that `bench -o` wrote")
    return [Row(**row) for row in listed]


def _objection(listed: Any) -> str:
    if not isinstance(listed, list) or not listed:
        return "must be a list of at least one row"
    for number, row in enumerate(listed):
        if not isinstance(row, dict):
            return f"row {number} is a {type(row).__name__}: must be an object"
        if wrong := [name for name in _REQUIRED if name not in row] or [name for name in row if name not in _FIELDS]:
            return f"row {number}: fields {', '.join(wrong)} are missing or unknown"
        if wrong := [name for name in _KEYS if not isinstance(row[name], str)]:
            return f"row {number}: {wrong[0]} = {row[wrong[0]]!r}: must be a string"
        if isinstance(row["ours_tflops"], bool) or not isinstance(row["ours_tflops"], (int, float)):
            return f"row {number}: ours_tflops = {row['ours_tflops']!r}: must be a number"
    return ""


def compare(before: Sequence[Row], now: Sequence[Row], cases: Collection[str] = ()) -> list[Comparison]:
    """Returns a comparison for each case and direction of either record, in the order of `before`.

    cases: names of the cases that `now` was to measure; of the others none is missing. () for all.
    AttentionError if the records are of different GPUs, or one is of bursts and the other sustained.
    """
    for name, what in (("gpu", "GPU"), ("sustained", "sustained")):
        kinds = [sorted({str(getattr(row, name)) for row in rows}) for rows in (before, now)]
        if before and now and kinds[0] != kinds[1]:
            shown = " and ".join(", ".join(kind) for kind in kinds)
            raise AttentionError(f"{what} of the two records: {shown}: must be the same; compare records of one kind")
    old, new = _rates(before), _rates(now)
    keys = dict.fromkeys([key for key in old if not cases or key[0] in cases] + list(new))
    return [Comparison(*key, old.get(key), new.get(key)) for key in keys]


def _rates(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    return {(row.case, row.direction): row.ours_tflops for row in rows}


def table(found: Sequence[Comparison]) -> str:
    """Returns the comparisons as aligned text; the last line counts what dropped or is missing."""
    lines = [f"{'case':<46} {'direction':<9} {'before':>7} {'now':>7} {'now/before':>10}"]
    for each in found:
        before, now = (f"{rate:7.1f}" if rate is not None else f"{'-':>7}" for rate in (each.before, each.now))
        ratio = f"{each.ratio:10.3f}" if each.ratio is not None else f"{'':10}"
        lines.append(f"{each.case:<46} {each.direction:<9} {before} {now} {ratio}  {each.finding}".rstrip())
    dropped, missing = (sum(each.finding == word for each in found) for word in ("dropped", "missing"))
    return "\n".join(
        [*lines, f"{len(found)} rows in TFLOP/s: {dropped} dropped by more than {TOLERANCE:.0%}, {missing} missing"]
    )
