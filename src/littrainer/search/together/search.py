"""A search in several processes: the first one draws and decides, and all train each trial together.

What they agree on at places that all come to: that a trial begins, each objective, and how the trial has ended. What is
drawn for it, and whether it is pruned, the first one leaves for the others (led_trials.py). With one process nothing is
done.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from littrainer.distributed.agreement import are_several, failing_together, from_each, from_first
from littrainer.distributed.failure_report import FailedElsewhere, LostProcess
from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.notes import add_note
from littrainer.search.failures import SearchMistake
from littrainer.search.trial import run_trial
from littrainer.search.trial_parameters import asked

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

Value = TypeVar("Value")
RunsTrial = Callable[[Any], Any]


class _Begun(NamedTuple):
    """A trial begins; from the facts the other processes make theirs."""

    facts: Any


class _Over(NamedTuple):
    """The search has ended, with what it returns, or with an error."""

    result: Any = None
    error: str | None = None


class _End(Enum):
    """How a trial ended in one process."""

    COMPLETE = 1
    FAILED = 2
    FAILED_ELSEWHERE = 3


class _Outcome(NamedTuple):
    """How a trial ended in one process; the error is pickled."""

    end: _End
    error: bytes = b""


def refuse_side_by_side(trainer: Trainer, what: str) -> None:
    """Refuse trials side by side where several processes train each trial together.

    Parameters:
        what: what asks for them, as it was written: `n_jobs=4`.

    Raises:
        SearchMistake: there are several processes.
    """
    size = trainer.args.world_size
    if size > 1:
        raise SearchMistake(
            f"{what} runs trials side by side, each in a process of its own, and here {size} processes train one model "
            f'together. Search with backend="optuna" and n_jobs=1, where the {size} processes train each '
            "trial together, or start one process (`littrainer run --devices 1`)."
        )


def searched_together(trainer: Trainer, search: Callable[[RunsTrial], Value]) -> Value:
    """Carry out a search whose trials all processes train together.

    Parameters:
        search: called in the first process alone, with what runs a trial in all processes and returns its objective, or
            raises what ended it. Between trials it must do nothing that processes do together.

    Returns:
        what `search` returns, in all processes.

    Raises:
        FailedElsewhere: `search` has failed in the first process; there, and where a trial's error came up that ended
            the search, that error is raised.
        LostProcess: a process has ended, or is elsewhere.
    """
    if not are_several():
        return search(lambda trial: run_trial(trainer, trial))
    if dist.get_rank() != 0:
        return _follow(trainer)
    leader = _Leader(trainer)
    try:
        result = search(leader.run)
    except BaseException as error:
        leader.raise_if_lost()
        if not isinstance(error, LostProcess):
            from_first(_Over(error=_told(error)))
        raise
    leader.raise_if_lost()
    from_first(_Over(result))
    return result


def objective_of_all(compute: Callable[[], Value]) -> Value:
    """The objective as the first process computes it; where one process fails, all do."""
    if not are_several():
        return compute()
    with failing_together("computing the objective"):
        value = compute()
    return from_first(value)


class _Leader:
    """Runs trials in all processes, from the first one."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.lost: LostProcess | None = None

    def run(self, trial: Any) -> Any:
        """Run a trial in all processes.

        Raises:
            BaseException: what ended the trial, in whichever process; that it was pruned only where nothing else did.
        """
        self.raise_if_lost()
        led, facts = _led(trial)
        try:
            from_first(_Begun(facts))
            value, own, outcomes = _settled(led, lambda: self._run_here(led))
        except LostProcess as error:
            # A study may take this for a trial that failed, and go on to the next one.
            self.lost = error
            if hasattr(trial, "study"):
                trial.study.stop()
            raise
        decisive = _decisive(own, outcomes)
        if decisive is None:
            return value
        try:
            raise decisive
        finally:
            # Else the error holds this frame, and this frame the error.
            del own, decisive

    def _run_here(self, trial: Any) -> Any:
        if not isinstance(trial, dict):
            # As in transformers, which draws for several processes before the model is made.
            asked(self.trainer.hp_space, trial)
        return run_trial(self.trainer, trial)

    def raise_if_lost(self) -> None:
        """Raise LostProcess where a process was lost in an earlier trial."""
        if self.lost is not None:
            raise self.lost


def _follow(trainer: Trainer) -> Any:
    """Run the trials that the first process begins, until it ends the search."""
    own: BaseException | None = None
    while True:
        message: Any = from_first(None)
        if isinstance(message, _Begun):
            trial = _following(message.facts)
            # What becomes of an error the first process decides.
            _, own, _ = _settled(trial, lambda: run_trial(trainer, trial))  # noqa: B023
            continue
        if message.error is None:
            return message.result
        if own is not None and not _follows(own) and message.error == _told(own):
            raise own
        raise FailedElsewhere(
            f"Process {dist.get_rank()} ends because the search failed in process 0 with {message.error}"
        )


def _led(trial: Any) -> tuple[Any, Any]:
    """The trial to run in the first process, and what the others make theirs of."""
    if isinstance(trial, dict):
        return trial, trial
    # The library is loaded by the search that has made the trial.
    from littrainer.search.together.led_trials import LeadingTrial

    leading = LeadingTrial(trial)
    return leading, leading.facts


def _following(facts: Any) -> Any:
    if isinstance(facts, dict):
        return facts
    from littrainer.search.together.led_trials import FollowingTrial

    return FollowingTrial(facts)


def _settled(trial: Any, run: Callable[[], Value]) -> tuple[Any, BaseException | None, list[_Outcome]]:
    """Run a trial in this process as the others do, and learn how it has ended in all of them.

    Returns:
        its objective and its error here, one of which is None, and the outcomes by rank.
    """
    value: Any = None
    own: BaseException | None = None
    posts = getattr(trial, "posts", None)
    try:
        with failing_together(f"trial {getattr(trial, 'number', '')}".strip()):
            try:
                value = run()
            finally:
                if posts is not None:
                    posts.close()
    except LostProcess:
        raise
    except BaseException as error:
        own = error
    outcomes = from_each(_outcome(own))
    if posts is not None:
        posts.clear()
    return value, own, outcomes


def _outcome(error: BaseException | None) -> _Outcome:
    if error is None:
        return _Outcome(_End.COMPLETE)
    if _follows(error):
        return _Outcome(_End.FAILED_ELSEWHERE)
    return _Outcome(_End.FAILED, _pickled(error))


def _decisive(own: BaseException | None, outcomes: list[_Outcome]) -> BaseException | None:
    """The error that a trial has ended with: in the first of the processes that have an error of their own."""
    errors: dict[int, BaseException] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.end is _End.FAILED:
            errors[rank] = own if own is not None and rank == dist.get_rank() else pickle.loads(outcome.error)
    failures = {rank: error for rank, error in errors.items() if not is_a(error, "pruned trial")}
    for rank, error in (failures or errors).items():
        if rank != dist.get_rank():
            add_note(error, f"This came up in process {rank}.")
        return error
    return own


def _follows(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, FailedElsewhere):
            return True
        error = error.__cause__ or error.__context__
    return False


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _pickled(error: BaseException) -> bytes:
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:
        # A class of the script's own that cannot travel.
        return pickle.dumps(RuntimeError(_told(error)))
    return content
