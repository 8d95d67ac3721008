"""What all commands share: how their options are parsed, how they complain, and how they end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

BAD_INPUT = 2
# As shells count programs that a signal has ended: SIGPIPE, SIGINT.
NOBODY_READS, INTERRUPTED = 128 + 13, 128 + 2


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, which names the nearest option that there is.

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
        """As in argparse, with the nearest option in the complaint about one that there is not."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            self.error(unrecognized(left, option_names(self)))
        return found


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a parser, in every spelling."""
    return [name for name in parser._option_string_actions if name.startswith("--")]


def unrecognized(words: Sequence[str], known: Sequence[str]) -> str:
    """That words are no arguments, and which of the known ones may have been meant."""
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    hints = [f"{name}: {hint}" for name in names if (hint := suggested(name, known))]
    return "; ".join([f"unrecognized arguments: {' '.join(words)}", *(hints or ["see --help"])])


def suggested(word: str, known: Sequence[str]) -> str:
    """The question whether the nearest of the known words was meant; empty if none is similar."""
    from littrainer.arguments.did_you_mean import nearest_name

    nearest = nearest_name(word, known)
    return "" if nearest is None else f"did you mean {nearest!r}?"


def complain(command: str, message: str) -> int:
    """Say in one line on standard error what is wrong with what `littrainer COMMAND` was given; returns the status."""
    print(f"littrainer {command}: {message}", file=sys.stderr)
    return BAD_INPUT


def quietly(answer: Callable[[], int]) -> int:
    """Carry a command out; Ctrl-C, and a reader that has left (`littrainer explain | head -1`), end it without a word.

    Letters that standard output cannot hold are written as escapes.

    Parameters:
        answer: carries it out and returns the exit status.

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
