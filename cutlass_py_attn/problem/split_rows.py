"""Rows of one call over several devices: which rows each has, which tiles of a ring it computes, what is refused.

With n devices the zigzag order is chunk 0, chunk 2 n - 1, chunk 1, chunk 2 n - 2, ... of 2 n equal chunks. In this
order an even split gives device r the chunks r and 2 n - 1 - r: with a causal mask equal work for all.

Indices of devices are ints, or traced by JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.refusals import Refusal, one_of, refuse
from cutlass_py_attn.suggestions import did_you_mean

ALL_GATHER: Final = "all_gather"
ULYSSES: Final = "ulysses"
RING: Final = "ring"
STRATEGIES: Final = (ALL_GATHER, ULYSSES, RING)
ZIGZAG: Final = "zigzag"
_OTHERS: Final = "pass context_strategy='all_gather' or 'ulysses'"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a device. first: index among the device's rows; start: index among all rows."""

    first: int
    count: int
    start: Any


def strategy_refusals(value: object) -> list[Refusal]:
    """Returns why a value of context_strategy is refused."""
    if isinstance(value, str) and value in STRATEGIES:
        return []
    remedy = did_you_mean(value, STRATEGIES, "choose one") if isinstance(value, str) else "choose one"
    return [refuse("context_strategy", value, one_of(STRATEGIES), remedy)]


def order_refusals(value: object) -> list[Refusal]:
    """Returns why a value of load_balance is refused."""
    if value is None or (isinstance(value, str) and value == ZIGZAG):
        return []
    return [refuse("load_balance", value, f"must be {ZIGZAG!r}, or None for the natural order", "choose one")]


def array_mask_refusals(key_start: object, visible_blocks: object, mask_program: object) -> list[Refusal]:
    """Returns why a mask in memory is refused; None stands for what it does not have."""
    rule = "must be None where the rows are split over devices, which do not split masks in memory"
    fields = {"key_start": key_start, "visible_blocks": visible_blocks, "mask_program": mask_program}
    remedy = "pass a mask of another type, or a bias of -inf"
    return [refuse(name, value, rule, remedy) for name, value in fields.items() if value is not None]


def chunks(size: int, zigzag: bool, rows: int, device: Any) -> list[Chunk]:
    """Returns the runs of consecutive rows among the `rows` rows of one of `size` devices."""
    if not zigzag:
        return [Chunk(0, rows, device * rows)]
    half = rows // 2
    return [Chunk(0, half, device * half), Chunk(half, half, (2 * size - 1 - device) * half)]


def is_causal(mask: Mask) -> bool:
    """Returns whether the mask is causal, with or without a window; both diagonals are one if lengths are equal."""
    return isinstance(mask, (Causal, CausalBottomRight))


def window_of(mask: Mask) -> int | None:
    """Returns the window of a causal mask."""
    return getattr(mask, "window_size", None)


def keys_around(mask: Mask, start: int, rows: int, keys: int) -> tuple[int, int, Mask]:
    """Returns the first key and one past the last key that rows from `start` on see, and their mask on these keys.

    The mask counts from the last row and the last key.
    """
    left, right = mask.left, mask.right
    first = 0 if left is None else max(0, start - left)
    last = keys if right is None else min(keys, start + rows + right)
    if is_causal(mask):
        return first, last, CausalBottomRight(window_of(mask))
    shift = last - start - rows
    return first, last, Window(None if left is None else left + shift, None if right is None else right - shift)


@dataclass(frozen=True, slots=True)
class RingTile:
    """Rows of a device, and keys that came over the ring.

    row, key: the first ones; column: of the key, among all. is_seen: whether the rows see the keys at all.
    """

    mask: Mask
    row: Any
    rows: int
    key: Any
    keys: int
    column: Any
    is_seen: Any


