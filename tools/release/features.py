"""Features: which features a case has, and the record of the random cases that ran on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.plan import decode
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.tensors import SHORT_NAMES
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.random_cases import RESIDENT_DIMS
from tools.release import record

Json = dict[str, Any]
PATH: Final = "ptx/features.json"
REMEDY: Final = f"run python -m tools.release.fuzz --record {PATH} on a GPU"


def _is_summed(case: Case) -> bool:
    """Whether grad_bias is summed over an axis of size above 1."""
    sizes = zip(case.spec.bias, case.spec.shape.bias, strict=False)
    return _has_gradient(case, "b") and any(letter == "1" and size > 1 for letter, size in sizes)


def _has_gradient(case: Case, letter: str) -> bool:
    return case.direction == "backward" and letter in case.spec.gradients


def _largest_dim(case: Case) -> int:
    return max(case.spec.head_dim, case.spec.head_dim_value)


FEATURES: Final[dict[str, Callable[[Case], bool]]] = {
    "any problem": lambda c: True,
    "causal, top-left": lambda c: c.spec.mask == Causal(),
    "causal, bottom-right": lambda c: c.spec.mask.name == "causal_br" and c.spec.mask.left is None,
    "window of a causal mask": lambda c: c.spec.mask.name.startswith("causal") and c.spec.mask.left is not None,
    "window left and right": lambda c: c.spec.mask.name == "window",
    "head_dim_value other than head_dim": lambda c: c.spec.head_dim_value != c.spec.head_dim,
    "few queries against many keys": lambda c: not decode.unsupported_features(c.problem()),
    "odd head dims": lambda c: c.spec.head_dim % 2 == 1 or c.spec.head_dim_value % 2 == 1,
    "head dims 129 to 256": lambda c: 128 < _largest_dim(c) <= 256,
    "head dims beyond 256": lambda c: _largest_dim(c) > max(RESIDENT_DIMS),
    "rows aligned to less than 16 bytes": lambda c: c.layout == "shifted" or c.spec.head_dim % 8 != 0,
    "packed query, key, value and gradients": lambda c: c.layout == "packed",
    "variable length": lambda c: bool(c.spec.sequences),
    "variable length with seqused_k": lambda c: c.spec.has_used_keys,
    "grouped heads (GQA, MQA)": lambda c: c.spec.num_heads_key != c.spec.num_heads,
    "bias": lambda c: bool(c.spec.bias),
    "bias that broadcasts": lambda c: "1" in c.spec.bias,
    "bias and variable length": lambda c: bool(c.spec.bias and c.spec.sequences),
    "bias, any strides": lambda c: c.bias_layout in ("transposed", "shifted"),
    "gradient of the bias, full": lambda c: _has_gradient(c, "b") and not _is_summed(c),
    "gradient of the bias, summed": _is_summed,
    "gradient of the bias alone": lambda c: c.direction == "backward" and c.spec.gradients == "b",
    "dropout": lambda c: 0 < c.spec.dropout_p < 1,
    "dropout of everything": lambda c: c.spec.dropout_p == 1,
    "dropout, seed on the device": lambda c: c.spec.philox_on_device,
    "dropout and variable length": lambda c: c.spec.dropout_p > 0 and bool(c.spec.sequences),
    "softcap": lambda c: c.spec.softcap > 0,
    "ALiBi": lambda c: bool(c.spec.alibi),
    "attention sinks": lambda c: c.spec.sinks,
    "gradient of the sinks": lambda c: _has_gradient(c, "s"),
    "some gradients only": lambda c: c.direction == "backward" and not set("qkv") <= set(c.spec.gradients),
    "deterministic": lambda c: c.spec.deterministic,
    "num_splits_key given": lambda c: c.spec.num_splits_key is not None,
}


def tally(results: Iterable[tuple[Case, Build, float]]) -> list[Json]:
    """Returns a row for each feature, dtype and direction: how many cases passed, with how many kernels, and the worst
    error / allowed."""
    found: dict[tuple[str, str, str], tuple[int, set[Build], float]] = {}
    for case, build, worst in results:
        for name, has in FEATURES.items():
            if has(case):
                key = name, SHORT_NAMES[case.spec.dtype], case.direction
                count, kernels, most = found.get(key, (0, set(), 0.0))
                found[key] = count + 1, kernels | {build}, max(most, worst)
    order = {name: number for number, name in enumerate(FEATURES)}
    return [
        {"feature": f, "dtype": t, "direction": d, "problems": count, "kernels": len(kernels), "worst": round(most, 3)}
        for (f, t, d), (count, kernels, most) in sorted(found.items(), key=lambda item: (order[item[0][0]], item[0]))
    ]


def table(recorded: Json) -> str:
    """Returns the Markdown table of a record: cases that agreed with float64, by feature, dtype and direction."""
    columns = [(dtype, direction) for direction in ("forward", "backward") for dtype in ("f16", "bf16", "f32")]
    cells = {(row["feature"], row["dtype"], row["direction"]): row for row in recorded["rows"]}
    lines = [
        f"{recorded['problems']} random problems on {recorded['gpu']}, {recorded['kernels']} kernels. A cell counts "
        "the problems with the feature; all agree with float64. Empty: none was run.",
        "",
        f"| feature | {' | '.join(f'{direction} {dtype}' for dtype, direction in columns)} |",
        f"| --- | {' | '.join('---' for _ in columns)} |",
    ]
    for name in FEATURES:
        shown = [str(cells[name, *column]["problems"]) if (name, *column) in cells else "" for column in columns]
        if any(shown):
            lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def read(root: Path) -> Json | None:
    """Returns the record of tools/release/fuzz.py; None if there is none."""
    path = root / PATH
    return json.loads(path.read_text()) if path.is_file() else None


def sha256(root: Path) -> str:
    """Returns the hash of the record's file; "" if there is none."""
    path = root / PATH
    return record.sha256(path.read_bytes()) if path.is_file() else ""


def objections(root: Path) -> list[str]:
    """Returns a line if no random cases are recorded for today's sources of the kernels."""
    recorded = read(root)
    if recorded is None:
        return [f"{PATH}: MISSING; {REMEDY}"]
    if recorded["sources"] != record.sources_digest(root):
        return [f"{PATH}: STALE: the kernels' sources changed since; {REMEDY}"]
    return []
