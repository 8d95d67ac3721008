"""Signals sent to the process of a test, from a callback's event."""

from __future__ import annotations

import os
import signal
from typing import Any

from littrainer import TrainerCallback


class SignalIn(TrainerCallback):
    """Sends this process a signal in an event, at one optimizer step.

    Parameters:
        event: the event.
        step: `global_step` as the event sees it.
        number: the signal, which is sent `times` times.

    Attributes:
        ended: the optimizer steps that have ended.
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
        """Note the step."""
        self.ended.append(state.global_step)
