from __future__ import annotations

import dataclasses
from pathlib import Path

from littrainer.arguments import TrainingArguments
from littrainer.arguments.documentation import arguments_page

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"


def test_the_committed_page_is_what_the_arguments_say() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == arguments_page(), "run: python -m littrainer.arguments.documentation > docs/arguments.md"


def test_the_page_has_one_row_for_each_argument_in_their_order() -> None:
    rows = [line.split("`")[1] for line in arguments_page().splitlines() if line.startswith("| `")]
    assert rows == [field.name for field in dataclasses.fields(TrainingArguments)]


def test_the_page_tells_refused_arguments_from_honoured_ones() -> None:
    page = arguments_page()
    assert "| `bf16` | `False` | not yet (mixed precision) |" in page
    assert "| `seed` | `42` | honoured |" in page
