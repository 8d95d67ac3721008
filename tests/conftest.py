"""Settings for every test: no network, one thread, and no progress bars of tokenizers across processes."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest

from tests.scenarios.once_per_process import leave_out_of_collections, remember_entry_points

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Clients of experiment trackers report on their use otherwise.
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}

# Before torch, transformers or datasets is imported, since they read these when they are imported.
for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)

# A shell starts what runs in its background with Ctrl-C ignored; tests send it to themselves and to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

remember_entry_points()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected before the first test is no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        leave_out_of_collections()
