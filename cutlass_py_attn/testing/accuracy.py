"""Accuracy: whether a kernel's result is as good as rounding allows, and how close it came to failing.

Three results of one problem are compared: `kernel`, `truth` (reference/numpy_reference.py in float64) and `low`
(the same reference in the kernel's own dtype). Four rules, because each notices faults that the others miss:

  tile     the error of every 64-row tile, in norm, against twice the error of low: one row or tile is wrong
  maximum  the largest error, against twice the largest error of low: one element is wrong
  slope    <kernel, truth> / <truth, truth> - 1 by head: rounding errors have no sign, a wrong factor has one
  zero     rows that must be exactly zero

`worst` is error / allowed: 1 or less passes. All tensors are (batch, rows, heads, channels). Over few rows low may be
accurate by luck; low's error is pooled over heads, so small problems are checked best with four heads or more.
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
# Over fewer rows than these, low may be accurate by luck; a kernel must not need the same luck.
FEW_ROWS = 32
TIMES_LOW_FEW = 4.0
SLOPE = 2e-3
# The slope of a correct kernel scatters like the relative error of low over the root of the number of rows, because one
# wrong weight moves a whole row; four such deviations are allowed beside SLOPE.
SLOPE_DEVIATIONS = 4.0
# Up to this many rows that scatter is not yet small, and the slope of low itself is allowed for, twice.
SMALL_ROWS = 256
# A truth less than this many times the error of low is made of rounding alone and has no slope.
SLOPE_SIGNAL = 4.0
LOGSUMEXP = 1e-4
# FlashAttention's floor for the maximum: the rounding of adding and subtracting 0.3 in float32.
DISTURBANCE = np.float32(0.3)


@dataclass(frozen=True, slots=True)
class Floor:
    """Error that a dtype is allowed where low happens to be exact.

    tile: share of the median norm of the head's tiles. maximum: share of the largest |truth|.
    absolute: error of an element of a result that cancels to zero; assumes inputs of about one.
    ulp: relative error that is assumed for low where low itself overflowed.
    """

    tile: float
    maximum: float
    absolute: float
    ulp: float


# Sixteen bits: 1e-3 is about the rounding of a bfloat16 output, whose root mean square is 2^-9 / sqrt(3).
# float32: low is good to 5e-7 and less; three TF32 products with truncating sums and a fast exponential
# reach a few 1e-6, a single TF32 product 3e-4. The floor of 1e-5 lies between, with a margin on both sides.
FLOORS: dict[str, Floor] = {
    "float16": Floor(tile=1e-3, maximum=0.0, absolute=2e-5, ulp=2.0**-10),
    "bfloat16": Floor(tile=1e-3, maximum=0.0, absolute=2e-5, ulp=2.0**-7),
    "float32": Floor(tile=1e-5, maximum=1e-5, absolute=1e-6, ulp=2.0**-23),
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one rule on one tensor. worst: error / allowed (1 or less passes); location: of the worst error."""

    tensor: str
    rule: str
    worst: float
    location: str

    def __str__(self) -> str:
        return f"{self.tensor:<11} {self.rule:<9} {self.worst:7.3f}  {self.location}"


