"""The page of arguments is up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from littrainer import Seq2SeqTrainingArguments
from littrainer.arguments.destinations import READERS
from tests.arguments.arguments_page import arguments_page

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"


def test_the_committed_page_is_up_to_date() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == arguments_page(), "run: python -m tests.arguments.arguments_page > docs/arguments.md"


def test_every_argument_has_a_reader() -> None:
    assert set(READERS) == {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
