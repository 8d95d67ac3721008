"""Flags that some processes raise, and that all of them act on together. Two of them are played by two threads here;
real ones run in tests/distributed/test_data_parallel.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from littrainer.distributed import flags
from littrainer.distributed.flags import FlagsRaisedTogether
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS

NAMES = ("stop", "save")
PROCESSES = 2

Round = tuple[set[str], set[str]]


class Exchange:
    """In the place of `begin_counting`: what each thread raised at each of its calls."""

    def __init__(self) -> None:
        self.calls: tuple[list[Sequence[bool]], ...] = ([], [])
        self.of_thread = threading.local()
        self.changed = threading.Condition()
        self.waits = 0

    def begin(self, raised: Sequence[bool]) -> Callable[[], list[int]]:
        with self.changed:
            own = self.calls[self.of_thread.rank]
            own.append(raised)
            number = len(own)
            self.changed.notify_all()

        def wait() -> list[int]:
            with self.changed:
                self.waits += 1
                all_came = lambda: all(len(calls) >= number for calls in self.calls)  # noqa: E731
                assert self.changed.wait_for(all_came, LONGEST_WAIT_SECONDS), "one process waits for ever"
                return [sum(column) for column in zip(*(calls[number - 1] for calls in self.calls), strict=True)]

        return wait


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    made = Exchange()
    monkeypatch.setattr(flags, "begin_counting", made.begin)
    return made


def settled(
    exchange: Exchange, *rounds: Round, among: dict[int, tuple[str, ...]] | None = None
) -> list[list[set[str]]]:
    """What is raised in each of two processes after each round, in which each has raised some flags.

    Parameters:
        among: number of a round -> the flags that count in it, where they are not all.
    """

    def process(rank: int) -> list[set[str]]:
        exchange.of_thread.rank = rank
        settling, found = FlagsRaisedTogether(NAMES, PROCESSES), []
        for number, raised in enumerate(rounds):
            holder: Any = SimpleNamespace(**{name: name in raised[rank] for name in NAMES})
            settling.settle(holder, (among or {}).get(number))
            found.append({name for name in NAMES if getattr(holder, name)})
        settling.finish()
        return found

    with ThreadPoolExecutor(PROCESSES) as threads:
        first, second = threads.map(process, range(PROCESSES))
    return [first, second]


def test_a_flag_that_all_raise_stays_raised(exchange: Exchange) -> None:
    assert settled(exchange, ({"stop"}, {"stop"})) == [[{"stop"}]] * 2


def test_a_flag_that_one_raises_is_raised_by_all_at_the_next_call(exchange: Exchange) -> None:
    nobody: Round = (set(), set())
    assert settled(exchange, (set(), {"stop"}), nobody, nobody) == [[set(), {"stop"}, set()]] * 2


def test_a_flag_that_one_raises_leaves_another_one_that_all_raise_alone(exchange: Exchange) -> None:
    assert settled(exchange, ({"save"}, {"save", "stop"}), (set(), set())) == [[{"save"}, {"stop"}]] * 2


def test_nobody_waits_for_the_call_at_which_nothing_is_raised(exchange: Exchange) -> None:
    nobody: Round = (set(), set())
    assert settled(exchange, nobody) == [[set()]] * 2
    # Each looks at it when it has finished, and not before.
    assert exchange.waits == PROCESSES


def test_flags_that_do_not_count_at_a_place_are_left_alone_and_kept_for_later(exchange: Exchange) -> None:
    nobody: Round = (set(), set())
    found = settled(exchange, (set(), {"save"}), nobody, nobody, among={1: ("stop",)})
    assert found == [[set(), set(), {"save"}]] * 2
    assert settled(exchange, ({"save"}, set()), among={0: ("stop",)}) == [[{"save"}], [set()]]


def test_what_all_are_ready_for_is_done_at_one_call_in_all(exchange: Exchange) -> None:
    # The second process raises a flag, and so knows the counts a call before the first one looks at them.
    ready: tuple[tuple[bool, ...], ...] = ((True, True, False, False), (False, True, False, False))

    def process(rank: int) -> list[bool]:
        exchange.of_thread.rank = rank
        settling, holder = FlagsRaisedTogether(("save",), PROCESSES), SimpleNamespace(save=False)
        found = []
        for number, is_ready in enumerate(ready[rank]):
            holder.save = rank == 1 and number == 1
            found.append(settling.settle(holder, is_ready=is_ready))
        settling.finish()
        return found

    with ThreadPoolExecutor(PROCESSES) as threads:
        assert list(threads.map(process, range(PROCESSES))) == [[False, False, True, False]] * PROCESSES


def test_who_raises_a_flag_alone_is_told_once(exchange: Exchange, caplog: pytest.LogCaptureFixture) -> None:
    alone: Round = (set(), {"stop"})
    with caplog.at_level(logging.WARNING):
        settled(exchange, alone, (set(), set()), alone, (set(), set()))
    assert [record.message.split(" was")[0] for record in caplog.records] == ["control.stop"]
