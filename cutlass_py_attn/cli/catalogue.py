"""Catalogue: the kernels of common problems on a target, found without compiling, and what each of them serves."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from cutlass_py_attn.cli.selection import SIZES, builds_among, component_gemms
from cutlass_py_attn.kernels.catalogue import kernel_of
from cutlass_py_attn.kernels.families import FAMILIES
from cutlass_py_attn.kernels.sm90_family.tile_time import LONG_LENGTH, MULTICAST_LENGTH
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import ROW_KINDS, Build
from cutlass_py_attn.launch.variants import E4M3, E4M3_ROW, E4M3_TILE, LAST, STANDARD, SUM, SUM_LAST, TOTAL
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.append import GIVEN_SCALES, NO_SCALES, ROW_SCALES, TILE_SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import ProblemSpec, parse
from cutlass_py_attn.problem.tensors import DIRECTIONS, OPERANDS, SHORT_NAMES

TILE_SUFFIX: Final = re.compile(r"_\d+x\d+$")
HEAD_DIMS: Final = ("d32", "d64", "d96", "d128", "d192", "d192v128", "d256", "d512")
COMPONENT_GEMM_HEAD_DIMS: Final = (32, 64, 96, 128, 192, 256)
ROW_HEAD_DIMS: Final = (64, 128, 256)
LATENT_DIMS: Final = (512, 64)  # columns of a latent row that are codes, and those of the rotary embedding
FEATURE_HEAD_DIMS: Final = ("d64", "d128")
WINDOW: Final = "causal_window64"
COMMON_MASKS: Final = ("full", "causal", WINDOW)  # one for each form of a mask in kernels
FEATURES: Final = ("bias", "biasgrad", "biassum", "dropout0.5", "softcap30", "alibi", "sinks", "deterministic")
# Sizes decide no machine code, except that kernels with wgmma are for short and for long sequences, and for few.
_LENGTH: Final = LONG_LENGTH
_WGMMA_SIZES: Final = (*SIZES, (MULTICAST_LENGTH, 512))  # (length, heads)
_VARIABLE_LENGTHS: Final = ("n128,100", "n128x128u100,100")
_GROUPED_HEADS: Final = ("b1_h4k2", "b64_h4k2")  # few and many key tiles: two backwards with wgmma
_LENGTHS: Final = {"short": "short sequences", "long": "long sequences", "few_queries": "few queries and many keys"}
_FORMS: Final = {"full": "no mask", "causal": "causal", "local": "window", "ranges": "ranges of keys"}
_WORDS: Final = {
    "varlen": "variable length",
    "seqused": "seqused_k",
    "grouped": "grouped heads",
    "alibi": "ALiBi",
    "float16_output": "float16 output",
}
_ROWS: Final = {
    ("append", STANDARD): "rows for a paged cache",
    ("append", E4M3): "rows for a paged e4m3 cache, by given scales",
    ("append", E4M3_ROW): "rows for a paged e4m3 cache, by a scale of each row",
    ("append", E4M3_TILE): "rows for a paged latent cache of e4m3 codes, by a scale of each 128 columns",
    ("merge", STANDARD): "merge of two partial results",
    ("merge", TOTAL): "merge of a partial result into a float32 total",
    ("merge", LAST): "merge of a float32 total and the last partial result",
    ("merge", SUM): "sum of a float32 total and a partial gradient",
    ("merge", SUM_LAST): "sum of a float32 total and the last partial gradient",
}
# Forwards of e4m3 operands, which wgmma alone multiplies.
_E4M3: Final = tuple(f"e4m3_{dims}" for dims in ("d64", "d128", "d192", "d192v128", "d256"))
_OF_BACKWARD: Final = ("biasgrad", "biassum", "deterministic")


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel of the catalogue.

    symbol, arch: of its build
    serves: which problems it serves, in words
    reason: returns why the planner chooses it, as `Plan.reason`
    """

    symbol: str
    arch: str
    serves: str
    reason: Callable[[], str]

    @property
    def stem(self) -> str:
        """The symbol without its tile."""
        return TILE_SUFFIX.sub("", self.symbol)


def of_plan(plan: Plan) -> Entry:
    """Returns the entry of a plan."""
    return Entry(plan.symbol, plan.build.arch, serves(plan.build), lambda: plan.reason)


@functools.cache
def entries(arch: str) -> tuple[Entry, ...]:
    """Returns every kernel of the catalogue on a target, each once: component GEMMs, forwards, backwards.

    On sm_90a these are the kernels with wgmma alone: the others are built for sm_90.
    """
    found = {
        plan.symbol: of_plan(plan) for plan in (*_component_gemms(arch), *_row_kernels(arch)) if _is_shown(plan.build)
    }
    for direction in DIRECTIONS:
        fused = [entry for specs in _specs(direction, arch) for entry in _fused(specs, direction, arch)]
        for entry in (*fused, *filter(None, map(_float16_twin, fused))):
            found.setdefault(entry.symbol, entry)
    return tuple(found.values())


def _fused(specs: Iterable[ProblemSpec], direction: str, arch: str) -> Iterator[Entry]:
    """Yields the kernels of problems that differ in sizes alone."""
    given = (spec.problem(direction) for spec in specs)
    for build, problem in builds_among(given, arch).items():
        if _is_shown(build):
            yield Entry(build.symbol, arch, serves(build), functools.partial(_reason, problem, build))


def _is_shown(build: Build) -> bool:
    return FAMILIES[build.family].needs_wgmma or not architecture(build.arch).has_wgmma


