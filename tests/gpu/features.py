"""Features: which of them a drawn problem has, and the record of what ran on a GPU, by feature, dtype and direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from cutlass_py_attn import decode
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import SHORT_NAMES
from tests.gpu.drawn import RESIDENT_DIMS, Drawn

Json = dict[str, Any]


def _summed(drawn: Drawn) -> bool:
    """Whether grad_bias is summed over an axis that the problem has more than one of."""
    sizes = zip(drawn.bias, drawn.shape.bias, strict=False)
    is_summed = any(letter == "1" and size > 1 for letter, size in sizes)
    return is_summed and "b" in drawn.grads and drawn.direction == "backward"


FEATURES: Final[dict[str, Callable[[Drawn], bool]]] = {
    "any problem": lambda d: True,
    "causal, top-left": lambda d: d.mask == "causal",
    "causal, bottom-right": lambda d: d.mask == "causal_br",
    "window of a causal mask": lambda d: d.mask.startswith("causal") and ":" in d.mask,
    "window left and right": lambda d: d.mask.startswith("window"),
    "head_dim_value other than head_dim": lambda d: d.dim_value not in (0, d.dim),
    "few queries against many keys": lambda d: not decode.lacking(d.problem()),
    "odd head dims": lambda d: d.dim % 2 == 1 or d.dim_value % 2 == 1,
    "head dims 129 to 256": lambda d: 128 < max(d.dim, d.dim_value) <= 256,
    "head dims beyond 256": lambda d: max(d.dim, d.dim_value) > max(RESIDENT_DIMS),
    "rows aligned to less than 16 bytes": lambda d: d.layout == "shifted" or d.dim % 8 != 0,
    "packed query, key, value and gradients": lambda d: d.layout == "packed",
    "variable length": lambda d: bool(d.sequences),
    "variable length with seqused_k": lambda d: d.seqused,
    "grouped heads (GQA, MQA)": lambda d: d.heads_key not in (0, d.heads),
    "bias": lambda d: bool(d.bias),
    "bias that broadcasts": lambda d: "1" in d.bias,
    "bias and variable length": lambda d: bool(d.bias and d.sequences),
    "bias, any strides": lambda d: d.bias_layout in ("transposed", "shifted"),
    "gradient of the bias, full": lambda d: d.direction == "backward" and "b" in d.grads and not _summed(d),
    "gradient of the bias, summed": _summed,
    "gradient of the bias alone": lambda d: d.direction == "backward" and d.grads == "b",
    "dropout": lambda d: 0 < d.dropout_p < 1,
    "dropout of everything": lambda d: d.dropout_p == 1,
    "dropout, seed on the device": lambda d: d.dropout_p > 0 and d.on_device,
    "dropout and variable length": lambda d: d.dropout_p > 0 and bool(d.sequences),
    "softcap": lambda d: d.softcap > 0,
    "ALiBi": lambda d: bool(d.alibi),
    "attention sinks": lambda d: d.sinks,
    "gradient of the sinks": lambda d: d.direction == "backward" and "s" in d.grads,
    "some gradients only": lambda d: d.direction == "backward" and not set("qkv") <= set(d.grads),
    "deterministic": lambda d: d.deterministic,
    "num_splits_key given": lambda d: d.splits > 0,
}


def tally(results: Iterable[tuple[Drawn, Build, float]]) -> list[Json]:
    """A row for each feature, dtype and direction: how many problems agreed, of how many kernels, and the worst
    error / allowed."""
    found: dict[tuple[str, str, str], tuple[int, set[Build], float]] = {}
    for drawn, build, worst in results:
        for name, has in FEATURES.items():
            if has(drawn):
                key = name, SHORT_NAMES[drawn.dtype], drawn.direction
                count, kernels, most = found.get(key, (0, set(), 0.0))
                found[key] = count + 1, kernels | {build}, max(most, worst)
    order = {name: number for number, name in enumerate(FEATURES)}
    return [
        {"feature": f, "dtype": t, "direction": d, "problems": count, "kernels": len(kernels), "worst": round(most, 3)}
        for (f, t, d), (count, kernels, most) in sorted(found.items(), key=lambda item: (order[item[0][0]], item[0]))
    ]


def table(record: Json) -> str:
    """README's table of a record: problems that agreed with float64, by feature, dtype and direction."""
    columns = [(dtype, direction) for direction in ("forward", "backward") for dtype in ("f16", "bf16", "f32")]
    cells = {(row["feature"], row["dtype"], row["direction"]): row for row in record["rows"]}
    lines = [
        f"{record['problems']} random problems on {record['gpu']}, {record['kernels']} kernels. A cell says how many "
        "had the feature, all of which agree with float64. Empty: nothing was run.",
        "",
        f"| feature | {' | '.join(f'{direction} {dtype}' for dtype, direction in columns)} |",
        f"| --- | {' | '.join('---' for _ in columns)} |",
    ]
    for name in FEATURES:
        shown = [str(cells[name, *column]["problems"]) if (name, *column) in cells else "" for column in columns]
        if any(shown):
            lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)
