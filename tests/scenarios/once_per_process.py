"""Work that libraries repeat in each training, and that a process of tests needs once."""

from __future__ import annotations

import gc
import os
from typing import Any


def leave_out_of_collections() -> None:
    """Freeze all current objects, so that garbage collections skip them.

    Trainings ask for collections, each of transformers' for several. Traversing the modules of all libraries, which are
    never garbage, takes longer than a training here. Later objects are collected as usual.
    """
    gc.collect()
    gc.freeze()


def leave_writing_to_the_system() -> None:
    """Let files reach the disk when the system likes.

    Waiting for the disk takes more than a quarter of the time of tests that save: 5,200 calls and 26 of 93 seconds in
    44 tests of rotation and exact resume. A wait protects from the end of the machine, and the end of a process loses
    nothing. Tests of the wait itself replace `os.fsync` by their own function, and the processes that tests/faults
    kills keep the real function.
    """

    def check_descriptor(file: Any) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    os.fsync = check_descriptor
