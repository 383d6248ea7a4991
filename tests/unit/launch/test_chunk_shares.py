"""Tests of the shares of teams in chunks: they cover all chunks once and differ by one; pieces have their own slots."""

from __future__ import annotations

import itertools

import pytest

from cutlass_py_attn.launch.chunk_shares import Shares, shares, slot_of_team

SIZES = [*itertools.product((1, 2, 3, 7, 8, 63, 64, 65, 1000, 4001), (1, 2, 3, 8, 264), (1, 2, 4))]


@pytest.mark.parametrize(("chunks", "teams", "least"), SIZES)
def test_every_chunk_has_one_team(chunks: int, teams: int, least: int) -> None:
    found = shares(chunks, teams, least)
    starts = [found.begin(team) for team in range(teams + 1)]
    assert starts[0] == 0
    assert starts[-1] == chunks
    sizes = [end - start for start, end in itertools.pairwise(starts)]
    active = [size for size in sizes if size]
    assert sizes == active + [0] * (teams - len(active)), "idle teams come last"
    assert max(active) - min(active) <= 1
    assert min(active) >= min(least, chunks)
    for team, (start, end) in enumerate(itertools.pairwise(starts)):
        assert {found.team_of(chunk) for chunk in range(start, end)} <= {team}


@pytest.mark.parametrize(("teams", "least"), [(1, 1), (3, 1), (8, 4), (264, 2)])
def test_pieces_of_rows_have_slots_of_their_own(teams: int, least: int) -> None:
    rows = [1, 5, 40, 1, 1, 300, 17, 2]  # chunks of each row
    found = shares(sum(rows), teams, least)
    taken: set[int] = set()
    for row_begin, row_end in itertools.pairwise(itertools.accumulate(rows, initial=0)):
        pieces = pieces_of(found, row_begin, row_end)
        assert pieces[0][1] == row_begin
        assert pieces[-1][2] == row_end
        if len(pieces) == 1:
            continue  # the team stores the row itself
        slots = [slot_of_team(team, start == found.begin(team)) for team, start, _ in pieces]
        # What the combine kernel reads: slot 0 or 1 of the first team, slot 0 of the teams after it.
        first = found.team_of(row_begin)
        assert slots == [
            2 * (first + number) + (1 if number == 0 and row_begin != found.begin(first) else 0)
            for number in range(len(pieces))
        ]
        assert taken.isdisjoint(slots)
        taken.update(slots)
    assert not taken or max(taken) < 2 * teams


def pieces_of(found: Shares, row_begin: int, row_end: int) -> list[tuple[int, int, int]]:
    """Returns (team, first chunk, end) of the pieces of a row, as the teams walk them."""
    teams = range(found.team_of(row_begin), found.team_of(row_end - 1) + 1)
    return [(team, max(row_begin, found.begin(team)), min(row_end, found.begin(team + 1))) for team in teams]
