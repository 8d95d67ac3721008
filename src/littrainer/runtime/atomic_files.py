"""Atomic writes of small files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file such that a failure or kill preserves its content."""
    target = Path(path).resolve()
    staging = target.with_name(f".{target.name}.unfinished-{os.getpid()}")
    try:
        with open(staging, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, target)
    except BaseException as error:
        with suppress(OSError):
            staging.unlink()
        if isinstance(error, OSError):
            state = "what it held before is kept" if target.exists() else "nothing was written"
            # OSError chooses the subclass by errno.
            raise OSError(error.errno, f"{error.strerror}; {state}", str(target)) from error
        raise
