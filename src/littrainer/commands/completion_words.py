"""The words that a shell completes."""

from __future__ import annotations

from typing import NamedTuple

# What a command takes besides options: nothing, words of a list, folders, a script and what belongs to it, the same or
# training arguments alone.
NOTHING, CHOICES, SCRIPT, SCRIPT_OR_ARGUMENTS, FOLDERS = (
    "nothing",
    "choices",
    "script",
    "script or arguments",
    "folders",
)


class Option(NamedTuple):
    """One option.

    Parameters:
        names: its spellings, each once.
        about: what it does, in one line.
        takes_value: whether a word follows it.
        choices: the words that may follow; empty where any may.
    """

    names: tuple[str, ...]
    about: str
    takes_value: bool
    choices: tuple[str, ...]


class CommandWords(NamedTuple):
    """One command.

    Parameters:
        name: the word that asks for it.
        about: what it does, in one line.
        options: what it takes.
        operands: what it takes besides, one of the constants above.
        choices: the words of `CHOICES`.
    """

    name: str
    about: str
    options: tuple[Option, ...]
    operands: str
    choices: tuple[str, ...] = ()


class Vocabulary(NamedTuple):
    """All words.

    Parameters:
        commands: the commands.
        options: what stands in the place of a command.
        arguments: the training arguments, which scripts and `explain` take.
    """

    commands: tuple[CommandWords, ...]
    options: tuple[Option, ...]
    arguments: tuple[Option, ...]
