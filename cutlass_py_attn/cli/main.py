"""Entry point: runs the commands, or says how to install the packages that they need."""

from __future__ import annotations

import signal
import sys
import warnings

from cutlass_py_attn import extras

NEEDED = ("click", "rich")


def main() -> None:
    """Runs `cutlass-py-attn`; the exit code is 1 if a check fails, 2 if an option is wrong and 130 after Ctrl-C."""
    warnings.formatwarning = _one_line
    try:
        from cutlass_py_attn.cli.group import group

        group(prog_name="cutlass-py-attn")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        sys.exit(f"cutlass-py-attn needs {missing} for its commands: {extras.remedy('cli')}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """Returns a warning as the commands print it, without the line of source that gave it."""
    return f"Warning: {message}\n"
