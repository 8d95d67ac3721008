from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from littrainer.arguments import TrainingArguments


@dataclasses.dataclass
class PlainSubclass(TrainingArguments):
    generation_beams: int = 1


def test_an_unknown_argument_name_suggests_the_nearest_known_one() -> None:
    with pytest.raises(TypeError, match="'evalution_strategy' is unknown, did you mean 'eval_strategy'"):
        TrainingArguments(evalution_strategy="no")  # type: ignore[call-arg]


def test_all_mistakes_stand_in_one_message_of_one_line() -> None:
    with pytest.raises(TypeError) as caught:
        TrainingArguments(learning_rte=1, no_cudaa=True, zzzzqqqq=1)  # type: ignore[call-arg]
    message = str(caught.value)
    assert "\n" not in message
    for part in ("'learning_rte'", "'learning_rate'", "'no_cudaa'", "'zzzzqqqq'", "no known name"):
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
