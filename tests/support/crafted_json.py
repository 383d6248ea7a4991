"""Crafted JSON: copies of a JSON value in which one node is something else, as a damaged or hostile file has it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

STRANGE: tuple[Any, ...] = (None, True, -1, 2**70, 1.5, "", "../../x", "*/\n#error x", [], [[]], {}, {"x": 1})
DEEP = "[" * 100_000 + "]" * 100_000  # json.loads raises RecursionError


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every node below the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from nodes(item, (*path, key))


def crafted(value: Any, path: tuple[Any, ...], item: Any) -> Any:
    """Returns a copy of the value with another item at the path."""
    found = copy.deepcopy(value)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = item
    return found


def each(value: Any, every: int = 1) -> Iterator[tuple[str, Any]]:
    """Yields (what was changed, the changed value) for each node and strange value; every: takes one of so many."""
    for number, path in enumerate(nodes(value)):
        for index, item in enumerate(STRANGE):
            if (number + index) % every == 0:
                yield f"{'.'.join(map(str, path))} = {json.dumps(item)}", crafted(value, path, item)
