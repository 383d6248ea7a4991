"""Entry point: starts the commands, or says in one sentence how to install what they need."""

from __future__ import annotations

import sys

NEEDED = ("click", "rich")


def main() -> None:
    """Run `cutlass-py-attn`; the exit code is 1 when a check fails and 2 when an option is wrong."""
    try:
        from cutlass_py_attn.cli.group import group
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        sys.exit(f"cutlass-py-attn needs {missing} for its commands: pip install 'cutlass-py-attn[cli]'")
    group(prog_name="cutlass-py-attn")
