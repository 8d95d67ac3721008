"""Commands in the running text and in tables name what is there: commands, options, targets of the Makefile."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT, pages
from tests.docs.command_lines import unknown_in
from tests.docs.markdown_links import prose

MESSAGES = ("littrainer does not ",)
"""What begins like a command and is what an error says."""


def commands_of(page: str) -> list[str]:
    """The code in the running text that begins with one of our commands."""
    results = re.findall(r"`((?:littrainer|make) [^`]+)`", prose(ROOT / page))
    return [command for command in results if not command.startswith(MESSAGES)]


@pytest.mark.parametrize("page", [page for page in pages() if commands_of(page)])
def test_commands_in_the_text_name_what_is_there(page: str) -> None:
    assert {command: unknown for command in commands_of(page) if (unknown := unknown_in(command))} == {}


def test_a_missing_file_is_reported() -> None:
    assert unknown_in("make no-such-target PYTHON='python3 -B'") == ["no-such-target"]
    assert unknown_in("littrainer run --no-such 2 script.py --its-own") == ["--no-such"]
