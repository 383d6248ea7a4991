"""Judge: whether a kernel's result is as good as honest rounding allows, and how close it came to failing.

Three results of one problem are compared: `kernel`, `truth` (reference.py in float64) and `low`
(reference.py in the kernel's own dtype). Four rules, because each notices faults that hide from the others:

  tile     the error of every 64-row tile, in norm, against twice the error of low: one row or tile is wrong
  maximum  the largest error, against twice the largest error of low: one element is wrong
  slope    <kernel, truth> / <truth, truth> - 1 by head: rounding has no sign, a wrong factor has
  zero     rows that must be exactly zero

`worst` is error / allowed: 1 or less passes. All tensors are [batch, rows, heads, channels]. Over few rows
low may be right by luck, so small problems are judged best with four heads or more: low's error is pooled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TILE_ROWS = 64
TIMES_LOW = 2.0
# Over fewer rows than these, low may be right by luck; a kernel must not need the same luck.
FEW_ROWS = 32
TIMES_LOW_FEW = 4.0
SLOPE = 2e-3
# An honest slope scatters like the relative error of low over the root of the number of rows, because one
# wrong weight moves a whole row; four such deviations are allowed beside SLOPE.
SLOPE_DEVIATIONS = 4.0
# Up to this many rows that scatter is not yet small, and the slope of low itself is allowed for, twice.
SMALL_ROWS = 256
# A truth less than this many times the error of low is made of rounding alone and has no slope.
SLOPE_SIGNAL = 4.0
LOGSUMEXP = 1e-4
# FlashAttention's floor for the maximum: what adding and taking away 0.3 in float32 does to the truth.
DISTURBANCE = np.float32(0.3)


@dataclass(frozen=True, slots=True)
class Floor:
    """What is allowed to a dtype where low happens to be exact.

    tile: share of the median norm of the head's tiles. maximum: share of the largest |truth|. absolute: per
    element, for results that cancel to zero; it supposes inputs of about one. ulp: relative error that is
    assumed for low where low itself overflowed.
    """

    tile: float
    maximum: float
    absolute: float
    ulp: float


# Sixteen bits: 1e-3 is about the rounding of a bfloat16 output, whose root mean square is 2^-9 / sqrt(3).
# float32: low is good to 5e-7 and less; three TF32 products with truncating sums and a fast exponential
# reach a few 1e-6, a single TF32 product 3e-4. The floor of 1e-5 stands between, with room to both sides.
FLOORS: dict[str, Floor] = {
    "float16": Floor(tile=1e-3, maximum=0.0, absolute=2e-5, ulp=2.0**-10),
    "bfloat16": Floor(tile=1e-3, maximum=0.0, absolute=2e-5, ulp=2.0**-7),
    "float32": Floor(tile=1e-5, maximum=1e-5, absolute=1e-6, ulp=2.0**-23),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule's finding on one tensor: error / allowed (1 or less passes), and the place of the worst."""

    tensor: str
    rule: str
    worst: float
    where: str


