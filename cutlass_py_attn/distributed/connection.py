"""Connection: a new group of processes, and which rows each of them has."""

from __future__ import annotations

import time
from typing import Any, Final

from cutlass_py_attn.distributed import bootstrap, nccl
from cutlass_py_attn.distributed.communicator import DEFAULT_TIMEOUT, timeout_refusals
from cutlass_py_attn.distributed.group import Group
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import split_rows
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.split_rows import ZIGZAG, order_refusals
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime import driver

_MOST_RANKS: Final = 2**31 - 1  # NCCL counts ranks by ints


def connect(
    rank: int,
    size: int,
    address: str,
    *,
    device: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    check_calls: bool = True,
    secret: str | None = None,
) -> Group:
    """Returns the group of `size` processes over NCCL, one for each GPU. Every process calls this, with its rank.

    rank: index of this process, from 0 to size - 1
    address: where the ranks find each other: "host:port", at which rank 0 listens for a moment, or the path of a file
        that all ranks see, which has a "/"
    device: ordinal of this process's GPU; None for the current one
    timeout, check_calls: as in `Group`; the time limit holds for this call too
    secret: text that all ranks know and strangers do not, which then cannot pose as a rank; None for the environment
        variable CUTLASS_PY_ATTN_SECRET. Without either, whoever reaches the port is trusted

    NotSupported: a wrong argument, or ranks disagree. PeerLost: a rank did not come in time. NoDevice: nccl4py or
    libnccl is not installed or too old, or there is no GPU.
    """
    if reasons := [*_rank_refusals(rank, size), *timeout_refusals(timeout)]:
        raise NotSupported(reasons)
    nccl.bindings()
    ordinal = driver.current_ordinal() if device is None else driver.checked_ordinal(device)
    driver.device(ordinal)
    start = time.monotonic()
    identifier = bootstrap.exchange_id(address, int(rank), int(size), nccl.unique_id, timeout, secret)
    left = max(timeout - (time.monotonic() - start), 1.0)
    communicator = nccl.NcclCommunicator.create(identifier, int(rank), int(size), ordinal, timeout, left)
    return Group(communicator, timeout=timeout, check_calls=check_calls)


def rows_of_rank(rank: int, size: int, num_rows: int, load_balance: str | None = None) -> tuple[slice, ...]:
    """Returns where a rank's rows are among all `num_rows` rows: one range, or two in zigzag order.

    The rank's array is their concatenation, in this order. Reorder everything that has a row for each token: tokens,
    positions, targets; of a bias the rows, not the columns.

    NotSupported: the ranks do not divide the rows.
    """
    reasons, count = [*_rank_refusals(rank, size), *order_refusals(load_balance)], integer_of(num_rows)
    if not reasons:
        parts = size * (2 if load_balance == ZIGZAG else 1)
        if count is None or count < 0 or count % parts:
            reasons.append(refuse("num_rows", num_rows, f"must be a multiple of {parts}", "pad the rows"))
    if reasons:
        raise NotSupported(reasons)
    assert count is not None
    chunks = split_rows.chunks(size, load_balance == ZIGZAG, count // size, rank)
    return tuple(slice(chunk.start, chunk.start + chunk.count) for chunk in chunks)


def _rank_refusals(rank: Any, size: Any) -> list[Refusal]:
    count, number = integer_of(size), integer_of(rank)
    if count is None or not 1 <= count <= _MOST_RANKS:
        return [refuse("size", size, f"must be an int from 1 to {_MOST_RANKS}, the number of processes", "pass it")]
    if number is None or not 0 <= number < count:
        return [refuse("rank", rank, f"must be an int from 0 to {count - 1}, another one in each process", "pass it")]
    return []