@dataclass(frozen=True, slots=True)
class Ring:
    """What decides the tiles of a ring.

    queries, keys: rows of a device, equal if positions count
    has_bias: whether the columns of a tile must follow one another
    """

    size: int
    zigzag: bool
    mask: Mask
    queries: int
    keys: int
    has_bias: bool

    def tiles(self, rank: Any, step: int, where: Callable[[Any, Any, Any], Any]) -> list[RingTile]:
        """Returns what device `rank` computes after `step` turns; empty if no device's rows see those keys.

        With the zigzag order the second chunk sees the first one of every other device. Besides, the first chunk sees
        that of a device before, and the second chunk sees the second one of a device behind: equal work.

        where: selects one of two values by a condition, which is traced if `rank` is.
        """
        rows, mask = self.keys, self.mask
        source = (rank - step) % self.size
        is_before = rank >= step  # whether the keys are those of rows before
        if mask.form.sees_all:
            parts = chunks(self.size, self.zigzag, rows, source) if self.has_bias else [Chunk(0, rows, 0)]
            return [RingTile(mask, 0, self.queries, part.first, part.count, part.start, True) for part in parts]
        if self.zigzag:
            half = rows // 2
            own = where(is_before, 0, half)
            columns = [chunk.start for chunk in chunks(self.size, True, rows, source)]
            return [
                RingTile(Full(), half, half, 0, half, columns[0], True),
                RingTile(Full(), own, half, own, half, where(is_before, *columns), True),
            ]
        window = window_of(mask)
        if window is None:
            return [RingTile(Full(), 0, rows, 0, rows, source * rows, is_before)]
        nearest = step * rows - (window - 1)  # row i sees the keys from i + nearest on
        if nearest >= rows:
            return []
        if nearest <= 0:
            return [RingTile(Window(-nearest, None), 0, rows, 0, rows, source * rows, is_before)]
        count = rows - nearest
        return [RingTile(Window(0, None), 0, count, nearest, count, source * rows + nearest, is_before)]

    def own_mask(self) -> Mask:
        """Returns the mask of a device's rows and its own keys: in zigzag order too, later rows are behind."""
        return Causal(window_of(self.mask)) if is_causal(self.mask) else self.mask


def joined(tiles: list[RingTile], has_bias: bool) -> list[RingTile]:
    """Returns the tiles of a known device, two of them as one if they share their rows or their keys."""
    if len(tiles) != 2 or has_bias or tiles[0].mask != tiles[1].mask:
        return tiles
    one, two = sorted(tiles, key=lambda tile: (tile.row, tile.key))
    if one.row == two.row and one.key + one.keys == two.key:
        return [RingTile(one.mask, one.row, one.rows, one.key, one.keys + two.keys, one.column, True)]
    if one.key == two.key and one.row + one.rows == two.row:
        return [RingTile(one.mask, one.row, one.rows + two.rows, one.key, one.keys, one.column, True)]
    return tiles


def repeats_of_key(num_heads: int, num_heads_key: int, size: int) -> int | None:
    """Returns how often each key head is repeated, so that devices get whole groups; None if none do."""
    repeated = math.lcm(num_heads_key, size)
    return None if num_heads % repeated else repeated // num_heads_key


