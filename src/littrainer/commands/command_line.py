"""How all commands parse their options, complain about bad input, and end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

BAD_INPUT = 2
# How shells report programs that SIGPIPE or SIGINT has ended.
NOBODY_READS, INTERRUPTED = 128 + 13, 128 + 2


class CommandParser(argparse.ArgumentParser):
    """A parser that complains in one line, which names the nearest known option.

    Parameters:
        prog: the command, as `littrainer report`.
        keywords: of `argparse.ArgumentParser`.
    """

    def __init__(self, prog: str, **keywords: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        """End the program with exit status 2 and one line."""
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse; a complaint about an unknown option names the nearest one."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            from littrainer.arguments.did_you_mean import unrecognized

            self.error(unrecognized(left, option_names(self)))
        return found


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a parser, in every spelling."""
    return [name for name in parser._option_string_actions if name.startswith("--")]


def complain(command: str, message: str) -> int:
    """Print one line about bad input of a command on standard error; returns the status."""
    print(f"littrainer {command}: {message}", file=sys.stderr)
    return BAD_INPUT


def quietly(answer: Callable[[], int]) -> int:
    """Run a command; Ctrl-C, and a reader that has left (`littrainer explain | head -1`), end it without a message.

    Letters that standard output cannot hold are written as escapes.

    Parameters:
        answer: runs it and returns the exit status.

    Returns:
        That status, or the one that shells expect after a signal.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        try:
            return answer()
        finally:
            # What argparse prints itself still lies in the buffer when it raises SystemExit.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more when it ends, and would report the error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except KeyboardInterrupt:
        if os.name == "posix":
            import signal

            # A shell ends a loop around the command only if a signal has ended it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return INTERRUPTED
