"""Processes that were started by another one end with it, however that ends."""

from __future__ import annotations

import os
import signal
import threading
import time

from littrainer.distributed.environment import whole_number

# The process that has started this one for training together.
STARTED_BY = "LITTRAINER_STARTED_BY"
SECONDS_BETWEEN_LOOKS = 1.0
# How long processes that are told to end may take to save a checkpoint before they are killed; whoever wants the
# machine back sooner kills them himself. torch's agent reads the same variable.
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SECONDS_TO_SAVE = 600

_is_watching = False


def grace_seconds() -> int:
    """How long a process that is told to end may take.

    Raises:
        ValueError: the environment variable for it holds no number from 0 up.
    """
    seconds = whole_number(GRACE, SECONDS_TO_SAVE)
    if seconds < 0:
        raise ValueError(f"environment variable {GRACE}={seconds} must be 0 or more.")
    return seconds


def end_with_starter() -> None:
    """From now on, end when the process ends that has started this one among others; nothing is done for any other.

    Raises:
        ValueError: the environment says no time that this process may take to end.
    """
    global _is_watching
    starter = os.environ.get(STARTED_BY, "")
    # What this process starts itself inherits the variable, and has another parent.
    if _is_watching or os.name != "posix" or not starter.isdecimal() or os.getppid() != int(starter):
        return
    _is_watching = True
    watch = threading.Thread(
        target=_watch, args=(int(starter), grace_seconds()), name="littrainer-starter", daemon=True
    )
    watch.start()


def _watch(starter: int, seconds_to_end: int) -> None:
    while os.getppid() == starter:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds_to_end)
    os._exit(1)
