"""Errors of a search: those that one trial's hyperparameters bring about, and those of the script."""

from __future__ import annotations

from littrainer.callbacks.handler import FROM_CALLBACK


class SearchMistake(TypeError):
    """The script's space, objective or model is wrong, whatever was drawn: the search ends."""


class ObjectiveIsNan(ArithmeticError):
    """A trial ended with an objective that is not a number: it has failed."""


# What hyperparameters can bring about (memory that runs out, numbers that overflow, values that do not go together).
# Anything else, a misspelled name for one, would fail in each further trial too.
TRIAL_FAILURES: tuple[type[Exception], ...] = (ArithmeticError, MemoryError, RuntimeError, ValueError)


def fails_trial_only(error: BaseException) -> bool:
    """Whether hyperparameters can have brought an error about; one of a callback is taken for the script's own."""
    of_callback = any(note.startswith(FROM_CALLBACK) for note in getattr(error, "__notes__", ()))
    return isinstance(error, TRIAL_FAILURES) and not of_callback
