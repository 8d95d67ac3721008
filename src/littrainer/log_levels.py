"""How much littrainer's logger tells, and transformers' beside it: what `log_level` and `log_level_replica` ask for."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

    StreamHandler = logging.StreamHandler[Any]
else:
    # Python 3.10's takes no type in brackets.
    StreamHandler = logging.StreamHandler

OURS, THEIRS = "littrainer", "transformers"


class _Stderr(StreamHandler):
    """Writes to what stderr is at the moment, as long as the script has no handler of its own."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(f"[{OURS}] %(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        # Both may come after this one has been added; a line is told once.
        elsewhere = [*logging.getLogger().handlers, *logging.getLogger(OURS).handlers]
        if not any(handler is not self for handler in elsewhere):
            super().emit(record)


_stderr = _Stderr()


def apply_log_level(args: TrainingArguments) -> None:
    """Set the level of littrainer's and transformers' loggers to the one that the arguments ask of this process.

    `passive` leaves the levels as they are; littrainer's then follows transformers', where a script has set that, and
    nobody set ours.
    """
    wanted = args.log_level if args.should_log else args.log_level_replica
    ours, theirs = logging.getLogger(OURS), logging.getLogger(THEIRS)
    if wanted != "passive":
        level = args.get_process_log_level()
        theirs.setLevel(level)
    elif ours.level == logging.NOTSET and theirs.level not in (logging.NOTSET, logging.WARNING):
        level = theirs.level
    else:
        return
    ours.setLevel(level)
    if level < logging.WARNING and _stderr not in ours.handlers:
        # Without any handler Python shows warnings only.
        ours.addHandler(_stderr)


def tells_details() -> bool:
    """Whether littrainer's logger was set to tell more than warnings; a level of the root logger does not count."""
    return logging.NOTSET < logging.getLogger(OURS).level <= logging.INFO


def tells_everything() -> bool:
    """Whether littrainer's logger was set to the level of debugging."""
    return logging.NOTSET < logging.getLogger(OURS).level <= logging.DEBUG
