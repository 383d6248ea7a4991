"""Ulysses: a call whose rows are split becomes one whose heads are split, by all-to-all exchanges.

Jacobs et al. 2023, DeepSpeed Ulysses. Between the exchanges each rank has all rows of some heads in natural order, so
that every mask and score term is computed as on one device. If the ranks do not divide the key heads, these are
repeated, and the gradients of the copies are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.distributed.communicator import Message
from cutlass_py_attn.distributed.machine import Arrays, along
from cutlass_py_attn.distributed.split import LENGTHS, OF_KEY, OF_LOGSUMEXP, OF_QUERY, Split
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.problem.split_rows import repeats_of_key
from cutlass_py_attn.problem.tensors import LSE_PADDING
from cutlass_py_attn.score_terms.dropout import Dropout

_WORDS = 2**64  # the index of a random word wraps


def forward(split: Split, operands: Arrays) -> Arrays:
    """Returns output and logsumexp of a rank's rows. With packed sequences logsumexp is of all rows and some heads."""
    machine, whole = split.machine, _of_heads(split, operands)
    query, value = whole["query"], whole["value"]
    output = machine.empty((*query.shape[:3], value.shape[3]), str(query.dtype))
    lines = []
    for options, given, item in _calls(split, operands, whole):
        target = output if item is None else output[along(0, item, item + 1)]
        lines.append(machine.forward(options, given, target)["logsumexp"])
    result = split.new_output(operands)
    sends, receives = _to_rows(split, output, result)
    if split.options.sequences is not None:
        machine.exchange(sends, receives)()
        logsumexp = machine.result("logsumexp", tuple(lines[0].shape), "float32")
        machine.copy(logsumexp, lines[0])
        return {"output": result, "logsumexp": logsumexp}
    logsumexp = split.new_logsumexp(operands)
    whole_lines = lines[0] if len(lines) == 1 else _stacked(split, lines)
    more = _lines_to_rows(split, whole_lines, logsumexp, operands["query"].shape[1])
    machine.exchange([*sends, *more[0]], [*receives, *more[1]])()
    return {"output": result, "logsumexp": logsumexp}


