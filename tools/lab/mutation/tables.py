"""Tables of docs/data/tests.md: the record of the mutation run with its survivors, and that of the kernel faults."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]

MUTANTS: Final = "tools/lab/mutation/results/mutants.json"
KERNEL_FAULTS: Final = "tools/lab/mutation/results/kernel_faults.json"
SURVIVORS: Final = "tools/lab/mutation/survivors.toml"
NOT_RUN: Final = (
    "Not run yet: `python -m tools.lab.mutation.kernel_faults --build FOLDER`, then "
    f"`python -m tools.lab.mutation.kernel_faults --kernels FOLDER --record {KERNEL_FAULTS}` on an H100 or H200."
)


def read(root: Path, name: str) -> Json | None:
    """Returns a record; None if there is none."""
    path = root / name
    return json.loads(path.read_text()) if path.is_file() else None


def explanations(root: Path) -> dict[str, str]:
    """Returns why each mutant that survives is no missing test, by the mutant's id."""
    return tomllib.loads((root / SURVIVORS).read_text())


def mutants(root: Path) -> str:
    """Returns the counts of the mutation run by package."""
    found = read(root, MUTANTS)
    assert found is not None, f"{MUTANTS} is missing"
    counts = found["summary"]
    total = {outcome: sum(each[outcome] for each in counts.values()) for outcome in ("killed", "survived")}
    rows = ["| code | mutants | killed | survived |", "| --- | --- | --- | --- |"]
    for name, each in [*((f"`{name}`", each) for name, each in counts.items()), ("all", total)]:
        rows.append(f"| {name} | {sum(each.values())} | {each['killed']} | {each['survived']} |")
    return "\n".join([f"{found['date']}, commit {found['commit'][:12]}, seed {found['seed']}.", "", *rows])


def survivors(root: Path) -> str:
    """Returns a row for each survivor: its place, its change and why no test can or need notice it."""
    found = read(root, MUTANTS)
    assert found is not None, f"{MUTANTS} is missing"
    why = explanations(root)
    rows = ["| place | change | why it survives |", "| --- | --- | --- |"]
    for row in found["mutants"]:
        if row["outcome"] == "survived":
            file, scope = row["file"].removeprefix("cutlass_py_attn/"), row["scope"]
            place = f"`{file}`, `{scope}`" if scope else f"`{file}`"
            rows.append(f"| {place} | {_code(row['before'])} → {_code(row['after'])} | {why[row['id']]} |")
    return "\n".join(rows)


def kernel_faults(root: Path) -> str:
    """Returns a row for each kernel fault: where it was caught, and by how much; a sentence if there was no run."""
    found = read(root, KERNEL_FAULTS)
    if found is None:
        return NOT_RUN
    rows = ["| fault | file | kernels | worst error / allowed, unchanged | faulty |", f"|{' --- |' * 5}"]
    for row in found["faults"]:
        name = row["file"].removeprefix("cutlass_py_attn/")
        family, line = row["shown_by"]
        unchanged, faulty = (_worst(row[kind]) for kind in ("unchanged", "faulty"))
        outcome = faulty if row["is_caught"] else f"{faulty}, not caught"
        rows.append(f"| {row['name']} | `{name}` | {family}, `{line}` | {unchanged} | {outcome} |")
    caught = sum(row["is_caught"] for row in found["faults"])
    head = f"{found['gpu']}, {found['date']}, commit {found['commit'][:12]}: {caught} of {len(found['faults'])} caught."
    return "\n".join([head, "", *rows])


def _worst(ratios: Mapping[str, Any]) -> str:
    """The largest ratio with its result, or the error of the launch."""
    texts = [f"{name}: {ratio}" for name, ratio in ratios.items() if isinstance(ratio, str)]
    if texts:
        return ", ".join(texts)
    name = max(ratios, key=lambda each: float(ratios[each]))
    return f"{ratios[name]:.2f} ({name})"


def _code(text: str) -> str:
    """A change in one line of Markdown, without what cannot stand in a table."""
    line = re.sub(r"\s+", " ", text).replace("|", "\\|")
    return f"`{line if len(line) <= 80 else line[:77] + '...'}`"
