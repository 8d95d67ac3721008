"""Folders of trainings and hyperparameter searches, as read by `report` and `compare`."""

from __future__ import annotations

import csv
import functools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from littrainer.arguments.secrets import redact_secrets
from littrainer.arguments.shown_arguments import format_value
from littrainer.callbacks.log_history import (
    EVALUATION,
    TRAINING,
    History,
    Point,
    collect_logged_values,
    parse_log_history,
)
from littrainer.callbacks.state import COMPLETED, PATIENCE_COUNTER, TrainerState, describe_early_stop
from littrainer.checkpoint.layout import (
    PREFIX_CHECKPOINT_DIR,
    RUN_RECORD_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    checkpoint_step,
    list_checkpoints,
)
from littrainer.commands.command_line import BadInput
from littrainer.search.record import (
    COMPLETE,
    MAXIMIZE,
    SEARCH_RECORD_NAME,
    StoredSearch,
    TrialRecord,
    UnreadableRecord,
    find_best_trials,
    load_search_record,
)

LIGHTNING_LOG_NAME = "metrics.csv"
LIGHTNING_PREFIXES = {"val_": "eval_", "test_": "test_", "train_": ""}
# Endings of model classes, and PEFT tasks, with a token-level cross-entropy.
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "CAUSAL_LM")
MAX_EXPONENT = 700
# Missing for a run that only saved its state at the end.
FIRST_WEIGHTS = "weights at the start"
LESS_IS_BETTER = ("loss", "perplexity", "error", "wer", "cer", "mae", "mse", "rmse")


class MissingState(BadInput):
    """Folder without a training's state or a search's record."""


