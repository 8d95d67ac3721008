"""Keeping Lightning's messages about itself, and advice that does not apply here, from the user."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# The loggers that Lightning tells of itself by, each time a lightning.Trainer is built, has run or saves. Of its
# separate packages the one that was imported last tells through its own.
CHATTING_LOGGERS = (
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "pytorch_lightning.utilities.rank_zero",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
)
# Path of the code of such a message: not a callback or a profiler, whose messages a script has asked for.
LIGHTNING_ITSELF = re.compile(r"[\\/]lightning[\\/](fabric|pytorch)[\\/](?!callbacks|profilers)")
# Advice of Lightning's, by its text: none of it applies to what is set up here.
SILENCED_TEXTS = (
    r".*You defined a `validation_step` but have no `val_dataloader`.*",
    r".*GPU available but not used.*",
    r".*does not have many workers.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    # The schedule of that callback takes the place of the other one, whatever that counts.
    r".*SWA is currently only supported every epoch.*",
    # Asked for again, the Trainer's module changes nothing there.
    r".*WeightAveraging callback with a model that overrides the configure_model.*",
    # Each training step puts the model into training mode.
    r".*module\(s\) in eval mode at the start of training.*",
    # The Trainer notes them.
    r".*Couldn't infer the batch indices fetched from your dataloader.*",
)
SILENCED_WARNINGS = tuple(re.compile(text, re.IGNORECASE) for text in SILENCED_TEXTS)

# Lists of filters are read and replaced in two steps, which those of two trainings must not do at a time.
_while_filters_change = threading.Lock()


class _NoChatter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or not LIGHTNING_ITSELF.search(record.pathname)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Drop that chatter and advice, and nothing else; what a callback logs, or filters, in between is left alone.

    One training may run within another, or at the same time in another thread: each has its own filters.
    """
    loggers = [logging.getLogger(name) for name in CHATTING_LOGGERS]
    no_chatter = _NoChatter()
    # New ones each time, since they are taken away by identity.
    ours = [("ignore", text, Warning, None, 0) for text in SILENCED_WARNINGS]
    own = {id(entry) for entry in ours}
    with _while_filters_change:
        for logger in loggers:
            logger.addFilter(no_chatter)
        # Not warnings.catch_warnings(), which would also undo the filters that a script sets while it trains.
        warnings.filters[:0] = ours  # type: ignore[index]
    try:
        yield
    finally:
        with _while_filters_change:
            # Equal filters of another training stay.
            warnings.filters[:] = [entry for entry in warnings.filters if id(entry) not in own]  # type: ignore[index]
            for logger in loggers:
                logger.removeFilter(no_chatter)
