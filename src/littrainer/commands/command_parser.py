"""How the options of a command are parsed, and how it complains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

BAD_INPUT = 2


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
        """As in argparse, but that unknown options come before what else is wrong: they often are the reason for it."""
        words = list(sys.argv[1:] if args is None else args)
        options = words[: words.index("--")] if "--" in words else words
        self._refuse_unknown([word for word in options if word.startswith("--")])
        found, left = self.parse_known_args(words, namespace)
        self._refuse_unknown(left)
        return found

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        unknown = [word for word in words if word.partition("=")[0] not in self._option_string_actions]
        if unknown:
            self.error(unrecognized(unknown, option_names(self)))


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a parser, in every spelling."""
    return [name for name in parser._option_string_actions if name.startswith("--")]


def unrecognized(words: Sequence[str], known: Sequence[str]) -> str:
    """That words are no arguments, and which of the known ones may have been meant."""
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    hints = [f"{name}: {hint}" for name in names if (hint := suggested(name, known))]
    return "; ".join([f"unrecognized arguments: {' '.join(words)}", *(hints or ["see --help"])])


def suggested(word: str, known: Sequence[str]) -> str:
    """The question whether the nearest of the known words was meant; empty where none is similar."""
    from littrainer.arguments.did_you_mean import nearest_name

    nearest = nearest_name(word, known)
    return "" if nearest is None else f"did you mean {nearest!r}?"


def complain(command: str, message: str) -> int:
    """Say in one line on standard error what is wrong with what `littrainer COMMAND` was given; returns the status."""
    print(f"littrainer {command}: {message}", file=sys.stderr)
    return BAD_INPUT
