"""Size report: lines of the package, tests, tools and docs by folder, beside those of a base commit.

python -m tools.lab.size_report [--write]      --write makes today's lines the base

A line of a file counts, whatever is on it. The reference page, which is generated, does not count.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
BASE: Final = "tools/lab/size_base.json"
PACKAGE: Final = "cutlass_py_attn"
FAMILIES: Final = re.compile("sm80|sm90")
KNOW_FAMILIES: Final = ("kernels", "testing")  # folders of the package that name families of kernels
OF_FAMILIES: Final = "host lines that name sm80 or sm90"


def sizes(root: Path) -> dict[str, int]:
    """Returns the number of lines by folder, and of lines of the host code that name a family of kernels."""
    found: Counter[str] = Counter()
    for top in (PACKAGE, "tests", "tools"):
        for path in sorted((root / top).rglob("*.py")):
            lines = path.read_text().splitlines()
            parts = path.relative_to(root).parts
            found["/".join(parts[:2]) if len(parts) > 2 else top] += len(lines)
            if top == PACKAGE and parts[1] not in KNOW_FAMILIES:
                found[OF_FAMILIES] += sum(bool(FAMILIES.search(line)) for line in lines)
    found["docs"] = sum(
        len(path.read_text().splitlines()) for path in (root / "docs").glob("*.md") if path.name != "reference.md"
    )
    return dict(sorted(found.items()))


def report(today: dict[str, int], base: dict[str, int]) -> str:
    """Returns a table with today's lines and the change against the base."""
    rows = [(name, today.get(name, 0), base.get(name, 0)) for name in sorted({*today, *base})]
    for what, tops in (("all of the package", (PACKAGE,)), ("all of tests and tools", ("tests", "tools"))):
        sums = [sum(lines[name] for name in lines if name.split("/")[0] in tops) for lines in (today, base)]
        rows.append((what, sums[0], sums[1]))
    return "\n".join(f"{name:36} {now:7} {now - before:+7}" for name, now, before in rows)


def main() -> int:
    """Prints the table, or writes the base."""
    parser = argparse.ArgumentParser(
        prog="size_report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write today's lines to {BASE}")
    given = parser.parse_args()
    today = sizes(ROOT)
    if given.write:
        (ROOT / BASE).write_text(json.dumps(today, indent=1) + "\n")
    print(report(today, json.loads((ROOT / BASE).read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
