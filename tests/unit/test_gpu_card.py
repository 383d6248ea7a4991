"""Tests of how tests/gpu shares a GPU: shares of its memory across processes, and the order of long tests."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.gpu.card import Card
from tests.gpu.schedule import long_first

HOLDER = """
import sys
from pathlib import Path
from tests.gpu.card import Card
with Card(Path(sys.argv[1]), 10).share(float(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def shares(card: Card) -> list[tuple[float, bool]]:
    return [(share.gib, share.is_held) for share in card._change(list)]


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return Card(tmp_path / "shares.json", 10)


def test_a_large_share_waits_and_is_not_passed_over(card: Card) -> None:
    started: list[str] = []
    threads = []
    asked = threading.Event()

    def hold(name: str, gib: float) -> None:
        asked.set()
        with card.share(gib):
            started.append(name)

    with card.share(4):
        for name, gib in (("large", 7.0), ("small", 1.0)):
            asked.clear()
            threads.append(threading.Thread(target=hold, args=(name, gib)))
            threads[-1].start()
            asked.wait()
            while len(shares(card)) < len(threads) + 1:
                pass
        assert started == [], "4 + 7 are more than 10, and the small one asked later"
        assert shares(card) == [(4, True), (7, False), (1, False)]
    for thread in threads:
        thread.join()
    assert sorted(started) == ["large", "small"]
    assert shares(card) == []


def test_shares_of_another_process(card: Card) -> None:
    """They count while the process lives, and not after it was killed, even before its parent waits for it."""
    command = [sys.executable, "-c", HOLDER, str(card.path), "6"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with card.share(4):
            assert shares(card) == [(6, True), (4, True)]
        mine = card.share(5)
        waiting = threading.Thread(target=mine.__enter__, daemon=True)
        waiting.start()
        while len(shares(card)) < 2:
            pass
        assert shares(card) == [(6, True), (5, False)]
        other.kill()
        waiting.join(timeout=30)
        assert not waiting.is_alive()
    assert shares(card) == [(5, True)]
    mine.__exit__(None, None, None)


def test_more_than_the_card_has(card: Card) -> None:
    with pytest.raises(ValueError, match=r"10\.5 GiB of device memory: the tests may use 10\.0 GiB"):
        card.share(10.5).__enter__()
    with card.share(10):
        assert shares(card) == [(10, True)]


def test_long_tests_are_at_the_head_of_chunks() -> None:
    items = [0, 0, 5, 0, 0, 9, 0]
    named = list(enumerate(items))
    found = long_first(named, lambda item: item[1], 3)
    assert [number for number, _ in found] == [5, 0, 1, 2, 3, 4, 6]
    assert long_first(named[:2], lambda item: item[1], 3) == named[:2]
