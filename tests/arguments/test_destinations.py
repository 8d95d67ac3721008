from __future__ import annotations

import dataclasses

from littrainer import Seq2SeqTrainingArguments
from littrainer.arguments.destinations import DESTINATIONS, derived_keywords
from littrainer.arguments.documentation import arguments_page
from littrainer.engine import DERIVED_KEYWORDS


def test_every_argument_has_its_destination_in_a_sentence() -> None:
    names = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert names and set(DESTINATIONS) == names
    for destination in DESTINATIONS.values():
        assert destination.sentence.endswith(".") and "\n" not in destination.sentence


def test_the_engine_takes_its_derived_keywords_from_the_table_of_destinations() -> None:
    assert DERIVED_KEYWORDS.keys() == derived_keywords().keys() >= {"accelerator", "accumulate_grad_batches"}


def test_the_page_of_arguments_tells_each_destination() -> None:
    rows = {line.split("`")[1]: line for line in arguments_page().splitlines() if line.startswith("| `")}
    for name, (place, sentence, _) in DESTINATIONS.items():
        assert rows[name].endswith(f"| {place.value}: {sentence} |".replace("||", "|"))
