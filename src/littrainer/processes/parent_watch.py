"""Processes that were started by another one end with it, however that ends."""

from __future__ import annotations

import os
import signal
import threading
import time

# The process that has started this one for training together.
STARTED_BY = "LITTRAINER_STARTED_BY"
SECONDS_BETWEEN_LOOKS = 1.0
# How long this process may take to end by itself.
SECONDS_TO_END = 30.0

_is_watching = False


def end_with_starter() -> None:
    """From now on, end when the process ends that has started this one among others; nothing is done for any other."""
    global _is_watching
    starter = os.environ.get(STARTED_BY, "")
    # What this process starts itself inherits the variable, and has another parent.
    if _is_watching or os.name != "posix" or not starter.isdecimal() or os.getppid() != int(starter):
        return
    _is_watching = True
    threading.Thread(target=_watch, args=(int(starter),), name="littrainer-starter", daemon=True).start()


def _watch(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)
