"""Card: tests of several processes share the memory of one GPU, each for as long as it declares a share of it.

The shares are in a file that all processes of a user lock. A test starts if the shares of all running tests leave
enough for its own. Tests start in the order in which they asked, so that a large share is not passed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

POLL_SECONDS: Final = 0.02
EPSILON: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Share:
    """What one test holds, or waits for."""

    ticket: str
    process: int
    gib: float
    is_held: bool = False


Shares = list[Share]


@dataclass(frozen=True, slots=True)
class Card:
    """The memory of one GPU. path: the file of shares; gib: what all tests may hold together."""

    path: Path
    gib: float

    @contextlib.contextmanager
    def share(self, gib: float) -> Iterator[None]:
        """Context manager that holds `gib` of the card; waits until they are free. ValueError if it has less."""
        if gib > self.gib + EPSILON:
            raise ValueError(f"{gib} GiB of device memory: the tests may use {self.gib:.1f} GiB of this card")
        mine = Share(f"{os.getpid()}.{time.monotonic_ns()}", os.getpid(), gib)
        self._change(lambda shares: [*shares, mine])
        try:
            while not any(each.ticket == mine.ticket and each.is_held for each in self._change(self._granted)):
                time.sleep(POLL_SECONDS)
            yield
        finally:
            self._change(lambda shares: [each for each in shares if each.ticket != mine.ticket])

    def _granted(self, shares: Shares) -> Shares:
        """Returns the shares with every one held that may start now."""
        found: Shares = []
        free = self.gib - sum(each.gib for each in shares if each.is_held)
        is_blocked = False
        for each in shares:
            if not each.is_held:
                is_blocked = is_blocked or each.gib > free + EPSILON
                if not is_blocked:
                    free -= each.gib
                    each = replace(each, is_held=True)
            found.append(each)
        return found

    def _change(self, change: Callable[[Shares], Shares]) -> Shares:
        """Rewrites the file under its lock, without the shares of processes that ended; returns the shares."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            shares = change([each for each in map(_share, json.loads(text or "[]")) if _is_alive(each.process)])
            file.seek(0)
            file.truncate()
            json.dump([asdict(each) for each in shares], file)
        return shares


def _share(fields: dict[str, object]) -> Share:
    return Share(**fields)  # type: ignore[arg-type]


def _is_alive(process: int) -> bool:
    """Whether the process runs. One that ended, but was not waited for, still takes signals, and its state is Z."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