def judge(
    name: str,
    kernel: Array,
    truth: Array,
    low: Array,
    *,
    unseen: Array | None = None,
    absolute: float | None = None,
) -> list[Verdict]:
    """All verdicts on one tensor, one a rule; an empty list for an empty tensor of the right shape.

    kernel [B, rows, H, C] in the dtype that the kernel wrote (float16, bfloat16 or float32: it chooses the
    floor), truth the same shape in float64, low the same shape in any float dtype. A wrong shape gives the
    single verdict "shape", a NaN or an infinity where truth is finite (or the reverse) the single verdict
    "finite"; both have worst = inf.

    unseen: boolean [rows], the rows that no visible (query, key) pair touches; they must be exactly zero.
    None stands for the rows of `output` whose truth is zero, and for no row of a gradient: a gradient may
    cancel to an exact zero in float64 and not in float32 (a query with one key), so its zeros prove nothing.
    absolute: replaces Floor.absolute. Give inputs.MAGNITUDE times Floor.absolute, and five times that for
    problems with a single key, whose query and key gradients are a difference of equal numbers.

    Raises ValueError for another dtype of kernel, and when truth and low differ in shape.
    """
    if kernel.dtype.name not in FLOORS:
        raise ValueError(f"kernel has dtype {kernel.dtype.name}, must be one of {', '.join(FLOORS)}")
    if truth.shape != low.shape or truth.ndim != 4:
        raise ValueError(f"truth {truth.shape} and low {low.shape} must have the same shape of rank 4")
    if kernel.shape != truth.shape:
        return [Verdict(name, "shape", math.inf, f"{kernel.shape} instead of {truth.shape}")]
    if truth.size == 0:
        return []
    floor = FLOORS[kernel.dtype.name]
    kernel, truth, low = (np.asarray(tensor, np.float64) for tensor in (kernel, truth, low))
    finite = np.isfinite(truth)
    strays = np.isfinite(kernel) != finite
    if strays.any():
        place = _place(_first(strays))
        return [Verdict(name, "finite", math.inf, f"{place}, {strays.sum()} elements")]
    # What is infinite in truth and kernel alike has been judged; zeros take it out of all sums.
    truth = np.where(finite, truth, 0.0)
    kernel = np.where(finite, kernel, 0.0)
    error = kernel - truth
    low_error = np.where(np.isfinite(low), low - truth, floor.ulp * np.abs(truth))
    slack = floor.absolute if absolute is None else absolute
    return [
        _tile(name, (error, truth, low_error), floor.tile, slack),
        _maximum(name, (error, truth, low_error), floor.maximum, slack),
        _slope(name, (error, truth, low_error)),
        _zero(name, kernel, truth, unseen),
    ]


def judge_logsumexp(kernel: Array, truth: Array) -> Verdict:
    """The verdict on logsumexp [B, H, ceil32(rows)]: absolute 1e-4; infinities exactly where truth has them.

    A wrong shape, a NaN, or an infinity that is missing, misplaced or of the wrong sign has worst = inf.
    """
    if kernel.shape != truth.shape:
        return Verdict("logsumexp", "shape", math.inf, f"{kernel.shape} instead of {truth.shape}")
    if truth.size == 0:
        return Verdict("logsumexp", "absolute", 0.0, "empty")
    kernel, truth = np.asarray(kernel, np.float64), np.asarray(truth, np.float64)
    finite = np.isfinite(truth) & np.isfinite(kernel)
    ratio = np.where(kernel == truth, 0.0, math.inf)
    ratio[finite] = np.abs(kernel[finite] - truth[finite]) / LOGSUMEXP
    batch, head, row = _argmax(ratio)
    return Verdict("logsumexp", "absolute", float(ratio.max()), f"batch {batch} head {head} row {row}")


def passed(verdicts: Iterable[Verdict]) -> bool:
    """Whether every verdict is 1 or less."""
    return all(verdict.worst <= 1 for verdict in verdicts)


