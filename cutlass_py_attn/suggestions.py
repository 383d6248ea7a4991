"""Suggestions: the known names that are nearest to a mistyped one, for the ends of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_NAMES = 3


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Returns up to MAX_NAMES known names like `name`, the nearest first; cutoff: from 0 (any) to 1 (equal)."""
    return difflib.get_close_matches(name, list(dict.fromkeys(known)), MAX_NAMES, cutoff)


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Returns "did you mean ...?" with the nearest known names; `otherwise` if there are none."""
    found = nearest(name, known)
    return f"did you mean {' or '.join(found)}?" if found else otherwise
