"""What a call of evaluate() or predict() costs however little it evaluates, in Python calls, beside transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments

LIBRARIES = ("littrainer", "transformers")
# The first calls pay for what is kept.
COUNTED_CALL = 3


@contextmanager
def counted(numbers: list[int]) -> Iterator[None]:
    """Add the number of Python calls in the block."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
    numbers.append(calls)


def counting_trainer(library: str, folder: Path, batches: int) -> Any:
    """A Trainer of one side that counts the calls of each evaluation and prediction."""
    module = __import__(library)

    class Counting(module.Trainer):  # type: ignore[misc, name-defined]
        calls: list[int]

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            with counted(self.calls):
                return super().evaluate(*args, **kwargs)

        def predict(self, *args: Any, **kwargs: Any) -> Any:
            with counted(self.calls):
                return super().predict(*args, **kwargs)

    arguments = quiet_arguments(
        folder / library, module.TrainingArguments, max_steps=COUNTED_CALL, eval_strategy="steps", eval_steps=1
    )
    trainer = Counting(
        model=VectorClassifier(),
        args=arguments,
        train_dataset=Rows(vector_rows(4)),
        eval_dataset=Rows(vector_rows(3 * batches, seed=1)),
        compute_metrics=accuracy,
    )
    trainer.calls = []
    return trainer


def outside(trainer: Any) -> None:
    for _ in range(COUNTED_CALL):
        trainer.evaluate()


WORK: dict[str, Callable[[Any], Any]] = {
    "in fit": lambda trainer: trainer.train(),
    "outside": outside,
    "prediction": lambda trainer: [trainer.predict(trainer.eval_dataset) for _ in range(COUNTED_CALL)],
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_neither_a_call_nor_a_batch_costs_more_than_under_transformers(
    tmp_path: Path, work: Callable[[Any], Any]
) -> None:
    short: dict[str, int] = {}
    long: dict[str, int] = {}
    for batches, counts in ((1, short), (41, long)):
        for library in LIBRARIES:
            trainer = counting_trainer(library, tmp_path, batches)
            work(trainer)
            counts[library] = trainer.calls[COUNTED_CALL - 1]
    ours, theirs = LIBRARIES
    assert short[ours] <= short[theirs], f"calls of one batch: {short}"
    of_a_batch = {library: (long[library] - short[library]) / 40 for library in LIBRARIES}
    assert of_a_batch[ours] <= of_a_batch[theirs], f"for each further batch: {of_a_batch}"


def test_a_model_of_many_modules_is_walked_no_more_often_than_under_transformers(tmp_path: Path) -> None:
    from torch import nn

    class Deep(VectorClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Sequential(*(nn.Linear(1, 1) for _ in range(200)))

    counts: dict[str, int] = {}
    for library in LIBRARIES:
        trainer = counting_trainer(library, tmp_path, 1)
        trainer.model = trainer.model_wrapped = Deep()
        outside(trainer)
        counts[library] = trainer.calls[COUNTED_CALL - 1]
    ours, theirs = LIBRARIES
    assert counts[ours] <= counts[theirs], f"calls of one batch: {counts}"
