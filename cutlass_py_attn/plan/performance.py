"""Performance: what a plan is estimated to take, and which change of the call is estimated to make it much faster.

The estimate is coarse: the rate of the kernel's class, measured on an H200 with long sequences (docs/data and the
notes beside the kernels), times the part of its tiles that has rows and of the multiprocessors that have blocks, but no
more than the memory allows. It tells a call that runs at a tenth of what its sizes allow, not one that loses a fifth.

`slow_road` decides for the functions, JAX, `explain` and the command line; tools/tuning/cliffs.py compares it with
plans.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.kernels.decode.layout import MAX_QUERIES
from cutlass_py_attn.kernels.families import FAMILIES
from cutlass_py_attn.kernels.sm90_family import slow_roads
from cutlass_py_attn.launch.variants import MLA
from cutlass_py_attn.problem.masks import Form
from cutlass_py_attn.problem.tensors import E4M3_BYTES, ITEM_BYTES, OPERAND_BYTES, ROW_ALIGNMENT_BYTES
from cutlass_py_attn.score_terms import registry

if TYPE_CHECKING:
    from cutlass_py_attn.launch.build import Build
    from cutlass_py_attn.plan.plan import Plan

LEAST_FACTOR: Final = 3.0  # of the estimated time without the change and with it, from which on a plan is slow
LAUNCH: Final = 7.0  # microseconds of a call, whatever it computes
BYTES_PER_US: Final = 4.0e6  # that decode kernels read from device memory
DECODE_ROWS: Final = 16  # of a tile of the decode kernels
MLA_ROWS: Final = 64  # of a tile
# TFLOP/s by class and direction, up to so many columns of the wider head dim.
_Rates = tuple[tuple[float, float], ...]
WGMMA: Final[dict[str, _Rates]] = {
    "forward": ((32, 340), (64, 610), (96, 715), (128, 790), (256, 830), (math.inf, 680)),
    "backward": ((32, 380), (64, 620), (96, 650), (128, 700), (256, 510), (math.inf, 410)),
}
MMA_SYNC: Final[dict[str, _Rates]] = {
    "forward": ((64, 322), (96, 327), (128, 360), (256, 320), (math.inf, 279)),
    "backward": ((64, 295), (96, 267), (128, 322), (256, 257), (math.inf, 146)),
}
TF32: Final[dict[str, _Rates]] = {
    "forward": ((64, 70), (128, 64), (math.inf, 54)),
    "backward": ((64, 60), (128, 57), (math.inf, 39)),
}
E4M3_OPERANDS: Final[dict[str, _Rates]] = {"forward": ((64, 660), (128, 950), (math.inf, 980))}
LATENT: Final[dict[str, _Rates]] = {"forward": ((math.inf, 580),)}
LATENT_CODES: Final[dict[str, _Rates]] = {"forward": ((math.inf, 394),)}
DECODE: Final[dict[str, _Rates]] = {"forward": ((math.inf, 275),)}
CODES_FACTOR: Final = 0.73  # of a forward over an e4m3 cache
NARROW_BIAS_BYTES, NARROW_BIAS_FACTOR = 2, 0.4  # of a backward whose bias has rows aligned to so few bytes: 121 of 297


class PerformanceWarning(UserWarning):
    """A call is computed, but much slower than its sizes allow: the message has the estimate and what to change."""


@dataclass(frozen=True, slots=True)
class SlowRoad:
    """A change that is estimated to make a plan at least LEAST_FACTOR times as fast.

    factor: estimated time of the plan / estimated time with the change
    remedy: the change, as the end of "faster with ..."
    """

    factor: float
    remedy: str

    def __str__(self) -> str:
        return f"estimated to be {self.factor:.0f} times as fast with {self.remedy}"


@dataclass(frozen=True, slots=True)
class _Work:
    """The sizes of a plan that decide its time: those of a call, and the head dims and item bytes of its build."""

    direction: str
    batch: int
    num_heads: int
    group: int
    num_queries: float  # of a sequence on average
    num_keys: int
    head_dim: int
    head_dim_value: int
    pairs: float  # of a query and a key that it sees, of one head of a sequence

    @classmethod
    def of(cls, plan: Plan) -> _Work:
        build, sizes = plan.build, dict(plan.params)
        batch = max(sizes["batch"], 1)
        queries = sizes["tokens_q"] / batch if sizes.get("tokens_q") else sizes["num_queries"]
        pairs = _pairs(build.form, queries, sizes["num_keys"], sizes)
        heads, group = max(sizes["num_heads"], 1), sizes["group"]
        dims = build.head_dim, build.head_dim_value
        return cls(build.kind, batch, heads, group, queries, sizes["num_keys"], *dims, pairs)

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.head_dim_value)

    def time(
        self, rates: dict[str, _Rates], rows: int, key_bytes: int, *, packs_heads: bool = False, share: float = 1.0
    ) -> float:
        """Returns the estimated microseconds with kernels of a class.

        rates: of the class. rows: queries of a tile. key_bytes: of an element of key. packs_heads: whether a tile has
        the queries of a group of heads. share: of the multiprocessors that have blocks
        """
        rate = next(rate for most, rate in rates[self.direction] if self.widest <= most)
        in_tiles = max(self.num_queries, 1) * (self.group if packs_heads else 1)
        padding = ceil_div(math.ceil(in_tiles), rows) * rows / in_tiles
        columns = self.head_dim + self.head_dim_value
        flops = 2 * self.batch * self.num_heads * self.pairs * columns * (1 if self.direction == "forward" else 2.5)
        keys = self.batch * self.num_heads // self.group * self.num_keys * columns * key_bytes
        queries = self.batch * self.num_heads * self.num_queries * columns * 2
        return LAUNCH + max(flops * padding / (rate * share * 1e6), (keys + queries) / BYTES_PER_US)


def slow_road(plan: Plan) -> SlowRoad | None:
    """Returns the smallest change of a call that makes this plan much faster, by estimate; None if there is none."""
    if plan.build.kind not in ("forward", "backward") or not plan.launches or not plan.build.has_main:
        return None
    own = estimated_time(plan)
    if own < LEAST_FACTOR * LAUNCH:
        return None
    for remedy, time in _changes(plan, _Work.of(plan)):
        if own >= LEAST_FACTOR * time:
            return SlowRoad(own / time, remedy)
    return None


def estimated_time(plan: Plan) -> float:
    """Returns the estimated microseconds of a plan of attention on an H200."""
    build, work = plan.build, _Work.of(plan)
    main = [launch for launch in plan.launches if launch.symbol.endswith("_0")]
    blocks = sum(math.prod(launch.grid) for launch in main)
    share = min(1.0, max(blocks, 1) / plan.architecture.num_sms)
    key_bytes = E4M3_BYTES if build.has(registry.KV8) else OPERAND_BYTES[build.dtype]
    if build.variant == MLA:
        return work.time(LATENT_CODES if build.has(registry.KV8) else LATENT, build.tile_m, key_bytes, packs_heads=True)
    if build.family == "decode":
        rates = TF32 if build.dtype == "float32" else DECODE
        return work.time(rates, build.tile_m, key_bytes, packs_heads=True)
    time = (
        work.time(_rates(build.dtype, FAMILIES[build.family].needs_wgmma), build.tile_m, key_bytes, share=share)
        - LAUNCH
    )
    if build.has(registry.KV8):
        time /= CODES_FACTOR
    if _has_narrow_bias(build):
        time /= NARROW_BIAS_FACTOR
    return LAUNCH + time


def advice(plan: Plan) -> str:
    """Returns a sentence about the slow road of a plan; "" for a plan that has none."""
    found = slow_road(plan)
    return f"slow: {plan.symbol} is {found}" if found else ""


def warn(plan: Plan) -> None:
    """Gives a PerformanceWarning for a plan with a slow road, for the line outside of this package that called it."""
    if text := advice(plan):
        warn_caller(text.removeprefix("slow: "))


def warn_caller(text: str) -> None:
    """Gives a PerformanceWarning for the line outside of this package that called it."""
    warnings.warn(text, PerformanceWarning, stacklevel=_callers_level())


class Notice:
    """The warning of a plan, to be given once, also if it is raised as an error."""

    def __init__(self, plan: Plan) -> None:
        self._plan: Plan | None = plan

    def give(self) -> None:
        """Warns at the first call alone."""
        plan, self._plan = self._plan, None
        if plan is not None:
            warn(plan)


# Packages whose frames are no call of a user.
_INNER: Final = ("cutlass_py_attn", "jax", "jaxlib", "contextlib", "functools")


def _callers_level() -> int:
    """Returns the stack level, for a call of warnings.warn in the caller, of the innermost frame of a user."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    return level


