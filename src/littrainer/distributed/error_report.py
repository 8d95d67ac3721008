"""What an error says that ends a process before it has met the others: torchrun's agent hears of it, which names it."""

from __future__ import annotations

import os
import sys
from types import TracebackType

# Where torchrun's agent looks for the error of a process.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_reports = False


def report_errors_to_agent() -> None:
    """From now on, tell the agent that has started this process of the error that ends it; else nothing is done."""
    global _reports
    if _reports or not os.environ.get(ERROR_FILE):
        return
    _reports = True
    earlier_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # It loads torch, which an error may come before.
        from littrainer.distributed.failure_report import tell_agent

        tell_agent(error)
        earlier_hook(kind, error, trace)

    sys.excepthook = hook
