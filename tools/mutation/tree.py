"""Copies of the checkout, in which the mutation run and the kernel faults change files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_tree(target: Path, *folders: str) -> None:
    """Copies files of the checkout to `target`: tracked ones, and new ones that git does not ignore.

    folders: only files of these folders; none for all
    """
    command = ["git", "ls-files", "-co", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
