"""Commands in the running text and in tables name what is there: commands, options, targets of the Makefile."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex

import pytest

from littrainer import Seq2SeqTrainingArguments
from littrainer.cli import main
from tests.docs.blocks import ROOT, pages
from tests.docs.markdown_links import prose

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {*re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE), *re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE)}
MESSAGES = ("littrainer does not ",)
"""What begins like a command and is what an error says."""


@functools.cache
def help_of(*words: str) -> str:
    """What `littrainer WORDS --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return printed.getvalue()


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text)) | {"--help"}


def unknown_in(command: str) -> list[str]:
    """What a command names that is not there.

    Parameters:
        command: a text that begins with `littrainer` or `make`.
    """
    program, *words = shlex.split(command)
    if program == "make":
        return [word for word in words if word.partition("=")[0] not in TARGETS]
    if not words or words[0].startswith("-"):
        return [word for word in words if word not in options_in(help_of())]
    if words[0].isupper():
        return []
    if not re.search(rf"^ *{{?.*\b{re.escape(words[0])}\b", help_of(), re.MULTILINE):
        return [words[0]]
    arguments = words[1:]
    # What follows the script, or the module, is its own.
    own = next((place for place, word in enumerate(arguments) if word.endswith(".py") or word == "-m"), len(arguments))
    known = options_in(help_of(words[0]))
    if words[0] == "explain":
        known |= {f"--{name}" for name in Seq2SeqTrainingArguments.__dataclass_fields__}
    given = [word.partition("=")[0] for word in arguments[:own] if re.match(r"--?[A-Za-z]", word)]
    return [word for word in given if word not in known]


def commands_of(page: str) -> list[str]:
    """The code in the running text that begins with one of our commands."""
    found = re.findall(r"`((?:littrainer|make) [^`]+)`", prose(ROOT / page))
    return [command for command in found if not command.startswith(MESSAGES)]


@pytest.mark.parametrize("page", [page for page in pages() if commands_of(page)])
def test_commands_in_the_text_name_what_is_there(page: str) -> None:
    assert {command: unknown for command in commands_of(page) if (unknown := unknown_in(command))} == {}


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("make no-such-target PYTHON='python3 -B' NO=1", ["no-such-target", "NO=1"]),
        ("littrainer walk script.py", ["walk"]),
        ("littrainer run --no-such 2 script.py --its-own", ["--no-such"]),
        ("littrainer explain --no_such 3 --learning_rate 1", ["--no_such"]),
        ("littrainer report out --no-png", []),
    ],
)
def test_what_is_not_there_is_found(command: str, unknown: list[str]) -> None:
    assert unknown_in(command) == unknown
