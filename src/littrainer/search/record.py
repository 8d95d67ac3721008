"""The result of a search, and its record, a file in its output folder with the state of each trial."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.arguments.secrets import redact_secrets
from littrainer.runtime.atomic_files import write_atomically

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

SEARCH_RECORD_NAME = "hyperparameter_search.json"
VERSION = 1
STATES = COMPLETE, PRUNED, FAILED, RUNNING = "complete", "pruned", "failed", "running"
INTERRUPTED = "it was interrupted"
"""The error of a trial that was running at the end of its search."""
MAXIMIZE = "maximize"
MAX_ERROR_CHARACTERS = 2000
MAX_SHOWN_TRIALS = 5
# Folder of a trial's model in its run folder, with `keep_best_trial`.
MODEL_FOLDER = "model"


class BestRun(NamedTuple):
    """The best trial of a search, or a Pareto-optimal trial of several objectives.

    Parameters:
        run_id: the trial's id; its checkpoints are in `run-<run_id>`, unless `hp_name` names the folder.
        objective: the result of `compute_objective`; a list if there are several objectives.
        hyperparameters: the drawn values, under the names of the search space.
        run_summary: with Ray Tune the `ExperimentAnalysis` of all trials, with Weights & Biases the sweep's id.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any | None = None


@dataclass
class TrialRecord:
    """The record of a trial.

    Parameters:
        state: `complete`, `pruned`, `failed` or `running`.
        objective: a number, or a list with a number for each direction.
        parameters: its hyperparameters; values that JSON lacks are written as text.
        distributions: parameter -> `{"kind": "categorical", "choices"}`, or `{"kind": "float" or "int", "low", "high",
            "log", "step"}` with inclusive bounds, and `step` None for a continuous range.
        intermediate: (optimizer step, value) of each objective reported during training.
        error: the reason of a failure, in one line.
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
        """Return the objectives in the order of the directions."""
        if self.objective is None:
            return []
        return list(self.objective) if isinstance(self.objective, list | tuple) else [self.objective]


@dataclass
class StoredSearch:
    """The record of a search.

    Parameters:
        backend: `optuna`, `ray` or `wandb`, or the name of a script's backend.
        directions: `maximize` or `minimize` for each objective.
        name: the name of the study or experiment.
        objective_names: a name for each direction, or an empty list.
        trials: in the order of their starts.
    """

    backend: str
    directions: list[str]
    name: str | None = None
    objective_names: list[str] = field(default_factory=list)
    trials: list[TrialRecord] = field(default_factory=list)


class UnreadableRecord(ValueError):
    """Raised for a file that is not the record of a search, with the reason."""


class SearchRecord:
    """Writer of a running search's record into the `output_dir` at its start, in the first process."""

    def __init__(
        self,
        args: TrainingArguments,
        backend: str,
        directions: Sequence[str],
        name: str | None = None,
        objective_names: Sequence[str] | None = None,
    ):
        self.path = Path(args.output_dir).absolute() / SEARCH_RECORD_NAME
        self.search = StoredSearch(backend, list(directions), name, list(objective_names or []))
        self._can_write: bool = args.process_index == 0

    def update(self, trials: Sequence[TrialRecord]) -> None:
        """Write the record; a failure is logged once, and the search continues."""
        self.search.trials = list(trials)
        if not self._can_write:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {"version": VERSION, **vars(self.search), "trials": [vars(trial) for trial in trials]}
            write_atomically(self.path, json.dumps(plain(redact_secrets(content)), indent=1, allow_nan=False))
        except OSError as error:
            self._can_write = False
            logger.warning(
                f"{self.path} cannot be written ({error.strerror}): the search continues, and `littrainer report` will "
                "not show it."
            )


def find_best_trials(
    trials: Sequence[TrialRecord], directions: Sequence[str], max_trials: int = 1
) -> list[TrialRecord]:
    """Return the complete trials with the best objectives, of equal trials the earlier first; or the Pareto front.

    Parameters:
        max_trials: for a single objective.
    """
    signs = [-1.0 if direction == MAXIMIZE else 1.0 for direction in directions]
    costs: list[tuple[list[float], TrialRecord]] = []
    for trial in trials:
        values = trial.objectives()
        if trial.state == COMPLETE and len(values) == len(signs) and not any(map(math.isnan, values)):
            costs.append(([sign * value for sign, value in zip(signs, values, strict=True)], trial))
    if len(signs) == 1:
        return [trial for _, trial in sorted(costs, key=lambda entry: entry[0])[:max_trials]]
    return [trial for cost, trial in costs if not any(_dominates(other, cost) for other, _ in costs)]


