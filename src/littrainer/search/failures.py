"""Errors of a search: those that one trial's hyperparameters bring about, and those of the script."""

from __future__ import annotations


class SearchMistake(TypeError):
    """The script's space, objective or model is wrong, whatever was drawn: the search ends."""


class ObjectiveIsNan(ArithmeticError):
    """A trial ended with an objective that is not a number: it has failed."""


# What hyperparameters can bring about (memory that runs out, numbers that overflow, values that do not go together).
# Anything else, a misspelled name for one, would fail in each further trial too.
TRIAL_FAILURES: tuple[type[Exception], ...] = (ArithmeticError, MemoryError, RuntimeError, ValueError)
