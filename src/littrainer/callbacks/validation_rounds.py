"""When Lightning's callbacks hear that a validation inside fit has ended: once its metrics have been logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ValidationRounds:
    """Holds `on_validation_end` back until the metrics are known that callbacks look for in it.

    Lightning's loop ends before metrics are computed, and a subclass may add metrics of its own after that. Several
    datasets are one round: callbacks that monitor a metric hear of its end once, with the metrics of all datasets.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._end: Callable[[bool], None] | None = None

    @contextmanager
    def round(self, when_over: Callable[[], None] = lambda: None) -> Iterator[None]:
        """What is evaluated within it is one round, or part of the round around it.

        Parameters:
            when_over: called at the end of a round in which there was a validation inside fit.
        """
        self._depth += 1
        try:
            yield
        except BaseException:
            self._end = None
            raise
        finally:
            self._depth -= 1
        if not self._depth and self._end is not None:
            end, self._end = self._end, None
            end(False)
            end(True)
            when_over()

    def add(self, end: Callable[[bool], None]) -> None:
        """A validation inside fit has run.

        Parameters:
            end: calls `on_validation_end` of the callbacks that monitor metrics (True), or of all others (False).
        """
        self._end = end

    def end_earlier_one(self) -> None:
        """Another validation of the round begins: callbacks that monitor no metric hear that the last one has ended."""
        end, self._end = self._end, None
        if end is not None:
            end(False)
