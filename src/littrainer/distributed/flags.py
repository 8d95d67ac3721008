"""Flags that each process raises for itself and that all of them have to act on at once, such as one to stop.

A process that raises a flag waits for the others; one that raises none goes on, and looks at the next step what they
did. So nobody waits at a step at which nothing is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from littrainer.distributed.agreement import begin_counting

logger = logging.getLogger(__name__)


class FlagsRaisedTogether:
    """Keeps flags of an object equal in all processes; all call it at the same places.

    Parameters:
        names: the attributes that are flags.
        processes: number of processes.
    """

    def __init__(self, names: Sequence[str], processes: int):
        self.names = tuple(names)
        self.processes = processes
        # What was begun at the last call and has not been asked for.
        self._counting: Callable[[], list[int]] | None = None
        # Flags that some raised, and all raise at the next call.
        self._late: set[str] = set()
        self._told: set[str] = set()
        # Processes that were ready at the last call that was looked at.
        self._ready = 0

    def settle(self, holder: Any, among: Sequence[str] | None = None, is_ready: bool = False) -> bool:
        """Leave flags raised that all processes raise. One that only some raise is lowered; all raise it next time.

        Parameters:
            holder: the object that has the flags.
            among: the flags that count at this place; the others are left alone.
            is_ready: whether this process is ready for something that all are to do at once.

        Returns:
            whether all processes were ready at the last call.
        """
        counted = self.names if among is None else among
        self._look_at_last_call()
        were_ready = self._ready == self.processes
        for name in [name for name in counted if name in self._late]:
            self._late.discard(name)
            setattr(holder, name, True)
        raised = [name in counted and bool(getattr(holder, name)) for name in self.names]
        self._counting = begin_counting([*raised, is_ready])
        if any(raised):
            self._look_at_last_call()
            for name in self._late.intersection(counted):
                if getattr(holder, name):
                    setattr(holder, name, False)
                    self._tell(name)
        return were_ready

    def finish(self) -> None:
        """Wait until all processes have made their last call; what some have raised then comes to nothing."""
        self._look_at_last_call()

    def _look_at_last_call(self) -> None:
        if self._counting is None:
            return
        (*counts, self._ready), self._counting = self._counting(), None
        self._late.update(name for name, count in zip(self.names, counts, strict=True) if 0 < count < self.processes)

    def _tell(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning(
                "control.%s was set in this process and not in all of them. All do what it asks for one step later; a "
                "callback that decides by time, or by values of its own process, should let one process decide.",
                name,
            )
