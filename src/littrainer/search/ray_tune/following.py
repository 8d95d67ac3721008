"""What becomes of the trials of a Ray search: the record, a line for each of them, and which errors end the search."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.tune import Callback

from littrainer.search import distributions
from littrainer.search.failures import fails_trial_only
from littrainer.search.progress_lines import told
from littrainer.search.ray_tune.trial import LAST_STEP, OBJECTIVE, STEP, EndedByScript
from littrainer.search.record import (
    COMPLETE,
    FAILED,
    PRUNED,
    RUNNING,
    SearchRecord,
    TrialRecord,
    best_of,
    error_in_a_line,
)
from littrainer.search.reporting import name_by
from littrainer.search.trial import delete_checkpoints

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

SECONDS = "time_total_s"
# Ray's states of a trial.
TERMINATED, PAUSED, ERROR = "TERMINATED", "PAUSED", "ERROR"
# Why a trial has failed.
NO_ERROR_IS_LEFT = "its process failed, and left no error that can be read"
OUT_OF_MEMORY = (
    "its process was ended by Ray, as the machine's memory ran out: give each trial more, with "
    "resources_per_trial={'memory': <bytes>, ...}, or let fewer run at once (max_concurrent_trials)"
)
DIED = (
    "its process died without an error, most often as memory ran out (let fewer trials run at once, with "
    "max_concurrent_trials) or as native code crashed; Ray's logs of its worker may say more"
)
INTERRUPTED = "it was interrupted"
SEARCH_HAS_ENDED = "the search was ended while it ran"
# What Ray's texts have where memory was the reason, and only there.
LOW_ON_MEMORY = "running low on memory"


class Following(Callback):
    """Follows a search on Ray Tune.

    Parameters:
        trainer: the Trainer that searches.
        space: what `hp_space` returned.
        direction: `minimize` or `maximize`.
        planned: number of trials; None where time decides.
        time_limits: as `ray_keywords.time_limits` gives them.

    Attributes:
        mistake: the error that ended the search, where the script is wrong.
    """

    def __init__(
        self,
        trainer: Trainer,
        space: dict[str, Any],
        direction: str,
        planned: int | None,
        time_limits: dict[str, float],
    ) -> None:
        self.trials: dict[str, TrialRecord] = {}
        self.mistake: BaseException | None = None
        self._trainer = trainer
        self._drawn_from = {name: found for name, domain in space.items() if (found := distributions.of_ray(domain))}
        self._directions = [direction]
        self._planned = planned
        self._time_limits = time_limits
        self._record: SearchRecord | None = None
        self._errors: dict[str, BaseException] = {}
        self._is_stopped: set[str] = set()
        self._has_new_folder: set[str] = set()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial begins, or goes on."""
        self._of(trial).state = RUNNING
        self._write(trial)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial has reported an evaluation; it is done where the scheduler, or a limit, stops it there."""
        kept = self._of(trial)
        if OBJECTIVE not in result:
            return
        kept.parameters = dict(trial.config)
        kept.objective = result[OBJECTIVE]
        kept.intermediate.append((result.get(STEP, iteration), result[OBJECTIVE]))
        if result.get("done") and result.get(STEP, 0) < result.get(LAST_STEP, 0):
            self._is_stopped.add(trial.trial_id)
        self._write(trial)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has ended, or has been stopped."""
        was_stopped_elsewhere = trial.status == PAUSED or trial.is_saving
        is_at_end = self._is_at_end(trial)
        stopped = trial.trial_id in self._is_stopped or (was_stopped_elsewhere and not is_at_end)
        self._end(trial, PRUNED if stopped and not self._is_at_limit(trial) else COMPLETE)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has failed.

        Raises:
            BaseException: the error, where it is none that hyperparameters bring about.
        """
        error = self._note_error(trial, _error_of(trial))
        cause = _cause(error)
        if isinstance(error, RayTaskError) and not fails_trial_only(cause):
            self.mistake = cause.as_raised() if isinstance(cause, EndedByScript) else error.as_instanceof_cause()
            # Ray ends the other trials only where what is raised here is an Exception.
            raise cause if isinstance(cause, EndedByScript) else self.mistake

    def take_in(self, trials: Sequence[Any]) -> None:
        """Take in what ended unseen: trials on a cluster, those of a search that is resumed, and those that Ray stopped
        all at once. One that never began is none."""
        for trial in trials:
            kept, result = self.trials.get(trial.trial_id), trial.last_result or {}
            if kept is not None and kept.state != RUNNING:
                continue
            if kept is None and trial.status == TERMINATED and OBJECTIVE not in result:
                continue
            self._of(trial).objective = result.get(OBJECTIVE)
            if trial.status == TERMINATED:
                self._end(trial, COMPLETE if self._is_at_end(trial) or self._is_at_limit(trial) else PRUNED)
            elif trial.status == ERROR:
                self._note_error(trial, trial.get_pickled_error())

    # ---- After the search -------------------------------------------------------------------------------------------

    def has_unfinished(self, trials: Sequence[Any]) -> bool:
        """Whether trials are left that have neither ended nor failed."""
        return any(not trial.is_finished() for trial in trials)

    def leave_unfinished(self, why: str) -> None:
        """The search has been ended: note why the trials that ran then have no end. All checkpoints stay."""
        running = [trial for trial in self.trials.values() if trial.state == RUNNING]
        for trial in running:
            trial.state, trial.error = FAILED, why
        if running and self._record is not None:
            self._record.update(list(self.trials.values()))

    def close(self, best: Any) -> None:
        """The search has come to its end: its best trial counts as complete, also where it was stopped, and checkpoints
        of the other trials that were stopped are deleted."""
        self._of(best).state = COMPLETE
        self._write(best)
        others_folders = {trial.folder for trial in self.trials.values() if trial.state != PRUNED}
        for trial in self.trials.values():
            if trial.state == PRUNED and trial.id in self._has_new_folder and trial.folder not in others_folders:
                delete_checkpoints(str(trial.folder))

    def completed(self, trials: Sequence[Any]) -> list[Any]:
        """Trials that have not failed and have an objective that can be compared."""
        return [
            trial
            for trial in trials
            if trial.status == TERMINATED
            and OBJECTIVE in trial.metric_analysis
            and all(map(math.isfinite, (trial.metric_analysis[OBJECTIVE][name] for name in ("last", "min", "max"))))
        ]

    def refuse_without_result(self, trials: Sequence[Any]) -> None:
        """See that there is a best trial.

        Raises:
            RuntimeError: none is complete; the error names the first failure.
        """
        if self.completed(trials):
            return
        first = next(iter(self._errors.values()), None)
        why = f"; the first failed with {_in_a_line(first)}" if first is not None else ""
        raise RuntimeError(f"None of the {len(trials)} trials ended with an objective{why}.") from first

    # ---- Each trial --------------------------------------------------------------------------------------------------

    def _of(self, trial: Any) -> TrialRecord:
        if trial.trial_id not in self.trials:
            folder = self._folder(trial)
            if (
                folder is not None
                and not os.path.exists(folder)
                and all(folder != other.folder for other in self.trials.values())
            ):
                # No other one's checkpoints lie there, whatever hp_name returns.
                self._has_new_folder.add(trial.trial_id)
            self.trials[trial.trial_id] = TrialRecord(
                id=trial.trial_id,
                state=RUNNING,
                parameters=dict(trial.config),
                distributions=self._drawn_from,
                folder=folder,
            )
        return self.trials[trial.trial_id]

    def _folder(self, trial: Any) -> str | None:
        name = self._trainer.hp_name
        try:
            run = f"run-{trial.trial_id}" if name is None else name_by(name, trial.config)
        except Exception:
            # It fails in the trial's process too, which ends the search.
            return None
        return str(Path(self._trainer.args.output_dir).absolute() / run)

    def _end(self, trial: Any, state: str) -> None:
        kept = self._of(trial)
        kept.state = state
        kept.seconds = (trial.last_result or {}).get(SECONDS)
        self._write(trial)
        ended = [one for one in self.trials.values() if one.state != RUNNING]
        # A trial that was stopped may have the best objective all the same.
        compared = [replace(one, state=COMPLETE) if one.state == PRUNED else one for one in ended]
        told(kept, (len(ended), self._planned), best_of(compared, self._directions))

    def _write(self, trial: Any) -> None:
        if self._record is None:
            self._record = SearchRecord(self._trainer, "ray", self._directions, trial.experiment_dir_name)
        self._record.update(list(self.trials.values()))

    def _is_at_end(self, trial: Any) -> bool:
        result = trial.last_result or {}
        return result.get(STEP, 0) >= result.get(LAST_STEP, math.inf)

    def _is_at_limit(self, trial: Any) -> bool:
        """Whether a trial was stopped only because it has had all that the search gives a trial."""
        result = trial.last_result or {}
        limits = {**self._time_limits, **(trial.stopping_criterion or {})}
        return any(name in result and result[name] >= limit for name, limit in limits.items())

    def _note_error(self, trial: Any, error: Any) -> BaseException:
        found = error if isinstance(error, BaseException) else RuntimeError(NO_ERROR_IS_LEFT)
        self._errors[trial.trial_id] = found
        self._of(trial).error = _in_a_line(found)
        self._end(trial, FAILED)
        return found


def _error_of(trial: Any) -> Any:
    # The copies beside Ray's logs; those in the storage are brought there later.
    with contextlib.suppress(Exception):
        return cloudpickle.loads(Path(str(trial.pickled_error_file)).read_bytes())
    with contextlib.suppress(OSError):
        # Of this one Ray keeps the text alone.
        if LOW_ON_MEMORY in Path(str(trial.error_file)).read_text(encoding="utf-8", errors="replace"):
            return OutOfMemoryError(OUT_OF_MEMORY)
    return None


def _in_a_line(error: BaseException) -> str:
    """An error as the record and progress lines have it; of a process that died one sentence, where Ray has many."""
    if isinstance(error, OutOfMemoryError) or (isinstance(error, RayActorError) and LOW_ON_MEMORY in str(error)):
        return OUT_OF_MEMORY
    if isinstance(error, RayActorError) and not error.actor_init_failed:
        return DIED
    cause = _cause(error)
    return error_in_a_line(cause.as_raised() if isinstance(cause, EndedByScript) else cause)


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
