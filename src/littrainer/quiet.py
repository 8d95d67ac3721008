"""Keeping Lightning's start-up messages, and advice that does not apply here, from the user."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Told by Lightning each time a lightning.Trainer is built or has run.
CHATTER = re.compile(
    r"GPU available|TPU available|HPU available|LOCAL_RANK|.*Tip: |"
    r"`?Trainer\.\w+` stopped|You are using (the plain ModelCheckpoint|a CUDA device)|"
    r"Using (16bit|bfloat16) |.*attempting graceful shutdown|Detected KeyboardInterrupt"
)
CHATTING_LOGGERS = (
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.accelerators.cuda",
)
# Advice of Lightning's, by its text: none of it applies to what is set up here.
SILENCED_WARNINGS = (
    r".*You defined a `validation_step` but have no `val_dataloader`.*",
    r".*GPU available but not used.*",
    r".*does not have many workers.*",
    r".*isinstance\(treespec, LeafSpec\).*",
)


def _is_no_chatter(record: logging.LogRecord) -> bool:
    return not CHATTER.match(record.getMessage().strip())


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Drop that chatter and advice, and nothing else; what a callback logs, or filters, in between is left alone."""
    loggers = [logging.getLogger(name) for name in CHATTING_LOGGERS]
    ours = [("ignore", re.compile(text, re.IGNORECASE), Warning, None, 0) for text in SILENCED_WARNINGS]
    for logger in loggers:
        logger.addFilter(_is_no_chatter)
    # Not warnings.catch_warnings(), which would also undo the filters that a script sets while it trains.
    warnings.filters[:0] = ours  # type: ignore[index]
    try:
        yield
    finally:
        warnings.filters[:] = [entry for entry in warnings.filters if entry not in ours]  # type: ignore[index]
        for logger in loggers:
            logger.removeFilter(_is_no_chatter)
