"""A hyperparameter search as its record shows it, and its parameters made ready for axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from littrainer.arguments.secrets import without_secrets
from littrainer.report.axes import Axis, range_axis, short_number
from littrainer.report.labels import shortened
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    MAXIMIZE,
    RUNNING,
    SEARCH_RECORD_NAME,
    StoredSearch,
    TrialRecord,
    UnreadableRecord,
    best_of,
    read_record,
)

# More names than these would lie over each other along an axis.
MOST_CATEGORY_LABELS = 12
LONGEST_FAILURE = 300


class UnreadableSearch(Exception):
    """The record of a search cannot be read; the message is a sentence without its end."""


@dataclass
class Search:
    """One search.

    Parameters:
        name: what it is called on the page.
        folder: the folder that was given.
        file: the record that was read.
        stored: what it holds.
        notes: sentences about what could not be shown.
    """

    name: str
    folder: Path
    file: Path
    stored: StoredSearch
    notes: list[str] = field(default_factory=list)

    @property
    def trials(self) -> list[TrialRecord]:
        """All trials in the order in which they began."""
        return self.stored.trials

    @property
    def directions(self) -> list[str]:
        """`maximize` or `minimize`, for each objective."""
        return self.stored.directions

    def objective_names(self) -> list[str]:
        """What the objectives are called."""
        if self.stored.objective_names:
            return self.stored.objective_names
        several = len(self.directions) > 1
        return [f"objective {number + 1}" if several else "objective" for number in range(len(self.directions))]

    def best(self) -> list[TrialRecord]:
        """The best trial; with several objectives all that none surpasses."""
        return best_of(self.trials, self.directions)

    def complete(self) -> list[TrialRecord]:
        """The complete trials that have all objectives as finite numbers, in the order in which they began."""
        return [trial for trial in self.trials if trial.state == COMPLETE and is_sound(trial, len(self.directions))]

    def ranked(self) -> list[TrialRecord]:
        """The same, the best by the first objective first."""
        sign = -1 if self.directions[0] == MAXIMIZE else 1
        return sorted(self.complete(), key=lambda trial: sign * trial.objectives()[0])


def is_sound(trial: TrialRecord, directions: int) -> bool:
    """Whether a trial has a finite number for each direction."""
    values = trial.objectives()
    return len(values) == directions and all(map(math.isfinite, values))


def read_search(folder: Path, name: str) -> Search | None:
    """The search in a folder, None where it has no record.

    Raises:
        UnreadableSearch: it has one that cannot be read.
    """
    file = folder / SEARCH_RECORD_NAME
    if not file.is_file():
        return None
    try:
        search = Search(name, folder, file, read_record(file))
        for trial in search.trials:
            trial.parameters = without_secrets(trial.parameters)
    except OSError as error:
        raise UnreadableSearch(f"{file} cannot be read: {error.strerror}") from error
    except UnreadableRecord as error:
        raise UnreadableSearch(f"{file} is not a readable record of a search ({error})") from error
    running = sum(trial.state == RUNNING for trial in search.trials)
    if running:
        verb = "trial was" if running == 1 else "trials were"
        search.notes.append(f"{running} {verb} running when the record was written.")
    if not search.trials:
        search.notes.append("No trial had ended when the record was written.")
    elif not search.ranked():
        first = next((trial.error for trial in search.trials if trial.state == FAILED and trial.error), None)
        why = f" The first failure: {first[:LONGEST_FAILURE]}" if first else ""
        search.notes.append(f"No trial is complete.{why}")
    return search


@dataclass(frozen=True)
class Parameter:
    """One hyperparameter and the values that it may have.

    Parameters:
        name: as the search calls it.
        axis: from the lowest to the highest value; the places 0, 1, 2, ... of choices.
        choices: what stands at these places; None where values are numbers on the axis.
        whole: whether they are whole numbers.
    """

    name: str
    axis: Axis
    choices: tuple[str, ...] | None = None
    whole: bool = False

    def share(self, trial: TrialRecord) -> float | None:
        """Where the value of a trial stands, from 0 to 1; None where the trial has none."""
        if self.name not in trial.parameters:
            return None
        value = trial.parameters[self.name]
        if self.choices is not None:
            return self.axis.share(self.choices.index(_choice(value)))
        return self.axis.share(value)

    def text(self) -> str:
        """What values it may have, in words."""
        if self.choices is not None:
            named = ", ".join(map(shortened, self.choices[:MOST_CATEGORY_LABELS]))
            rest = len(self.choices) - MOST_CATEGORY_LABELS
            return named + (f" and {rest} more" if rest > 0 else "")
        told = f"{short_number(self.axis.low)} to {short_number(self.axis.high)}"
        return told + (", by powers" if self.axis.logarithmic else "")


def parameters_of(search: Search) -> list[Parameter]:
    """The hyperparameters that may have more than one value, in the order in which trials have them."""
    names = dict.fromkeys(name for trial in search.trials for name in trial.parameters)
    found = [_parameter(name, search.trials) for name in names]
    return [parameter for parameter in found if parameter is not None]


def _parameter(name: str, trials: Sequence[TrialRecord]) -> Parameter | None:
    values = [trial.parameters[name] for trial in trials if name in trial.parameters]
    drawn = [trial.distributions[name] for trial in trials if name in trial.distributions]
    if all(map(is_number, values)) and not any("choices" in entry for entry in drawn):
        return _of_numbers(name, values, drawn)
    # Choices in the order in which the space names them.
    given = [choice for entry in drawn for choice in _listed(entry.get("choices"))]
    choices = tuple(dict.fromkeys(map(_choice, [*given, *values])))
    if len(choices) < 2:
        return None
    every = math.ceil(len(choices) / MOST_CATEGORY_LABELS)
    places = tuple(float(place) for place in range(0, len(choices), every))
    labels = tuple(shortened(choices[int(place)]) for place in places)
    return Parameter(name, Axis(0.0, float(len(choices) - 1), places, labels), choices)


def _of_numbers(name: str, values: list[Any], drawn: list[dict[str, Any]]) -> Parameter | None:
    ends = [entry[end] for entry in drawn for end in ("low", "high") if is_number(entry.get(end))]
    low, high = float(min([*values, *ends])), float(max([*values, *ends]))
    if not low < high:
        return None
    logarithmic = bool(drawn) and all(entry.get("log") is True for entry in drawn)
    whole = all(isinstance(value, int) for value in values) and not any(entry.get("kind") == "float" for entry in drawn)
    return Parameter(name, range_axis(low, high, logarithmic, whole), whole=whole)


def is_number(value: Any) -> bool:
    """Whether a value from a record is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _choice(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
