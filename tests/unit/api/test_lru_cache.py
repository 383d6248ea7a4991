"""Tests of the LRU cache: what it drops, and which caches are LRU caches."""

from __future__ import annotations

from typing import Any

import pytest

from cutlass_py_attn.api import calls, options
from cutlass_py_attn.api.lru_cache import LruCache


def test_the_entry_that_was_not_used_for_longest_is_dropped() -> None:
    cache: LruCache[str] = LruCache(2)
    cache.put("a", "A")
    cache.put("b", "B")
    assert cache.get("a") == "A"
    cache.put("c", "C")
    assert [cache.get(key) for key in "abc"] == ["A", None, "C"]
    cache.put("a", "D")
    assert (len(cache), cache.get("a"), cache.values()) == (2, "D", ["C", "D"])
    cache.clear()
    assert (len(cache), cache.get("a")) == (0, None)
    with pytest.raises(TypeError):
        cache.get(["unhashable"])


def test_an_entry_that_is_stored_again_was_used_last() -> None:
    cache: LruCache[str] = LruCache(2)
    for key, entry in (("a", "A"), ("b", "B"), ("a", "C"), ("c", "D")):
        cache.put(key, entry)
    assert cache.values() == ["C", "D"]


def test_a_destructor_may_use_the_cache() -> None:
    cache: LruCache[Any] = LruCache(1)

    class Entry:
        def __del__(self) -> None:
            found.append(cache.get("second"))

    found: list[Any] = []
    cache.put("first", Entry())
    cache.put("second", "kept")
    assert found == ["kept"]


def test_the_caches_of_calls_are_locked() -> None:
    for cache, size in (
        (calls._prepared, calls.MAX_PREPARED),
        (calls._repeated, calls.MAX_REPEATED),
        (options._checked, 256),
    ):
        assert isinstance(cache, LruCache)
        assert cache.size == size
