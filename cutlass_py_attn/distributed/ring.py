"""Ring: keys and values travel from rank to rank, and each rank computes its rows with those that come.

Partial outputs are merged in float32 by their logsumexp, and gradients are summed in float32, in the order in which
keys come. NCCL's kernels take multiprocessors: a forward beside them took up to 1.5 times as long. So each turn of the
ring is finished before the next call starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass_py_attn.api.options import Options
from cutlass_py_attn.distributed.machine import Arrays, along
from cutlass_py_attn.distributed.split import OF_KEY, Split, block, keys
from cutlass_py_attn.problem.split_rows import Ring, RingTile, joined


def forward(split: Split, operands: Arrays) -> Arrays:
    """Returns output and logsumexp of a rank's rows: with its own keys first, then with those of the ranks before."""
    machine, ring = split.machine, _ring(split, operands)
    steps = _steps(split, ring)
    coming = {name: operands[name] for name in OF_KEY}
    output, result = split.new_output(operands), split.new_logsumexp(operands)
    own = machine.forward(split.with_options(mask=ring.own_mask()), _own(split, operands), output)
    lines = own["logsumexp"]
    is_merged_once = sum(map(len, steps)) <= 1  # then there is one rounding, from two parts
    total = output if is_merged_once else machine.widened(output)
    for tiles in steps:
        coming, wait = _turn(split, coming, 1)
        wait()
        for tile in tiles:
            part = machine.forward(_options(split, tile), _operands(split, tile, operands, coming))
            rows = along(1, tile.row, tile.row + tile.rows)
            merged = machine.merge(
                total[rows],
                machine.rows_of_logsumexp(lines, tile.row, tile.rows, output.shape[1]),
                part["output"],
                part["logsumexp"],
            )
            machine.put_rows(lines, tile.row, merged, 0, tile.rows)
    if not is_merged_once:
        machine.round_to(total, output)
    machine.put_rows(result, 0, lines, 0, output.shape[1])
    return {"output": output, "logsumexp": result}


def backward(split: Split, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
    """Returns the gradients of a rank's operands by name: of the keys of other ranks first.

    Sums of their gradients travel with them, and then home while the own keys are computed: the backward is hardly
    slower beside NCCL's kernels. Gradients of a bias without rows and of sinks are of all ranks' rows.
    """
    machine, ring = split.machine, _ring(split, operands)
    of_tiles = tuple(name for name in gradients if name != "sinks")
    steps = _steps(split, ring) if of_tiles else []
    targets = {name: split.new_gradient(operands, name) for name in gradients}
    totals = {name: machine.zeros(tuple(operands[name].shape), "float32") for name in of_tiles if name not in OF_KEY}
    sums: Arrays = {}
    coming = {name: operands[name] for name in OF_KEY}
    for tiles in steps:
        moved, wait = _turn(split, {**coming, **{f"sum_{name}": array for name, array in sums.items()}}, 1)
        wait()
        coming = {name: moved[name] for name in OF_KEY}
        sums = {name: moved[f"sum_{name}"] for name in sums} or {
            name: machine.zeros(tuple(operands[name].shape), "float32") for name in of_tiles if name in OF_KEY
        }
        for tile in tiles:
            given = _operands(split, tile, operands, coming)
            found = machine.backward(_options(split, tile), given, of_tiles)
            _add_tile(split, tile, found, totals, sums)
    sums, wait = _turn(split, sums, -len(steps))
    own = machine.backward(split.with_options(mask=ring.own_mask()), _own(split, operands), gradients)
    wait()
    for name in gradients:
        if name in OF_KEY and sums:
            machine.add(sums[name], own[name], targets[name])
        elif name in OF_KEY:
            machine.copy(targets[name], own[name])
        elif name == "query":
            machine.add(totals[name], own[name], targets[name])
        elif name == "sinks":
            machine.sum_over_ranks(own[name], targets[name])
        else:
            _add_own_bias(split, operands, own[name], totals[name])
            is_whole = operands["bias"].shape[2] == 1
            store = machine.sum_over_ranks if is_whole else machine.round_to
            store(totals[name], targets[name])
    return targets


def _ring(split: Split, operands: Arrays) -> Ring:
    """Returns the ring of these operands."""
    rows, count = operands["query"].shape[1], operands["key"].shape[1]
    return Ring(split.size, split.zigzag, split.options.mask, rows, count, "bias" in operands)


def _steps(split: Split, ring: Ring) -> list[list[RingTile]]:
    """Returns this rank's tiles after each turn, as far as a window reaches. All ranks make as many turns."""
    found = []
    for step in range(1, split.size):
        tiles = ring.tiles(split.rank, step, lambda condition, one, other: one if condition else other)
        if tiles:
            found.append(joined([tile for tile in tiles if tile.is_seen], ring.has_bias))
    return found


def _turn(split: Split, arrays: Arrays, distance: int) -> tuple[Arrays, Callable[[], None]]:
    """Sends arrays to the rank that is `distance` further. Returns those that come, and a function that waits."""
    machine, size = split.machine, split.size
    found = {name: machine.empty(tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}
    target, source = (split.rank + distance) % size, (split.rank - distance) % size
    wait = machine.exchange(
        [(target, array) for array in arrays.values()], [(source, array) for array in found.values()]
    )
    return found, wait


def _options(split: Split, tile: RingTile) -> Options:
    """Returns the options of a tile."""
    return split.with_options(mask=tile.mask)


def _operands(split: Split, tile: RingTile, operands: Arrays, coming: Arrays) -> Arrays:
    """Returns the operands of a tile. A sink joins the softmax once, beside a rank's own keys."""
    given = {name: array for name, array in {**operands, **coming}.items() if name != "sinks"}
    return keys(split.rows(given, tile.row, tile.rows), tile.key, tile.key + tile.keys, tile.column)


def _own(split: Split, operands: Arrays) -> Arrays:
    """Returns the operands with a bias of this rank's own keys alone."""
    if "bias" not in operands or operands["bias"].shape[3] == 1:
        return operands
    bias, rows, machine = operands["bias"], operands["key"].shape[1], split.machine
    found = machine.empty((*bias.shape[:3], rows), str(bias.dtype))
    for chunk in split.chunks(rows, split.rank):
        source = bias[along(3, chunk.start, chunk.start + chunk.count)]
        machine.copy(found[along(3, chunk.first, chunk.first + chunk.count)], source)
    return {**operands, "bias": found}


def _add_tile(split: Split, tile: RingTile, found: Arrays, totals: Arrays, sums: Arrays) -> None:
    """Adds the gradients of a tile to the sums."""
    rows, columns = (tile.row, tile.row + tile.rows), (tile.column, tile.column + tile.keys)
    for name, part in found.items():
        if name in OF_KEY:
            total = sums[name][along(1, tile.key, tile.key + tile.keys)]
        elif name == "query":
            total = totals[name][along(1, *rows)]
        else:
            total = block(totals[name], rows, columns)
        split.machine.add(total, part)


def _add_own_bias(split: Split, operands: Arrays, part: Any, total: Any) -> None:
    """Adds the gradient of a bias of this rank's own keys."""
    if total.shape[3] == 1:
        split.machine.add(total, part)
        return
    for chunk in split.chunks(operands["key"].shape[1], split.rank):
        target = total[along(3, chunk.start, chunk.start + chunk.count)]
        split.machine.add(target, part[along(3, chunk.first, chunk.first + chunk.count)])
