"""Communicators: how the ranks of a group exchange arrays.

NCCL is one (nccl.py), threads of one process are another (simulated.py). A communicator of your own, such as one over
MPI, needs these few methods.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.problem.scalars import number_of
from cutlass_py_attn.refusals import Refusal, refuse

DEFAULT_TIMEOUT: Final = 60.0  # seconds that ranks wait for each other
_POLL_SECONDS: Final = 2e-3  # of a wait that looks again at once
_LONGEST_PAUSE: Final = 1e-3
Message = tuple[int, Any]  # rank of the other side, and a contiguous array


class PeerLost(AttentionError, RuntimeError):
    """Another rank of a group has ended, or did not come in time. The group is aborted."""


class Communicator(Protocol):
    """The ranks of a group.

    rank: of this process, from 0 to size - 1
    device: ordinal of this rank's GPU; None if the arrays are in host memory
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> int | None: ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int, timeout: float) -> None:
        """Sends and receives all of these arrays at once, in the order of `stream`.

        The messages of two ranks arrive in the order in which they are listed. An array has `nbytes`, and in device
        memory `pointer`; in host memory it is a NumPy array. `stream` is 0 for arrays in host memory.

        PeerLost: a rank did not come within `timeout` seconds.
        """

    def failure(self) -> str:
        """Returns why communication has failed, "" while it has not. Called while the exchanges are awaited."""

    def abort(self) -> None:
        """Ends all exchanges that wait for other ranks, and makes the communicator useless."""

    def close(self) -> None:
        """Releases the communicator when no exchange is under way."""


def timeout_refusals(timeout: object) -> list[Refusal]:
    """Returns why a time limit is refused."""
    seconds = number_of(timeout) if isinstance(timeout, (int, float)) else None
    if seconds is not None and seconds > 0:
        return []
    return [refuse("timeout", timeout, "must be a number of seconds greater than 0", "pass one")]


def pause(start: float) -> None:
    """Lets other threads run between two looks at what a rank waits for since `start`, a time of time.monotonic().

    A short wait, such as that for an exchange inside of a call, looks again at once: a sleep takes longer than it is
    asked to. Later the pauses are a sixteenth of the time waited so far, at most _LONGEST_PAUSE.
    """
    waited = time.monotonic() - start
    time.sleep(0.0 if waited < _POLL_SECONDS else min(waited / 16, _LONGEST_PAUSE))


def not_in_time(communicator: Communicator, waited: str, aborted: str) -> PeerLost:
    """Returns the error of a rank whose time limit has passed. waited: how long, and where; aborted: what it ended."""
    return PeerLost(
        f"rank {communicator.rank} waited {waited} for the other {communicator.size - 1}: one of them has ended, or "
        f"made another call; the {aborted} is aborted; restart all ranks"
    )
