"""Cliffs: problems whose plan is estimated to be several times slower than that of the same sizes with one change.

    python -m tools.tuning.cliffs [--problems 400] [--seed 1] [--arch sm_90a]

Draws problems of attention, plans each, and plans it again with one property changed: the rows of a page, the alignment
of rows, a latent cache, the dtype, each feature, the heads of a group as queries. plan/performance.py estimates both.
The table counts the problems below a third by change, and those for which `slow_road` names a change; exit code 1 if it
names none for a problem that a change makes SURE_FACTOR times as fast.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.kernels.decode.layout import MAX_QUERIES
from cutlass_py_attn.launch.arch import ARCHITECTURES
from cutlass_py_attn.plan import performance, planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import ProblemSpec
from cutlass_py_attn.problem.tensors import DIRECTIONS, OPERANDS, ROW_ALIGNMENT_BYTES

DIMS: Final = ((64, 0), (96, 0), (128, 0), (128, 0), (192, 128), (256, 0), (512, 0), (576, 512), (576, 512), (63, 0))
LENGTHS: Final = (512, 2048, 4096, 8192, 16384)
QUERIES: Final = (1, 1, 1, 4, 16, 128, 2048)  # of a forward over more keys
FEATURES: Final[dict[str, dict[str, Any]]] = {  # fields of a ProblemSpec that a problem has, or has not
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": "h"},
    "sinks": {"sinks": True},
    "bias": {"bias": "bhqk"},
    "deterministic": {"deterministic": True},
}
SURE_FACTOR: Final = 1.5 * performance.LEAST_FACTOR  # the rule does not plan: it may count other blocks than the plan
_NONE: Final = {"dropout_p": 0.0, "softcap": 0.0, "alibi": "", "sinks": False, "bias": "", "deterministic": False}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A problem: its spec and direction. alignment: of the rows of query and of the bias (bytes)."""

    spec: ProblemSpec
    direction: str
    alignment: int = ROW_ALIGNMENT_BYTES
    bias_alignment: int = ROW_ALIGNMENT_BYTES

    def problem(self) -> Problem:
        """Returns the Problem."""
        found = self.spec.problem(self.direction)
        names = [(name, self.alignment) for name in OPERANDS[:1]]
        names += [("bias", self.bias_alignment)] if self.spec.bias else []
        for name, alignment in names:
            tensor = getattr(found, name)
            if alignment < ROW_ALIGNMENT_BYTES:
                found = found.replace(**{name: replace(tensor, alignment=max(alignment, 2))})
        return found


@dataclass(frozen=True, slots=True)
class Cliff:
    """A problem that is slow, with the change that helps most. factor: by estimate. said: what `slow_road` names."""

    drawn: Drawn
    change: str
    factor: float
    said: str


def draw(rng: random.Random) -> Drawn:
    """Returns a problem of training, of a prompt or of a decode step."""
    direction = rng.choice(DIRECTIONS)
    (dim, value_dim), length = rng.choice(DIMS), rng.choice(LENGTHS)
    heads_key = rng.choice((1, 2, 8, 16))
    spec = ProblemSpec(
        rng.choice(("bfloat16", "bfloat16", "bfloat16", "float16", "float32")), dim, length, length,
        rng.choice((1, 4, 64)), heads_key, value_dim, heads_key, rng.choice((Full(), Causal(), Window(1024, 0))),
    )  # fmt: skip
    if direction == "forward" and rng.random() < 0.6:
        heads = heads_key * rng.choice((1, 4, 16, 128 if heads_key == 1 else 8))
        latent = (dim, value_dim) == (576, 512) and rng.random() < 0.7
        changes: dict[str, Any] = {"num_queries": rng.choice(QUERIES), "num_heads": heads, "value_in_key": latent}
        changes["mask"] = rng.choice((Full(), CausalBottomRight()))
        changes["page_size"] = rng.choice((0, 0, 1, 4, 8, 16, 64))
        changes |= {"num_heads_key": 1, "num_heads": rng.choice((16, 64, 128))} if latent else {}
        spec = spec.replace(**changes)
    for name, fields in FEATURES.items():
        if rng.random() < 0.12 and (name != "deterministic" or direction == "backward"):
            spec = spec.replace(**fields)
    if spec.bias and direction == "backward" and rng.random() < 0.5:
        spec = spec.replace(bias_gradient="grad")
    return Drawn(spec, direction, rng.choice((16, 16, 16, 8, 2)), rng.choice((16, 16, 2)))


