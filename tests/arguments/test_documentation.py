from __future__ import annotations

import dataclasses
from pathlib import Path

from littrainer import Seq2SeqTrainingArguments
from littrainer.arguments.documentation import arguments_page
from littrainer.arguments.earlier_names import EARLIER_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"


def test_the_committed_page_is_what_the_arguments_say() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == arguments_page(), "run: python -m littrainer.arguments.documentation > docs/arguments.md"


def test_the_page_has_one_row_for_each_argument_in_their_order() -> None:
    page = arguments_page().partition("## Earlier spellings")[0]
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert rows == [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)]


def test_the_page_tells_values_that_are_refused_from_honoured_arguments() -> None:
    page = arguments_page()
    assert "| honoured for `underflow_overflow` |" in page
    assert "| `seed` | `42` | honoured |" in page


def test_the_page_has_one_row_for_each_earlier_name_with_what_to_write_today() -> None:
    rows = [line for line in arguments_page().partition("## Earlier spellings")[2].splitlines() if line[:3] == "| `"]
    assert [row.split("`")[1] for row in rows] == list(EARLIER_NAMES)
    assert all(EARLIER_NAMES[row.split("`")[1]].advice in row for row in rows)
