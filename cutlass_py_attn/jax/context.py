"""Context parallelism: one attention call whose rows are split over a mesh axis, inside jax.shard_map.

Each device has some rows of query, key and value. `all_gather` gathers keys and values, `ulysses` (Jacobs et al. 2023,
DeepSpeed Ulysses) exchanges rows for heads, and `ring` (Liu et al. 2023, Ring Attention) passes keys and values from
device to device. Partial outputs are merged in float32 by their logsumexp, in a fixed order:

    logsumexp = log(exp(l_1) + exp(l_2)),   O = exp(l_1 - logsumexp) O_1 + exp(l_2 - logsumexp) O_2

The backward of a part takes the output and the logsumexp of all parts: P_ij = exp(S_ij - logsumexp_i) is the weight
among all keys, and delta_i = rowsum(dO_i O_i) concerns all keys too. So the gradients of the parts add up, and no part
needs a gradient of its own logsumexp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.jax.call_primitive import bind
from cutlass_py_attn.jax.calls import RESULTS, Call
from cutlass_py_attn.jax.rows import Context
from cutlass_py_attn.problem.masks import CausalBottomRight, Mask
from cutlass_py_attn.problem.split_rows import RING, Chunk, Ring, RingTile, is_causal, keys_around, window_of
from cutlass_py_attn.problem.tensors import LSE_PADDING

Arrays = dict[str, Any]

_OF_KEY: Final = ("key", "value")
_OF_QUERY: Final = ("query", "output", "grad_output")
_OF_LOGSUMEXP: Final = ("logsumexp", "grad_logsumexp")
_MOST_UNROLLED: Final = 7  # turns of a ring: those of the GPUs of one host, which were measured so


def run(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    """Returns the results of a device's rows by name, as `calls.run` does.

    operands: the device's. With variable lengths logsumexp has an axis in front, of the device's runs of rows.
    """
    assert call.context is not None
    split, whole = call.context, dataclasses.replace(call, context=None)
    if not gradients:
        forward = _ring_forward if split.strategy == RING else _gathered_forward
        return dict(zip(RESULTS, forward(split, whole, operands), strict=True))
    backward = _ring_backward if split.strategy == RING else _gathered_backward
    results = backward(split, whole, operands, gradients)
    return {f"grad_{name}": results[name].astype(operands[name].dtype) for name in gradients}


def _run(call: Call, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
    """Returns output and logsumexp, or the gradients by the operand's name, of one call of one device."""
    results = bind(call, gradients, operands)
    return {name.removeprefix("grad_"): array for name, array in results.items()}


def _padded(logsumexp: Any) -> Any:
    """Pads the rows of logsumexp, or of its gradient, with +inf to a multiple of LSE_PADDING."""
    rows = logsumexp.shape[2]
    padding = (0, 0), (0, 0), (0, round_up(rows, LSE_PADDING) - rows)
    return jnp.pad(logsumexp, padding, constant_values=np.inf)


def _cut(operands: Arrays, names: Sequence[str], first: Any, count: int, axis: int) -> Arrays:
    """Returns those operands' elements from `first`, which may be traced, along an axis; whole arrays as they are."""
    found = {}
    for name in names:
        array = operands.get(name)
        if array is not None:
            is_whole = isinstance(first, int) and first == 0 and count == array.shape[axis]
            found[name] = array if is_whole else jax.lax.dynamic_slice_in_dim(array, first, count, axis)
    return found


def _rows(operands: Arrays, first: Any, count: int) -> Arrays:
    """Returns the operands of some rows of query, with all keys."""
    found = {**operands, **_cut(operands, _OF_QUERY, first, count, 1)}
    lines = _cut(operands, _OF_LOGSUMEXP, first, count, 2)
    found |= {name: _padded(array) for name, array in lines.items()}
    if "bias" in found and found["bias"].shape[2] > 1:
        found |= _cut(found, ("bias",), first, count, 2)
    return found


def _add(total: Any, part: Any, first: Any, axis: int) -> Any:
    """Returns `total`, to which a part is added from `first` on, which may be traced."""
    if part.shape[axis] == total.shape[axis]:
        return total + part
    own = jax.lax.dynamic_slice_in_dim(total, first, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, own + part, first, axis)


# All-gather of keys and values


