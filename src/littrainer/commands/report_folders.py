"""The folders that `littrainer report` reads: trainings and hyperparameter searches."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from littrainer.arguments.secrets import without_secrets
from littrainer.arguments.shown_arguments import as_text
from littrainer.callbacks.log_history import TRAINING, History, logged_values, read_history
from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.layout import (
    PREFIX_CHECKPOINT_DIR,
    RUN_RECORD_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    checkpoint_step,
)
from littrainer.search.record import (
    FAILED,
    RUNNING,
    SEARCH_RECORD_NAME,
    StoredSearch,
    UnreadableRecord,
    read_record,
)

# What Lightning's CSVLogger writes.
LIGHTNING_LOG_NAME = "metrics.csv"
# Models whose loss is the mean of -log p of tokens end so, as do tasks of PEFT.
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "CAUSAL_LM")
MOST_EXPONENT = 700
# What has the arguments of a run: ours, and what transformers writes too.
RECORDS = (RUN_RECORD_NAME, TRAINING_ARGS_NAME)
# What the model of a run is called among its facts; a run that only saved its state at the end does not know it.
FIRST_WEIGHTS = "weights at the start"


class NothingToReport(Exception):
    """What was given cannot be reported on; the message is one sentence that names the file and says what to do."""


@dataclass
class Run:
    """One training, as its folder shows it.

    Parameters:
        name: what it is called on the page; no two runs of a page have the same.
        folder: the folder that was given.
        state_file: the trainer_state.json that was read.
        state: what it holds.
        history: the numbers in it.
        arguments: its arguments as text, None if they are not known.
        environment: what it ran on, by name: device, processes, versions, class of the model.
        notes: sentences about what could not be shown.
    """

    name: str
    folder: Path
    state_file: Path
    state: TrainerState
    history: History
    arguments: dict[str, str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def logged(self) -> dict[tuple[int, str], Any]:
        """What was logged by step and name, as `logged_values` returns it."""
        return logged_values(self.state.log_history)

    @property
    def places(self) -> list[Path]:
        """Where files about the run may lie, the most likely folder first."""
        return [self.state_file.parent, self.folder, self.state_file.parent.parent]

    @property
    def best_checkpoint(self) -> str | None:
        """The best checkpoint, as a path if it lies next to the others or where it was written, else its name."""
        recorded = self.state.best_model_checkpoint
        if recorded is None:
            return None
        home, name = self.state_file.parent, Path(recorded).name
        found = (place for place in (home / name, home.parent / name, Path(recorded)) if place.is_dir())
        return str(next(found, f"{recorded} (not there)"))

    @property
    def best_step(self) -> int | None:
        """The optimizer step of the best evaluation; earlier releases note it in the checkpoint's name alone."""
        if self.state.best_global_step is not None or self.state.best_model_checkpoint is None:
            return self.state.best_global_step
        return checkpoint_step(Path(self.state.best_model_checkpoint))


@dataclass
class Search:
    """One hyperparameter search: its name on the page, the record that was read, what it holds, and notes."""

    name: str
    file: Path
    stored: StoredSearch
    notes: list[str] = field(default_factory=list)


def read_folders(folders: Sequence[str]) -> tuple[list[Run], list[Search]]:
    """Read the runs and searches in the given folders; one that is given twice is read once.

    Parameters:
        folders: output directories, checkpoints in them, or trainer_state.json and hyperparameter_search.json files.

    Raises:
        NothingToReport: one of them cannot be read; the message names it.
    """
    paths: dict[Path, Path] = {}
    for given in folders:
        path = Path(given)
        is_known_file = path.name in (TRAINER_STATE_NAME, SEARCH_RECORD_NAME) and path.is_file()
        folder = path.parent if is_known_file else path
        paths.setdefault(folder.resolve(), folder)
    runs: list[Run] = []
    searches: list[Search] = []
    # Several are called by what follows their common beginning.
    common = Path(os.path.commonpath(paths)) if len(paths) > 1 else None
    for real, folder in paths.items():
        name = real.name if common is None or common == real else str(real.relative_to(common))
        record = folder / SEARCH_RECORD_NAME
        if record.is_file():
            searches.append(_read_search(record, name))
        # A training may have followed in the same folder.
        if not record.is_file() or _state_file(folder) is not None:
            runs.append(_read_run(folder, name))
    return runs, searches


def _read_search(record: Path, name: str) -> Search:
    try:
        search = Search(name, record, read_record(record))
    except (OSError, UnreadableRecord) as error:
        raise NothingToReport(
            f"{record} is not a readable record of a search ({error}); give a folder whose file is intact."
        ) from error
    trials = search.stored.trials
    for trial in trials:
        trial.parameters = without_secrets(trial.parameters)
    running = sum(trial.state == RUNNING for trial in trials)
    if running:
        search.notes.append(f"{running} of {len(trials)} trials were running when the record was written.")
    failure = next((trial.error for trial in trials if trial.state == FAILED and trial.error), None)
    if failure:
        search.notes.append(f"The first failure: {failure[:300]}")
    return search