def format_best_trials(search: StoredSearch) -> str:
    """Return a table of the best trials, with rounded values; empty if no trial was completed."""
    best = find_best_trials(search.trials, search.directions, MAX_SHOWN_TRIALS)[:MAX_SHOWN_TRIALS]
    if not best:
        return ""
    counts = Counter(trial.state for trial in search.trials)
    names = list(dict.fromkeys(name for trial in best for name in trial.parameters))
    objectives = search.objective_names or ["objective"] * len(search.directions)
    rows = [["trial", *objectives, *names]]
    for trial in best:
        values = [*trial.objectives(), *(trial.parameters.get(name, "") for name in names)]
        rows.append([trial.id, *map(format_value, values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    title = f"Best of {len(search.trials)} trials ({', '.join(f'{count} {state}' for state, count in counts.items())}):"
    models = [Path(trial.folder, MODEL_FOLDER) for trial in best if trial.folder is not None]
    return "\n".join([title, *lines, *(f"Kept model: {folder}" for folder in models if folder.is_dir())])


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def delete_models_of_other_trials(search: StoredSearch) -> None:
    """Delete the models that ended trials have saved for `keep_best_trial`, except those of the best."""
    # `hp_name` may give trials the same folder.
    kept = {trial.folder for trial in find_best_trials(search.trials, search.directions)}
    for trial in search.trials:
        if trial.state != RUNNING and trial.folder is not None and trial.folder not in kept:
            shutil.rmtree(Path(trial.folder, MODEL_FOLDER), ignore_errors=True)


def _dominates(cost: list[float], other: list[float]) -> bool:
    return cost != other and all(ours <= theirs for ours, theirs in zip(cost, other, strict=True))


def load_search_record(source: str | Path) -> StoredSearch:
    """Return the search from a record file, or from the record in a folder.

    Raises:
        OSError: the file does not exist or cannot be read.
        UnreadableRecord: the file is not a record, or has a later version; the message is half a sentence.
    """
    path = Path(source)
    path = path / SEARCH_RECORD_NAME if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("version")
        if version != VERSION:
            raise UnreadableRecord(f"its version is {version!r}, and {VERSION} is known here")
        search = StoredSearch(**content)
        search.trials = [TrialRecord(**entry) for entry in content["trials"]]
        for trial in search.trials:
            # Infinities are stored as text.
            values = [float(value) for value in trial.objectives()]
            trial.objective = values if isinstance(trial.objective, list) else values[0] if values else None
            trial.intermediate = [(int(step), float(value)) for step, value in trial.intermediate]
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableRecord(f"it is no record of a search: {error!r}") from error
    except ValueError as error:
        raise UnreadableRecord(str(error)) from error
    return search


def plain(value: Any) -> Any:
    """Return a value for JSON: numbers of NumPy and torch as Python's, nan and other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if value is None or isinstance(value, str | int):
        return value
    is_number = callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", (2,))) == 1
    return plain(value.item()) if is_number else str(value)


def format_error(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:MAX_ERROR_CHARACTERS] if message else type(error).__name__


def make_no_trial_error(trials: Sequence[TrialRecord], advice: str = "") -> RuntimeError:
    """Return the error for a search without a complete trial, with the first failure and advice on it."""
    if not trials:
        return RuntimeError(
            "This search ended before any trial: give it more time (timeout), or find the caller of Study.stop()."
        )
    failed = [trial for trial in trials if trial.state == FAILED]
    pruned = sum(trial.state == PRUNED for trial in trials)
    message = f"None of {len(trials)} trials of this search was completed: {len(failed)} failed and {pruned} pruned."
    if failed:
        first = failed[0]
        message += f" The first failure, in trial {first.id} with {first.parameters}: {first.error}. {advice}".rstrip()
    return RuntimeError(message)