def _rates(dtype: str, has_wgmma: bool) -> dict[str, _Rates]:
    """Returns the rates of the kernels of a dtype that are no decode kernels."""
    if dtype == "float32":
        return TF32
    if dtype not in ITEM_BYTES:
        return E4M3_OPERANDS
    return WGMMA if has_wgmma else MMA_SYNC


def _pairs(form: Form, queries: float, keys: int, sizes: Mapping[str, int]) -> float:
    """Returns how many pairs of a query and a key a mask shows, but for its edges."""
    if form.sees_all:
        return queries * keys
    if form.has_left:
        return queries * min(keys, sizes["window_left"] + sizes["window_right"] + 1)
    both = min(queries, keys)
    rest = queries - keys if queries > keys else 0 if not sizes["bottom_right"] else keys - queries
    shown = both * both / 2
    if sizes["bottom_right"]:
        return shown + (rest * queries if keys > queries else 0)
    return shown + (rest * keys if queries > keys else 0)


def _changes(plan: Plan, work: _Work) -> Iterator[tuple[str, float]]:
    """Yields changes of a call, those that keep its result first, each with the estimated time that it then takes."""
    build = plan.build
    step = _Step(plan, work) if build.kind == "forward" else None
    has_short_rows, has_narrow_bias = build.vector_bytes < ROW_ALIGNMENT_BYTES, _has_narrow_bias(build)
    if has_short_rows:
        text = f"rows of {ROW_ALIGNMENT_BYTES} bytes: align the addresses and strides, and pad the head dims"
        times = [_usual_time(plan, work, is_aligned=True, has_narrow_bias=has_narrow_bias)]
        yield text, min([*times, *([step.time] if step and not step.objections else [])])
    if has_narrow_bias:
        text = "rows of the bias aligned to 4 bytes: pad its keys to an even number in memory"
        yield text, _usual_time(plan, work, is_aligned=not has_short_rows, has_narrow_bias=False)
    if text := slow_roads.latent_cache(build, dict(plan.params)):
        yield text, work.time(LATENT, MLA_ROWS, OPERAND_BYTES[build.dtype], packs_heads=True)
    if step is not None:
        yield from _heads_as_queries(plan, work)
        yield from step.changes()
        if text := slow_roads.in_parts(build):
            yield text, work.time(WGMMA, min(build.tile_m, 64), OPERAND_BYTES[build.dtype])
    text, missing = slow_roads.one_feature_less(build)
    if text and not has_short_rows:
        yield text, _usual_time(plan, work, is_aligned=True, has_narrow_bias=False, without=missing)
    if build.dtype == "float32":
        text = "bfloat16 or float16, if 16 bits suffice: a product of float32 is three of TF32"
        yield text, _usual_time(plan, work, dtype="bfloat16", is_aligned=not has_short_rows, has_narrow_bias=False)


