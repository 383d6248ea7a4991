"""Group: a communicator with a stream of its own, a time limit, and the check that all ranks make the same call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np

from cutlass_py_attn.distributed.communicator import (
    DEFAULT_TIMEOUT,
    Communicator,
    Message,
    PeerLost,
    not_in_time,
    pause,
    timeout_refusals,
)
from cutlass_py_attn.distributed.views import View
from cutlass_py_attn.errors import AttentionError, NotSupported
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.refusals import refuse
from cutlass_py_attn.runtime import driver

_METHODS: Final = ("exchange", "failure", "abort", "close")
_DRAIN_SECONDS: Final = 5.0  # that an abort waits for the exchanges which it ends


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
                refuse("communicator", communicator, f"must have {', '.join(missing)}", "pass one that connect returns")
            )
        reasons += timeout_refusals(timeout)
        if not isinstance(check_calls, bool):
            reasons.append(refuse("check_calls", check_calls, "must be True or False", "pass one of them"))
        if not missing:
            rank, size = integer_of(communicator.rank), integer_of(communicator.size)
            if rank is None or size is None or not 0 <= rank < size:
                rule = f"must be from 0 to size - 1, of size {communicator.size}"
                reasons.append(refuse("communicator.rank", communicator.rank, rule, "correct it"))
        if reasons:
            raise NotSupported(reasons)
        self.communicator = communicator
        self.timeout = float(timeout)
        self.check_calls = check_calls
        self._stream: int | None = None
        self._texts: View | None = None  # device memory of `share`: this rank's text, and those of all ranks
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

    @property
    def is_open(self) -> bool:
        """Whether the group was neither aborted nor closed."""
        return not self._ended

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

    def share(self, text: bytes) -> list[bytes]:
        """Returns the texts of all ranks, each as long as this one."""
        return self.start_sharing(text)()

    def start_sharing(self, text: bytes) -> Callable[[], list[bytes]]:
        """Starts `share`; the function that it returns waits for the texts. No other may be shared in between."""
        own = np.frombuffer(text, np.uint8)
        found = np.empty((self.size, len(text)), np.uint8)
        if self.device is None:
            self._exchange_texts(own, [found[rank] for rank in range(self.size)])
        else:
            with driver.device(self.device).current():
                texts = self._start_on_device(own)

        def wait() -> list[bytes]:
            if self.device is not None:
                with driver.device(self.device).current():
                    self.finish()
                    driver.copy_to_host(found.ctypes.data, texts.pointer, found.nbytes, self.stream)
                    driver.synchronise(self.stream)
            found[self.rank] = own
            return [row.tobytes() for row in found]

        return wait

    def _start_on_device(self, own: np.ndarray[Any, Any]) -> View:
        """Starts the exchange of the texts, and returns where those of all ranks arrive."""
        assert self.device is not None
        shape = self.size + 1, own.size
        if self._texts is not None and self._texts.shape != shape:
            driver.free_now(self._texts.pointer)
            self._texts = None
        if self._texts is None:
            pointer = driver.allocate_now(own.size * shape[0], "the texts of all ranks")
            self._texts = View(pointer, shape, (own.size, 1), "uint8", self.device, None)
        mine, texts = self._texts[:1,], self._texts[1:,]
        driver.copy_to_device(mine.pointer, own.ctypes.data, own.nbytes, self.stream)
        self._exchange_texts(mine, [texts[rank : rank + 1,] for rank in range(self.size)])
        return texts

    def _exchange_texts(self, own: Any, places: list[Any]) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        if others:
            self.exchange([(rank, own) for rank in others], [(rank, places[rank]) for rank in others])

    def finish(self) -> None:
        """Waits until all exchanges are complete. PeerLost: they were not in time, and the group is aborted."""
        if self.device is None:
            return
        with driver.device(self.device).current():
            event = driver.record_event(self.stream)
            try:
                self._wait_for(event)
            finally:
                driver.destroy_event(event)

    def _wait_for(self, event: int) -> None:
        start = time.monotonic()
        while not driver.has_passed(event):
            if reason := self.communicator.failure():
                self.abort()
                raise PeerLost(f"{reason}: the group is aborted; restart all ranks")
            if time.monotonic() - start > self.timeout:
                self.abort()
                raise not_in_time(self.communicator, f"{self.timeout:g} s", "group")
            pause(start)

    def abort(self) -> None:
        """Ends the exchanges that wait for other ranks. Every later call raises PeerLost."""
        if not self._ended:
            self._ended = "aborted"
            try:
                self.communicator.abort()
                self._drain()
            finally:
                self._texts = None  # stays allocated: cuMemFree waits for all work, which may not end
                self._drop_stream()

    def close(self) -> None:
        """Releases the communicator and the stream, when this rank needs no call any more."""
        if not self._ended:
            self._ended = "closed"
            try:
                self.communicator.close()
                if self._texts is not None and self.device is not None:
                    with driver.device(self.device).current():
                        driver.free_now(self._texts.pointer)
            finally:
                self._texts = None
                self._drop_stream()

    def _drain(self) -> None:
        """Waits until the aborted exchanges touch no memory any more, because their arrays are freed next."""
        if self._stream is None or self.device is None:
            return
        with contextlib.suppress(AttentionError), driver.device(self.device).current():
            event, start = driver.record_event(self._stream), time.monotonic()
            while not driver.has_passed(event) and time.monotonic() - start < _DRAIN_SECONDS:
                pause(start)
            driver.destroy_event(event)

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
