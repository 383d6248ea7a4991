"""All-gather: every rank gets the keys and values of all, and computes its own rows.

The runs of a rank's rows are one call each, on the keys that their rows see: a causal diagonal ends in the last row and
the last of these keys, and ALiBi counts from there too. The gradients of keys are summed in float32, in the order of
the ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutlass_py_attn.api.options import Options, VariableLength
from cutlass_py_attn.distributed.machine import Arrays, along
from cutlass_py_attn.distributed.split import OF_KEY, OF_QUERY, Split, block, keys
from cutlass_py_attn.problem.masks import CausalBottomRight
from cutlass_py_attn.problem.split_rows import Chunk, is_causal, keys_around, window_of


def forward(split: Split, operands: Arrays) -> Arrays:
    """Returns output and logsumexp of a rank's rows.

    With packed sequences logsumexp has an axis in front, of the rank's runs of rows.
    """
    machine, whole = split.machine, _with_all_keys(split, operands)
    output = split.new_output(operands)
    found = []
    for chunk in _chunks(split, operands):
        options, given, _ = _of_chunk(split, whole, chunk, None)
        target = output[along(1, chunk.first, chunk.first + chunk.count)]
        found.append((chunk, machine.forward(options, given, target)["logsumexp"]))
    if split.options.sequences is not None:
        logsumexp = machine.result("logsumexp", (len(found), *found[0][1].shape), "float32")
        for number, (_, lines) in enumerate(found):
            machine.copy(logsumexp[along(0, number, number + 1)], lines.reshape((1, *lines.shape)))
        return {"output": output, "logsumexp": logsumexp}
    logsumexp = split.new_logsumexp(operands)
    for chunk, lines in found:
        machine.put_rows(logsumexp, chunk.first, lines, 0, chunk.count)
    return {"output": output, "logsumexp": logsumexp}


def backward(split: Split, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
    """Returns the gradients of a rank's operands by name.

    Those of operands that every rank has whole, a bias without rows and sinks, are of all ranks' rows.
    """
    machine, whole = split.machine, _with_all_keys(split, operands)
    targets = {name: split.new_gradient(operands, name) for name in gradients}
    totals = {
        name: machine.zeros(tuple(whole[name].shape), "float32")
        for name in gradients
        if name != "query" and not (name == "bias" and _has_rows(operands))
    }
    if "bias" in targets and "bias" not in totals:  # a run of rows does not see all keys
        machine.copy(targets["bias"], machine.zeros(tuple(targets["bias"].shape), str(targets["bias"].dtype)))
    for number, chunk in enumerate(_chunks(split, operands)):
        options, given, (first, last) = _of_chunk(split, whole, chunk, number)
        rows = chunk.first, chunk.first + chunk.count
        for name, part in machine.backward(options, given, gradients).items():
            if name == "query":
                machine.copy(targets[name][along(1, *rows)], part)
            elif name == "bias" and name not in totals:
                machine.copy(block(targets[name], rows, (first, last)), part)
            else:
                total = totals[name][along(1, first, last)] if name in OF_KEY else totals[name]
                machine.add(block(total, rows, (first, last)) if name == "bias" else total, part)
    _reduce(split, [(totals[name], targets[name]) for name in gradients if name in OF_KEY])
    for name in gradients:
        if name in totals and name not in OF_KEY:
            machine.sum_over_ranks(totals[name], targets[name])
    return targets


def _has_rows(operands: Arrays) -> bool:
    """Returns whether each rank has rows of the bias of its own."""
    return bool(operands["bias"].shape[2] > 1)


def _with_all_keys(split: Split, operands: Arrays) -> Arrays:
    """Returns the operands with the keys and values of all ranks, in natural order."""
    machine, whole = split.machine, dict(operands)
    sends, receives = [], []
    for name in OF_KEY:
        array = operands[name]
        batch, rows, heads, columns = array.shape
        whole[name] = machine.empty((batch, rows * split.size, heads, columns), str(array.dtype))
        parts = [array[along(1, own.first, own.first + own.count)] for own in split.chunks(rows, split.rank)]
        for rank in range(split.size):
            sends += [(rank, part) for part in parts]
            receives += [
                (rank, whole[name][along(1, it.start, it.start + it.count)]) for it in split.chunks(rows, rank)
            ]
    machine.exchange(sends, receives)()
    return whole


def _reduce(split: Split, pairs: list[tuple[Any, Any]]) -> None:
    """Stores sums of all ranks' gradients of this rank's keys, added in the order of the ranks.

    pairs: the rank's own gradients of all keys, and the array for the sum
    """
    machine = split.machine
    sends, receives = [], []
    sums: list[tuple[list[Any], Any]] = []  # pieces of all ranks, and the array for their sum
    for total, target in pairs:
        rows = target.shape[1]
        owns = split.chunks(rows, split.rank)
        pieces: list[list[Any]] = [[] for _ in owns]
        for rank in range(split.size):
            for theirs, own, of_chunk in zip(split.chunks(rows, rank), owns, pieces, strict=True):
                of_chunk.append(machine.empty((target.shape[0], own.count, *target.shape[2:]), "float32"))
                sends.append((rank, total[along(1, theirs.start, theirs.start + theirs.count)]))
                receives.append((rank, of_chunk[-1]))
        sums += [
            (of_chunk, target[along(1, own.first, own.first + own.count)])
            for own, of_chunk in zip(owns, pieces, strict=True)
        ]
    machine.exchange(sends, receives)()
    for of_chunk, target in sums:
        machine.add_all(of_chunk, target)


def _chunks(split: Split, operands: Arrays) -> list[Chunk]:
    """Returns the runs of rows that are one call each."""
    rows = operands["query"].shape[1]
    if split.options.mask.form.sees_all and split.options.sequences is None:  # no position counts
        return [Chunk(0, rows, 0)]
    return split.chunks(rows, split.rank)


def _of_chunk(split: Split, whole: Arrays, chunk: Chunk, number: int | None) -> tuple[Options, Arrays, tuple[int, int]]:
    """Returns options and operands of one run of rows, and the range of keys that its rows see.

    number: of the run, in a backward; None in a forward
    """
    count, mask = whole["key"].shape[1], split.options.mask
    if split.options.sequences is not None:
        return (*_of_documents(split, whole, chunk, number), (0, count))
    operands = split.rows(whole, chunk.first, chunk.count)
    if mask.form.sees_all:
        return split.options, operands, (0, count)
    first, last, mask = keys_around(mask, chunk.start, chunk.count, count)
    return split.with_options(mask=mask), keys(operands, first, last, first), (first, last)


def _of_documents(split: Split, whole: Arrays, chunk: Chunk, number: int | None) -> tuple[Options, Arrays]:
    """Returns the call of a run of rows of packed sequences: each has those of its rows that lie in the run."""
    given, mask = split.options.sequences, split.options.mask
    assert isinstance(given, VariableLength)
    queries, starts = (np.asarray(it, np.int64) for it in (given.cu_seqlens_q, given.cu_seqlens_k))
    used = np.diff(starts) if given.seqused_k is None else np.asarray(given.seqused_k, np.int64)
    if is_causal(mask):
        diagonal = used - np.diff(queries) if mask.bottom_right else 0
        seen = np.minimum(queries[1:], chunk.start + chunk.count) - queries[:-1] + diagonal  # by its last row here
        used, mask = np.clip(seen, 0, used), CausalBottomRight(window_of(mask))
    lengths = {
        "cu_seqlens_q": np.clip(queries - chunk.start, 0, chunk.count).astype(np.int32),
        "cu_seqlens_k": starts.astype(np.int32),
        "seqused_k": used.astype(np.int32),
    }
    longest = min(int(given.max_seqlen_q), chunk.count), int(given.max_seqlen_k)
    sequences = VariableLength(**lengths, max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    operands = {**whole, **{name: split.machine.constant(array) for name, array in lengths.items()}}
    for name in OF_QUERY:
        if name in operands:
            operands[name] = operands[name][along(1, chunk.first, chunk.first + chunk.count)]
    if number is not None:
        lines = operands["logsumexp"]
        operands["logsumexp"] = lines[along(0, number, number + 1)].reshape(tuple(lines.shape[1:]))
    return split.with_options(mask=mask, sequences=sequences), operands
