"""Parameters: types of option values; a wrong value is answered with the nearest ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from cutlass_py_attn.cli.selection import ARCHS, MASKS
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.spec import parse_mask
from cutlass_py_attn.suggestions import did_you_mean

ALL = "all"


class Choice(click.Choice[str]):
    """One of several words."""

    def __init__(self, choices: Sequence[str]) -> None:
        super().__init__(list(choices))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the word; fails with the nearest ones."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            suggestion = did_you_mean(str(value), [str(choice) for choice in self.choices])
            self.fail("; ".join(filter(None, (error.message.rstrip("."), suggestion))), param, ctx)


class MaskName(click.ParamType):  # type: ignore[type-arg]
    """A mask by the words of problem/spec.py, such as causal_br or window_left100_right30; or `all`."""

    name = "mask"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Returns the form of a value."""
        return f"{'|'.join(MASKS)}|...|{ALL}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the words; fails with every objection."""
        text = str(value)
        if text != ALL:
            try:
                parse_mask(text)
            except NotSupported as error:
                self.fail("; ".join(error.reasons), param, ctx)
        return text


def masks_of(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the masks that values of MaskName name, each once; `all` is the masks without numbers."""
    return tuple(dict.fromkeys(mask for name in names for mask in (MASKS if name == ALL else (name,))))


class Archs(click.ParamType):  # type: ignore[type-arg]
    """Compile targets, separated by commas."""

    name = "archs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the targets as given; fails with the nearest names of the unknown ones."""
        unknown = [arch for arch in str(value).split(",") if arch not in ARCHS]
        if unknown:
            known = ", ".join(ARCHS)
            suggestions = [did_you_mean(arch, ARCHS, "correct it") for arch in unknown]
            self.fail(f"{', '.join(map(repr, unknown))}: must be of {known}; {' '.join(suggestions)}", param, ctx)
        return str(value)
