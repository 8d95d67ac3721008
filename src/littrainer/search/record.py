"""What a search leaves in its output folder: one file that tells of every trial, written anew after each of them."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from littrainer.arguments.secrets import without_secrets
from littrainer.errors.atomic_files import write_whole

logger = logging.getLogger(__name__)

SEARCH_RECORD_NAME = "hyperparameter_search.json"
VERSION = 1
COMPLETE, PRUNED, FAILED, RUNNING = "complete", "pruned", "failed", "running"
STATES = (COMPLETE, PRUNED, FAILED, RUNNING)
MAXIMIZE, MINIMIZE = "maximize", "minimize"
# Of the message of an error; a report is no place for a whole traceback.
LONGEST_ERROR = 2000


@dataclass
class TrialRecord:
    """One trial of a search.

    Parameters:
        id: what its backend calls it; its run folder bears this name.
        state: `complete`, `pruned`, `failed` or `running`.
        objective: what it reached, one number for each direction of several; None where it has none.
        parameters: its hyperparameters; what JSON cannot hold is written as text.
        distributions: parameter -> what it was drawn from, as `distributions.py` makes them.
        intermediate: (optimizer step, value) for each objective that was reported before the trial ended.
        seconds: how long it took, None where that is not known.
        folder: its run folder.
        error: what failed, in one line.
    """

    id: str
    state: str
    objective: float | list[float] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    distributions: dict[str, dict[str, Any]] = field(default_factory=dict)
    intermediate: list[tuple[int, float]] = field(default_factory=list)
    seconds: float | None = None
    folder: str | None = None
    error: str | None = None

    def objectives(self) -> list[float]:
        """Its objectives, one for each direction; none where it has none."""
        if self.objective is None:
            return []
        return list(self.objective) if isinstance(self.objective, list | tuple) else [self.objective]


@dataclass
class StoredSearch:
    """A search as its record tells it.

    Parameters:
        backend: `optuna`, `ray` or `wandb`, or the name of a script's own.
        directions: `maximize` or `minimize`, one for each objective.
        name: of the study or experiment; None where it has none.
        objective_names: one for each direction; none where they have no names.
        trials: in the order in which they began.
    """

    backend: str
    directions: list[str]
    name: str | None = None
    objective_names: list[str] = field(default_factory=list)
    trials: list[TrialRecord] = field(default_factory=list)


class UnreadableRecord(ValueError):
    """A file is no record of a search; the message says why."""


class SearchRecord:
    """Keeps the record of a running search.

    Parameters:
        trainer: the first of its processes writes, into the `output_dir` that its arguments name at this moment.
        backend, directions, name, objective_names: as of `StoredSearch`.
    """

    def __init__(
        self,
        trainer: Any,
        backend: str,
        directions: Sequence[str],
        name: str | None = None,
        objective_names: Sequence[str] | None = None,
    ):
        self.path = Path(trainer.args.output_dir).absolute() / SEARCH_RECORD_NAME
        self.writes: bool = trainer.args.process_index == 0
        self.search = StoredSearch(backend, list(directions), name, list(objective_names or []))
        # Trials side by side end in threads of their own.
        self._lock = threading.Lock()

    def update(self, trials: Sequence[TrialRecord]) -> None:
        """Write the record of these trials, which are all of the search, in place of the one before.

        A search goes on where its record cannot be written; that is told once.
        """
        with self._lock:
            self.search.trials = list(trials)
            if not self.writes:
                return
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self.path, _as_text(self.search))
            except OSError as error:
                self.writes = False
                logger.warning(
                    f"{self.path} cannot be written ({error.strerror}): the search goes on, and `littrainer report` "
                    "will not show it."
                )


def best_of(trials: Sequence[TrialRecord], directions: Sequence[str]) -> list[TrialRecord]:
    """The best of the complete trials: the first with the best objective, or with several all that none surpasses.

    A trial surpasses another one where it is better in one objective and worse in none.
    """
    signs = [-1.0 if direction == MAXIMIZE else 1.0 for direction in directions]
    costs: list[tuple[list[float], TrialRecord]] = []
    for trial in trials:
        values = trial.objectives()
        if trial.state == COMPLETE and len(values) == len(signs) and not any(map(math.isnan, values)):
            costs.append(([sign * value for sign, value in zip(signs, values, strict=True)], trial))
    if len(signs) == 1:
        return [min(costs, key=lambda entry: entry[0])[1]] if costs else []
    return [trial for cost, trial in costs if not any(_surpasses(other, cost) for other, _ in costs)]


def _surpasses(cost: list[float], other: list[float]) -> bool:
    return cost != other and all(one <= two for one, two in zip(cost, other, strict=True))


def read_record(place: str | Path) -> StoredSearch:
    """The search whose record lies in a folder, or is this file.

    Raises:
        OSError: there is none, or it cannot be read.
        UnreadableRecord: it is no record, or one of a later version; the message is half a sentence.
    """
    path = Path(place)
    path = path / SEARCH_RECORD_NAME if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UnreadableRecord("it is nested too deeply") from None
    except ValueError as error:
        raise UnreadableRecord(str(error)) from error
    if not isinstance(content, dict):
        raise UnreadableRecord("it holds no object")
    if content.get("version") != VERSION:
        raise UnreadableRecord(f"its version is {str(content.get('version'))[:40]!r}, and {VERSION} is known here")
    directions = _texts(content.get("directions"))
    if not directions or not set(directions) <= {MAXIMIZE, MINIMIZE}:
        raise UnreadableRecord(f"its directions are not a list of {MAXIMIZE!r} and {MINIMIZE!r}")
    trials = content.get("trials")
    if not isinstance(trials, list):
        raise UnreadableRecord("it has no list of trials")
    names = _texts(content.get("objective_names"))
    return StoredSearch(
        backend=str(content.get("backend")),
        directions=directions,
        name=_text(content.get("name")),
        objective_names=names if len(names) == len(directions) else [],
        trials=[_trial(entry, number) for number, entry in enumerate(trials)],
    )


def _trial(entry: Any, number: int) -> TrialRecord:
    if not isinstance(entry, dict) or entry.get("state") not in STATES:
        raise UnreadableRecord(f"entry {number} of its trials is no trial")
    parameters, distributions = entry.get("parameters"), entry.get("distributions")
    intermediate, objective = entry.get("intermediate"), entry.get("objective")
    several = [_number(value) for value in objective] if isinstance(objective, list) else []
    reported = [pair for pair in intermediate if _is_pair(pair)] if isinstance(intermediate, list) else []
    return TrialRecord(
        id=str(entry.get("id")),
        state=entry["state"],
        # One that is no number counts as none.
        objective=[value for value in several if value is not None] if several else _number(objective),
        parameters=parameters if isinstance(parameters, dict) else {},
        distributions={name: drawn for name, drawn in distributions.items() if isinstance(drawn, dict)}
        if isinstance(distributions, dict)
        else {},
        intermediate=[(pair[0], value) for pair in reported if (value := _number(pair[1])) is not None],
        seconds=_number(entry.get("seconds")),
        folder=_text(entry.get("folder")),
        error=_text(entry.get("error")),
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) is int and 0 <= value[0] < 2**53


def _texts(value: Any) -> list[str]:
    return value if isinstance(value, list) and all(isinstance(entry, str) for entry in value) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    if isinstance(value, str) and value in NO_JSON_NUMBERS:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


NO_JSON_NUMBERS = ("nan", "inf", "-inf")


def _as_text(search: StoredSearch) -> str:
    about = {
        "version": VERSION,
        "backend": search.backend,
        "name": search.name,
        "directions": search.directions,
        "objective_names": search.objective_names,
    }
    trials = [
        {entry.name: plain(without_secrets(getattr(trial, entry.name))) for entry in fields(trial)}
        for trial in search.trials
    ]
    # One line for each trial.
    head = json.dumps(about, indent=2, allow_nan=False)[: -len("\n}")]
    lines = ",".join(f"\n    {json.dumps(trial, allow_nan=False)}" for trial in trials)
    return f'{head},\n  "trials": [{lines}\n  ]\n}}\n'


def plain(value: Any) -> Any:
    """A value as JSON holds it: NumPy's and torch's numbers as Python's; nan, infinities and other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", (2,))) == 1:
        return plain(value.item())
    return str(value)


def error_in_a_line(error: BaseException) -> str:
    """The kind of an error and its message in one line, for the record and for progress lines."""
    told = " ".join(str(error).split())
    return f"{type(error).__name__}: {told}"[:LONGEST_ERROR] if told else type(error).__name__
