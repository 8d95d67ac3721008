"""What libraries do anew in each training, and a process of tests, which trains for a moment each time, needs once."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
from typing import Any


def remember_entry_points() -> None:
    """Read what installed packages register once; has to come before the import of Lightning.

    Each Trainer of Lightning looks for callbacks there, for which the metadata of all packages are read.
    """
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


def leave_out_of_collections() -> None:
    """Let collections of garbage pass by all that there is now.

    Trainings ask for collections, each of transformers' for several. With the modules of all libraries to go through,
    which are never garbage, one takes longer than a training does here. What is made later is collected as ever.
    """
    gc.collect()
    gc.freeze()


def leave_writing_to_the_system() -> None:
    """Let files reach the disk when the system likes.

    Each checkpoint waits for the disk several times otherwise. What waiting guards against is the end of the machine;
    the end of a process loses nothing. Tests that are about waiting put a function of their own in its place.
    """

    def check_descriptor(file: Any) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    os.fsync = check_descriptor