def _has_narrow_bias(build: Build) -> bool:
    is_narrow = build.bias_vector_bytes == NARROW_BIAS_BYTES and build.dtype != "float32"
    return build.kind == "backward" and is_narrow


def _usual_time(
    plan: Plan,
    work: _Work,
    *,
    is_aligned: bool,
    has_narrow_bias: bool,
    dtype: str = "",
    rows: int = 0,
    without: Collection[str] = (),
) -> float:
    """Returns the estimated time of the kernels that are no decode kernels, with other rows, another bias or dtype.

    rows: queries of a group of heads that are one tile; 0 for the queries of one head
    without: features that are left out
    """
    build = plan.build
    dtype = dtype or build.dtype
    wgmma = dtype in ITEM_BYTES and dtype != "float32" and is_aligned and not has_narrow_bias
    wgmma = wgmma and slow_roads.takes(build, dict(plan.params), without)
    tile = min(build.tile_m, 128) if not rows else min(build.tile_m, 64)
    heads = work.num_heads // work.group if rows else work.num_heads
    tiles = work.batch * heads * ceil_div(rows or math.ceil(work.num_queries), tile)
    if work.direction == "backward":
        tiles = work.batch * work.num_heads // work.group * ceil_div(work.num_keys, max(build.tile_n, 64))
    share = 1.0 if wgmma and slow_roads.divides_tiles(build) else min(1.0, tiles / plan.architecture.num_sms)
    item = OPERAND_BYTES[dtype]
    time = work.time(_rates(dtype, wgmma), tile, item, packs_heads=bool(rows), share=max(share, 1e-3))
    return LAUNCH + (time - LAUNCH) / (NARROW_BIAS_FACTOR if has_narrow_bias else 1)


