"""Group: a communicator with a stream of its own, a time limit, and the check that all ranks make the same call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from cutlass_py_attn.distributed.communicator import DEFAULT_TIMEOUT, Communicator, Message, PeerLost
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.scalars import integer_of, shown
from cutlass_py_attn.runtime import driver

_METHODS: Final = ("exchange", "failure", "abort", "close")
_SHORTEST_WAIT, _LONGEST_WAIT = 2e-5, 1e-3  # seconds between two looks at an event


class Group:
    """The ranks of a call whose rows are split, one process or thread each.

    communicator: of this rank, such as `connect` makes
    timeout: seconds that a call waits for the other ranks before it aborts the group and raises PeerLost
    check_calls: whether every call first compares shapes, dtypes and options of all ranks, by one small exchange. If
        False on one rank, then on all; ranks that differ then compute wrong results or wait for each other.

    A context manager, which closes the communicator; after an error it aborts it. Calls of one group must come from
    one thread at a time, and in the same order on all ranks.
    """

    def __init__(
        self, communicator: Communicator, *, timeout: float = DEFAULT_TIMEOUT, check_calls: bool = True
    ) -> None:
        reasons = []
        missing = [name for name in ("rank", "size", "device", *_METHODS) if not hasattr(communicator, name)]
        if missing:
            reasons.append(
                f"communicator = {shown(communicator)}: must have {', '.join(missing)}; pass one that connect returns"
            )
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            reasons.append(f"timeout = {shown(timeout)}: must be a number of seconds greater than 0; pass one")
        if not isinstance(check_calls, bool):
            reasons.append(f"check_calls = {shown(check_calls)}: must be True or False; pass one of them")
        if not missing:
            rank, size = integer_of(communicator.rank), integer_of(communicator.size)
            if rank is None or size is None or not 0 <= rank < size:
                reasons.append(
                    f"communicator has rank {communicator.rank} of {communicator.size}: must be from 0 to size - 1; "
                    "correct it"
                )
        if reasons:
            raise NotSupported(reasons)
        self.communicator = communicator
        self.timeout = float(timeout)
        self.check_calls = check_calls
        self._stream: int | None = None
        self._ended = ""  # why the group is of no use any more

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return int(self.communicator.rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.communicator.size)

    @property
    def device(self) -> int | None:
        """Ordinal of this rank's GPU; None for host memory."""
        return self.communicator.device

    @property
    def stream(self) -> int:
        """Handle of the stream on which the group communicates; 0 for host memory."""
        if self.device is None:
            return 0
        if self._stream is None:
            with driver.device(self.device).current():
                self._stream = driver.create_stream()
        return self._stream

    def expect_open(self) -> None:
        """Raises PeerLost if the group was aborted or closed."""
        if self._ended:
            raise PeerLost(f"the group was {self._ended}: create a new one on all ranks")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends and receives contiguous arrays in the order of the group's stream; an error aborts the group."""
        try:
            self.communicator.exchange(sends, receives, self.stream, self.timeout)
        except BaseException:
            self.abort()
            raise

    def finish(self) -> None:
        """Waits until all exchanges are complete. PeerLost: they were not in time, and the group is aborted."""
        if self.device is None:
            return
        event = driver.record_event(self.stream)
        limit, wait = time.monotonic() + self.timeout, _SHORTEST_WAIT
        try:
            while not driver.has_passed(event):
                if reason := self.communicator.failure():
                    self.abort()
                    raise PeerLost(f"{reason}: the group is aborted; restart all ranks")
                if time.monotonic() > limit:
                    self.abort()
                    raise PeerLost(
                        f"rank {self.rank} waited {self.timeout:g} s for the other {self.size - 1}: one of them has "
                        "ended, or made another call; the group is aborted; restart all ranks"
                    )
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
        finally:
            driver.destroy_event(event)

    def abort(self) -> None:
        """Ends the exchanges that wait for other ranks. Every later call raises PeerLost."""
        if not self._ended:
            self._ended = "aborted"
            try:
                self.communicator.abort()
            finally:
                self._drop_stream()

    def close(self) -> None:
        """Releases the communicator and the stream, when this rank needs no call any more."""
        if not self._ended:
            self._ended = "closed"
            try:
                self.communicator.close()
            finally:
                self._drop_stream()

    def _drop_stream(self) -> None:
        if self._stream is not None and self.device is not None:
            stream, self._stream = self._stream, None
            with driver.device(self.device).current():
                driver.destroy_stream(stream)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()
