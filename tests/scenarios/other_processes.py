"""Waiting for other threads and processes, however busy the machine is, and ending a process of a test."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

MAX_WAIT_SECONDS = 600.0
"""What a test waits at most for a thread, for a process, or for the files of another program."""


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until something is so.

    Parameters:
        is_so: asked again and again; may raise what ends the waiting.
        what: that is waited for, in the words of the error.

    Raises:
        AssertionError: it has not become so for `MAX_WAIT_SECONDS`.
    """
    until = time.monotonic() + MAX_WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < until, f"{MAX_WAIT_SECONDS:g} s were not enough for this: {what}"
        time.sleep(0.02)


@contextmanager
def process_group(meeting_place: Path, rank: int, size: int, longest_wait: timedelta) -> Iterator[None]:
    """Join a new process group while a block runs; a single process joins none.

    Parameters:
        meeting_place: a file that does not exist yet.
        longest_wait: of an exchange.
    """
    # Not all tests that wait need torch.
    import torch.distributed as dist

    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=size, timeout=longest_wait
        )
    try:
        yield
    finally:
        if size > 1 and dist.is_initialized():
            dist.destroy_process_group()
        # A loader that is collected waits five seconds for each of its lasting workers.
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()
        # Garbage may still hold the group. A worker of a later loader, forked, would end it when it collects that, and
        # wait for threads which it does not have, or crash.
        if size > 1:
            gc.collect()


def end_process() -> None:
    """End this process well, without the end of Python.

    A process that initialized its process group ends like this: threads of gloo may outlive the group, and the process
    is aborted if such a thread frees a tensor while Python finalizes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