def worst(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """The largest error / allowed of each tensor, over all rules and cases."""
    found: dict[str, float] = {}
    for verdict in verdicts:
        found[verdict.tensor] = max(found.get(verdict.tensor, 0.0), verdict.worst)
    return found


def _tile(name: str, results: tuple[Array, Array, Array], share: float, absolute: float) -> Verdict:
    """Norm of the error of each (batch, 64 rows, head) against low's, the median tile and the floor."""
    error, truth, low_error = (_tile_norms(tensor) for tensor in results)
    present = _present(results[1])
    height = np.minimum(TILE_ROWS, present.shape[1] - np.arange(0, present.shape[1], TILE_ROWS))
    few = np.add.reduceat(present, np.arange(0, present.shape[1], TILE_ROWS), axis=1, dtype=int) < FEW_ROWS
    # Tiles without keys are zero and would draw the median, and the floor with it, to zero.
    lone = ~(truth > 0).any(axis=1, keepdims=True)
    median = np.nanmedian(np.where((truth > 0) | lone, truth, np.nan), axis=1, keepdims=True)
    elements = height[None, :, None] * results[1].shape[3]
    allowed = np.where(few, TIMES_LOW_FEW, TIMES_LOW) * _pooled(low_error)
    allowed = allowed + share * median + absolute * np.sqrt(elements)
    ratio = _ratio(error, allowed)
    batch, tile, head = _argmax(ratio)
    return Verdict(name, "tile", float(ratio.max()), f"batch {batch} head {head} tile {tile}")


def _maximum(name: str, results: tuple[Array, Array, Array], share: float, absolute: float) -> Verdict:
    """The largest error of the tensor against the largest of low and FlashAttention's floor."""
    error, truth, low_error = (np.abs(tensor) for tensor in results)
    single = results[1].astype(np.float32)
    disturbed = np.abs((single + DISTURBANCE) - DISTURBANCE - single).max()
    times = TIMES_LOW_FEW if _present(truth).sum() < FEW_ROWS else TIMES_LOW
    allowed = times * low_error.max() + TIMES_LOW * float(disturbed) + share * truth.max() + absolute
    ratio = _ratio(error.max(keepdims=True), np.asarray(allowed))
    return Verdict(name, "maximum", float(ratio.max()), _place(_argmax(error)))


def _slope(name: str, results: tuple[Array, Array, Array]) -> Verdict:
    """The relative factor between kernel and truth, by batch and head."""
    error, truth, low_error = results
    rows = np.maximum(_present(truth).sum(axis=1), 1)
    length = np.sqrt(_by_head(truth, truth))
    low_length = _pooled(np.sqrt(_by_head(low_error, low_error)))
    above = length > SLOPE_SIGNAL * low_length
    safe = np.where(above, length, 1.0)
    allowed = SLOPE + SLOPE_DEVIATIONS * low_length / safe / np.sqrt(rows)
    allowed += np.where(rows <= SMALL_ROWS, TIMES_LOW * np.abs(_by_head(low_error, truth)) / safe**2, 0.0)
    ratio = np.where(above, _ratio(np.abs(_by_head(error, truth)) / safe**2, allowed), 0.0)
    batch, head = _argmax(ratio)
    return Verdict(name, "slope", float(ratio.max()), f"batch {batch} head {head}")


def _present(truth: Array) -> Array:
    """Which rows are not zero, [batch, rows, heads]: rows without keys say nothing about rounding."""
    rows: Array = np.any(truth != 0, axis=3)
    return rows


def _pooled(low_error: Array) -> Array:
    """Low's error, but at least its root mean square over batches and heads (first and last axis)."""
    mean = np.sqrt((low_error**2).mean(axis=(0, low_error.ndim - 1), keepdims=True))
    pooled: Array = np.maximum(low_error, mean)
    return pooled


def _zero(name: str, kernel: Array, truth: Array, unseen: Array | None) -> Verdict:
    """Nothing but exact zeros in rows that no visible pair touches."""
    if unseen is not None:
        empty = np.broadcast_to(unseen[None, :, None, None], (*truth.shape[:3], 1))
    elif name == "output":
        empty = ~_present(truth)[..., None]
    else:
        empty = np.zeros((1, 1, 1, 1), np.bool_)
    strays = (kernel != 0) & empty
    if not strays.any():
        return Verdict(name, "zero", 0.0, "everywhere")
    return Verdict(name, "zero", math.inf, _place(_first(strays)))


def _tile_norms(tensor: Array) -> Array:
    """Norm of every tile of 64 rows, [batch, tiles, heads]."""
    starts = np.arange(0, tensor.shape[1], TILE_ROWS)
    squares = np.einsum("bmhk,bmhk->bmh", tensor, tensor)
    norms: Array = np.sqrt(np.add.reduceat(squares, starts, axis=1))
    return norms


def _by_head(left: Array, right: Array) -> Array:
    """Inner products over rows and channels, [batch, heads]."""
    products: Array = np.einsum("bmhk,bmhk->bh", left, right)
    return products


def _ratio(error: Array, allowed: Array) -> Array:
    """error / allowed, where no error at all is allowed to be compared with nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / allowed)


def _argmax(values: Array) -> tuple[int, ...]:
    """Index of the largest value."""
    return tuple(int(index) for index in np.unravel_index(int(np.argmax(values)), values.shape))


def _first(flags: Array) -> tuple[int, ...]:
    """Index of the first true flag."""
    return _argmax(flags)


def _place(index: tuple[int, ...]) -> str:
    """An element of a BMHK tensor in words."""
    batch, row, head, channel = index
    return f"batch {batch} head {head} row {row} channel {channel}"
