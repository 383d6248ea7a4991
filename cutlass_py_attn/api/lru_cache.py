"""LRU cache with a lock: calls of several threads look up and store entries at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class LruCache(Generic[Entry]):
    """A cache of at most `size` entries; the entry that was not used for the longest time is dropped first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        # Reentrant: a garbage collection inside may run code that makes a call.
        self._lock = threading.RLock()

    def get(self, key: Hashable) -> Entry | None:
        """Returns the entry of this key; None if there is none. TypeError: the key is not hashable."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def put(self, key: Hashable, entry: Entry) -> None:
        """Stores an entry."""
        dropped = []  # released behind the lock: the destructors of entries call the driver
        with self._lock:
            dropped.append(self._entries.pop(key, None))
            self._entries[key] = entry
            while len(self._entries) > self.size:
                dropped.append(self._entries.popitem(last=False)[1])

    def clear(self) -> None:
        """Drops every entry."""
        with self._lock:
            self._entries = OrderedDict()

    def values(self) -> list[Entry]:
        """Returns the entries, the one that was used last at the end."""
        with self._lock:
            return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
