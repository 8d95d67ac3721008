"""The page of arguments says what the arguments and the table of destinations say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from littrainer import Seq2SeqTrainingArguments
from littrainer.arguments.destinations import DESTINATIONS, derived_keywords
from littrainer.engine.lightning_trainer import DERIVED_KEYWORDS
from tests.arguments.arguments_page import arguments_page

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"


def test_the_committed_page_is_what_the_arguments_say() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == arguments_page(), "run: python -m tests.arguments.arguments_page > docs/arguments.md"


def test_every_argument_has_its_destination_in_a_sentence() -> None:
    names = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert names and set(DESTINATIONS) == names
    for destination in DESTINATIONS.values():
        assert destination.sentence.endswith(".") and "\n" not in destination.sentence


def test_the_engine_takes_its_derived_keywords_from_the_table_of_destinations() -> None:
    assert DERIVED_KEYWORDS.keys() == derived_keywords().keys() >= {"accelerator", "accumulate_grad_batches"}
