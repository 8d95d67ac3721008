"""Finding and reading what a training left in its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from littrainer.report.history import History, read_history
from littrainer.report.searches import Search, UnreadableSearch, read_search
from littrainer.report.stored_arguments import Changed, Unreadable, changed_arguments, read_arguments
from littrainer.search.record import SEARCH_RECORD_NAME


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
        stored: its arguments as text, None where they could not be read.
        changed: those of them that are away from their defaults.
        notes: sentences about what could not be shown.
    """

    name: str
    folder: Path
    state_file: Path
    state: TrainerState
    history: History
    stored: dict[str, str] | None = None
    changed: Changed | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def best_checkpoint(self) -> str | None:
        """The best checkpoint, as a path where it lies beside the others or where it was written, else its name."""
        recorded = self.state.best_model_checkpoint
        if recorded is None:
            return None
        home = self.state_file.parent
        name = Path(recorded).name
        for candidate in (home / name, home.parent / name, Path(recorded)):
            if candidate.is_dir() and candidate.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
                return str(candidate)
        return f"{recorded} (not there)"

    @property
    def best_step(self) -> int | None:
        """The optimizer step of the best evaluation; earlier releases tell it by the checkpoint's name alone."""
        if self.state.best_global_step is not None or self.state.best_model_checkpoint is None:
            return self.state.best_global_step
        return _step_of(Path(self.state.best_model_checkpoint))


class Findings(NamedTuple):
    """What folders hold; a folder may hold a search and a training that followed it."""

    runs: list[Run]
    searches: list[Search]


def read_folders(folders: Sequence[str]) -> Findings:
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
    names = _shortest_names(list(paths))
    found = Findings([], [])
    for real, folder in paths.items():
        _read_folder(folder, names[real], found)
    return found


def _read_folder(folder: Path, name: str, found: Findings) -> None:
    try:
        search, note = read_search(folder, name), None
    except UnreadableSearch as error:
        if not _has_state(folder):
            raise NothingToReport(f"{error}; give a folder whose file is intact.") from error
        search, note = None, f"{error}."
    if search is not None:
        found.searches.append(search)
    if search is None or _has_state(folder):
        run = _read_run(folder, name)
        run.notes += [note] if note else []
        found.runs.append(run)


def _has_state(folder: Path) -> bool:
    try:
        return find_state(folder).is_file()
    except (NothingToReport, OSError):
        return False


def _read_run(folder: Path, name: str) -> Run:
    try:
        state_file = find_state(folder)
        state = TrainerState.load_from_json(str(state_file))
    except OSError as error:
        raise NothingToReport(f"{error.filename} cannot be read: {error.strerror}.") from error
    # A file that is nested without end makes the reader run out of its stack.
    except (ValueError, RecursionError) as error:
        reason = error.__cause__ or "it is nested too deeply"
        raise NothingToReport(
            f"{state_file} is not a readable trainer state ({reason}); give the folder of a checkpoint whose file is "
            "intact."
        ) from error
    run = Run(name, folder, state_file, state, read_history(state.log_history))
    run.notes += run.history.notes
    _note_a_later_checkpoint(run)
    _add_arguments(run)
    return run


def find_state(folder: Path) -> Path:
    """The trainer_state.json of a run: in the folder itself, else in its newest checkpoint that has one.

    Raises:
        NothingToReport: there is none, or no such folder.
        OSError: the folder cannot be listed.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise NothingToReport(f"{folder} {what}; give the output_dir of a training, or a checkpoint in it.")
    if (folder / TRAINER_STATE_NAME).is_file():
        return folder / TRAINER_STATE_NAME
    for checkpoint in reversed(_checkpoints(folder)):
        if (checkpoint / TRAINER_STATE_NAME).is_file():
            return checkpoint / TRAINER_STATE_NAME
    raise NothingToReport(
        f"{folder} has no {TRAINER_STATE_NAME}, nor has a {PREFIX_CHECKPOINT_DIR}-<step> folder in it; give the "
        "output_dir of a training that saved checkpoints or called trainer.save_state(), or of a hyperparameter search."
    )


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the one with the fewest steps first."""
    steps = {entry: _step_of(entry) for entry in folder.iterdir()}
    found = {entry: step for entry, step in steps.items() if step is not None and entry.is_dir()}
    return sorted(found, key=lambda entry: found[entry])


def _step_of(checkpoint: Path) -> int | None:
    match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d{{1,18}})", checkpoint.name)
    return int(match.group(1)) if match else None


def _note_a_later_checkpoint(run: Run) -> None:
    if run.state_file.parent != run.folder:
        return
    newest = next(reversed(_checkpoints(run.folder)), None)
    step = None if newest is None else _step_of(newest)
    if step is not None and step > run.state.global_step:
        run.notes.append(
            f"{newest} goes further than {run.state_file}, which ends at step {run.state.global_step}; give that "
            "folder to see it."
        )


def _add_arguments(run: Run) -> None:
    home = run.state_file.parent
    places = [home, run.folder]
    if run.folder.is_dir() and home == run.folder:
        places += reversed(_checkpoints(run.folder))
    path = next((place / TRAINING_ARGS_NAME for place in places if (place / TRAINING_ARGS_NAME).is_file()), None)
    if path is None:
        run.notes.append(f"The arguments are not known: there is no {TRAINING_ARGS_NAME} beside {run.state_file}.")
        return
    try:
        run.stored = read_arguments(path)
    except (OSError, Unreadable) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        run.notes.append(f"The arguments are not known: {path} could not be read safely, {reason}.")
        return
    run.changed = changed_arguments(run.stored)


def _shortest_names(paths: list[Path]) -> dict[Path, str]:
    """For each path as many of its last parts as tell it from the others."""
    names = {path: path.name or str(path) for path in paths}
    for length in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        taken = list(names.values())
        doubled = [path for path, name in names.items() if taken.count(name) > 1]
        if not doubled:
            break
        names.update({path: os.path.join(*path.parts[-length:]) for path in doubled})
    return names