@dataclass
class Run:
    """Training, as read from its folder.

    Parameters:
        name: unique among the runs of a page.
        state_file, state, history: trainer_state.json, its content, and the numbers in it.
        arguments: training arguments as text, None if unknown.
        environment: device, processes, versions, class of the model, by name.
        started, command, end: date and time of the start, the command line, and why the training ended; None if not
            recorded.
        notes: sentences about missing information.
    """

    name: str
    folder: Path
    state_file: Path
    state: TrainerState
    history: History
    arguments: dict[str, str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    started: str | None = None
    command: str | None = None
    end: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def logged(self) -> dict[tuple[int, str], Any]:
        return collect_logged_values(self.state.log_history)

    @property
    def ending(self) -> str:
        """Reason why the training ended, or how far it is."""
        state = self.state
        if self.end is not None:
            return self.end
        if 0 < state.max_steps <= state.global_step:
            return COMPLETED
        saved = (state.stateful_callbacks or {}).values()
        callbacks = [callback for states in saved for callback in (states if isinstance(states, list) else [states])]
        counters = [
            (
                callback.get("args", {}).get("early_stopping_patience", math.inf),
                callback.get("attributes", {}).get(PATIENCE_COUNTER, 0),
            )
            for callback in callbacks
        ]
        early_stop = describe_early_stop(counters, (self.arguments or {}).get("metric_for_best_model"))
        if early_stop is not None:
            return early_stop
        if self.history.summary:
            return "stopped before its last step, by a callback or a time limit"
        return f"not known: the newest record is of step {state.global_step} of {state.max_steps}"

    @property
    def best_step(self) -> int | None:
        """Optimizer step of the best evaluation, or of the best checkpoint in earlier releases."""
        if self.state.best_global_step is not None or self.state.best_model_checkpoint is None:
            return self.state.best_global_step
        return checkpoint_step(Path(self.state.best_model_checkpoint))

    @functools.cached_property
    def deciding_curve(self) -> tuple[str, str]:
        """Metric and evaluation set that rank runs: those of the best model, else the loss."""
        best, step = self.state.best_metric, self.best_step
        evaluated = {key: points for key, points in self.history.curves.items() if key[1] != TRAINING}
        for key, points in evaluated.items():
            if best is not None and any(point.step == step and point.value == best for point in points):
                return key
        return next((key for key in evaluated if key[0] == "loss"), ("loss", EVALUATION))

    def is_less_better(self, metric: str) -> bool:
        greater = (self.arguments or {}).get("greater_is_better")
        if self.state.best_metric is not None and greater in ("True", "False") and self.deciding_curve[0] == metric:
            return greater == "False"
        return metric.endswith(LESS_IS_BETTER)

    def best_points(self, metric: str, source: str) -> list[Point]:
        """Return the best evaluation during training, or several with the same value."""
        points = [point for point in self.history.curves.get((metric, source), []) if math.isfinite(point.value)]
        points = [point for point in points if not point.is_after_training] or points
        if not points:
            return []
        values = [point.value for point in points]
        best = min(values) if self.is_less_better(metric) else max(values)
        if self.deciding_curve == (metric, source) and self.state.best_metric in values:
            best = self.state.best_metric
        return [point for point in points if point.value == best]

    def estimate_seconds(self, step: int) -> float | None:
        """Return the seconds from the beginning of training to a step, if all steps took the same time."""
        total, steps = self.history.summary.get("train_runtime"), self.state.global_step
        if total is None or not math.isfinite(total) or not steps:
            return None
        return round(total * step / steps, 3)


@dataclass
class Search:
    """Hyperparameter search.

    Parameters:
        name: unique among the searches of a page.
        file, stored: the record and its content.
    """

    name: str
    file: Path
    stored: StoredSearch

    @property
    def objective_names(self) -> list[str]:
        count = len(self.stored.directions)
        default = [f"objective {number + 1}" for number in range(count)] if count > 1 else ["objective"]
        return self.stored.objective_names or default

    def is_complete(self, trial: TrialRecord) -> bool:
        """Return whether a trial is complete and all its objectives are finite."""
        values = trial.objectives()
        has_all = len(values) == len(self.stored.directions)
        return trial.state == COMPLETE and has_all and all(map(math.isfinite, values))

    @functools.cached_property
    def complete(self) -> list[TrialRecord]:
        """Complete trials, best first by the first objective."""
        complete = filter(self.is_complete, self.stored.trials)
        is_reversed = self.stored.directions[0] == MAXIMIZE
        return sorted(complete, key=lambda trial: -trial.objectives()[0] if is_reversed else trial.objectives()[0])

    @functools.cached_property
    def best(self) -> list[TrialRecord]:
        """Trials with the best objective; for several objectives, the Pareto front."""
        trials = self.stored.trials
        objectives = {tuple(trial.objectives()) for trial in find_best_trials(trials, self.stored.directions)}
        return [trial for trial in trials if self.is_complete(trial) and tuple(trial.objectives()) in objectives]


def load_folders(folders: Sequence[str]) -> tuple[list[Run], list[Search]]:
    """Load the runs and searches in folders, ignoring duplicates.

    Parameters:
        folders: output directories, checkpoints, or their JSON files.

    Raises:
        BadInput: a folder cannot be read.
    """
    paths: dict[Path, Path] = {}
    for path in map(Path, folders):
        is_file = path.name in (TRAINER_STATE_NAME, SEARCH_RECORD_NAME) and path.is_file()
        folder = path.parent if is_file else path
        paths.setdefault(folder.resolve(), folder)
    runs: list[Run] = []
    searches: list[Search] = []
    common = Path(os.path.commonpath(paths)) if len(paths) > 1 else None
    for real, folder in paths.items():
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise MissingState(f"{folder} {what}; give the output_dir of a training, or a checkpoint in it.")
        name = real.name if common is None or common == real else str(real.relative_to(common))
        record, state_file = folder / SEARCH_RECORD_NAME, _find_state_file(folder)
        if record.is_file():
            searches.append(_load_search(record, name))
        if state_file is not None:
            runs.append(_load_run(folder, name, state_file))
        elif not record.is_file():
            raise MissingState(
                f"{folder} has no {TRAINER_STATE_NAME}, and no {PREFIX_CHECKPOINT_DIR}-<step> folder in it has one; "
                "give the output_dir of a training that saved checkpoints or called trainer.save_state(), or of a "
                "hyperparameter search."
            )
    return runs, searches


def _load_search(record: Path, name: str) -> Search:
    try:
        search = Search(name, record, load_search_record(record))
    except (OSError, UnreadableRecord) as error:
        raise BadInput(
            f"{record} is not a readable record of a search ({error}); give a folder whose file is intact."
        ) from error
    for trial in search.stored.trials:
        trial.parameters = redact_secrets(trial.parameters)
    return search


def _load_run(folder: Path, name: str, state_file: Path) -> Run:
    is_table = state_file.name == LIGHTNING_LOG_NAME
    try:
        count = None
        if is_table:
            state, count = _load_lightning_log(state_file)
        else:
            state = TrainerState.load_from_json(str(state_file))
        history = parse_log_history(state.log_history, count)
    # Entries of log_history that are no dicts or have no step end with one of the last three.
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise BadInput(
            f"{state_file} is not a readable trainer state ({error.__cause__ or error}); give the folder of a "
            "checkpoint whose file is intact."
        ) from error
    run = Run(name, folder, state_file, state, history, notes=[*history.notes])
    if not history.curves:
        run.notes.append(
            "Nothing was logged that could be drawn. Was training shorter than logging_steps, or logging_strategy 'no'?"
        )
    candidates = [state_file.parent, folder, state_file.parent.parent]
    if is_table:
        versions = [*state_file.parent.parent.glob(f"version_*/{LIGHTNING_LOG_NAME}")]
        if len(versions) > 1 and folder != state_file.parent:
            run.notes.append(f"{state_file.parent} is shown, the newest of {len(versions)} logs.")
    else:
        _add_arguments(run, candidates)
    _add_model(run, candidates)
    return run


def _find_state_file(folder: Path) -> Path | None:
    """Return the trainer_state.json of a run or its newest checkpoint, else the last file of a CSVLogger."""
    states = (path / TRAINER_STATE_NAME for path in (folder, *list_checkpoints(folder)))
    logs = (log for depth in ("", "version_*/", "*/version_*/") for log in folder.glob(depth + LIGHTNING_LOG_NAME))
    return next(filter(Path.is_file, states), None) or max(logs, key=lambda log: log.stat().st_mtime, default=None)


def _load_lightning_log(table: Path) -> tuple[TrainerState, int]:
    """Return the rows of Lightning's CSVLogger with a Trainer's names, and how many are of the training."""
    history: list[dict[str, Any]] = []
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            entry: dict[str, Any] = {"step": int(float(row.pop("step", None) or 0))}
            for name, cell in row.items():
                if name and cell:
                    prefix = next(filter(name.startswith, LIGHTNING_PREFIXES), "")
                    entry[LIGHTNING_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = float(cell)
            history.append(entry)
    # A LearningRateMonitor logs each parameter group: the first is the learning rate, others only where they differ.
    first, *others = dict.fromkeys(name for entry in history for name in entry if name.startswith("lr-")) or [""]
    for entry in history:
        for name in others:
            if entry.get(name) == entry.get(first):
                entry.pop(name, None)
        if first in entry:
            entry["learning_rate"] = entry.pop(first)
    count = _count_rows_of_training(history)
    steps = max((entry["step"] + 1 for entry in history[:count]), default=0)
    return TrainerState(global_step=steps, log_history=history), count


def _count_rows_of_training(history: Sequence[dict[str, Any]]) -> int:
    """Return the number of a Lightning log's rows before the evaluations that follow `fit`.

    Within an epoch, rows of evaluations have the step of the last batch. After `fit` they have the next step and epoch.
    """
    evaluation_names = ("eval_", "test_")
    is_evaluation = [any(name.startswith(evaluation_names) for name in entry) for entry in history]
    count = len(history)
    while count and is_evaluation[count - 1]:
        entry, earlier = history[count - 1], history[: count - 1]
        if any(row["step"] == entry["step"] and not is_evaluation[index] for index, row in enumerate(earlier)):
            break
        last_step = max((row["step"] for row in earlier if row["step"] < entry["step"]), default=-1)
        last_epoch = max((row.get("epoch", 0) for row in earlier if row["step"] < entry["step"]), default=0)
        is_test = not any(name.startswith("eval_") for name in entry)
        if not is_test and (last_step + 1 != entry["step"] or entry.get("epoch", 0) <= last_epoch):
            break
        count -= 1
    return count


def _add_arguments(run: Run, folders: list[Path]) -> None:
    records = (RUN_RECORD_NAME, TRAINING_ARGS_NAME)
    path = next((folder / name for name in records for folder in folders if (folder / name).is_file()), None)
    if path is None:
        run.notes.append(
            f"The arguments are not known: the folder of {run.state_file} has no {' and no '.join(records)}."
        )
        return
    try:
        if path.name == TRAINING_ARGS_NAME:
            # Loads torch.
            from littrainer.checkpoint.run_record import read_arguments

            run.arguments = read_arguments(path)
            return
        record = json.loads(path.read_text("utf-8"))
        run.arguments = {name: format_value(value) for name, value in redact_secrets(record["arguments"]).items()}
        start = record.get("run", {})
        run.started, run.command = start.get("started"), start.get("command")
        # The page of a checkpoint is about the training until then.
        run.end = None if checkpoint_step(run.folder) is not None else start.get("end", {}).get("reason")
        facts = {**record.get("environment", {}), **record.get("versions", {}), **record.get("code", {})}
        for name, data in record.get("data", {}).items():
            size = "stream" if data.get("rows") is None else f"{data['rows']:,} rows"
            facts[f"{name} data"] = ", ".join(filter(None, (f"{size} ({data['class']})", data.get("fingerprint"))))
            facts[f"{name} attributes"] = data.get("attributes")
        if model := record.get("model"):
            facts[FIRST_WEIGHTS] = f"{model['class']}, {model['parameters']:,} parameters, {model['fingerprint']}"
        run.environment = {name: format_value(fact) for name, fact in facts.items() if fact not in (None, {})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        run.notes.append(f"The arguments are not known: {path} is not readable ({type(error).__name__}: {error}).")


def _add_model(run: Run, folders: list[Path]) -> None:
    """Add the model's class, and the perplexity of a language model."""
    for path in (folder / name for folder in folders for name in ("config.json", "adapter_config.json")):
        try:
            config = json.loads(path.read_text("utf-8"))
            model = str((config.get("architectures") or [config["task_type"]])[0])
        # No configuration of a transformers model.
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
        run.environment = {"model": model, **run.environment}
        smoothing = (run.arguments or {}).get("label_smoothing_factor", "0.0")
        if model.endswith(LANGUAGE_MODELS) and smoothing in ("0", "0.0"):
            for (metric, source), points in [*run.history.curves.items()]:
                if metric == "loss" and source != TRAINING:
                    perplexity = [point._replace(value=math.exp(min(point.value, MAX_EXPONENT))) for point in points]
                    run.history.curves.setdefault(("perplexity", source), perplexity)
        return
