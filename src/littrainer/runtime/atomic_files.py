"""Small files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that a failure, or the end of the process, leaves what was there before.

    Parameters:
        content: text, which is written as UTF-8, or bytes.
    """
    target = Path(path).resolve()
    unfinished = target.with_name(f".{target.name}.unfinished-{os.getpid()}")
    try:
        with open(unfinished, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError):
            state = "what it held before is kept" if target.exists() else "nothing was written"
            # OSError makes an error of the kind that its number stands for.
            raise OSError(error.errno, f"{error.strerror}; {state}", str(target)) from error
        raise
