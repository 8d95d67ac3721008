"""Flags that some processes raise, and that all of them act on together. Two of them are played by two objects here;
real ones run in tests/distributed/test_data_parallel.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from littrainer.processes import flags
from littrainer.processes.flags import FlagsRaisedTogether

NAMES = ("stop", "save")


class Exchange:
    """What two processes raised at each of their calls."""

    def __init__(self) -> None:
        self.calls: dict[int, list[Sequence[bool]]] = {0: [], 1: []}
        self.waits = 0
        self.at_call = 0

    def of_process(self, rank: int) -> Callable[[Sequence[bool]], Callable[[], list[int]]]:
        def begin(raised: Sequence[bool]) -> Callable[[], list[int]]:
            self.calls[rank].append(raised)
            call = len(self.calls[rank]) - 1

            def wait() -> list[int]:
                self.waits += 1
                return [sum(one) for one in zip(*(self.calls[each][call] for each in self.calls), strict=True)]

            return wait

        return begin


class Together:
    """Two processes that settle their flags at the same places."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch
        self.exchange = Exchange()
        self.settling = [FlagsRaisedTogether(NAMES, 2) for _ in range(2)]

    def settle(self, *raised: set[str], among: tuple[str, ...] | None = None) -> list[set[str]]:
        """What is raised in each process after both have settled what each of them has raised."""
        found: list[set[str]] = [set(), set()]
        holders: list[Any] = [SimpleNamespace(**{name: name in one for name in NAMES}) for one in raised]
        # One that raises nothing does not wait, so that it can come first.
        for rank in sorted(range(2), key=lambda rank: bool(raised[rank])):
            other = 1 - rank
            if raised[rank] and len(self.exchange.calls[other]) <= len(self.exchange.calls[rank]):
                self.exchange.calls[other].append([name in raised[other] for name in NAMES])
                self._play(rank, holders[rank], among)
                self.exchange.calls[other].pop()
            else:
                self._play(rank, holders[rank], among)
        for rank, holder in enumerate(holders):
            found[rank] = {name for name in NAMES if getattr(holder, name)}
        return found

    def _play(self, rank: int, holder: Any, among: tuple[str, ...] | None) -> None:
        self.monkeypatch.setattr(flags, "begin_counting", self.exchange.of_process(rank))
        self.settling[rank].settle(holder, among)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    return Together(monkeypatch)


def test_a_flag_that_all_raise_stays_raised(together: Together) -> None:
    assert together.settle({"stop"}, {"stop"}) == [{"stop"}, {"stop"}]


def test_a_flag_that_one_raises_is_raised_by_all_at_the_next_call(together: Together) -> None:
    assert together.settle(set(), {"stop"}) == [set(), set()]
    assert together.settle(set(), set()) == [{"stop"}, {"stop"}]
    assert together.settle(set(), set()) == [set(), set()]


def test_nobody_waits_where_nothing_is_raised(together: Together) -> None:
    together.settle(set(), set())
    assert together.exchange.waits == 0


def test_flags_that_do_not_count_at_a_place_are_left_alone_and_kept_for_later(together: Together) -> None:
    assert together.settle(set(), {"save"}) == [set(), set()]
    assert together.settle({"save"}, {"save"}, among=("stop",)) == [{"save"}, {"save"}]
    assert together.settle(set(), set()) == [{"save"}, {"save"}]


def test_who_raises_a_flag_alone_is_told_once(together: Together, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            together.settle(set(), {"stop"})
            together.settle(set(), set())
    assert [record.message.split(" was")[0] for record in caplog.records] == ["control.stop"]
