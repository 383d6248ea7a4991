"""Entry point: runs the commands, or says how to install the packages that they need."""

from __future__ import annotations

import sys

from cutlass_py_attn import extras

NEEDED = ("click", "rich")


def main() -> None:
    """Runs `cutlass-py-attn`; the exit code is 1 if a check fails and 2 if an option is wrong."""
    try:
        from cutlass_py_attn.cli.group import group
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        sys.exit(f"cutlass-py-attn needs {missing} for its commands: {extras.remedy('cli')}")
    group(prog_name="cutlass-py-attn")
