"""A search in several processes: the first one draws and decides, and all train each trial together.

As in transformers the first process asks the space before the model is made; the others get what was drawn as a fixed
trial. What `model_init` asks for besides, each process fetches when it comes to it, and the first one waits for nobody:
`model_init` may run under `main_process_first`. Objectives, and whether a trial is pruned, are agreed on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from littrainer.distributed.agreement import (
    FailedElsewhere,
    LostProcess,
    are_several,
    failing_together,
    from_first,
    longest_wait,
)
from littrainer.search.parameters import SearchMistake, asked
from littrainer.search.trial import run_trial

Value = TypeVar("Value")
RunsTrial = Callable[[Any], Any]
SUGGESTIONS = ("suggest_float", "suggest_int", "suggest_categorical")
# The first process has drawn all that it draws for a trial.
CLOSED = "littrainer:closed"
SECONDS_BETWEEN_LOOKS = 0.01


class _Begun(NamedTuple):
    """A trial begins: what a sweep has drawn, or parameters, number and a key for further ones of an Optuna trial."""

    drawn: dict[str, Any]
    number: int | None
    key: str


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
    number = None if isinstance(trial, dict) else trial.number
    if number is not None:
        asked(trainer.hp_space, trial)
    begun = from_first(_Begun(trial if number is None else dict(trial.params), number, uuid.uuid4().hex))
    with failing_together(_named(number)), _shared_draws(trial, begun):
        return run_trial(trainer, trial)


def _follow(trainer: Any) -> Any:
    """Run the trials that the first process begins, until it ends the search."""
    own: Exception | None = None
    while True:
        message: Any = from_first(None)
        if isinstance(message, _Begun):
            own = None
            try:
                trial: Any = message.drawn
                if message.number is not None:
                    # The library is loaded by the search that has made the trial.
                    trial = importlib.import_module("optuna").trial.FixedTrial(trial, message.number)
                with failing_together(_named(message.number)), _shared_draws(trial, message):
                    run_trial(trainer, trial)
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


def _named(number: int | None) -> str:
    return "a trial" if number is None else f"trial {number}"


@contextlib.contextmanager
def _shared_draws(trial: Any, begun: _Begun) -> Iterator[None]:
    """Let a trial give all processes what the first one draws, also what is asked for in the block.

    Parameters:
        trial: an Optuna trial, or in another process a fixed one, which answers from `begun.drawn`.
    """
    if begun.number is None:
        yield
        return
    store: Any = dist.PrefixStore(f"littrainer/{begun.key}", dist.distributed_c10d._get_default_store())
    leads, drawn = dist.get_rank() == 0, begun.drawn

    def shared(suggest: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in drawn and leads:
            drawn[name] = suggest(name, *args, **kwargs)
            store.set(name, pickle.dumps(drawn[name]))
        elif name not in drawn:
            drawn[name] = _fetched(store, name)
        return suggest(name, *args, **kwargs)

    for method in SUGGESTIONS:
        setattr(trial, method, functools.partial(shared, getattr(trial, method)))
    try:
        yield
    finally:
        if leads:
            store.set(CLOSED, b"")


def _fetched(store: Any, name: str) -> Any:
    """Return what the first process has drawn under a name, as soon as it has."""
    rank, until = dist.get_rank(), time.monotonic() + longest_wait().total_seconds()
    while not store.check([name]):
        # In this order: what was left before the end is there when the end is.
        if store.check([CLOSED]) and not store.check([name]):
            raise FailedElsewhere(f"Process {rank} asks for the hyperparameter {name!r}, and process 0 has failed.")
        if time.monotonic() > until:
            raise LostProcess(
                f"Process {rank} has waited for the hyperparameter {name!r}, for which process 0 does not ask: what "
                "hp_space and model_init ask for must not depend on the rank."
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return pickle.loads(store.get(name))
