"""The folder in which a checkpoint is handed to Ray, of which nothing stays even where its process is killed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from littrainer.checkpoint.run_lock import give_back_claim, is_claimed, take_claim

PREFIX = "littrainer-ray-"
# Made when its parent is claimed: without a claim it was left by a process that was killed.
CONTENT = "checkpoint"


@contextlib.contextmanager
def folder_to_hand_over() -> Iterator[str]:
    """An empty folder that is deleted after the block."""
    parent = Path(tempfile.mkdtemp(prefix=PREFIX))
    claim = take_claim(parent)
    content = parent / CONTENT
    try:
        content.mkdir()
        yield str(content)
    finally:
        shutil.rmtree(content, ignore_errors=True)
        give_back_claim(claim)
        with contextlib.suppress(OSError):
            parent.rmdir()


def delete_abandoned() -> None:
    """Delete what processes that were killed have left on this machine."""
    for parent in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if (parent / CONTENT).is_dir() and is_claimed(parent) is False:
            shutil.rmtree(parent, ignore_errors=True)
