"""The help page of `HfArgumentParser`: fields under the headings of their topics, each option once."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import Any

from littrainer.arguments.fields import topics_of

MOST_OPTIONS_IN_USAGE = 12
MOST_CHOICES_BESIDE_OPTION = 6

# The help of a field that describes nothing: argparse shows no default where there is no help.
DEFAULT_ALONE = "(default: %(default)s)"

Section = tuple[str, str | None, list[dataclasses.Field[Any]]]


def sections_of(cls: type) -> Iterator[Section]:
    """The fields of a dataclass that a command line can give, as headings, descriptions and fields.

    A class may name its heading in `_argument_group_name`. Training arguments have one for each topic.
    """
    left = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for topic in topics_of(cls):
        names = [field.name for field in dataclasses.fields(topic) if field.name in left]
        yield (topic.__doc__ or topic.__name__).rstrip("."), None, [left.pop(name) for name in names]
    if left:
        yield getattr(cls, "_argument_group_name", cls.__name__), _first_line(cls), list(left.values())


def _first_line(cls: type) -> str | None:
    text = (cls.__doc__ or "").strip()
    # A dataclass without a docstring gets its signature for one.
    if not text or text.startswith(f"{cls.__name__}("):
        return None
    return text.splitlines()[0].replace("%", "%%")


class OneLineHelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows an option in one spelling, with its value, its help and its default, where it has one."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Show in the usage line what has to be given, and that there are options, instead of all of them."""
        actions = list(actions)
        if usage is None and len(actions) > MOST_OPTIONS_IN_USAGE:
            needed = [action for action in actions if action.required or not action.option_strings]
            texts = [
                f"{action.option_strings[0]} {self._metavar(action)}"
                if action.option_strings
                else self._metavar(action)
                for action in needed
                if action.help is not argparse.SUPPRESS
            ]
            usage = " ".join(["%(prog)s [options]", *(text.replace("%", "%%") for text in texts)])
        super().add_usage(usage, actions, groups, prefix)

    def _metavar(self, action: argparse.Action) -> str:
        named = action.metavar if isinstance(action.metavar, str) else None
        return named or (action.dest.upper() if action.option_strings else action.dest)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = [text for text in action.option_strings if text.replace("-", "_") not in _other_spellings(action, text)]
        value = "" if action.nargs == 0 else " " + self._format_args(action, self._value_name(action))
        return ", ".join(shown) + value

    def _value_name(self, action: argparse.Action) -> str:
        choices = list(action.choices or ())
        return self._metavar(action) if len(choices) > MOST_CHOICES_BESIDE_OPTION else action.dest.upper()

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        choices = list(action.choices or ())
        if len(choices) <= MOST_CHOICES_BESIDE_OPTION or action.metavar is not None:
            return super()._format_args(action, default_metavar)
        kept, action.choices = action.choices, None
        try:
            return super()._format_args(action, default_metavar)
        finally:
            action.choices = kept

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = "" if action.help == DEFAULT_ALONE else action.help or ""
        choices = [str(choice) for choice in action.choices or ()]
        if len(choices) > MOST_CHOICES_BESIDE_OPTION:
            text = f"{text} One of {', '.join(choices)}.".strip()
        if action.option_strings and action.default not in (None, argparse.SUPPRESS, [], "") and action.nargs != 0:
            default = action.default.value if isinstance(action.default, Enum) else action.default
            text = f"{text} (default: {default})".strip()
        return _with_literal_percent_signs(text, action)


def _other_spellings(action: argparse.Action, text: str) -> list[str]:
    """The earlier option strings of an action, in underscores, that `text` only repeats."""
    before = action.option_strings[: action.option_strings.index(text)]
    return [spelling.replace("-", "_") for spelling in before]


def _with_literal_percent_signs(text: str, action: argparse.Action) -> str:
    # argparse fills in %(default)s and the like; a help that merely speaks of 10 % must not break the whole page.
    try:
        text % {**vars(action), "prog": ""}
    except (KeyError, TypeError, ValueError):
        return text.replace("%", "%%")
    return text
