"""Seconds and bytes of this process and of those it starts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MIB = 2**20


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of a call, by the clock on the wall and of this process's threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def timed_process(command: list[str], environment: dict[str, str]) -> tuple[dict[str, float], str]:
    """Seconds of a process from its start to its end, those of processes it waited for among them, and its output.

    Raises:
        RuntimeError: it failed.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr[-4000:]}")
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return {"cpu_s": cpu, "wall_s": wall}, finished.stdout


def resident_bytes() -> int:
    """The resident set of this process; Linux alone tells it without further packages."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError("This benchmark reads resident memory from /proc, which Linux has. Leave it out by --only.")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def largest_resident_bytes() -> int:
    """The largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
