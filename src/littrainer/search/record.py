"""What a search returns, and the file that it leaves in its output folder: what became of each trial."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

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

FLOAT, INTEGER, CATEGORICAL = "float", "int", "categorical"


class BestRun(NamedTuple):
    """The best trial of a search, or one of the best if it has several objectives.

    Parameters:
        run_id: the trial's id; its checkpoints lie in `run-<run_id>`, unless `hp_name` names the folder.
        objective: what `compute_objective` returned for it; a list if there are several objectives.
        hyperparameters: what was drawn for it, under the names that the search space gave.
        run_summary: with Ray Tune the `ExperimentAnalysis` of all trials, with Weights & Biases the sweep's id.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any | None = None


@dataclass
class TrialRecord:
    """One trial of a search.

    Parameters:
        id: what its backend calls it; its run folder bears this name.
        state: `complete`, `pruned`, `failed` or `running`.
        objective: what it reached, one number for each direction of several; None if it has none.
        parameters: its hyperparameters; what JSON cannot hold is written as text.
        distributions: parameter -> what it was drawn from, as `of_optuna` gives it.
        intermediate: (optimizer step, value) for each objective that was reported before the trial ended.
        seconds: how long it took, None if that is not known.
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
        """Return its objectives, one for each direction; none if it has none."""
        if self.objective is None:
            return []
        return list(self.objective) if isinstance(self.objective, list | tuple) else [self.objective]


@dataclass
class StoredSearch:
    """A search as its record holds it.

    Parameters:
        backend: `optuna`, `ray` or `wandb`, or the name of a script's own.
        directions: `maximize` or `minimize`, one for each objective.
        name: of the study or experiment; None if it has none.
        objective_names: one for each direction; none if they have no names.
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

    def update(self, trials: Sequence[TrialRecord]) -> None:
        """Write the record of these trials, which are all of the search, in place of the one before.

        If the record cannot be written, the search goes on, with one warning.
        """
        self.search.trials = list(trials)
        if not self.writes:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {"version": VERSION, **vars(self.search), "trials": [vars(trial) for trial in trials]}
            write_whole(self.path, json.dumps(plain(without_secrets(content)), indent=1, allow_nan=False))
        except OSError as error:
            self.writes = False
            logger.warning(
                f"{self.path} cannot be written ({error.strerror}): the search goes on, and `littrainer report` will "
                "not show it."
            )


def best_of(trials: Sequence[TrialRecord], directions: Sequence[str]) -> list[TrialRecord]:
    """Return the first complete trial with the best objective; of several objectives, all trials that none surpasses.

    A trial surpasses another one if it is better in one objective and worse in none.
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
    """Return the search whose record lies in a folder, or is this file.

    Raises:
        OSError: there is none, or it cannot be read.
        UnreadableRecord: it is no record, or one of a later version; the message is half a sentence.
    """
    path = Path(place)
    path = path / SEARCH_RECORD_NAME if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("version")
        if version != VERSION:
            raise UnreadableRecord(f"its version is {version!r}, and {VERSION} is known here")
        search = StoredSearch(**content)
        search.trials = [TrialRecord(**entry) for entry in content["trials"]]
        for trial in search.trials:
            # Infinities are texts there.
            values = [float(value) for value in trial.objectives()]
            trial.objective = values if isinstance(trial.objective, list) else values[0] if values else None
            trial.intermediate = [(int(step), float(value)) for step, value in trial.intermediate]
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableRecord(f"it is no record of a search: {error!r}") from error
    except ValueError as error:
        raise UnreadableRecord(str(error)) from error
    return search


def plain(value: Any) -> Any:
    """Return a value as JSON holds it.

    NumPy's and torch's numbers become Python's; nan, infinities and other objects become text.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", (2,))) == 1:
        return plain(value.item())
    return str(value)


def error_in_a_line(error: BaseException) -> str:
    """Return the kind of an error and its message in one line, for the record and for progress lines."""
    told = " ".join(str(error).split())
    return f"{type(error).__name__}: {told}"[:LONGEST_ERROR] if told else type(error).__name__


# ---- What a hyperparameter was drawn from ----------------------------------------------------------------------------


def of_optuna(distribution: Any) -> dict[str, Any]:
    """Describe one of Optuna's distributions as plain data.

    Returns:
        `{"kind": "categorical", "choices": [...]}`, or `{"kind": "float" or "int", "low", "high", "log", "step"}` with
        both ends included and `step` None if any number between them may be drawn.
    """
    if hasattr(distribution, "choices"):
        return {"kind": CATEGORICAL, "choices": plain(list(distribution.choices))}
    kind = INTEGER if type(distribution).__name__.startswith("Int") else FLOAT
    return _range(kind, distribution.low, distribution.high, bool(distribution.log), distribution.step)


def of_ray(domain: Any) -> dict[str, Any] | None:
    """Describe one entry of Ray Tune's search space, as `of_optuna` does.

    Returns:
        None for a constant, a normal distribution, and a function that draws.
    """
    if isinstance(domain, dict) and list(domain) == ["grid_search"]:
        return {"kind": CATEGORICAL, "choices": plain(list(domain["grid_search"]))}
    if hasattr(domain, "categories"):
        return {"kind": CATEGORICAL, "choices": plain(list(domain.categories))}
    # Texts have something that is called `lower`, too.
    if not (hasattr(domain, "get_sampler") and hasattr(domain, "lower") and hasattr(domain, "upper")):
        return None
    low, high = domain.lower, domain.upper
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    sampler = domain.get_sampler()
    # A quantized one wraps the one that says how numbers are spread.
    step = getattr(sampler, "q", None)
    spread = type(getattr(sampler, "sampler", None) or sampler).__name__
    if type(domain).__name__ == "Integer":
        # Ray excludes the upper end of integers, but for those that it rounds to multiples.
        return _range(INTEGER, low, high if step else high - 1, "Log" in spread, step or 1)
    return _range(FLOAT, low, high, "Log" in spread, step)


def _range(kind: str, low: float, high: float, log: bool, step: float | None) -> dict[str, Any]:
    return {"kind": kind, "low": plain(low), "high": plain(high), "log": log, "step": plain(step)}
