"""A filter for Lightning's messages about itself, and for advice that does not apply here."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Loggers of Lightning, under the names of all its packages.
NOISY_LOGGERS = (
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "pytorch_lightning.utilities.rank_zero",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
)
# Code of Lightning, except its callbacks and profilers, which a script has chosen.
LIGHTNING_PATH = re.compile(r"[\\/]lightning[\\/](fabric|pytorch)[\\/](?!callbacks|profilers)")
SILENCED_TEXTS = (
    r".*You defined a `validation_step` but have no `val_dataloader`.*",
    r".*GPU available but not used.*",
    r".*does not have many workers.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    # SWA's schedule replaces the other.
    r".*SWA is currently only supported every epoch.*",
    # `configure_model` of the Trainer's module is idempotent.
    r".*WeightAveraging callback with a model that overrides the configure_model.*",
    # Each training step sets training mode.
    r".*module\(s\) in eval mode at the start of training.*",
    # The Trainer records the indices.
    r".*Couldn't infer the batch indices fetched from your dataloader.*",
)
SILENCED_WARNINGS = tuple(re.compile(text, re.IGNORECASE) for text in SILENCED_TEXTS)

# Changes of the filter lists are not atomic.
_filters_lock = threading.Lock()


class _DropInfo(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or not LIGHTNING_PATH.search(record.pathname)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning within a block; nested and parallel trainings have separate filters."""
    loggers = [*map(logging.getLogger, NOISY_LOGGERS)]
    log_filter = _DropInfo()
    # New tuples, since they are removed by identity.
    filters = [("ignore", text, Warning, None, 0) for text in SILENCED_WARNINGS]
    ids = {*map(id, filters)}
    with _filters_lock:
        for logger in loggers:
            logger.addFilter(log_filter)
        # Not warnings.catch_warnings(), which would undo filters that a script sets meanwhile.
        warnings.filters[:0] = filters  # type: ignore[index]
    try:
        yield
    finally:
        with _filters_lock:
            # Keeps equal filters of another training.
            warnings.filters[:] = [entry for entry in warnings.filters if id(entry) not in ids]  # type: ignore[index]
            for logger in loggers:
                logger.removeFilter(log_filter)
