"""One line for each trial that has ended."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from littrainer.arguments.secrets import without_secrets
from littrainer.search.record import FAILED, PRUNED, TrialRecord

# Loggers of Optuna that tell of each trial, and how those lines begin.
OPTUNAS_LOGGERS = ("optuna.study.study", "optuna.study._optimize", "optuna.study._tell")
OPTUNAS_BEGINNING = "Trial "
# Of a failure it writes a line with the error, and one that says no more.
OPTUNAS_SECOND_LINE = "failed with value"
LONGEST_VALUE = 60


def told(trial: TrialRecord, n_of: tuple[int, int | None], best: TrialRecord | Sequence[TrialRecord] | None) -> None:
    """Tell on stderr how a trial has ended, above progress bars; nothing where `log_level` is `error` or `critical`.

    To be called in the first process alone.

    Parameters:
        trial: one that is complete, pruned or failed.
        n_of: how many trials of this search have ended with it, and how many there will be, None where time decides.
        best: the best trial so far, or the best ones with several objectives; `record.best_of` finds them.
    """
    if sys.stderr is None or logging.getLogger("littrainer").getEffectiveLevel() >= logging.ERROR:
        return
    # Not before a search ends a trial: reading a record needs no bars.
    from tqdm.auto import tqdm

    tqdm.write(line(trial, n_of, best), file=sys.stderr)
    sys.stderr.flush()


def line(trial: TrialRecord, n_of: tuple[int, int | None], best: TrialRecord | Sequence[TrialRecord] | None) -> str:
    """What `told` writes."""
    ended, planned = n_of
    place = f"{ended} of {planned}" if planned is not None else f"{ended}"
    best_ones = [best] if isinstance(best, TrialRecord) else list(best or [])
    how, reason = _how(trial)
    parameters = without_secrets(trial.parameters)
    took = "" if trial.seconds is None else f" in {_duration(trial.seconds)}"
    parts = [f"trial {_value(trial.id)} ({place}) {how}{took}{reason}"]
    parts += [", ".join(f"{_value(name)}={_value(value)}" for name, value in parameters.items())]
    parts += [_best(trial, best_ones)]
    return f"[littrainer] {'; '.join(part for part in parts if part)}"


def _how(trial: TrialRecord) -> tuple[str, str]:
    """How a trial ended, and what it ended with."""
    if trial.state == FAILED:
        return "failed", f": {' '.join((trial.error or 'no error is known').split())}"
    if trial.state == PRUNED and trial.intermediate:
        step, value = trial.intermediate[-1]
        return f"pruned at step {step}", f": {value:.6g}"
    values = trial.objectives()
    return trial.state, f": {', '.join(f'{value:.6g}' for value in values)}" if values else ""


def _best(trial: TrialRecord, best: list[TrialRecord]) -> str:
    if not best:
        return "none is complete so far"
    values = best[0].objectives()
    if len(values) > 1:
        return f"{len(best)} of those so far {'is' if len(best) == 1 else 'are'} surpassed by none"
    if best[0].id == trial.id:
        return "the best so far"
    return f"best so far: {values[0]:.6g} in trial {_value(best[0].id)}"


def _value(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


class _KeptBack(logging.Filter):
    def __init__(self, caught: tuple[type[Exception], ...]):
        super().__init__()
        self._caught = caught

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if not message.startswith(OPTUNAS_BEGINNING):
            return True
        if record.levelno == logging.INFO or OPTUNAS_SECOND_LINE in message:
            return False
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, self._caught)


@contextlib.contextmanager
def optunas_lines_kept_back(caught: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """While this is open Optuna writes none of its own lines about single trials; its other warnings are told.

    Parameters:
        caught: errors of trials that do not end the search; Optuna's warning of any other one is told.
    """
    kept_back = _KeptBack(caught)
    loggers = [logging.getLogger(name) for name in OPTUNAS_LOGGERS]
    for each in loggers:
        each.addFilter(kept_back)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(kept_back)
