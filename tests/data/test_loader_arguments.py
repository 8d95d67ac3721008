"""Effects of `dataloader_*` arguments."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from littrainer.data.loaders import build_loader
from tests.scenarios.other_processes import MAX_WAIT_SECONDS
from tests.scenarios.trainers import quiet_arguments

Loader = Any


class Observed:
    """Samples with the process that read them.

    Parameters:
        is_slow: reading sample 0 waits for the last sample, which is in the other worker's second batch.
    """

    def __init__(self, is_slow: bool) -> None:
        self.last_is_read = multiprocessing.Event() if is_slow else None

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.last_is_read is not None and index == 9:
            self.last_is_read.set()
        if self.last_is_read is not None and index == 0:
            assert self.last_is_read.wait(MAX_WAIT_SECONDS)
            # Lets the other worker's first batch arrive before.
            time.sleep(0.2)
        return index, os.getpid()


def make_loader(folder: Path, is_slow: bool, **changes: Any) -> Loader:
    args, data = quiet_arguments(folder, **changes), Observed(is_slow)
    return build_loader(args, data, collate=list, batch_size=3, sampler=None, is_training=True)


def processes(loader: Loader) -> frozenset[int]:
    return frozenset(pid for batch in loader for _, pid in batch)


def has_persistent_workers(loader: Loader) -> bool:
    return processes(loader) == processes(loader)


def is_in_order(loader: Loader) -> bool:
    return next(iter(loader))[0][0] == 0


TWO_WORKERS = {"dataloader_num_workers": 2}

EFFECTS: dict[str, tuple[Any, dict[str, Any], Callable[[Loader], Any], Any, Any]] = {
    "dataloader_num_workers": (2, {}, lambda loader: len(processes(loader) - {os.getpid()}), 0, 2),
    "dataloader_persistent_workers": (True, TWO_WORKERS, has_persistent_workers, False, True),
    "dataloader_in_order": (False, TWO_WORKERS, is_in_order, True, False),
}
"""Argument -> value, further settings, observation, and its result without and with the value."""


@pytest.mark.parametrize("name", EFFECTS)
def test_a_dataloader_argument_changes_what_the_loader_does(tmp_path: Path, name: str) -> None:
    value, settings, observe, without, with_value = EFFECTS[name]
    observed = [
        observe(make_loader(tmp_path, name == "dataloader_in_order", **settings, **changes))
        for changes in ({}, {name: value})
    ]
    assert observed == [without, with_value]