def check(
    name: str,
    kernel: Array,
    truth: Array,
    low: Array,
    *,
    unseen: Array | None = None,
    absolute: float | None = None,
) -> list[CheckResult]:
    """Returns the results of all rules on one tensor; none for an empty tensor of the right shape.

    kernel: (batch, rows, heads, channels) in the dtype that the kernel wrote (float16, bfloat16 or float32), which
    chooses the floor. truth: the same shape in float64. low: the same shape in any float dtype.
    A wrong shape gives the single result "shape", a NaN or infinity where truth is finite (or the reverse) the single
    result "finite"; both have worst = inf.

    unseen: boolean (rows) or (batch, rows, heads), the rows without a visible (query, key) pair, which must be exactly
    zero.
    None stands for the rows of `output` whose truth is zero, and for no row of a gradient: a gradient may
    cancel to an exact zero in float64 and not in float32 (a query with one key), so its zeros prove nothing.
    absolute: replaces Floor.absolute. Pass inputs.MAGNITUDE times Floor.absolute, and five times that for
    problems with a single key, whose query and key gradients are a difference of equal numbers.

    Raises ValueError for another dtype of kernel, and if truth and low differ in shape.
    """
    if kernel.dtype.name not in FLOORS:
        raise ValueError(f"kernel has dtype {kernel.dtype.name}, must be one of {', '.join(FLOORS)}")
    if truth.shape != low.shape or truth.ndim != 4:
        raise ValueError(f"truth {truth.shape} and low {low.shape} must have the same shape of rank 4")
    if kernel.shape != truth.shape:
        return [CheckResult(name, "shape", math.inf, f"{kernel.shape} instead of {truth.shape}")]
    if truth.size == 0:
        return []
    floor = FLOORS[kernel.dtype.name]
    kernel, truth, low = (np.asarray(tensor, np.float64) for tensor in (kernel, truth, low))
    finite = np.isfinite(truth)
    strays = np.isfinite(kernel) != finite
    if strays.any():
        place = _place(_first(strays))
        return [CheckResult(name, "finite", math.inf, f"{place}, {strays.sum()} elements")]
    # Elements that are infinite in truth and kernel alike pass; zeros remove them from all sums.
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


def check_logsumexp(kernel: Array, truth: Array) -> CheckResult:
    """Returns the result on logsumexp (batch, num_heads, ceil32(rows)): absolute error 1e-4.

    A wrong shape, a NaN, or an infinity that is missing, misplaced or of the wrong sign gives worst = inf.
    """
    if kernel.shape != truth.shape:
        return CheckResult("logsumexp", "shape", math.inf, f"{kernel.shape} instead of {truth.shape}")
    if truth.size == 0:
        return CheckResult("logsumexp", "absolute", 0.0, "empty")
    kernel, truth = np.asarray(kernel, np.float64), np.asarray(truth, np.float64)
    finite = np.isfinite(truth) & np.isfinite(kernel)
    ratio = np.where(kernel == truth, 0.0, math.inf)
    ratio[finite] = np.abs(kernel[finite] - truth[finite]) / LOGSUMEXP
    batch, head, row = _argmax(ratio)
    return CheckResult("logsumexp", "absolute", float(ratio.max()), f"batch {batch} head {head} row {row}")


def passed(results: Iterable[CheckResult]) -> bool:
    """Whether every result is 1 or less."""
    return all(result.worst <= 1 for result in results)


def worst(results: Iterable[CheckResult]) -> dict[str, float]:
    """Returns the largest error / allowed of each tensor, over all rules and cases."""
    found: dict[str, float] = {}
    for result in results:
        found[result.tensor] = max(found.get(result.tensor, 0.0), result.worst)
    return found


def _tile(name: str, results: tuple[Array, Array, Array], share: float, absolute: float) -> CheckResult:
    """Compares the norm of the error of each (batch, 64 rows, head) with low's, the median tile's and the floor."""
    error, truth, low_error = (_tile_norms(tensor) for tensor in results)
    present = _present(results[1])
    height = np.minimum(TILE_ROWS, present.shape[1] - np.arange(0, present.shape[1], TILE_ROWS))
    few = np.add.reduceat(present, np.arange(0, present.shape[1], TILE_ROWS), axis=1, dtype=int) < FEW_ROWS
    # Tiles without visible keys are zero and would pull the median, and with it the floor, to zero.
    lone = ~(truth > 0).any(axis=1, keepdims=True)
    median = np.nanmedian(np.where((truth > 0) | lone, truth, np.nan), axis=1, keepdims=True)
    elements = height[None, :, None] * results[1].shape[3]
    allowed = np.where(few, TIMES_LOW_FEW, TIMES_LOW) * _pooled(low_error)
    allowed = allowed + share * median + absolute * np.sqrt(elements)
    ratio = _ratio(error, allowed)
    batch, tile, head = _argmax(ratio)
    return CheckResult(name, "tile", float(ratio.max()), f"batch {batch} head {head} tile {tile}")