def _gathered_forward(context: Context, call: Call, operands: Arrays) -> tuple[Any, Any]:
    whole = _with_all_keys(context, operands)
    found = [_of_chunk(context, call, whole, number, ()) for number in range(len(_chunks(context, call, operands)))]
    output = jnp.concatenate([results["output"] for results in found], 1)
    if call.max_seqlens is not None:
        return output, jnp.stack([results["logsumexp"] for results in found])
    lines = [results["logsumexp"][:, :, : results["output"].shape[1]] for results in found]
    return output, _padded(jnp.concatenate(lines, 2))


def _gathered_backward(context: Context, call: Call, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
    whole = _with_all_keys(context, operands)
    count = len(_chunks(context, call, operands))
    found = [_of_chunk(context, call, whole, number, gradients) for number in range(count)]
    results = {}
    for name in gradients:
        parts = [each[name] for each in found]
        if name == "query":
            results[name] = jnp.concatenate(parts, 1)
        elif name == "bias" and operands["bias"].shape[2] > 1:
            results[name] = jnp.concatenate(parts, 2)
        else:
            results[name] = sum(part.astype(jnp.float32) for part in parts)
        if name in _OF_KEY:
            ordered = context.from_natural(results[name], 1)
            results[name] = jax.lax.psum_scatter(ordered, context.axis, scatter_dimension=1, tiled=True)
    return results


def _with_all_keys(context: Context, operands: Arrays) -> Arrays:
    """Returns the operands with the keys and values of all devices, in natural order."""
    whole = {name: jax.lax.all_gather(operands[name], context.axis, axis=1, tiled=True) for name in _OF_KEY}
    return {**operands, **{name: context.to_natural(array, 1) for name, array in whole.items()}}


def _chunks(context: Context, call: Call, operands: Arrays, device: Any = 0) -> list[Chunk]:
    """Returns the runs of rows that are one call each."""
    rows = operands["query"].shape[1]
    if call.mask.form.sees_all and call.max_seqlens is None:  # no position counts
        return [Chunk(0, rows, 0)]
    return context.chunks(rows, device)


def _of_chunk(context: Context, call: Call, whole: Arrays, number: int, gradients: tuple[str, ...]) -> Arrays:
    """Returns the results of one run of this device's rows, with all keys."""
    chunk = _chunks(context, call, whole, context.rank())[number]
    if call.max_seqlens is not None:
        return _of_documents(call, whole, chunk, number, gradients)
    operands = _rows(whole, chunk.first, chunk.count)
    if call.mask.form.sees_all:
        return _run(call, operands, gradients)
    if is_causal(call.mask):
        return _with_keys_until(call, operands, chunk.start + chunk.count, gradients)
    starts = [_chunks(context, call, whole, device)[number].start for device in range(context.size)]
    branches = [_with_keys_around(call, start, gradients) for start in starts]
    found: Arrays = jax.lax.switch(context.rank(), branches, operands)
    return found


def _with_keys_until(call: Call, operands: Arrays, end: Any, gradients: tuple[str, ...]) -> Arrays:
    """Computes rows whose last one sees the keys before `end`, which is traced.

    The batch is one of variable-length sequences, whose numbers of used keys are device data. The causal diagonal ends
    in the last row and the last used key, and ALiBi counts from there too.
    """
    batch, rows = operands["query"].shape[:2]
    keys = operands["key"].shape[1]
    bounds = np.arange(batch + 1, dtype=np.int32)
    lengths = {
        "cu_seqlens_q": jnp.asarray(bounds * rows),
        "cu_seqlens_k": jnp.asarray(bounds * keys),
        "seqused_k": jnp.full((batch,), end, jnp.int32),
    }
    packed: Arrays = {
        name: operands[name].reshape(1, -1, *operands[name].shape[2:])
        for name in (*_OF_QUERY, *_OF_KEY)
        if name in operands
    }
    mask = CausalBottomRight(window_of(call.mask))
    found = _run(
        dataclasses.replace(call, mask=mask, max_seqlens=(rows, keys)), {**operands, **packed, **lengths}, gradients
    )
    return {
        name: array.reshape(batch, -1, *array.shape[2:]) if name in (*_OF_QUERY, *_OF_KEY) else array
        for name, array in found.items()
    }


def _with_keys_around(call: Call, start: int, gradients: tuple[str, ...]) -> Callable[[Arrays], Arrays]:
    """Returns a function that computes rows from `start` on with the keys that their windows reach."""

    def compute(operands: Arrays) -> Arrays:
        rows, keys = operands["query"].shape[1], operands["key"].shape[1]
        first, last, mask = keys_around(call.mask, start, rows, keys)
        own = {**operands, **_cut(operands, _OF_KEY, first, last - first, 1)}
        if "bias" in own and own["bias"].shape[3] > 1:
            own |= _cut(own, ("bias",), first, last - first, 3)
        found = _run(dataclasses.replace(call, mask=mask), own, gradients)
        for name, axis in (("key", 1), ("value", 1), ("bias", 3)):
            if name in found and operands[name].shape[axis] > 1:
                outside = [(0, 0)] * 4
                outside[axis] = first, keys - last
                found[name] = jnp.pad(found[name], outside)
        return found

    return compute


def _of_documents(call: Call, whole: Arrays, chunk: Chunk, number: int, gradients: tuple[str, ...]) -> Arrays:
    """Computes a run of rows of packed sequences: each sequence has those of its rows that lie in the run."""
    longest = call.max_seqlens or (0, 0)
    queries, keys = whole["cu_seqlens_q"], whole["cu_seqlens_k"]
    operands = {**whole, **_cut(whole, _OF_QUERY, chunk.first, chunk.count, 1)}
    operands["cu_seqlens_q"] = jnp.clip(queries - chunk.start, 0, chunk.count).astype(jnp.int32)
    if is_causal(call.mask):
        used = jnp.minimum(queries[1:], chunk.start + chunk.count) - queries[:-1]  # up to its last row here
        if call.mask.bottom_right:
            used += whole.get("seqused_k", keys[1:] - keys[:-1]) - (queries[1:] - queries[:-1])
        call = dataclasses.replace(call, mask=CausalBottomRight(window_of(call.mask)))
        operands["seqused_k"] = jnp.maximum(used, 0).astype(jnp.int32)
    if gradients:
        operands["logsumexp"] = whole["logsumexp"][number]
    longest = min(longest[0], chunk.count), longest[1]
    return _run(dataclasses.replace(call, max_seqlens=longest), operands, gradients)


# Ring


@dataclass(frozen=True, slots=True)
class _Part:
    """Attention over some keys. output: (batch, rows, heads, columns) float32; logsumexp: (batch, heads, rows)."""

    output: Any
    logsumexp: Any

    @staticmethod
    def of(results: Arrays) -> _Part:
        """Returns the results of a call."""
        output = results["output"]
        return _Part(output.astype(jnp.float32), results["logsumexp"][:, :, : output.shape[1]])

    def merged(self, other: _Part) -> _Part:
        """Returns the attention over the keys of both parts."""
        top = jnp.maximum(self.logsumexp, other.logsumexp)
        finite = jnp.where(jnp.isneginf(top), 0, top)  # -inf - -inf is NaN
        weights = [jnp.exp(part.logsumexp - finite) for part in (self, other)]
        total = weights[0] + weights[1]
        shares = [jnp.swapaxes(weight / jnp.where(total == 0, 1, total), 1, 2)[..., None] for weight in weights]
        line = jnp.where(total == 0, -jnp.inf, finite + jnp.log(jnp.where(total == 0, 1, total)))
        return _Part(shares[0] * self.output + shares[1] * other.output, line)

    def with_rows(self, tile: RingTile, part: _Part) -> _Part:
        """Returns this part, with another one of a tile's rows merged into it."""
        own = _cut({"output": self.output}, ("output",), tile.row, tile.rows, 1)["output"]
        line = _cut({"logsumexp": self.logsumexp}, ("logsumexp",), tile.row, tile.rows, 2)["logsumexp"]
        part = _Part(part.output, jnp.where(tile.is_seen, part.logsumexp, -jnp.inf))
        both = _Part(own, line).merged(part)
        if tile.rows == self.output.shape[1]:
            return both
        return _Part(
            jax.lax.dynamic_update_slice_in_dim(self.output, both.output, tile.row, 1),
            jax.lax.dynamic_update_slice_in_dim(self.logsumexp, both.logsumexp, tile.row, 2),
        )


def _operands_of(tile: RingTile, given: Arrays) -> Arrays:
    """Returns a tile's operands. In a tile that is not seen a logsumexp of +inf makes every weight 0."""
    found = _rows(given, tile.row, tile.rows)
    found |= _cut(given, _OF_KEY, tile.key, tile.keys, 1)
    if "bias" in found and found["bias"].shape[3] > 1:
        found |= _cut(found, ("bias",), tile.column, tile.keys, 3)
    if "logsumexp" in found:
        found["logsumexp"] = jnp.where(tile.is_seen, found["logsumexp"], jnp.inf)
    return found


def _ring(context: Context, mask: Mask, operands: Arrays) -> Ring:
    """Returns the ring of these operands."""
    rows, keys = operands["query"].shape[1], operands["key"].shape[1]
    return Ring(context.size, context.zigzag, mask, rows, keys, "bias" in operands)


def _results_of(call: Call, tiles: list[RingTile], operands: Arrays, gradients: tuple[str, ...]) -> list[Arrays]:
    """Returns the results of each tile, by one call if they have the same mask and no bias."""
    given = [_operands_of(tile, operands) for tile in tiles]
    call = dataclasses.replace(call, mask=tiles[0].mask)
    if len(tiles) == 1 or "bias" in operands:
        return [_run(call, each, gradients) for each in given]
    stacked = {name: jnp.concatenate([each[name] for each in given]) for name in given[0]}
    found = {name: jnp.split(array, len(tiles)) for name, array in _run(call, stacked, gradients).items()}
    return [{name: parts[number] for name, parts in found.items()} for number in range(len(tiles))]


def _own(context: Context, operands: Arrays) -> Arrays:
    """Returns the operands with a bias of this device's own keys alone."""
    if "bias" not in operands or operands["bias"].shape[3] == 1:
        return operands
    chunks = context.chunks(operands["key"].shape[1], context.rank())
    parts = [jax.lax.dynamic_slice_in_dim(operands["bias"], chunk.start, chunk.count, 3) for chunk in chunks]
    return {**operands, "bias": jnp.concatenate(parts, 3)}


def _own_call(context: Context, call: Call, operands: Arrays) -> Call:
    """Returns the call of a device's rows and its own keys."""
    return dataclasses.replace(call, mask=_ring(context, call.mask, operands).own_mask())


def _of_others(operands: Arrays, keys: Arrays) -> Arrays:
    """Returns the operands with the keys of another device. A sink joins the softmax once, beside a device's own."""
    return {name: array for name, array in {**operands, **keys}.items() if name != "sinks"}


def _steps(context: Context, mask: Mask, operands: Arrays) -> list[list[RingTile]]:
    """Returns the tiles after each turn of the ring, as far as a window reaches."""
    ring, rank = _ring(context, mask, operands), context.rank()
    turns = (ring.tiles(rank, step, jnp.where) for step in range(1, context.size))
    return [tiles for tiles in turns if tiles]


def _send(context: Context, arrays: Arrays, distance: int = 1) -> Arrays:
    """Sends arrays to the device that is `distance` further, and returns those that come."""
    pairs = [(number, (number + distance) % context.size) for number in range(context.size)]
    return {name: jax.lax.ppermute(array, context.axis, pairs) for name, array in arrays.items()}


def _ring_forward(context: Context, call: Call, operands: Arrays) -> tuple[Any, Any]:
    """Computes a device's own keys first, then those of the devices before it.

    NCCL's kernels take multiprocessors: a forward beside them took up to 1.5 times as long, because its blocks are as
    many as multiprocessors. So each turn of the ring is finished before the next call starts.
    """
    steps = _steps(context, call.mask, operands)
    own, coming = operands, {name: operands[name] for name in _OF_KEY}
    if steps:
        coming = _send(context, coming)
        own, coming = jax.lax.optimization_barrier((own, coming))

    def turn(tiles: list[RingTile], coming: Arrays, total: _Part) -> tuple[Arrays, _Part]:
        given, coming = jax.lax.optimization_barrier((_of_others(own, coming), _send(context, coming)))
        return coming, _merged(call, tiles, given, total)

    total = _Part.of(_run(_own_call(context, call, operands), _own(context, own), ()))
    if _is_loop(context, call.mask, steps):
        ring, rank = _ring(context, call.mask, operands), context.rank()

        def body(step: Any, carry: tuple[Arrays, Any, Any]) -> tuple[Arrays, Any, Any]:
            coming, total = turn(ring.tiles(rank, step, jnp.where), carry[0], _Part(*carry[1:]))
            return coming, total.output, total.logsumexp

        coming, *parts = jax.lax.fori_loop(1, len(steps), body, (coming, total.output, total.logsumexp))
        total, steps = _Part(*parts), steps[-1:]
    for tiles in steps[:-1]:
        coming, total = turn(tiles, coming, total)
    if steps:
        total = _merged(call, steps[-1], _of_others(own, coming), total)
    return total.output.astype(operands["query"].dtype), _padded(total.logsumexp)


def _merged(call: Call, tiles: list[RingTile], given: Arrays, total: _Part) -> _Part:
    """Returns a part with the attention of tiles merged into it."""
    for tile, results in zip(tiles, _results_of(call, tiles, given, ()), strict=True):
        total = total.with_rows(tile, _Part.of(results))
    return total


def _is_loop(context: Context, mask: Mask, steps: list[list[RingTile]]) -> bool:
    """Returns whether the turns of a ring are a loop of the program, because they are many.

    Without a window all turns have tiles of the same sizes. Unrolled, a program has the kernels of each turn, and is
    compiled in a time that grows with the number of devices.
    """
    return len(steps) > _MOST_UNROLLED and window_of(mask) is None


def _ring_backward(context: Context, call: Call, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
    """Computes the keys of other devices first. Sums of their gradients travel with them, and then home.

    A device's own keys come last, while the sums travel home: the backward is hardly slower beside NCCL's kernels.
    """
    of_tiles = tuple(name for name in gradients if name != "sinks")
    steps = _steps(context, call.mask, operands) if of_tiles else []
    total = {name: jnp.zeros(operands[name].shape, jnp.float32) for name in of_tiles if name not in _OF_KEY}
    sums: Arrays = {}
    own, coming = operands, {name: operands[name] for name in _OF_KEY}

    def turn(tiles: list[RingTile], coming: Arrays, sums: Arrays, total: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        coming, sums = _send(context, coming), _send(context, sums)
        found = _results_of(call, tiles, _of_others(operands, coming), of_tiles)
        zeros = {name: jnp.zeros(operands[name].shape, jnp.float32) for name in of_tiles if name in _OF_KEY}
        for tile, results in zip(tiles, found, strict=True):
            wide = {name: array.astype(jnp.float32) for name, array in results.items()}
            for name in zeros:
                zeros[name] = _add(zeros[name], wide[name], tile.key, 1)
            total = _with_tile(total, tile, wide)
        return coming, {name: sums[name] + zeros[name] if sums else zeros[name] for name in zeros}, total

    is_loop = _is_loop(context, call.mask, steps)
    for tiles in steps[:1] if is_loop else steps:  # the first turn has no sums to send
        coming, sums, total = turn(tiles, coming, sums, total)
    if is_loop:
        ring, rank = _ring(context, call.mask, operands), context.rank()

        def body(step: Any, carry: tuple[Arrays, Arrays, Arrays]) -> tuple[Arrays, Arrays, Arrays]:
            return turn(ring.tiles(rank, step, jnp.where), *carry)

        coming, sums, total = jax.lax.fori_loop(2, len(steps) + 1, body, (coming, sums, total))
    if steps:
        own, total, sums = jax.lax.optimization_barrier((own, total, sums))
        sums = _send(context, sums, -len(steps))
    results = _run(_own_call(context, call, operands), _own(context, own), gradients)
    wide = {name: array.astype(jnp.float32) for name, array in results.items()}
    if "bias" in total and operands["bias"].shape[3] > 1:
        bias = wide.pop("bias")
        for chunk in context.chunks(operands["key"].shape[1], context.rank()):
            part = jax.lax.slice_in_dim(bias, chunk.first, chunk.first + chunk.count, axis=3)
            total["bias"] = _add(total["bias"], part, chunk.start, 3)
    return {name: sum(part[name] for part in (total, wide, sums) if name in part) for name in gradients}


def _with_tile(total: Arrays, tile: RingTile, results: Arrays) -> Arrays:
    """Returns the gradients of query and bias with those of a tile added."""
    found = dict(total)
    if "query" in total:
        found["query"] = _add(total["query"], results["query"], tile.row, 1)
    if "bias" in total:
        found["bias"] = _add_block(total["bias"], results["bias"], (tile.row, tile.column))
    return found


def _add_block(total: Any, part: Any, starts: tuple[Any, Any]) -> Any:
    """Returns a bias's gradient with that of some rows and columns added; an axis of size 1 is not cut."""
    at = [jnp.int32(0), jnp.int32(0)]
    at += [jnp.asarray(start if size > 1 else 0, jnp.int32)
           for start, size in zip(starts, total.shape[2:], strict=True)]  # fmt: skip
    own = jax.lax.dynamic_slice(total, at, part.shape)
    return jax.lax.dynamic_update_slice(total, own + part, at)
