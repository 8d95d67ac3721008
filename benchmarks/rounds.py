"""Taking turns: every side once in each round, each round beginning with another one.

A change of clock speed or load falls on all sides that way. What a side does first pays for imports and caches: kept
processes have a round before those that count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .benchmark import Measured
from .sides import Side


def take_turns(
    sides: Sequence[Side], rounds: int, measure: Callable[[Side], Measured], *, rehearse: bool
) -> dict[str, list[Measured]]:
    """What each side measured, one entry for each round.

    Parameters:
        rehearse: Whether each side measures once before, which is not told.
    """
    if rehearse:
        for side in sides:
            measure(side)
    measured: dict[str, list[Measured]] = {side.name: [] for side in sides}
    for turn in range(rounds):
        first = turn % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            measured[side.name].append(measure(side))
    return measured
