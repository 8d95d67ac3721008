"""A search in several processes: the first one draws and decides, and all train each trial together.

As in transformers the first process calls the space before the model is made, and the others get the drawn values as a
fixed trial. The objective, and whether a trial is pruned, are the first process's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from littrainer.distributed.collectives import (
    FailedElsewhere,
    LostProcess,
    barrier_with_timeout,
    broadcast_object,
    is_distributed,
    raise_on_all_ranks,
)
from littrainer.distributed.failures import publish_failure
from littrainer.search.parameters import SearchMistake, call_space
from littrainer.search.trial import run_trial

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

Value = TypeVar("Value")
TrialRunner = Callable[[Any], Any]
# After the first of several processes has failed in a trial.
MAX_WAIT_FOR_FAILURES_S = 60.0


class _EndSearch(NamedTuple):
    """The message after the last trial: the result of the search, or the error that has ended it."""

    result: Any = None
    error: str | None = None


def reject_multiple_processes(args: TrainingArguments, option: str) -> None:
    """Raise a SearchMistake if several processes train each trial, and an option such as `n_jobs=4` runs it in one."""
    if args.world_size > 1:
        raise SearchMistake(
            f"{option} runs each trial in one process, and here {args.world_size} processes train one model together. "
            f'Search with backend="optuna" and n_jobs=1, so that the {args.world_size} processes train each trial '
            "together, or start one process (`littrainer run --devices 1`)."
        )


def search_with_all(trainer: Any, search: Callable[[TrialRunner], Value]) -> Value:
    """Run a search whose trials all processes train together, and return its result in all of them.

    Parameters:
        search: called in the first process alone, with a function that runs a trial in all processes and returns its
            objective, or raises the error that ended it. Between trials it must not use collectives.

    Raises:
        FailedElsewhere: `search` has failed in the first process; there the error itself is raised, and in a process
            in which the last trial has failed, the error of that trial.
        LostProcess: a process has ended, or is at another place of the program.
    """
    if not is_distributed():
        return search(functools.partial(run_trial, trainer))
    if dist.get_rank() != 0:
        return _run_trials_of_first(trainer)
    try:
        result = search(functools.partial(_start_trial, trainer))
    except BaseException as error:
        if not isinstance(error, LostProcess):
            broadcast_object(_EndSearch(error=f"{type(error).__name__}: {error}"))
        raise
    broadcast_object(_EndSearch(result))
    return result


def _start_trial(trainer: Any, trial: Any) -> Any:
    """Run a trial in all processes, from the first one; the message to the others is the trial."""
    message = trial
    if not isinstance(trial, dict):
        call_space(trainer.hp_space, trial)
        # The library is loaded by the search that has made the trial.
        message = importlib.import_module("optuna").trial.FixedTrial(dict(trial.params), trial.number)
    broadcast_object(message)
    return _run_trial_on_all_ranks(trainer, trial)


def _run_trials_of_first(trainer: Any) -> Any:
    """Run the trials that the first process starts, until it ends the search."""
    failure: Exception | None = None
    while not isinstance(message := broadcast_object(cast("Any", None)), _EndSearch):
        failure = None
        try:
            _run_trial_on_all_ranks(trainer, message)
        except LostProcess:
            raise
        except Exception as error:
            # The first process decides whether the error ends the search.
            failure = error
    if message.error is None:
        return message.result
    if failure is not None and not isinstance(failure, FailedElsewhere):
        raise failure
    raise FailedElsewhere(f"Process {dist.get_rank()} ends because the search failed in process 0 with {message.error}")


def _run_trial_on_all_ranks(trainer: Any, trial: Any) -> Any:
    """Run a trial that has failed if it fails in one process; a LostProcess if the others wait in the middle of it."""
    name = f"trial {trial.number}" if hasattr(trial, "number") else "a trial"
    with raise_on_all_ranks(name):
        try:
            objective = run_trial(trainer, trial)
        except LostProcess:
            raise
        except BaseException as error:
            publish_failure(error)
            if not barrier_with_timeout(MAX_WAIT_FOR_FAILURES_S):
                raise LostProcess(
                    f"Process {dist.get_rank()} cannot continue the search: {name} failed here with "
                    f"{type(error).__name__}: {error}, and the others wait for it in the middle of that trial."
                ) from error
            raise
        barrier_with_timeout(0)
        return objective