def _heads_as_queries(plan: Plan, work: _Work) -> Iterator[tuple[str, float]]:
    """Yields the change that gives the heads of a group one tile: as queries, which nothing tells apart from heads."""
    build, sizes = plan.build, dict(plan.params)
    sees_all = build.form.sees_all or (build.form.grows and sizes["bottom_right"])
    packs_heads = build.family == "decode" or build.variant == MLA
    if packs_heads or sizes["num_queries"] != 1 or work.group == 1 or not sees_all:
        return
    if {*build.features} - {"grouped", "softcap", registry.PAGED, registry.KV8, registry.KV8_ROW}:
        return
    text = (
        f"the {work.group} heads of a group as queries of one head: query as (batch, {work.group}, num_heads_key, "
        "head_dim), without a mask"
    )
    is_aligned = build.vector_bytes == ROW_ALIGNMENT_BYTES
    yield text, _usual_time(plan, work, is_aligned=is_aligned, has_narrow_bias=False, rows=work.group)


class _Step:
    """A few queries of many keys, which decode kernels compute if nothing objects.

    objections: what they do not take, each as the change that removes it; time: estimated with them
    """

    def __init__(self, plan: Plan, work: _Work) -> None:
        self._build, self._sizes, self._work = plan.build, dict(plan.params), work
        rates = TF32 if plan.build.dtype == "float32" else DECODE
        self.time = work.time(rates, DECODE_ROWS, OPERAND_BYTES[plan.build.dtype], packs_heads=True)
        self.objections = [*self._objections(has_pages="page_size" in self._sizes)]

    def changes(self) -> Iterator[tuple[str, float]]:
        """Yields the one change with which a decode kernel computes the step; to pages, if it needs no other."""
        build = self._build
        if build.family == "decode" or build.variant == MLA or build.vector_bytes < decode.LEAST_COPY:
            return
        if len(self.objections) == 1 and self._work.group * self._sizes["num_queries"] <= decode.PERSISTENT_MAX_ROWS:
            yield self.objections[0], self.time
        if "page_size" not in self._sizes and not [*self._objections(has_pages=True)]:
            yield "keys in pages, of which a decode kernel computes up to 128 queries of a group of heads", self.time

    def _objections(self, *, has_pages: bool) -> Iterator[str]:
        build, queries = self._build, self._sizes["num_queries"]
        rows = queries * self._work.group
        missing = (decode.PERSISTENT_FORWARD if has_pages else decode.FORWARD).lacks(build)
        yield from (f"no {name}, which no decode kernel takes" for name in missing)
        most = decode.PERSISTENT_MAX_ROWS if has_pages else decode.MAX_ROWS
        if rows > most or (queries > MAX_QUERIES and not has_pages):
            yield f"at most {most} queries of a group of heads in a call, which a decode kernel takes"
        if self._sizes["num_keys"] < decode.MIN_KEYS and not has_pages:
            yield f"at least {decode.MIN_KEYS} keys"
        if build.dtype not in ITEM_BYTES:
            yield "a query of 16 bits"
        elif self._work.widest > (widest := decode.MAX_HEAD_DIM[ITEM_BYTES[build.dtype]]):
            yield f"head dims up to {widest}, which a decode kernel takes"
