"""A search in several processes: the first one draws and decides, and all train each trial together.

As in transformers the first process asks the space before the model is made, and the others get what was drawn as a
fixed trial. Objectives, and whether a trial is pruned, are agreed on.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from littrainer.distributed.agreement import (
    FailedElsewhere,
    LostProcess,
    all_arrive,
    are_several,
    failing_together,
    from_first,
)
from littrainer.distributed.failure_report import leave_word
from littrainer.search.parameters import SearchMistake, asked
from littrainer.search.trial import run_trial

Value = TypeVar("Value")
RunsTrial = Callable[[Any], Any]
# How much later than the first of them the other processes may end a trial that has failed.
SECONDS_UNTIL_ALL_HAVE_FAILED = 60.0


class _Begun(NamedTuple):
    """A trial begins: what a sweep has drawn, or the parameters and the number of an Optuna trial."""

    drawn: dict[str, Any]
    number: int | None = None


class _Over(NamedTuple):
    """The search has ended, with what it returns, or with an error."""

    result: Any = None
    error: str | None = None


def refuse_several_processes(args: Any, what: str) -> None:
    """Refuse trials at once if several processes train each trial together.

    Parameters:
        args: the training arguments.
        what: what asks for them, as it was written: `n_jobs=4`.

    Raises:
        SearchMistake: there are several processes.
    """
    if args.world_size > 1:
        raise SearchMistake(
            f"{what} runs each trial in one process, and here {args.world_size} processes train one model together. "
            f'Search with backend="optuna" and n_jobs=1, so that the {args.world_size} processes train each trial '
            "together, or start one process (`littrainer run --devices 1`)."
        )


def searched_by_all(trainer: Any, search: Callable[[RunsTrial], Value]) -> Value:
    """Carry out a search whose trials all processes train together.

    Parameters:
        search: called in the first process alone, with what runs a trial in all processes and returns its objective, or
            raises what ended it. Between trials it must do nothing that processes do together.

    Returns:
        what `search` returns, in all processes.

    Raises:
        FailedElsewhere: `search` has failed in the first process; there the error itself is raised, and in a process
            in which the last trial has failed, that error.
        LostProcess: a process has ended, or is elsewhere.
    """
    if not are_several():
        return search(functools.partial(run_trial, trainer))
    if dist.get_rank() != 0:
        return _follow(trainer)
    try:
        result = search(functools.partial(_lead, trainer))
    except BaseException as error:
        if not isinstance(error, LostProcess):
            from_first(_Over(error=f"{type(error).__name__}: {error}"))
        raise
    from_first(_Over(result))
    return result


def _lead(trainer: Any, trial: Any) -> Any:
    """Run a trial in all processes, from the first one."""
    if isinstance(trial, dict):
        begun = _Begun(trial)
    else:
        asked(trainer.hp_space, trial)
        begun = _Begun(dict(trial.params), trial.number)
    return _run_in_all(trainer, trial, from_first(begun))


def _follow(trainer: Any) -> Any:
    """Run the trials that the first process begins, until it ends the search."""
    own: Exception | None = None
    while True:
        message: Any = from_first(None)
        if isinstance(message, _Begun):
            own, trial = None, message.drawn
            if message.number is not None:
                # The library is loaded by the search that has made the trial.
                trial = importlib.import_module("optuna").trial.FixedTrial(trial, message.number)
            try:
                _run_in_all(trainer, trial, message)
            except LostProcess:
                raise
            except Exception as error:
                # What becomes of an error the first process decides.
                own = error
        elif message.error is None:
            return message.result
        elif own is not None and not isinstance(own, FailedElsewhere):
            raise own
        else:
            raise FailedElsewhere(
                f"Process {dist.get_rank()} ends because the search failed in process 0 with {message.error}"
            )


def _run_in_all(trainer: Any, trial: Any, begun: _Begun) -> Any:
    """Run a trial that has failed if it fails in one process.

    Raises:
        LostProcess: it has failed here, and the others wait for this process in the middle of it.
    """
    doing = "a trial" if begun.number is None else f"trial {begun.number}"
    with failing_together(doing):
        try:
            objective = run_trial(trainer, trial)
        except LostProcess:
            raise
        except BaseException as error:
            leave_word(error)
            if not all_arrive(SECONDS_UNTIL_ALL_HAVE_FAILED):
                raise LostProcess(
                    f"Process {dist.get_rank()} cannot go on with the search: {doing} failed here with "
                    f"{type(error).__name__}: {error}, and the others wait for it in the middle of that trial."
                ) from error
            raise
        all_arrive(0)
        return objective