@dataclass(frozen=True, slots=True)
class SplitCall:
    """What decides whether the rows of a call can be split.

    where: what they are split over, in words
    query, key: shapes (batch, rows, heads, head_dim) of a device; bias: that of a device's bias
    terms: names of registered score terms
    has_sequences, differ: whether the rows are packed sequences, and whether keys are known to differ from queries
    """

    strategy: str
    zigzag: bool
    size: int
    where: str
    mask: Mask
    query: tuple[int, ...]
    key: tuple[int, ...]
    bias: tuple[int, ...] | None
    has_alibi: bool
    dropout_p: float
    terms: tuple[str, ...]
    has_sequences: bool
    differ: bool

    def refusals(self) -> Iterator[Refusal]:
        """Yields why the rows cannot be split."""
        yield from self._sizes()
        yield from {ALL_GATHER: self._all_gather, RING: self._ring, ULYSSES: self._ulysses}[self.strategy]()

    def _sizes(self) -> Iterator[Refusal]:
        rows, keys = self.query[1], self.key[1]
        if self.zigzag:
            for name, count in (("query", rows), ("key", keys)):
                if count % 2:
                    rule = "must be an even number on each device with load_balance='zigzag', two chunks"
                    yield refuse(f"rows of {name}", count, rule, "pad the rows, or pass load_balance=None")
        ordered = not self.mask.form.sees_all or self.has_sequences
        if rows != keys and ordered and self.strategy != ULYSSES:
            rule = f"must be that of key on each device, {keys}, with mask {self.mask}, for a mask counts positions"
            yield refuse("rows of query", rows, rule, f"pass Full(), or context_strategy={ULYSSES!r}")
        if self.bias is None or len(self.bias) != 4 or self.has_sequences:
            return
        batch, _, heads, _ = self.query
        allowed = batch, heads, rows, keys * self.size
        if any(size not in (1, whole) for size, whole in zip(self.bias, allowed, strict=True)):
            rule = (
                f"must broadcast to {allowed}, the device's rows and the keys of all {self.size} devices in natural "
                "order"
            )
            yield refuse("bias.shape", self.bias, rule, "split its rows alone")

    def _all_gather(self) -> Iterator[Refusal]:
        yield from self._terms()
        remedy = f"pass context_strategy={ULYSSES!r}"
        if self.has_alibi and not is_causal(self.mask):
            rule = "must be a causal mask with alibi_slopes and all_gather, for ALiBi counts from the last visible key"
            yield refuse("mask", self.mask, rule, remedy)
        if not self.has_sequences:
            return
        if self.bias is not None:
            rule = "must be None with sequences and all_gather, for a sequence's rows are split"
            yield refuse("bias.shape", self.bias, rule, remedy)
        if not (is_causal(self.mask) or self.mask.form.sees_all):
            yield refuse("mask", self.mask, "must be causal or Full() with sequences and all_gather", remedy)
        if isinstance(self.mask, Causal) and not isinstance(self.mask, CausalBottomRight) and self.differ:
            rule = "must have cu_seqlens_q equal to cu_seqlens_k with sequences and all_gather, and no seqused_k"
            yield refuse("mask", self.mask, rule, f"pass CausalBottomRight, or {remedy.removeprefix('pass ')}")

    def _ring(self) -> Iterator[Refusal]:
        yield from self._terms()
        if self.has_alibi:
            rule = "must be ulysses or all_gather with alibi_slopes, for the kernels take no position of a part's keys"
            yield refuse("context_strategy", RING, rule, _OTHERS)
        if self.has_sequences:
            rule = "must be ulysses or all_gather with sequences, which the parts would split"
            yield refuse("context_strategy", RING, rule, _OTHERS)
        if not (is_causal(self.mask) or self.mask.form.sees_all):
            yield refuse("mask", self.mask, "must be causal or Full() with ring", _OTHERS)
        if is_causal(self.mask) and window_of(self.mask) is not None and self.zigzag:
            remedy = "pass load_balance=None, with which the ring ends where the window ends"
            yield refuse("mask", self.mask, "must have no window with ring and load_balance='zigzag'", remedy)

    def _terms(self) -> Iterator[Refusal]:
        remedy = f"pass context_strategy={ULYSSES!r}"
        if self.dropout_p:
            rule = (
                f"must be 0 with {self.strategy}, for the kernels count random numbers of a device's own rows and keys"
            )
            yield refuse("dropout_p", self.dropout_p, rule, remedy)
        for name in self.terms:
            rule = f"must be absent with {self.strategy}, for a term counts the positions of a device's own rows"
            yield refuse("score_terms", name, rule, remedy)

    def _ulysses(self) -> Iterator[Refusal]:
        heads, heads_key = self.query[2], self.key[2]
        remedy = f"pass context_strategy={ALL_GATHER!r}"
        if heads % self.size or heads_key == 0 or heads % heads_key:
            rule = f"must be divided by the {self.where}, and by the {heads_key} heads of key"
            yield refuse("heads of query", heads, rule, remedy)
        elif repeats_of_key(heads, heads_key, self.size) is None:
            rule = f"each of {self.where} must have whole groups of the {heads} heads of query"
            yield refuse("heads of key", heads_key, rule, remedy)
