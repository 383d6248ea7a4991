"""List: the symbols of kernels and which problems they serve, without compiling anything."""

from __future__ import annotations

import contextlib
import fnmatch
import json
from collections.abc import Iterator, Sequence
from itertools import product

import click

from cutlass_py_attn.bundle.rules import AnyProblem
from cutlass_py_attn.cli import catalogue
from cutlass_py_attn.cli.catalogue import Entry
from cutlass_py_attn.cli.outputs import counted, show_slow_roads
from cutlass_py_attn.cli.parameters import Choice
from cutlass_py_attn.cli.selection import ARCHS, DTYPES, problems
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.cli.target import best_plans, default_arch, wgmma_arch
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.suggestions import did_you_mean

NOTE = (
    "These serve common problems. Other head dims and combinations of features have kernels too: name a problem, such "
    "as bf16_d80_s4096_b2_h16_causal_br_window64_bias, in place of PATTERN."
)


@click.command("list")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--arch", "archs", type=Choice(ARCHS), multiple=True,
              help="Compile target; may be repeated.  [default: the GPU's, else sm_90a and sm_90]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_kernels(*, patterns: tuple[str, ...], archs: tuple[str, ...], as_json: bool) -> None:
    """List kernels by their symbols, with the problems that they serve. Nothing is compiled.

    Only kernels that match every PATTERN are listed. A PATTERN is a part of the symbol or of the description, such as
    bwd, d128 or dropout, a wildcard such as 'fwd_sm90_*', the whole symbol of any kernel, or the name of a problem
    (words: bench --help; append_... and merge_...: export --help), whose own kernels are then listed.
    """
    name = _problem_among(patterns)
    plans = [plan for problem in _named(name) for plan in best_plans(problem, archs)] if name else []
    if name:
        found = [catalogue.of_plan(plan) for plan in plans]
    else:
        targets = tuple(dict.fromkeys(archs or filter(None, (wgmma_arch(default_arch()), default_arch()))))
        found = [entry for arch in targets for entry in catalogue.entries(arch)]
    shown = [entry for entry in found if all(_matches(entry, pattern) for pattern in patterns if pattern != name)]
    if not (shown or name):
        shown = _named_kernel(patterns, targets)
    if not shown:
        raise NotSupported(_nothing(found, patterns))
    if as_json:
        rows = [{**_texts(entry), "reason": entry.reason()} for entry in shown]
        click.echo(json.dumps(rows, indent=1))
        return
    _print_table([("symbol", "target", "serves"), *(tuple(_texts(entry).values()) for entry in shown)])
    click.echo(f"{counted(len(shown), 'kernel')}. {'' if name else NOTE}".rstrip())
    show_slow_roads(plan for plan in plans if plan.symbol in {entry.symbol for entry in shown})


def _texts(entry: Entry) -> dict[str, str]:
    return {"symbol": entry.symbol, "arch": entry.arch, "serves": entry.serves}


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Prints columns two spaces apart, which takes a table of a thousand rows milliseconds."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    click.echo("\n".join(line.rstrip() for line in lines))


def _problem_among(patterns: tuple[str, ...]) -> str:
    """Returns the pattern that is the name of a problem; "" if none is."""
    for pattern in patterns:
        try:
            _named(pattern)
        except NotSupported:
            continue
        return pattern
    return ""


def _named_kernel(patterns: tuple[str, ...], targets: Sequence[str]) -> list[Entry]:
    """Returns the kernel of a symbol that the catalogue does not have, on each target that has it."""
    found = []
    for pattern, arch in product(patterns if len(patterns) == 1 else (), targets):
        with contextlib.suppress(NotSupported):
            found.append(catalogue.of_plan(parse_symbol(pattern, arch)))
    return found


def _matches(entry: Entry, pattern: str) -> bool:
    """Returns whether a pattern is a part of the kernel's symbol or description, or a wildcard for its symbol."""
    if any(letter in pattern for letter in "*?["):
        return any(fnmatch.fnmatch(name, pattern) for name in (entry.symbol, entry.stem))
    return pattern in entry.symbol or pattern.lower() in entry.serves.lower()


def _nothing(found: list[Entry], patterns: tuple[str, ...]) -> str:
    """Returns the message that no kernel matches, with the names that are nearest to the patterns."""
    words = dict.fromkeys(word for entry in found for word in _words(entry))
    unknown = [pattern for pattern in patterns if not any(_matches(entry, pattern) for entry in found)]
    nearest = " ".join(filter(None, (did_you_mean(pattern, words) for pattern in unknown)))
    objections = [reason for pattern in unknown for reason in _objections_to(pattern)]
    remedy = "; ".join(objections) or nearest or "use fewer or shorter patterns"
    return f"no kernel matches {' and '.join(map(repr, patterns))}; {remedy}"


def _objections_to(pattern: str) -> Sequence[str]:
    """Returns what is wrong with a pattern that starts like the name of a problem: with a dtype, and more words."""
    first, _, others = pattern.partition("_")
    if first not in DTYPES or not others:
        return ()
    try:
        _named(pattern)
    except NotSupported as error:
        return error.reasons
    return ()


def _named(name: str) -> list[AnyProblem]:
    """Returns the problems of a name; NotSupported if it is none. A file is no name."""
    if name.endswith(".json"):
        raise NotSupported(f"{name}: must be the name of a problem; inspect and build take files")
    return problems([name])


def _words(entry: Entry) -> Iterator[str]:
    yield entry.stem
    yield from entry.stem.split("_")