def changed(drawn: Drawn) -> Iterator[tuple[str, Drawn]]:
    """Yields the problem with one property changed."""
    spec = drawn.spec

    def other(**fields: Any) -> Drawn:
        return replace(drawn, spec=spec.replace(**fields))

    aligned = replace(drawn, alignment=ROW_ALIGNMENT_BYTES)
    dims = {"head_dim": round_up(spec.head_dim, 8), "head_dim_value": round_up(spec.head_dim_value, 8)}
    if drawn.alignment < ROW_ALIGNMENT_BYTES or dims["head_dim"] != spec.head_dim:
        yield "rows aligned to 16 bytes", replace(aligned, spec=spec.replace(**dims))
    if drawn.bias_alignment < ROW_ALIGNMENT_BYTES and spec.bias:
        yield "a bias aligned to 16 bytes", replace(drawn, bias_alignment=ROW_ALIGNMENT_BYTES)
    if 0 < spec.page_size < 64:
        yield "pages of 64 rows", other(page_size=64)
    if (spec.head_dim, spec.head_dim_value) == (576, 512) and drawn.direction == "forward":
        pages = {"page_size": 64} if spec.page_size else {}
        yield "a latent cache", replace(aligned, spec=spec.replace(value_in_key=True, **pages))
        for name, fields in FEATURES.items():
            if any(getattr(spec, field) for field in fields):
                without = {field: _NONE[field] for field in fields}
                latent = spec.replace(value_in_key=True, **pages, **without)
                yield f"a latent cache and no {name}", replace(aligned, spec=latent)
    widest = 128 if spec.dtype == "float32" else 256
    if max(spec.head_dim, spec.head_dim_value) > widest and spec.num_queries <= MAX_QUERIES and not spec.value_in_key:
        yield "head dims that decode kernels take", other(head_dim=widest, head_dim_value=widest)
    tells_heads_apart = spec.alibi or spec.sinks or spec.bias or spec.dropout_p
    if spec.num_queries == 1 and spec.num_heads > spec.num_heads_key and not tells_heads_apart:
        group = spec.num_heads // spec.num_heads_key
        yield "heads of a group as queries", other(num_queries=group, num_heads=spec.num_heads_key, mask=Full())
    if not spec.page_size and drawn.direction == "forward" and not spec.bias and not spec.dropout_p:
        yield "keys in pages", other(page_size=64)
    if spec.dtype == "float32":
        yield "bfloat16", other(dtype="bfloat16")
    for name, fields in FEATURES.items():
        if any(getattr(spec, field) for field in fields):
            without = {field: _NONE[field] for field in fields}
            yield f"no {name}", other(**without, **({"bias_gradient": "", "gradients": ""} if name == "bias" else {}))
    if spec.sinks and "s" in spec.gradients:
        yield "no gradient of the sinks", other(gradients=spec.gradients.replace("s", ""))


def cliff_of(drawn: Drawn, arch: str) -> Cliff | None:
    """Returns the cliff of a problem; None if no change is estimated to be LEAST_FACTOR times as fast, or none runs."""
    plan = _plan(drawn, arch)
    if plan is None or not plan.launches:
        return None
    own = performance.estimated_time(plan)
    others = [(change, _plan(other, arch)) for change, other in changed(drawn)]
    times = {change: _time_of_columns(plan, other) for change, other in others if other is not None}
    best = min(times, key=times.__getitem__, default="")
    found = performance.slow_road(plan)
    if not best or own < performance.LEAST_FACTOR * times[best]:
        return Cliff(drawn, "", 1.0, found.remedy) if found else None
    return Cliff(drawn, best, own / times[best], found.remedy if found else "")


def _time_of_columns(plan: Plan, other: Plan) -> float:
    """Returns the estimated time of another plan for as many columns of the head dims as `plan` has."""
    columns, others = (each.build.head_dim + each.build.head_dim_value for each in (plan, other))
    return performance.estimated_time(other) * columns / others


def _plan(drawn: Drawn, arch: str) -> Plan | None:
    """Returns the plan on the devices of a target; None if there is no kernel."""
    try:
        return planner.plans_on(drawn.problem(), ARCHITECTURES[arch].compute_capability)[0]
    except NotSupported:
        return None


def table(cliffs: Sequence[Cliff]) -> Iterator[str]:
    """Yields one line for each change, the most frequent first: problems, the largest factor, and what is named."""
    yield f"{'change':36} problems  at most  named  example"
    changes = sorted({cliff.change for cliff in cliffs}, key=lambda change: -sum(c.change == change for c in cliffs))
    for change in changes:
        group = [cliff for cliff in cliffs if cliff.change == change]
        worst = max(group, key=lambda cliff: cliff.factor)
        named = sum(bool(cliff.said) for cliff in group)
        name = f"{worst.drawn.spec.name} {worst.drawn.direction}"
        yield f"{change or '(none of these)':36} {len(group):8}  {worst.factor:7.0f}  {named:5}  {name}"


def main() -> int:
    """Prints the table; exit code 1 if a slow problem is not said to be slow."""
    parser = argparse.ArgumentParser(prog="cliffs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", type=int, default=400, help="problems to draw (400)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="sm_90a")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    drawn = [draw(rng) for _ in range(options.problems)]
    cliffs = [cliff for cliff in (cliff_of(each, options.arch) for each in drawn) if cliff is not None]
    print(f"{options.problems} problems on {options.arch}, estimates")
    print("\n".join(table(cliffs)))
    silent = [cliff for cliff in cliffs if not cliff.said and cliff.factor >= SURE_FACTOR]
    for cliff in silent:
        print(f"not named: {cliff.drawn} {cliff.change} {cliff.factor:.1f}", file=sys.stderr)
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
