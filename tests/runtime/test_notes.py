from __future__ import annotations

import logging
import traceback

import pytest

from littrainer.runtime import notes
from littrainer.runtime.notes import add_note


def test_a_note_is_added_once_and_does_not_change_the_error() -> None:
    error = KeyError("weight")
    add_note(error, "first")
    add_note(error, "second")
    add_note(error, "first")
    assert error.args == ("weight",)
    assert traceback.format_exception(error)[-3:] == ["KeyError: 'weight'\n", "first\n", "second\n"]


def test_notes_are_logged_if_python_does_not_print_them(caplog: pytest.LogCaptureFixture) -> None:
    class EarlierError(KeyError):
        """An error as Python 3.10 has it."""

        @property
        def add_note(self) -> None:
            raise AttributeError

    error = EarlierError("weight")
    with caplog.at_level(logging.ERROR, logger=notes.__name__):
        add_note(error, "first")
        add_note(error, "second")
        add_note(error, "first")
    assert [record.getMessage() for record in caplog.records] == ["first", "second"]
    assert error.__notes__ == ["first", "second"]
