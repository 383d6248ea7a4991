"""Simulated ranks: threads of one process, without NCCL, on the CPU or on one GPU.

For tests of a program that calls this package from several ranks:

    results = simulated.run(4, lambda group: attention_forward(*rows[group.rank], group=group, backend="reference"))
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from cutlass_py_attn.distributed.communicator import DEFAULT_TIMEOUT, Message, PeerLost
from cutlass_py_attn.distributed.group import Group
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.refusals import refuse
from cutlass_py_attn.runtime import driver

Result = TypeVar("Result")

_MOST_RANKS: Final = 1024  # a queue for each pair of them
_POLL_SECONDS: Final = 0.02  # between two looks at whether another rank has aborted


class _Mailboxes:
    """What the ranks of one group share: a queue for each ordered pair, and whether a rank has aborted."""

    def __init__(self, size: int) -> None:
        self.queues: dict[tuple[int, int], queue.Queue[Any]] = {
            (source, target): queue.Queue() for source in range(size) for target in range(size)
        }
        self.aborted = threading.Event()


class SimulatedCommunicator:
    """One rank of a group of threads.

    device: ordinal of the GPU whose memory holds the arrays of every rank; None for host memory
    """

    def __init__(self, mailboxes: _Mailboxes, rank: int, size: int, device: int | None) -> None:
        self._mailboxes = mailboxes
        self.rank, self.size, self.device = rank, size, device

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int, timeout: float) -> None:
        """Copies the arrays. On a GPU the host waits for the streams of both sides."""
        if self.device is not None:
            driver.synchronise(stream)
        replies: list[queue.Queue[None]] = []
        for target, array in sends:
            replies.append(queue.Queue())
            self._mailboxes.queues[self.rank, target].put((array, replies[-1]))
        for source, array in receives:
            sent, reply = self._wait(self._mailboxes.queues[source, self.rank], source, timeout)
            if sent.nbytes != array.nbytes:
                raise NotSupported(f"rank {source} sent {sent.nbytes} bytes: must be {array.nbytes}; send as many")
            if self.device is None:
                array[...] = sent
            else:
                driver.call("cuMemcpyDtoDAsync", array.pointer, sent.pointer, array.nbytes, stream)
                driver.synchronise(stream)
            reply.put(None)
        for (target, _), reply in zip(sends, replies, strict=True):
            self._wait(reply, target, timeout)

    def _wait(self, box: queue.Queue[Any], peer: int, timeout: float) -> Any:
        """Returns the next entry; PeerLost if none comes."""
        waited = 0.0
        while waited <= timeout:
            if self._mailboxes.aborted.is_set():
                raise PeerLost(f"rank {peer}, or another one, has aborted the group: restart all ranks")
            try:
                return box.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                waited += _POLL_SECONDS
        self.abort()
        raise PeerLost(f"rank {peer} sent nothing for {timeout:g} s: the group is aborted; restart all ranks")

    def failure(self) -> str:
        """Returns "": an exchange is complete when it returns."""
        return ""

    def abort(self) -> None:
        """Makes every exchange of every rank fail."""
        self._mailboxes.aborted.set()

    def close(self) -> None:
        """Does nothing: threads have nothing to release."""


def groups(size: int, device: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> list[Group]:
    """Returns a group for each of `size` ranks, each to be used in a thread of its own.

    size: at most 1024
    device: ordinal of the GPU that all ranks share; None for host memory, with backend="reference"
    """
    count = integer_of(size)
    if count is None or not 1 <= count <= _MOST_RANKS:
        raise NotSupported(refuse("size", size, f"must be an int from 1 to {_MOST_RANKS}, a thread each", "correct it"))
    ordinal = None if device is None else driver.checked_ordinal(device)
    mailboxes = _Mailboxes(count)
    ranks = (SimulatedCommunicator(mailboxes, rank, count, ordinal) for rank in range(count))
    return [Group(rank, timeout=timeout) for rank in ranks]


def run(
    size: int,
    function: Callable[[Group], Result],
    device: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> list[Result]:
    """Returns the results of `function(group)` of each rank, in their order; raises the error of the first that fails.

    When a rank fails, the others' exchanges end.
    """

    def of_rank(group: Group) -> Result:
        try:
            return function(group)
        except BaseException:
            group.abort()
            raise

    ranks = groups(size, device, timeout)
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(of_rank, group) for group in ranks]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
    return [future.result() for future in futures]
