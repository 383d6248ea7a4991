"""Schedule: the order in which the workers of pytest-xdist get the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


def long_first(items: Sequence[Item], seconds: Callable[[Item], float], chunk: int) -> list[Item]:
    """Returns the items with a long one at the head of each chunk, the longest first; the others keep their order.

    seconds: 0 for an item that is not long. chunk: the items that a worker gets at once.
    """
    long = sorted(filter(seconds, items), key=seconds, reverse=True)
    short = iter([item for item in items if not seconds(item)])
    found: list[Item] = []
    for item in long:
        found += [item, *islice(short, chunk - 1)]
    return [*found, *short]