def backward(split: Split, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
    """Returns the gradients of a rank's operands by name.

    Those of operands that every rank has whole, a bias without rows and sinks, are whole on every rank.
    """
    machine, whole = split.machine, _of_heads(split, operands)
    found: Arrays = {}
    for options, given, item in _calls(split, operands, whole):
        for name, part in machine.backward(options, given, gradients).items():
            if item is None:
                found[name] = part
            elif name == "sinks" or (name == "bias" and whole["bias"].shape[0] == 1):
                found.setdefault(name, machine.zeros(tuple(part.shape), "float32"))
                machine.add(found[name], part)
            else:
                found.setdefault(name, machine.empty(tuple(whole[name].shape), str(part.dtype)))
                machine.copy(found[name][along(0, item, item + 1)], part)
    targets = {name: split.new_gradient(operands, name) for name in gradients}
    sends: list[Message] = []
    receives: list[Message] = []
    for name in gradients:
        if name == "sinks":
            _share_heads(split, found[name], targets[name], 0)
        elif name == "bias":
            _bias_to_rows(split, found[name], targets[name])
        elif name == "query" or _repeats(split, operands) == 1:
            outgoing, incoming = _to_rows(split, found[name], targets[name])
            sends, receives = [*sends, *outgoing], [*receives, *incoming]
        else:
            _add_copies(split, found[name], targets[name])
    machine.exchange(sends, receives)()
    return targets


def _repeats(split: Split, operands: Arrays) -> int:
    """Returns how often each key head is repeated."""
    return repeats_of_key(operands["query"].shape[2], operands["key"].shape[2], split.size) or 1


def _part(count: int, size: int, rank: int) -> tuple[int, int]:
    """Returns the first of a rank's heads, and one past the last."""
    return count // size * rank, count // size * (rank + 1)


def _of_heads(split: Split, operands: Arrays) -> Arrays:
    """Returns the operands of all rows and this rank's heads."""
    machine, size, rank = split.machine, split.size, split.rank
    found = {name: array for name, array in operands.items() if name in ("alibi_slopes", "sinks")}
    for name, array in found.items():
        axis = len(array.shape) - 1
        found[name] = machine.dense(array[along(axis, *_part(array.shape[axis], size, rank))])
    found |= {name: operands[name] for name in LENGTHS if name in operands}
    sends: list[Message] = []
    receives: list[Message] = []
    for name in (*OF_QUERY, *OF_KEY):
        if name in operands:
            repeats = _repeats(split, operands) if name in OF_KEY else 1
            found[name], outgoing, incoming = _all_rows(split, operands[name], repeats)
            sends, receives = [*sends, *outgoing], [*receives, *incoming]
    for name in OF_LOGSUMEXP:
        if name in operands:
            if split.options.sequences is not None:
                found[name] = operands[name]
                continue
            found[name], outgoing, incoming = _all_lines(split, operands[name], operands["query"].shape[1])
            sends, receives = [*sends, *outgoing], [*receives, *incoming]
    if "bias" in operands:
        found["bias"], outgoing, incoming = _bias_of_heads(split, operands["bias"])
        sends, receives = [*sends, *outgoing], [*receives, *incoming]
    machine.exchange(sends, receives)()
    return found


def _heads_of(heads: int, repeats: int, size: int, rank: int) -> list[tuple[int, int]]:
    """Returns the runs of heads that a rank gets, as ranges; a repeated head is a run of its own."""
    if repeats == 1:
        return [_part(heads, size, rank)]
    first, last = _part(heads * repeats, size, rank)
    return [(number // repeats, number // repeats + 1) for number in range(first, last)]


def _all_rows(split: Split, array: Any, repeats: int) -> tuple[Any, list[Message], list[Message]]:
    """Returns an array for all rows of this rank's heads, and the messages that fill it."""
    batch, rows, heads, columns = array.shape
    runs = _heads_of(heads, repeats, split.size, split.rank)
    count = sum(last - first for first, last in runs)
    whole = split.machine.empty((batch, rows * split.size, count, columns), str(array.dtype))
    sends, receives = [], []
    for rank in range(split.size):
        for own in split.chunks(rows, split.rank):
            part = array[along(1, own.first, own.first + own.count)]
            sends += [(rank, part[along(2, *run)]) for run in _heads_of(heads, repeats, split.size, rank)]
        for theirs in split.chunks(rows, rank):
            part = whole[along(1, theirs.start, theirs.start + theirs.count)]
            receives += [(rank, part[along(2, *place)]) for place in _places(runs)]
    return whole, sends, receives


def _places(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields where runs of heads lie that follow each other."""
    start = 0
    for first, last in runs:
        yield start, start + last - first
        start += last - first


def _to_rows(split: Split, whole: Any, target: Any) -> tuple[list[Message], list[Message]]:
    """Returns the messages that fill a rank's rows of all heads from all rows of some heads."""
    rows, sends, receives = target.shape[1], [], []
    for rank in range(split.size):
        for theirs in split.chunks(rows, rank):
            sends.append((rank, whole[along(1, theirs.start, theirs.start + theirs.count)]))
        heads = along(2, *_part(target.shape[2], split.size, rank))
        for own in split.chunks(rows, split.rank):
            receives.append((rank, target[along(1, own.first, own.first + own.count)][heads]))
    return sends, receives


def _add_copies(split: Split, whole: Any, target: Any) -> None:
    """Stores the sums of the gradients of repeated key heads, in the order of the copies."""
    machine, (batch, rows, heads, columns) = split.machine, target.shape
    repeats = math.lcm(heads, split.size) // heads
    sends, receives, pieces = [], [], []
    for rank in range(split.size):
        for theirs in split.chunks(rows, rank):
            sends.append((rank, whole[along(1, theirs.start, theirs.start + theirs.count)]))
        runs = _heads_of(heads, repeats, split.size, rank)
        for own in split.chunks(rows, split.rank):
            piece = machine.empty((batch, own.count, len(runs), columns), str(target.dtype))
            receives.append((rank, piece))
            pieces += [(own, run, piece[along(2, *place)]) for run, place in zip(runs, _places(runs), strict=True)]
    machine.exchange(sends, receives)()
    total = machine.zeros(tuple(target.shape), "float32")
    for own, run, piece in pieces:
        machine.add(total[along(1, own.first, own.first + own.count)][along(2, *run)], piece)
    machine.round_to(total, target)


def _all_lines(split: Split, lines: Any, rows: int) -> tuple[Any, list[Message], list[Message]]:
    """Returns an array for a logsumexp of all rows of this rank's heads, and the messages that fill it."""
    batch, heads, _ = lines.shape
    whole = split.machine.empty((batch, heads // split.size, round_up(rows * split.size, LSE_PADDING)), "float32")
    split.machine.fill_infinite(whole)
    sends, receives = [], []
    for rank in range(split.size):
        part = lines[along(1, *_part(heads, split.size, rank))]
        sends += [(rank, part[along(2, it.first, it.first + it.count)]) for it in split.chunks(rows, split.rank)]
        receives += [(rank, whole[along(2, it.start, it.start + it.count)]) for it in split.chunks(rows, rank)]
    return whole, sends, receives


def _lines_to_rows(split: Split, whole: Any, target: Any, rows: int) -> tuple[list[Message], list[Message]]:
    """Returns the messages that fill a logsumexp of a rank's rows from that of all rows of some heads."""
    sends, receives = [], []
    for rank in range(split.size):
        sends += [(rank, whole[along(2, it.start, it.start + it.count)]) for it in split.chunks(rows, rank)]
        part = target[along(1, *_part(target.shape[1], split.size, rank))]
        receives += [(rank, part[along(2, it.first, it.first + it.count)]) for it in split.chunks(rows, split.rank)]
    return sends, receives


def _stacked(split: Split, lines: list[Any]) -> Any:
    """Returns the logsumexps of the items of a batch as one."""
    found = split.machine.empty((len(lines), *lines[0].shape[1:]), "float32")
    for item, part in enumerate(lines):
        split.machine.copy(found[along(0, item, item + 1)], part)
    return found


def _bias_of_heads(split: Split, bias: Any) -> tuple[Any, list[Message], list[Message]]:
    """Returns a bias of all rows and this rank's heads, and the messages that fill it."""
    size, rank, (batch, heads, rows, columns) = split.size, split.rank, bias.shape
    own = _part(heads, size, rank) if heads > 1 else (0, 1)
    if rows == 1:
        return split.machine.dense(bias[along(1, *own)]), [], []
    whole = split.machine.empty((batch, own[1] - own[0], rows * size, columns), str(bias.dtype))
    sends, receives = [], []
    for other in range(size):
        part = bias[along(1, *(_part(heads, size, other) if heads > 1 else (0, 1)))]
        sends += [(other, part[along(2, it.first, it.first + it.count)]) for it in split.chunks(rows, rank)]
        receives += [(other, whole[along(2, it.start, it.start + it.count)]) for it in split.chunks(rows, other)]
    return whole, sends, receives


def _bias_to_rows(split: Split, whole: Any, target: Any) -> None:
    """Stores the gradient of a bias from that of all rows and this rank's heads; sums over heads if it has none."""
    machine, (_, heads, rows, _) = split.machine, target.shape
    if rows == 1 and heads == 1:
        machine.sum_over_ranks(whole, target)
        return
    if rows == 1:
        _share_heads(split, whole, target, 1)
        return
    if heads > 1:
        whole = _rounded(split, whole, target)
    sends, receives, pieces = [], [], []
    for rank in range(split.size):
        sends += [(rank, whole[along(2, it.start, it.start + it.count)]) for it in split.chunks(rows, rank)]
        part = target[along(1, *_part(heads, split.size, rank))] if heads > 1 else None
        if part is None:
            part = machine.empty(tuple(target.shape), str(whole.dtype))
            pieces.append(part)
        receives += [(rank, part[along(2, it.first, it.first + it.count)]) for it in split.chunks(rows, split.rank)]
    machine.exchange(sends, receives)()
    if pieces:
        machine.add_all(pieces, target)


def _share_heads(split: Split, part: Any, target: Any, axis: int) -> None:
    """Stores every rank's heads of an array on every rank. axis: that of the heads."""
    machine, ranks, part = split.machine, range(split.size), _rounded(split, part, target)
    places = [target[along(axis, *_part(target.shape[axis], split.size, rank))] for rank in ranks]
    machine.exchange([(rank, part) for rank in ranks], [*zip(ranks, places, strict=True)])()


def _rounded(split: Split, part: Any, target: Any) -> Any:
    """Returns a float32 sum in the dtype of another array, and an array of that dtype as it is."""
    if str(part.dtype) == str(target.dtype):
        return part
    found = split.machine.empty(tuple(part.shape), str(target.dtype))
    split.machine.round_to(part, found)
    return found


def _calls(split: Split, operands: Arrays, whole: Arrays) -> Iterator[tuple[Options, Arrays, int | None]]:
    """Yields options, operands and item of the batch of each call; None for the whole batch.

    Word (b heads + h) queries keys + ... of the random numbers belongs to head h of item b. A call of some heads of
    several items would need two distances of the words, so that each item is a call of its own.
    """
    dropout = split.options.dropout
    if dropout is None or not dropout.is_active:
        yield split.options, whole, None
        return
    batch, rows, heads, _ = whole["query"].shape
    longest = rows, whole["key"].shape[1]
    if isinstance(split.options.sequences, VariableLength):
        longest = int(split.options.sequences.max_seqlen_q), int(split.options.sequences.max_seqlen_k)
    for item in range(batch):
        first_head = item * operands["query"].shape[2] + split.rank * heads
        offset = (int(dropout.philox_offset) + first_head * longest[0] * longest[1]) % _WORDS
        options = split.with_options(dropout=Dropout(dropout.dropout_p, dropout.philox_seed, offset))
        yield options, {name: _item(name, array, item) for name, array in whole.items()}, item


def _item(name: str, array: Any, item: int) -> Any:
    """Returns an operand of one item of the batch; one that all items share as it is."""
    is_shared = name == "sinks" or (name == "alibi_slopes" and len(array.shape) == 1)
    is_shared = is_shared or name in LENGTHS or array.shape[0] == 1
    return array if is_shared else array[along(0, item, item + 1)]
