"""Logger levels by `log_level`, and the handler of littrainer's records."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from littrainer.redirection.redirect import is_installed

if TYPE_CHECKING:
    StreamHandler = logging.StreamHandler[Any]
else:
    # Not generic in Python 3.10.
    StreamHandler = logging.StreamHandler

OURS, THEIRS = "littrainer", "transformers"
TRAINER_OF_TRANSFORMERS = "transformers.trainer"
# The default format of transformers, which names its package in each line.
DEFAULT_FORMAT = f"[{THEIRS}] %(message)s"
# Lowest level, if another logger decides; 0 would inherit the root logger's level.
ALL = 1
DEFAULT_LEVELS = (logging.NOTSET, ALL, logging.WARNING)


class _Console(StreamHandler):
    """A handler that passes records to the logger of transformers' Trainer, or writes them to the current stderr.

    Under `littrainer run` scripts configure that logger. Nothing is written if the script has its own handler.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(f"[{OURS}] %(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if is_installed():
            # Scripts filter by name, too.
            record.name = TRAINER_OF_TRANSFORMERS
            theirs = logging.getLogger(TRAINER_OF_TRANSFORMERS)
            if theirs.isEnabledFor(record.levelno):
                # Lower levels have transformers' lines, which programs may parse.
                if record.levelno >= logging.WARNING:
                    record.package = OURS
                    _name_package_in_lines()
                theirs.handle(record)
        # At each record, since a script may add handlers later.
        elif not any(handler is not self for name in (None, OURS) for handler in logging.getLogger(name).handlers):
            super().emit(record)


def _name_package_in_lines() -> None:
    """Let transformers' handlers write `[littrainer]` before messages of littrainer, in the default format."""
    for handler in logging.getLogger(THEIRS).handlers:
        if getattr(handler.formatter, "_fmt", None) == DEFAULT_FORMAT:
            handler.setFormatter(logging.Formatter("[%(package)s] %(message)s", defaults={"package": THEIRS}))


_console = _Console()


def apply_log_level(args: Any) -> None:
    """Set the levels of littrainer's and transformers' loggers for this process.

    With `passive` littrainer's logger follows a level that a script has set for transformers'.
    """
    _set_up()
    if (args.log_level if args.should_log else args.log_level_replica) != "passive":
        level = args.get_process_log_level()
        logging.getLogger(THEIRS).setLevel(level)
        logging.getLogger(OURS).setLevel(ALL if is_installed() else level)


def is_debug_logging_enabled() -> bool:
    deciding = logging.getLogger(TRAINER_OF_TRANSFORMERS if is_installed() else OURS)
    return deciding.getEffectiveLevel() <= logging.DEBUG


def _set_up() -> None:
    ours = logging.getLogger(OURS)
    if _console not in ours.handlers:
        ours.addHandler(_console)
    ours.propagate = not is_installed()
    if ours.level in DEFAULT_LEVELS:
        ours.setLevel(ALL if is_installed() else logging.getLogger(THEIRS).level or logging.WARNING)


# For records before a Trainer exists. The root logger's level is ignored, as in transformers.
_set_up()