def _maximum(name: str, results: tuple[Array, Array, Array], share: float, absolute: float) -> CheckResult:
    """Compares the largest error of the tensor with the largest of low and FlashAttention's floor."""
    error, truth, low_error = (np.abs(tensor) for tensor in results)
    single = results[1].astype(np.float32)
    disturbed = np.abs((single + DISTURBANCE) - DISTURBANCE - single).max()
    times = TIMES_LOW_FEW if _present(truth).sum() < FEW_ROWS else TIMES_LOW
    allowed = times * low_error.max() + TIMES_LOW * float(disturbed) + share * truth.max() + absolute
    ratio = _ratio(error.max(keepdims=True), np.asarray(allowed))
    return CheckResult(name, "maximum", float(ratio.max()), _place(_argmax(error)))


def _slope(name: str, results: tuple[Array, Array, Array]) -> CheckResult:
    """Measures the relative factor between kernel and truth, by batch and head."""
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
    return CheckResult(name, "slope", float(ratio.max()), f"batch {batch} head {head}")


def _present(truth: Array) -> Array:
    """Returns which rows are not zero, (batch, rows, heads). Rows without keys say nothing about rounding."""
    rows: Array = np.any(truth != 0, axis=3)
    return rows


def _pooled(low_error: Array) -> Array:
    """Returns low's error, but at least its root mean square over batches and heads (first and last axis)."""
    mean = np.sqrt((low_error**2).mean(axis=(0, low_error.ndim - 1), keepdims=True))
    pooled: Array = np.maximum(low_error, mean)
    return pooled


def _zero(name: str, kernel: Array, truth: Array, unseen: Array | None) -> CheckResult:
    """Requires exact zeros in rows without a visible pair."""
    if unseen is not None:
        empty = np.broadcast_to(unseen[..., None] if unseen.ndim > 1 else unseen[:, None, None], (*truth.shape[:3], 1))
    elif name == "output":
        empty = ~_present(truth)[..., None]
    else:
        empty = np.zeros((1, 1, 1, 1), np.bool_)
    strays = (kernel != 0) & empty
    if not strays.any():
        return CheckResult(name, "zero", 0.0, "everywhere")
    return CheckResult(name, "zero", math.inf, _place(_first(strays)))


def _tile_norms(tensor: Array) -> Array:
    """Returns the norm of every tile of 64 rows, (batch, tiles, heads)."""
    starts = np.arange(0, tensor.shape[1], TILE_ROWS)
    squares = np.einsum("bmhk,bmhk->bmh", tensor, tensor)
    norms: Array = np.sqrt(np.add.reduceat(squares, starts, axis=1))
    return norms


def _by_head(left: Array, right: Array) -> Array:
    """Returns inner products over rows and channels, (batch, heads)."""
    products: Array = np.einsum("bmhk,bmhk->bh", left, right)
    return products


def _ratio(error: Array, allowed: Array) -> Array:
    """Returns error / allowed; 0 for no error, even if none is allowed."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / allowed)


def _argmax(values: Array) -> tuple[int, ...]:
    """Returns the index of the largest value."""
    return tuple(int(index) for index in np.unravel_index(int(np.argmax(values)), values.shape))


def _first(flags: Array) -> tuple[int, ...]:
    """Returns the index of the first true flag."""
    return _argmax(flags)


def _place(index: tuple[int, ...]) -> str:
    """Returns the index of a (batch, row, head, channel) tensor in words."""
    batch, row, head, channel = index
    return f"batch {batch} head {head} row {row} channel {channel}"
