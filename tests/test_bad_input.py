"""Wrong input ends in one line that says what was wrong and what to do, before training where that is knowable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer, TrainerCallback, TrainingArguments
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import VectorClassifier


class StepCounter(TrainerCallback):
    """Counts the optimizer steps."""

    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


@contextmanager
def one_line_error(kind: type[Exception], words: str) -> Iterator[None]:
    """The block raises `kind` with a message of one line that matches `words`."""
    with pytest.raises(kind, match=words) as caught:
        yield
    message = str(caught.value).strip()
    assert message and "\n" not in message


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {"output_dir": str(folder), "max_steps": 2, "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(**{**settings, **changes})


SHORT_AND_LONG = {"whole": Rows(vector_rows(4)), "short": Rows([])}


@pytest.mark.parametrize(
    ("given", "changes", "kind", "words"),
    [
        ({"train_dataset": Rows([])}, {"max_steps": -1}, ValueError, "train_dataset.*empty"),
        ({"train_dataset": None}, {}, ValueError, "train_dataset"),
        ({"train_dataset": Stream(vector_rows(8))}, {"max_steps": -1}, ValueError, "max_steps"),
        ({"eval_dataset": Rows([])}, {"eval_strategy": "epoch"}, ValueError, "eval_dataset.*empty"),
        ({"eval_dataset": SHORT_AND_LONG}, {"eval_strategy": "epoch"}, ValueError, "eval_dataset.*empty"),
        ({}, {"eval_strategy": "steps"}, ValueError, "eval_strategy='steps'.*eval_dataset"),
        ({"model": None}, {}, RuntimeError, "model.*model_init"),
        ({"model_init": VectorClassifier}, {}, ValueError, "model.*model_init"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input_is_one_line_before_the_first_step(
    tmp_path: Path, given: dict[str, Any], changes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    counter = StepCounter()
    keywords = {"model": VectorClassifier(), "train_dataset": Rows(vector_rows(8)), **given}
    with one_line_error(kind, words):
        Trainer(args=arguments(tmp_path, **changes), callbacks=[counter], **keywords).train()
    assert counter.steps == 0


def test_evaluating_without_an_evaluation_set_says_which_argument_is_missing(tmp_path: Path) -> None:
    with one_line_error(ValueError, "eval_dataset"):
        Trainer(model=VectorClassifier(), args=arguments(tmp_path)).evaluate()
