"""What a benchmark is: a measurement, the cases and sides it is taken of, and the tables that its figures fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from .sides import Side

if TYPE_CHECKING:
    from .figures import Figures

Measured = dict[str, float]


class Processes(Enum):
    """Where a measurement runs."""

    KEPT = "one process for each side, in which all rounds run"
    FRESH = "a new process for each measurement"
    PAIR = "two processes for each side that train together, in which all rounds run"
    NONE = "this process, for measurements that start processes themselves"


@dataclass(frozen=True)
class Case:
    """One size of a measurement, taken of several sides in turns.

    Parameters:
        name: In records.
        title: In tables.
        sides: In the order of tables.
        settings: Keywords of the measurement; JSON can hold them.
        processes: Where it runs.
        curve: Cases of one curve are plotted together, each at one of its settings.
        rounds: Where the benchmark's number is too many or too few.
    """

    name: str
    title: str
    sides: tuple[Side, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    processes: Processes = Processes.KEPT
    curve: str = ""
    rounds: int | None = None


@dataclass(frozen=True)
class Benchmark:
    """A question about littrainer that figures answer.

    Parameters:
        name: On the command line and in records.
        question: The figures answer it.
        measure: Takes one measurement of a side: `measure(side, **case.settings)`.
        full: The cases of a whole run.
        short: The same with the smallest sizes, to see that all of it works.
        rounds: How often each side takes its turn in a whole run.
        tables: Makes each table by its name, as Markdown.
        failures: Names what is counted and wrong; times are never gates.
    """

    name: str
    question: str
    measure: Callable[..., Measured]
    full: tuple[Case, ...]
    short: tuple[Case, ...]
    rounds: int
    tables: dict[str, Callable[[Figures], str]]
    failures: Callable[[Figures], list[str]] = lambda figures: []
