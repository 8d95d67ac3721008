"""Each `dataloader_*` argument and each entry of the accelerator_config that loaders read: what it changes."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from littrainer.data.loaders import build_loader
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS
from tests.scenarios.trainers import quiet_arguments

Loader = Any


class Observed:
    """Samples that tell which process read them and what it drew.

    Parameters:
        is_slow: sample 0 takes a while, until the last one has been read, which is in the other worker's second batch.
    """

    def __init__(self, count: int = 10, is_slow: bool = False) -> None:
        self.count = count
        self.last_is_read = multiprocessing.Event() if is_slow else None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, int, tuple[float, ...]]:
        if self.last_is_read is not None and index == self.count - 1:
            self.last_is_read.set()
        if self.last_is_read is not None and index == 0:
            assert self.last_is_read.wait(LONGEST_WAIT_SECONDS)
            # Until the other worker's first batch, which is on its way, has come.
            time.sleep(0.2)
        return index, os.getpid(), (torch.rand(()).item(), random.random(), float(np.random.random()))


def loader_for(
    folder: Path, dataset: Any = None, is_training: bool = True, sampler: Any = None, **changes: Any
) -> Loader:
    return build_loader(
        quiet_arguments(folder, **changes),
        Observed() if dataset is None else dataset,
        collate=list,
        batch_size=3,
        sampler=sampler,
        is_training=is_training,
    )


def processes(loader: Loader) -> frozenset[int]:
    return frozenset(pid for batch in loader for _, pid, _ in batch)


def keeps_its_workers(loader: Loader) -> bool:
    return processes(loader) == processes(loader)


def begins_with_the_slow_sample(loader: Loader) -> bool:
    return next(iter(loader))[0][0] == 0


TWO_WORKERS = {"dataloader_num_workers": 2}

EFFECTS: dict[str, tuple[Any, dict[str, Any], Callable[[Loader], Any], Any, Any]] = {
    "dataloader_num_workers": (2, {}, lambda loader: len(processes(loader) - {os.getpid()}), 0, 2),
    "dataloader_persistent_workers": (True, TWO_WORKERS, keeps_its_workers, False, True),
    "dataloader_in_order": (False, TWO_WORKERS, begins_with_the_slow_sample, True, False),
}
"""Argument -> a value, what it needs beside it, what is observed, and that without and with the value."""


@pytest.mark.parametrize("name", EFFECTS)
def test_a_dataloader_argument_changes_what_the_loader_does(tmp_path: Path, name: str) -> None:
    value, beside, observe, without, with_value = EFFECTS[name]
    observed = [
        observe(loader_for(tmp_path, Observed(is_slow=name == "dataloader_in_order"), **beside, **changes))
        for changes in ({}, {name: value})
    ]
    assert observed == [without, with_value]
