"""Features: which features a case has, and the record of the random cases that ran on a GPU.

The record counts launches by the family of the kernel that ran, not by the planner's choice. It is of machine code and
launches: it has the cubins of each kernel that ran, by name, and one hash for what the driver got for the cases of each
kernel number. So it holds for other sources that give the same, which tools/release/carry_over.py shows without a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import SPLIT_D
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.problem.tensors import OPERAND_NAMES
from cutlass_py_attn.testing.cases import Case
from tests.cases.random_cases import RESIDENT_DIMS
from tools.release import digests, record

Json = dict[str, Any]
Passed = tuple[Case, Build, float]  # a case, the kernel that ran, and the worst error / allowed
FORMAT: Final = 3
FAMILIES: Final = ("sm90", "sm80", "sm80 split-D", "decode")
DTYPES: Final = ("f16", "bf16", "f32", "e4m3")
COLUMNS: Final = tuple((dtype, direction) for direction in ("forward", "backward") for dtype in DTYPES)
PATH: Final = "ptx/features.json"
REMEDY: Final = f"run python -m tools.release.fuzz --record {PATH} on a GPU"
CARRY: Final = "run python -m tools.release.carry_over"
RUN_CHANGED: Final = f"run python -m tools.release.fuzz --changed --record {PATH} on a GPU"
SUBJECTS: Final = {
    "kernels": "the kernels' sources",
    "launch": "the code that launches kernels",
    "checks": "the code that checks results",
}


def _is_summed(case: Case) -> bool:
    """Whether grad_bias is summed over an axis of size above 1."""
    sizes = zip(case.spec.bias, case.spec.shape.bias, strict=False)
    return _has_gradient(case, "b") and any(letter == "1" and size > 1 for letter, size in sizes)


def _has_gradient(case: Case, letter: str) -> bool:
    return case.direction == "backward" and letter in case.spec.gradients


def _is_function_within_arrays(case: Case) -> bool:
    spec = case.spec
    return bool(spec.mask_function) and (bool(spec.ranges) or spec.block_share is not None)


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
    "pages": lambda c: c.spec.page_size > 0,
    "pages of less than 16 rows": lambda c: 0 < c.spec.page_size < 16,
    "pages by page_indptr": lambda c: c.table == "csr",
    "pages and variable length of query": lambda c: c.spec.page_size > 0 and c.spec.has_ragged_queries,
    "pages, the same bits in any batch": lambda c: c.invariant == 1,
    "keys that contain the values (MLA)": lambda c: c.spec.value_in_key,
    "e4m3 key/value cache": lambda c: c.spec.e4m3_cache,
    "e4m3 latent cache with scales of tiles of columns": lambda c: c.spec.has_rope,
    "e4m3 codes without scales": lambda c: c.spec.has_codes and not c.spec.descale,
    "e4m3 codes, a scale for each row": lambda c: c.spec.descale == "row",
    "e4m3 codes, other scales": lambda c: c.spec.descale not in ("", "row"),
    "e4m3 operands, float16 output": lambda c: c.spec.float16_output,
    "ranges of keys": lambda c: bool(c.spec.ranges),
    "ranges of keys within a causal mask or a window": lambda c: bool(c.spec.ranges) and c.spec.mask != Full(),
    "ranges of keys of each sequence or head": lambda c: c.spec.ranges not in ("", "11"),
    "ranges of keys, any strides": lambda c: bool(c.spec.ranges) and c.range_layout != "dense",
    "visible blocks": lambda c: c.spec.block_share is not None,
    "mask functions": lambda c: bool(c.spec.mask_function),
    "mask functions within ranges of keys or visible blocks": _is_function_within_arrays,
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
    "inputs: one or two keys with all of a row's weight": lambda c: c.inputs in ("needle", "one_key"),
    "inputs: three times as large": lambda c: c.inputs == "gaussian_x3",
    "inputs: scores of zero": lambda c: c.inputs == "zero_scores",
    "inputs: scores at the softcap": lambda c: c.inputs == "saturated" and c.spec.softcap > 0,
    "inputs: the dtype's most negative number in the bias": lambda c: c.bias_inputs == "lowest",
    "inputs: rows that the bias hides by -inf": lambda c: c.bias_inputs == "hidden_rows",
}


def family_of(build: Build) -> str:
    """Returns the name in FAMILIES of a kernel's family; split-D kernels count apart."""
    return f"{build.family} split-D" if build.variant == SPLIT_D else build.family


def tally(results: Iterable[Passed]) -> list[Json]:
    """Returns a row for each family, feature, dtype and direction: how many launches passed, with how many kernels, and
    the worst error / allowed."""
    found: dict[tuple[str, str, str, str], tuple[int, set[Build], float]] = {}
    for case, build, worst in results:
        for name, has in FEATURES.items():
            if has(case):
                key = family_of(build), name, OPERAND_NAMES[case.spec.dtype], case.direction
                count, kernels, most = found.get(key, (0, set(), 0.0))
                found[key] = count + 1, kernels | {build}, max(most, worst)
    order = [(f, name, *column) for f in FAMILIES for name in FEATURES for column in COLUMNS]
    return [
        {
            "family": family,
            "feature": name,
            "dtype": dtype,
            "direction": direction,
            "problems": found[family, name, dtype, direction][0],
            "kernels": len(found[family, name, dtype, direction][1]),
            "worst": round(found[family, name, dtype, direction][2], 3),
        }
        for family, name, dtype, direction in order
        if (family, name, dtype, direction) in found
    ]