def _reason(problem: Problem, build: Build) -> str:
    return planner.plan_of_build(problem, build, architecture(build.arch).num_sms).reason


def _float16_twin(entry: Entry) -> Entry | None:
    """Returns the kernel of the same problems in float16; None for other dtypes, and for windows.

    The planner has the tiles of bfloat16 for it, but with a window some variants have no registers.
    """
    symbol = entry.symbol.replace("_bf16_", "_f16_")
    if symbol == entry.symbol or "_local" in symbol:
        return None
    return replace(entry, symbol=symbol, serves=entry.serves.replace("bfloat16", "float16"))


def serves(build: Build) -> str:
    """Returns which problems a kernel serves, in words."""
    dims = f"head dim {build.head_dim}"
    if build.head_dim_value != build.head_dim:
        dims += f", of value {build.head_dim_value}"
    if build.kind == "component_gemm":
        return f"one product of attention alone, {build.dtype}, {dims}"
    if build.kind in ROW_KINDS:
        features = [_WORDS[feature] for feature in build.features]
        return ", ".join([_ROWS[build.kind, build.variant], build.dtype, dims, *features])
    words = [build.kind, build.dtype, dims, _FORMS[build.mask]]
    words += [_WORDS.get(feature, feature) for feature in build.features]
    if build.kind == "backward" and build.gradients != OPERANDS:
        words.append(f"gradients of {' and '.join(build.gradients)}")
    if build.deterministic:
        words.append("deterministic")
    sizes = FAMILIES[build.family].sizes(build) or _LENGTHS.get(kernel_of(build).lengths, "")
    return ", ".join([*words, *([sizes] if sizes else [])])


def _component_gemms(arch: str) -> Iterator[Plan]:
    for dtype, head_dim in product(SHORT_NAMES, COMPONENT_GEMM_HEAD_DIMS):
        yield from component_gemms(dtype, head_dim, arch)


def _row_kernels(arch: str) -> Iterator[Plan]:
    """Yields the kernels that append to a cache and merge partial results."""
    for dtype, head_dim in product(SHORT_NAMES, ROW_HEAD_DIMS):
        for scales in (NO_SCALES, GIVEN_SCALES, ROW_SCALES):
            yield plan_append(AppendProblem.dense((1, 1, head_dim), (1, 1), dtype, scales=scales), arch)
        yield plan_merge(MergeProblem.dense((1, 1, 1, head_dim), dtype), arch)
        yield plan_merge(MergeProblem.packed(1, 1, (1, 1, head_dim), dtype), arch)
        for is_sum, is_last in product((False, True), (False, True)):
            if dtype != "float32" or (is_sum and not is_last):  # others are the kernels above
                total = MergeProblem.into_total((1, 1, 1, head_dim), dtype, is_sum, is_last)
                yield plan_merge(total, arch)
    codes, columns = LATENT_DIMS
    for dtype in SHORT_NAMES:
        latent = AppendProblem.dense((1, 1, codes), (1, 1), dtype, head_dim_value=columns, scales=TILE_SCALES)
        yield plan_append(latent, arch)


def _specs(direction: str, arch: str) -> Iterator[list[ProblemSpec]]:
    """Yields the problems of the catalogue: masks and lengths, then one feature each, then few queries.

    Those of a list differ in sizes alone. Problems in float16 that have a `_float16_twin` are left out.
    """
    has_wgmma = architecture(arch).has_wgmma
    dtypes = ("bf16",) if has_wgmma else ("bf16", "f32")
    sizes = _WGMMA_SIZES if has_wgmma else ((_LENGTH, 1),)
    masks = (*((dtype, mask) for dtype in dtypes for mask in COMMON_MASKS), ("f16", WINDOW))
    for (dtype, mask), dims in product(masks, HEAD_DIMS):
        yield [parse(f"{dtype}_{dims}_s{length}_b1_h{count}_{mask}") for length, count in sizes]
    for dtype, dims, mask in product(dtypes, FEATURE_HEAD_DIMS, ("full", "causal")):
        for feature in FEATURES:
            if direction == "backward" or feature not in _OF_BACKWARD:
                yield [parse(f"{dtype}_{dims}_s{_LENGTH}_b2_h2_{mask}_{feature}")]
        yield [parse(f"{dtype}_{dims}_s{_LENGTH}_{heads}_{mask}") for heads in _GROUPED_HEADS]
        for variable in _VARIABLE_LENGTHS:
            yield [parse(f"{dtype}_{dims}_{variable}_h1_{mask}")]
    if has_wgmma:
        for dims, heads in product(FEATURE_HEAD_DIMS, ("h2", "h2_sinks", "h4k2")):
            yield [parse(f"bf16_{dims}_s{_LENGTH}_b2_{heads}_full_ranges11")]
    if direction == "forward" and has_wgmma:
        for dims, mask in product(_E4M3, COMMON_MASKS):
            yield [parse(f"{dims}_s{_LENGTH}_b1_h1_{mask}")]
        for rest in ("s{length}_b1_h1_full_f16out", "s{length}_b1_h4k2_causal", "n128,100_h1_causal"):
            yield [parse(f"e4m3_d128_{rest.format(length=_LENGTH)}")]
    if direction == "forward" and not has_wgmma:
        for dtype, dims, heads, mask in product(dtypes, HEAD_DIMS, ("h1", "h8k2"), ("full", "causal_br")):
            yield [parse(f"{dtype}_{dims}_q1_s8192_b1_{heads}_{mask}")]
