"""Number of Python function calls in evaluate() and predict(), as a measure of overhead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from littrainer import Trainer
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.trainers import QUIET_RUN, quiet_trainer

# The first calls fill caches.
COUNTED_CALL = 3
# About 10 % above the calls of torch 2.13: 835 to 920, and 220 for each further batch.
MAX_CALLS = 1000
MAX_CALLS_PER_BATCH = 240


class CountingTrainer(Trainer):
    """Trainer that counts the function calls of each loop of an evaluation or a prediction."""

    def count(self, name: str, *args: Any, **kwargs: Any) -> Any:
        events: list[str] = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            return getattr(super(), name)(*args, **kwargs)
        finally:
            sys.setprofile(None)
            self.counts = [*getattr(self, "counts", []), events.count("call")]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self.count("evaluate", *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self.count("predict", *args, **kwargs)


def count_calls(folder: Path, work: str, batches: int) -> int:
    rows = vector_rows(batches * QUIET_RUN["per_device_eval_batch_size"])
    keywords = {"eval_dataset": Rows(rows), "compute_metrics": accuracy}
    changes: Any = {"max_steps": COUNTED_CALL, "eval_strategy": "steps", "eval_steps": 1}
    trainer: Any = quiet_trainer(folder, kind=CountingTrainer, trainer_kwargs=keywords, **changes)
    if work == "train":
        trainer.train()
    else:
        for _ in range(COUNTED_CALL):
            getattr(trainer, work)(trainer.eval_dataset)
    return int(trainer.counts[COUNTED_CALL - 1])


@pytest.mark.parametrize("work", ["train", "evaluate", "predict"])
def test_a_call_and_each_batch_have_few_function_calls(tmp_path: Path, work: str) -> None:
    short, long = (count_calls(tmp_path, work, batches) for batches in (1, 41))
    assert short <= MAX_CALLS
    assert (long - short) / 40 <= MAX_CALLS_PER_BATCH