def table(recorded: Json) -> str:
    """Returns the Markdown tables of a record: launches that agreed with float64, by family, feature, dtype and
    direction."""
    reruns = (
        f" {each['problems']} of them ran again on {each['gpu']}, {each['date']}, commit {each['commit'][:12]}."
        for each in recorded["reruns"]
    )
    lines = [
        f"{recorded['problems']} random problems in {recorded['launches']} launches of {num_kernels(recorded)} kernels "
        f"on {recorded['gpu']}, {recorded['date']}, commit {recorded['commit'][:12]}.{''.join(reruns)} "
        "A cell has the number of launches with the feature, and in brackets the worst error / allowed; all agree with "
        "float64. Empty: none was run.",
    ]
    for family in FAMILIES:
        cells = {
            (row["feature"], row["dtype"], row["direction"]): f"{row['problems']} ({row['worst']:.2f})"
            for row in recorded["rows"]
            if row["family"] == family
        }
        if cells:
            lines += ["", f"### {family} kernels", "", *_family_table(cells)]
    return "\n".join(lines)


def num_kernels(recorded: Json) -> int:
    """Returns how many kernels a record has."""
    return sum(map(len, recorded["kernels"].values()))


def _family_table(cells: Mapping[tuple[str, str, str], str]) -> Iterator[str]:
    columns = [column for column in COLUMNS if ("any problem", *column) in cells]
    yield f"| feature | {' | '.join(f'{direction} {dtype}' for dtype, direction in columns)} |"
    yield f"| --- | {' | '.join('---' for _ in columns)} |"
    for name in FEATURES:
        shown = [cells.get((name, *column), "") for column in columns]
        if any(shown):
            yield f"| {name} | {' | '.join(shown)} |"


def read(root: Path) -> Json | None:
    """Returns the record of tools/release/fuzz.py; None if there is none, or one of another format."""
    path = root / PATH
    recorded: Json = json.loads(path.read_text()) if path.is_file() else {}
    return recorded if recorded.get("format") == FORMAT else None


def write(root: Path, recorded: Json) -> None:
    """Writes the record."""
    (root / PATH).write_text(json.dumps(recorded, indent=1) + "\n")


def sha256(root: Path) -> str:
    """Returns the hash of what ran on a GPU, whatever the sources that are known to give the same; "" for no record."""
    recorded = read(root)
    parts = ("gpu", "date", "commit", "kernels", "reruns")
    return record.sha256(json.dumps([recorded.get(name) for name in parts])) if recorded else ""


def merged(recorded: Json, rerun: Json) -> Json:
    """Returns the record with that of a later run, of some of its kernel numbers."""
    about = {name: rerun[name] for name in ("gpu", "date", "commit", "problems", "launches", "fallbacks")}
    return {
        **recorded,
        "digests": rerun["digests"],
        "kernels": recorded["kernels"] | rerun["kernels"],
        "groups": recorded["groups"] | rerun["groups"],
        "changed": None,
        "reruns": [*recorded["reruns"], about],
        "rows": with_worst(rerun["rows"], recorded["rows"]),
    }


def with_worst(rows: Sequence[Json], others: Sequence[Json]) -> list[Json]:
    """Returns the rows of a tally, then those of another that it lacks, with the larger of the worst ratios."""
    found = {_key(row): dict(row) for row in rows}
    for row in others:
        kept = found.setdefault(_key(row), dict(row))
        kept["worst"] = max(kept["worst"], row["worst"])
    return list(found.values())


def _key(row: Json) -> tuple[str, ...]:
    return tuple(row[name] for name in ("family", "feature", "dtype", "direction"))


def objections(root: Path) -> list[str]:
    """Returns a line for each reason why the recorded random cases are not those of today's code."""
    recorded = read(root)
    if recorded is None:
        return [f"{PATH}: MISSING, or of another format; {REMEDY}"]
    today, compared = digests.of(root), recorded["changed"]
    if compared and compared["digests"] == today:
        return [f"{PATH}: CHANGED: {changes(compared)}; {RUN_CHANGED}"]
    edited = [name for name in SUBJECTS if recorded["digests"].get(name) != today[name]]
    if edited:
        subjects = " and ".join(SUBJECTS[name] for name in edited)
        return [f"{PATH}: STALE: {subjects} changed since; {REMEDY if 'checks' in edited else CARRY}"]
    if not all(recorded["groups"].values()):
        return [f"{PATH}: INCOMPLETE: it has no hashes of the launches; {CARRY}"]
    return []


def changes(changed: Json) -> str:
    """Returns the names of changed kernels, and of kernel numbers whose launches changed or are of such a kernel."""
    kernels, groups = changed["kernels"], changed["groups"]
    parts = [f"kernels {', '.join(kernels)}"] if kernels else []
    parts += [f"the launches of kernel numbers {', '.join(map(str, groups))}"] if groups else []
    return "; ".join(parts)
