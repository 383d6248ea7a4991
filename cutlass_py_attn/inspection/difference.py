"""Difference: compares two kernels, or two versions of one kernel."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cutlass_py_attn.inspection.facts import Json

# Registers and labels are numbered consecutively: one more instruction renumbers all that follow.
_NUMBERED = re.compile(r"(%[a-z]+|\$L__BB|__local_depot|\bU?[RP])\d+(?:_\d+)?")


def difference(left: Json, right: Json) -> Json:
    """Returns the rows {what, left, right} that differ, grouped by subject; equal subjects are omitted.

    left, right: two results of `facts`. Kernels of a launch are matched by their role (main, delta, ...), not by name.
    """
    found = {
        "identity": _rows(_identity(left), _identity(right)),
        "resources": _entries(left, right, "resources", "kernel"),
        "launches": _entries(left, right, "launches", "kernel"),
        "parameters": _rows(*(_by(item["parameters"], "name") for item in (left, right))),
        "fields": _rows(*(_by(item["fields"], "name") for item in (left, right))),
        "shared_memory": _rows(*(_by(item["shared_memory"], "name") for item in (left, right))),
        "instructions": _counts(left, right, "instructions"),
        "groups": _counts(left, right, "groups"),
        "steps": _rows(_step_counts(left), _step_counts(right)),
    }
    return {subject: rows for subject, rows in found.items() if rows}


def text_difference(left: Iterable[str], right: Iterable[str], names: tuple[str, str]) -> Iterator[str]:
    """Yields a unified diff of two listings without register numbers, label numbers and kernel names."""
    before, after = ([_without_numbers(line) for line in lines] for lines in (left, right))
    yield from difflib.unified_diff(before, after, *names, lineterm="", n=2)


def _without_numbers(line: str) -> str:
    return re.sub(r"\b(?:fwd|bwd)_\w+", "kernel", _NUMBERED.sub(r"\1", line))


def _identity(item: Json) -> Json:
    return {"symbol": item["symbol"], "arch": item["arch"], **item["identity"],
            "toolchain": item["toolchain"], "allocation": item["allocation"]}  # fmt: skip


def _rows(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Json]:
    """Returns a row for each name whose value differs; a missing value is None."""
    names = dict.fromkeys([*left, *right])
    return [
        {"what": name, "left": left.get(name), "right": right.get(name)}
        for name in names
        if left.get(name) != right.get(name)
    ]


def _by(rows: Iterable[Json], key: str) -> Json:
    return {row[key]: {name: value for name, value in row.items() if name != key} for row in rows}


def _roles(item: Json) -> dict[str, str]:
    """Returns the role of each kernel by symbol: the suffix after the Build's symbol, without the compiler's number."""
    return {
        row["kernel"]: re.sub(r"_?\d+$", "", row["kernel"].removeprefix(item["symbol"])).strip("_") or "main"
        for row in item["launches"]
    }


def _entries(left: Json, right: Json, subject: str, key: str) -> list[Json]:
    """Returns the rows "role: name" that differ in the tables of one subject."""
    flat = []
    for item in (left, right):
        roles = {**_roles(item), **{name.rpartition("_")[0]: role for name, role in _roles(item).items()}}
        flat.append(
            {f"{roles[row[key]]}: {name}": value for row in item[subject] for name, value in row.items() if name != key}
        )
    return _rows(*flat)


def _counts(left: Json, right: Json, subject: str) -> list[Json]:
    """Returns the rows "role: opcode" or "role: group" whose counts differ; a missing one counts 0."""
    flat = []
    for item in (left, right):
        roles = _roles(item)
        flat.append(
            {
                f"{roles[name]}: {what}": count
                for name, counts in item[subject].items()
                for what, count in counts.items()
            }
        )
    for one, other in (flat, flat[::-1]):
        one.update({name: 0 for name in other if name not in one})
    return _rows(*flat)


def _step_counts(item: Json) -> Json:
    roles = _roles(item)
    return {
        f"{roles[name]}: {row['step']}, {group}": count
        for name, rows in item["steps"].items()
        for row in rows
        for group, count in row["groups"].items()
    }
