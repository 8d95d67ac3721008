"""One line for each trial that has ended, of a sweep and on Ray; Optuna writes its own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from littrainer.arguments.secrets import without_secrets
from littrainer.errors.log_levels import level_in_force
from littrainer.search.record import FAILED, PRUNED, TrialRecord

LONGEST_VALUE = 60


def told(trial: TrialRecord, n_of: tuple[int, int | None], best: Sequence[TrialRecord]) -> None:
    """Tell on stderr how a trial has ended, above progress bars; nothing where `log_level` is `error` or `critical`.

    To be called in the first process alone.

    Parameters:
        trial: one that is complete, pruned or failed.
        n_of: how many trials of this search have ended with it, and how many there will be, None where time decides.
        best: the best trials so far; `record.best_of` finds them.
    """
    if sys.stderr is None or level_in_force() >= logging.ERROR:
        return
    # Not before a search ends a trial: reading a record needs no bars.
    from tqdm.auto import tqdm

    tqdm.write(line(trial, n_of, best), file=sys.stderr)
    sys.stderr.flush()


def line(trial: TrialRecord, n_of: tuple[int, int | None], best: Sequence[TrialRecord]) -> str:
    """What `told` writes."""
    ended, planned = n_of
    place = f"{ended} of {planned}" if planned is not None else f"{ended}"
    how, reason = _how(trial)
    parameters = without_secrets(trial.parameters)
    took = "" if trial.seconds is None else f" in {_duration(trial.seconds)}"
    parts = [f"trial {_value(trial.id)} ({place}) {how}{took}{reason}"]
    parts += [", ".join(f"{_value(name)}={_value(value)}" for name, value in parameters.items())]
    parts += [_best(trial, best)]
    return f"[littrainer] {'; '.join(part for part in parts if part)}"


def _how(trial: TrialRecord) -> tuple[str, str]:
    """How a trial ended, and what it ended with."""
    if trial.state == FAILED:
        return "failed", f": {' '.join((trial.error or 'no error is known').split())}"
    if trial.state == PRUNED and trial.intermediate:
        step, value = trial.intermediate[-1]
        return f"pruned at step {step}", f": {value:.6g}"
    return trial.state, "".join(f": {value:.6g}" for value in trial.objectives())


def _best(trial: TrialRecord, best: Sequence[TrialRecord]) -> str:
    if not best:
        return "none is complete so far"
    if best[0].id == trial.id:
        return "the best so far"
    return f"best so far: {best[0].objectives()[0]:.6g} in trial {_value(best[0].id)}"


def _value(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
