"""Signals from a callback's event to the process of a test."""

from __future__ import annotations

import os
import signal
from typing import Any

from littrainer import TrainerCallback


class SignalIn(TrainerCallback):
    """A callback that sends this process a signal in an event.

    Parameters:
        step: `global_step` in the event.
        number: the signal, sent `times` times.

    Attributes:
        ended: completed optimizer steps.
    """

    def __init__(self, event: str, step: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        self.step, self.number, self.times = step, number, times
        self.ended: list[int] = []
        earlier = getattr(self, event)

        def send(args: Any, state: Any, control: Any, **keywords: Any) -> None:
            earlier(args, state, control, **keywords)
            if state.global_step == self.step:
                for _ in range(self.times):
                    os.kill(os.getpid(), self.number)

        setattr(self, event, send)

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.ended.append(state.global_step)
