"""Copies of the checkout, in which the mutation run and the kernel faults change files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def copy_tree(target: Path, *folders: str) -> None:
    """Copies files of the checkout to `target`: tracked ones, and new ones that git does not ignore. Those with the
    same time are there already.

    folders: only files of these folders; none for all
    """
    command = ["git", "ls-files", "-co", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        source, copy = ROOT / name, target / name
        if source.is_file() and not (copy.is_file() and copy.stat().st_mtime_ns == source.stat().st_mtime_ns):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
