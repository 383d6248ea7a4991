"""Chunk shares: how the persistent decode kernel divides chunks of keys among teams of blocks, as integer functions.

Every function takes Python ints or traced integers: tests call it with ints, kernels trace it. Chunks are numbered from
0; kernels/decode/chunk_schedule.py says what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass_py_attn.integers import choose, larger, smaller


@dataclass(frozen=True)
class Shares:
    """Chunks divided among teams: the first `more` teams have share + 1 chunks, the other active ones have share."""

    active: Any
    share: Any
    more: Any

    def begin(self, team: Any) -> Any:
        """Returns the first chunk of a team; for teams behind the last active one the number of all chunks."""
        team = smaller(team, self.active)
        return team * self.share + smaller(team, self.more)

    def team_of(self, chunk: Any) -> Any:
        """Returns the team that has a chunk."""
        cut = self.more * (self.share + 1)
        behind = self.more + (chunk - cut) // larger(self.share, 1)
        return choose(chunk < cut, chunk // (self.share + 1), behind)


def shares(chunks: Any, teams: Any, least: Any) -> Shares:
    """Returns the shares of at most `teams` teams; a team has `least` chunks or more, unless there are fewer."""
    active = larger(smaller(teams, chunks // least), 1)
    share = chunks // active
    return Shares(active, share, chunks - share * active)


def slot_of_team(team: Any, begins_team: Any) -> Any:
    """Returns the slot of a piece's partial results, of the two that a team has.

    begins_team: whether the piece starts where the team starts. Another piece that is not a whole row is the team's
    last.
    """
    return team * 2 + choose(begins_team, 0, 1)
