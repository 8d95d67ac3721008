"""The machine under a training: system, processors, memory."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")


def machine() -> dict[str, str]:
    """Name of a fact -> the fact in words; one that cannot be found out says why."""
    found = {}
    for name, ask in FACTS.items():
        try:
            fact = ask()
        except Exception as error:
            fact = f"cannot be found out ({type(error).__name__}: {error})"
        if fact:
            found[name] = fact
    return found


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()} ({sys.executable or 'no executable known'})"


def _environment() -> str:
    if sys.prefix != sys.base_prefix:
        return f"virtual environment {sys.prefix}"
    return f"conda {os.environ['CONDA_PREFIX']}" if os.environ.get("CONDA_PREFIX") else "none: the system's packages"


def _system() -> str:
    distribution = ""
    if sys.platform == "linux":
        try:
            distribution = f", {platform.freedesktop_os_release()['PRETTY_NAME']}"
        except (OSError, KeyError):
            distribution = ""
    return f"{platform.platform()}{distribution}"


def _processors() -> str:
    told = f"{os.cpu_count()}"
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) != os.cpu_count():
        told += f", {len(os.sched_getaffinity(0))} of them for this process"
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        told += f", limited to the time of {int(quota) / int(period):g}"
    name = next((line for line in _read(Path("/proc/cpuinfo")).splitlines() if line.startswith("model name")), "")
    name = name.partition(":")[2].strip() or platform.processor() or platform.machine()
    return f"{told} ({name})"


def _memory() -> str:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        import psutil

        return _gib(psutil.virtual_memory().total)
    told = _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = _read(CGROUP / "memory.max").strip()
    return f"{told}, limited to {_gib(int(limit))}" if limit.isdecimal() else told


def _shared_memory() -> str:
    return _gib(shutil.disk_usage(SHARED_MEMORY).total) if SHARED_MEMORY.is_dir() else ""


def _free_space() -> str:
    return _gib(shutil.disk_usage(os.getcwd()).free)


def _driver() -> str:
    return _read(NVIDIA_DRIVER).partition("\n")[0]


def _encoding() -> str:
    printed = getattr(sys.stdout, "encoding", None)
    return f"files {sys.getfilesystemencoding()}, standard output {printed}"


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


FACTS: dict[str, Callable[[], str]] = {
    "Python": _python,
    "environment": _environment,
    "operating system": _system,
    "processors": _processors,
    "memory": _memory,
    "shared memory (/dev/shm)": _shared_memory,
    "free space in the working directory": _free_space,
    "NVIDIA driver": _driver,
    "encodings": _encoding,
}
