"""A search whose trials several processes train together.

The first process draws the parameters and broadcasts them as a fixed trial; it also decides objective and pruning.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.distributed.collectives import (
    PeerFailedError,
    PeerLostError,
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
# From the first failure in a trial to the last.
MAX_WAIT_FOR_FAILURES_S = 60.0


class _EndSearch(NamedTuple):
    """The message after the last trial."""

    result: Any = None
    error: str | None = None


def reject_multiple_processes(args: TrainingArguments, option: str) -> None:
    """Raise a SearchMistake if several processes train each trial."""
    if args.world_size > 1:
        raise SearchMistake(
            f"{option} runs each trial in one process, and here {args.world_size} processes train one model together. "
            f'Search with backend="optuna" and n_jobs=1, so that the {args.world_size} processes train each trial '
            "together, or start one process (`littrainer run --devices 1`)."
        )


def search_with_all(trainer: TrainerContext, search: Callable[[TrialRunner], Value]) -> Value:
    """Run a search whose trials all processes train together, and return its result in all of them.

    Parameters:
        search: called in the first process only, with a function that runs a trial in all processes; must not use
            collectives between trials.

    Raises:
        PeerFailedError: `search` has failed in the first process; a process in which the last trial has failed raises
            the trial's error instead.
        PeerLostError: a process has ended or is not in sync.
    """
    run = functools.partial(run_trial, trainer)
    if not is_distributed():
        return search(run)
    if dist.get_rank() != 0:
        return _run_trials_of_first(run)
    try:
        result = search(functools.partial(_start_trial, trainer.hp_space, run))
    except BaseException as error:
        if not isinstance(error, PeerLostError):
            broadcast_object(_EndSearch(error=f"{type(error).__name__}: {error}"))
        raise
    broadcast_object(_EndSearch(result))
    return result


def _start_trial(space: Any, run: TrialRunner, trial: Any) -> Any:
    message = trial
    if not isinstance(trial, dict):
        call_space(space, trial)
        message = importlib.import_module("optuna").trial.FixedTrial(dict(trial.params), trial.number)
    broadcast_object(message)
    return _run_trial_on_all_ranks(run, trial)


def _run_trials_of_first(run: TrialRunner) -> Any:
    """Run the trials that the first process broadcasts until it ends the search."""
    failure: Exception | None = None
    while not isinstance(message := broadcast_object(cast("Any", None)), _EndSearch):
        failure = None
        try:
            _run_trial_on_all_ranks(run, message)
        except PeerLostError:
            raise
        except Exception as error:
            # The first process decides whether the error ends the search.
            failure = error
    if message.error is None:
        return message.result
    if failure is not None and not isinstance(failure, PeerFailedError):
        raise failure
    raise PeerFailedError(f"Process {dist.get_rank()} ends because the search failed in process 0 with {message.error}")


def _run_trial_on_all_ranks(run: TrialRunner, trial: Any) -> Any:
    """Run a trial, which fails if any process fails; raise a PeerLostError if others hang in it."""
    name = f"trial {trial.number}" if hasattr(trial, "number") else "a trial"
    with raise_on_all_ranks(name):
        try:
            objective = run(trial)
        except PeerLostError:
            raise
        except BaseException as error:
            publish_failure(error)
            if not barrier_with_timeout(MAX_WAIT_FOR_FAILURES_S):
                raise PeerLostError(
                    f"Process {dist.get_rank()} cannot continue the search: {name} failed here with "
                    f"{type(error).__name__}: {error}, and the other processes wait for it in the middle of that trial."
                ) from error
            raise
        barrier_with_timeout(0)
        return objective
