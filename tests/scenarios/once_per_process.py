"""What libraries do anew in each training, and a process of tests, which trains for a moment each time, needs once."""

from __future__ import annotations

import functools
import gc
import importlib.metadata


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