def _read_run(folder: Path, name: str) -> Run:
    state_file = _state_file(folder)
    if state_file is None:
        raise NothingToReport(_nothing_in(folder))
    try:
        is_table = state_file.name == LIGHTNING_LOG_NAME
        state = _state_of_lightning(state_file) if is_table else TrainerState.load_from_json(str(state_file))
    # A file that is nested without end makes the reader run out of its stack.
    except (OSError, ValueError, RecursionError) as error:
        raise NothingToReport(
            f"{state_file} is not a readable trainer state ({error.__cause__ or error}); give the folder of a "
            "checkpoint whose file is intact."
        ) from error
    run = Run(name, folder, state_file, state, read_history(state.log_history))
    run.notes += run.history.notes
    if not run.history.curves:
        run.notes.append(
            "Nothing was logged that could be drawn. Was training shorter than logging_steps, or logging_strategy 'no'?"
        )
    if not is_table:
        _add_arguments(run)
    _add_model(run)
    return run


def _state_file(folder: Path) -> Path | None:
    """The trainer_state.json of a run, from the folder or its newest checkpoint; else what a CSVLogger wrote last."""
    places = [folder, *reversed(checkpoints_in(folder))]
    state = next((place / TRAINER_STATE_NAME for place in places if (place / TRAINER_STATE_NAME).is_file()), None)
    logs = (log for depth in ("", "version_*/", "*/version_*/") for log in folder.glob(depth + LIGHTNING_LOG_NAME))
    return state or max(logs, key=lambda log: log.stat().st_mtime, default=None)


def _state_of_lightning(table: Path) -> TrainerState:
    """What Lightning's CSVLogger wrote, under the names that a Trainer logs."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [{name: float(cell) for name, cell in row.items() if name and cell} for row in csv.DictReader(file)]
    names = {"val_": "eval_", "test_": "test_", "train_": ""}
    history: list[dict[str, Any]] = []
    for row in rows:
        step = int(row.pop("step", 0))
        renamed = {
            next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name): value
            for name, value in row.items()
        }
        history.append({**renamed, "step": step})
    steps = max((entry["step"] + 1 for entry in history), default=0)
    return TrainerState(global_step=steps, log_history=history)


def _nothing_in(folder: Path) -> str:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        return f"{folder} {what}; give the output_dir of a training, or a checkpoint in it."
    return (
        f"{folder} has no {TRAINER_STATE_NAME}, and no {PREFIX_CHECKPOINT_DIR}-<step> folder in it has one; give the "
        "output_dir of a training that saved checkpoints or called trainer.save_state(), or of a hyperparameter search."
    )


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the one with the fewest steps first."""
    found = [entry for entry in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if checkpoint_step(entry) is not None]
    return sorted((entry for entry in found if entry.is_dir()), key=lambda entry: checkpoint_step(entry) or 0)


def _add_arguments(run: Run) -> None:
    found = {name: place / name for place in reversed(run.places) for name in RECORDS if (place / name).is_file()}
    if not found:
        run.notes.append(
            f"The arguments are not known: the folder of {run.state_file} has no {' and no '.join(RECORDS)}."
        )
        return
    path = found.get(RUN_RECORD_NAME) or found[TRAINING_ARGS_NAME]
    try:
        if path.name == TRAINING_ARGS_NAME:
            # It loads torch, which most reports do without.
            from littrainer.checkpoint.run_record import read_arguments

            run.arguments = read_arguments(path)
            return
        record = json.loads(path.read_text("utf-8"))
        run.arguments = {name: as_text(value) for name, value in without_secrets(record["arguments"]).items()}
        facts = {
            name: fact for part in ("environment", "versions", "code") for name, fact in record.get(part, {}).items()
        }
        for name, described in record.get("data", {}).items():
            facts |= {f"{name} attributes": described.pop("attributes", None), f"{name} data": described}
        facts[FIRST_WEIGHTS] = record.get("model")
        run.environment = {name: as_text(fact).strip("{}") for name, fact in facts.items() if fact not in (None, {})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        run.notes.append(f"The arguments are not known: {path} is not readable ({type(error).__name__}: {error}).")


def _add_model(run: Run) -> None:
    """Add the model's class, and the perplexity if its loss is that of a language model."""
    for path in (place / name for place in run.places for name in ("config.json", "adapter_config.json")):
        try:
            described = json.loads(path.read_text("utf-8"))
            model = str((described.get("architectures") or [described["task_type"]])[0])
        # No model of transformers, or a file that is no configuration of one.
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
        run.environment = {"model": model, **run.environment}
        smoothed = (run.arguments or {}).get("label_smoothing_factor", "0.0")
        if model.endswith(LANGUAGE_MODELS) and smoothed in ("0", "0.0"):
            for (metric, source), points in [*run.history.curves.items()]:
                if metric == "loss" and source != TRAINING:
                    perplexity = [point._replace(value=math.exp(min(point.value, MOST_EXPONENT))) for point in points]
                    run.history.curves.setdefault(("perplexity", source), perplexity)
        return


def last_changes(folders: Sequence[str]) -> list[tuple[str, int]]:
    """The files that a page would be written from, with the times of their last changes; none before all are there."""
    found = []
    for given in folders:
        path = Path(given)
        folder = path.parent if path.is_file() else path
        read = [
            file for file in (folder / SEARCH_RECORD_NAME, _state_file(folder)) if file is not None and file.is_file()
        ]
        if not read:
            return []
        found += [(str(file), file.stat().st_mtime_ns) for file in read]
    return found
