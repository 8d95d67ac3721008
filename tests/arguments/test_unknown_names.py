from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import transformers

from littrainer.arguments import TrainingArguments
from littrainer.arguments.removed_names import REMOVED_NAMES

FIELD_NAMES = {field.name for field in dataclasses.fields(TrainingArguments)}


@dataclasses.dataclass
class PlainSubclass(TrainingArguments):
    generation_beams: int = 1


def test_an_unknown_argument_name_suggests_the_nearest_known_one() -> None:
    with pytest.raises(TypeError, match="'evalution_strategy' is unknown, did you mean 'eval_strategy'"):
        TrainingArguments(evalution_strategy="no")  # type: ignore[call-arg]


def test_all_mistakes_stand_in_one_message_of_one_line() -> None:
    with pytest.raises(TypeError) as caught:
        TrainingArguments(learning_rte=1, no_cuda=True, zzzzqqqq=1)  # type: ignore[call-arg]
    message = str(caught.value)
    assert "\n" not in message
    for part in ("'learning_rte'", "'learning_rate'", "'no_cuda'", "use use_cpu", "'zzzzqqqq'", "no known name"):
        assert part in message


def test_a_subclass_suggests_its_own_arguments_and_says_its_own_name() -> None:
    with pytest.raises(TypeError, match=r"PlainSubclass: 'generation_beam' .* did you mean 'generation_beams'"):
        PlainSubclass(generation_beam=2)  # type: ignore[call-arg]


def test_a_constructor_that_takes_any_keyword_sorts_them_itself() -> None:
    class Tolerant(TrainingArguments):
        def __init__(self, **keywords: Any) -> None:
            self.extra = keywords.pop("extra", None)
            super().__init__(**keywords)

    args = Tolerant(extra=3, seed=7)
    assert (args.extra, args.seed) == (3, 7)


@pytest.mark.parametrize("name", sorted(REMOVED_NAMES))
def test_a_name_that_transformers_removed_says_what_replaced_it(name: str) -> None:
    assert name not in {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    with pytest.raises(TypeError) as caught:
        TrainingArguments(**{name: "anything"})
    assert f"{name!r} is no longer an argument: {REMOVED_NAMES[name].advice}" in str(caught.value)


def test_the_replacements_of_removed_names_exist() -> None:
    assert {removed.replaced_by for removed in REMOVED_NAMES.values()} - {None} <= FIELD_NAMES
