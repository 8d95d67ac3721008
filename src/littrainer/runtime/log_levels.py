"""Levels of the loggers by `log_level`, and the handler of littrainer's records.

Under `littrainer run` they pass through the logger of transformers' Trainer, so that all that a script does with
transformers' loggers acts on them; otherwise through the logger `littrainer`.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from littrainer.redirection.redirect import is_installed

if TYPE_CHECKING:
    StreamHandler = logging.StreamHandler[Any]
else:
    # Python 3.10's takes no type in brackets.
    StreamHandler = logging.StreamHandler

OURS, THEIRS = "littrainer", "transformers"
TRAINER_OF_TRANSFORMERS = "transformers.trainer"
# The level if another logger decides; 0 would mean that of the root logger.
ALL = 1
LEVELS_THAT_NOBODY_SET = (logging.NOTSET, ALL, logging.WARNING)


class _Console(StreamHandler):
    """Hands records to the logger of transformers' Trainer, or writes them to what stderr is at the moment.

    It writes nothing if the script has its own handler.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(f"[{OURS}] %(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if is_installed():
            # Scripts look for the name, too.
            record.name = TRAINER_OF_TRANSFORMERS
            theirs = logging.getLogger(TRAINER_OF_TRANSFORMERS)
            if theirs.isEnabledFor(record.levelno):
                theirs.handle(record)
        # Handlers of a script may be added after this one; a line is written once.
        elif not any(handler is not self for name in (None, OURS) for handler in logging.getLogger(name).handlers):
            super().emit(record)


_console = _Console()


def apply_log_level(args: Any) -> None:
    """Set the level of littrainer's and transformers' loggers to the one that the arguments ask of this process.

    `passive` leaves the levels as they are; littrainer's then follows transformers' if a script has set that one and
    nobody has set ours.

    Parameters:
        args: training arguments.
    """
    _set_up()
    if (args.log_level if args.should_log else args.log_level_replica) != "passive":
        level = args.get_process_log_level()
        logging.getLogger(THEIRS).setLevel(level)
        logging.getLogger(OURS).setLevel(ALL if is_installed() else level)


def is_debug_logging_enabled() -> bool:
    """Return whether messages for debugging are logged."""
    deciding = logging.getLogger(TRAINER_OF_TRANSFORMERS if is_installed() else OURS)
    return deciding.getEffectiveLevel() <= logging.DEBUG


def _set_up() -> None:
    ours = logging.getLogger(OURS)
    if _console not in ours.handlers:
        ours.addHandler(_console)
    ours.propagate = not is_installed()
    if ours.level in LEVELS_THAT_NOBODY_SET:
        ours.setLevel(ALL if is_installed() else logging.getLogger(THEIRS).level or logging.WARNING)


# For what is logged before there is a Trainer. The level of the root logger does not count, as in transformers.
_set_up()
