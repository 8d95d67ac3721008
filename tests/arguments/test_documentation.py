"""The page of arguments is up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from littrainer import Seq2SeqTrainingArguments
from littrainer.arguments.specifications import SPECS
from tests.arguments.arguments_page import arguments_page

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"


def test_the_committed_page_is_up_to_date() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == arguments_page(), "run: python -m tests.arguments.arguments_page > docs/arguments.md"


def test_every_argument_has_a_specification() -> None:
    assert set(SPECS) == {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
