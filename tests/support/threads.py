"""Threads of tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_thread(work: Callable[[], object]) -> None:
    """Runs `work` in a new thread, waits for it, and raises its error."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
