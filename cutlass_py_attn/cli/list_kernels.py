"""List: the symbols of kernels and which problems they serve, without compiling anything."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Sequence

import click
from rich.markup import escape
from rich.table import Column, Table

from cutlass_py_attn.bundle.rules import AnyProblem
from cutlass_py_attn.cli import catalogue
from cutlass_py_attn.cli.artifacts import console, counted
from cutlass_py_attn.cli.parameters import Choice
from cutlass_py_attn.cli.selection import ARCHS, DTYPES, problems
from cutlass_py_attn.cli.target import best_plans, default_arch, sm90_arch
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan.plan import Plan
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
    bwd, d128 or dropout, a wildcard such as 'fwd_sm90_*', or the name of a problem (words: bench --help; append_... and
    merge_...: export --help), whose own kernels are then listed.
    """
    name = _problem_among(patterns)
    if name:
        found = [plan for problem in _named(name) for plan in best_plans(problem, archs)]
    else:
        targets = archs or tuple(filter(None, (sm90_arch(default_arch()), default_arch())))
        found = [plan for arch in dict.fromkeys(targets) for plan in catalogue.plans(arch)]
    shown = [plan for plan in found if all(_matches(plan, pattern) for pattern in patterns if pattern != name)]
    if not shown:
        raise NotSupported(_nothing(found, patterns))
    rows = [
        {"symbol": plan.symbol, "arch": plan.build.arch, "serves": catalogue.serves(plan.build), "reason": plan.reason}
        for plan in shown
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table(Column("symbol", no_wrap=True), "target", "serves", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(row[column]) for column in ("symbol", "arch", "serves")))
    console().print(table)
    click.echo(f"{counted(len(rows), 'kernel')}. {'' if name else NOTE}".rstrip())


def _problem_among(patterns: tuple[str, ...]) -> str:
    """Returns the pattern that is the name of a problem; "" if none is."""
    for pattern in patterns:
        try:
            _named(pattern)
        except NotSupported:
            continue
        return pattern
    return ""


def _matches(plan: Plan, pattern: str) -> bool:
    """Returns whether a pattern is a part of the plan's symbol or description, or a wildcard for its symbol."""
    if any(letter in pattern for letter in "*?["):
        return any(fnmatch.fnmatch(name, pattern) for name in (plan.symbol, plan.build.stem))
    return pattern in plan.symbol or pattern.lower() in catalogue.serves(plan.build).lower()


def _nothing(found: list[Plan], patterns: tuple[str, ...]) -> str:
    """Returns the message that no kernel matches, with the names that are nearest to the patterns."""
    words = dict.fromkeys(word for plan in found for word in _words(plan))
    unknown = [pattern for pattern in patterns if not any(_matches(plan, pattern) for plan in found)]
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


def _words(plan: Plan) -> Iterator[str]:
    yield plan.build.stem
    yield from plan.build.stem.split("_")
