"""Waiting for other threads and processes, however busy the machine is, and ending a process of a test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

LONGEST_WAIT_SECONDS = 600.0
"""What a test waits at most for a thread, for a process, or for the files of another program."""


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until something is so.

    Parameters:
        is_so: asked again and again; may raise what ends the waiting.
        what: that is waited for, in the words of the error.

    Raises:
        AssertionError: it has not become so for `LONGEST_WAIT_SECONDS`.
    """
    until = time.monotonic() + LONGEST_WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < until, f"{LONGEST_WAIT_SECONDS:g} s were not enough for this: {what}"
        time.sleep(0.02)


def end_process() -> None:
    """End this process well, without the end of Python.

    A process that has brought its process group up by itself ends so: threads of gloo may outlive the group, and one
    that lets go of a tensor while Python ends is aborted, and the process with it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
