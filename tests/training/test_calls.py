"""A training calls few Python functions, at its steps and around them: what it costs, counted and not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scenarios.data import token_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.training.step_calls import BATCH_SIZE, SIDES, CountedCalls, run_side

STEPS, FIRST, LAST = 12, 3, 9
# torch notes at each seeding who called it, which takes the longer the deeper a test lies.
STACK = ("traceback.py", "linecache.py")


def bert_rows(count: int) -> list[Any]:
    return [
        {"input_ids": torch.arange(1, 7), "attention_mask": torch.ones(6, dtype=torch.long), "labels": row["labels"]}
        for row in token_rows(count)
    ]


JOBS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]]]] = {
    "vectors": (VectorClassifier, vector_rows),
    "BERT": (tiny_bert_classifier, bert_rows),
}


# Job, micro-batches, and the most calls over a raw loop. How many transformers makes depends on the paths that it looks
# for modules in at each step.
@pytest.mark.parametrize(("job", "accumulation", "most"), [("vectors", 1, 150), ("vectors", 4, 370), ("BERT", 2, 0)])
def test_a_step_calls_few_functions_and_fewer_than_one_of_transformers(
    tmp_path: Path, job: str, accumulation: int, most: int
) -> None:
    make_model, make_rows = JOBS[job]
    settings = {"gradient_accumulation_steps": accumulation, "disable_tqdm": False}
    settings |= {"logging_strategy": "steps", "logging_steps": 6}
    counted = {}
    for side in SIDES:
        calls = CountedCalls(FIRST, LAST)
        torch.manual_seed(0)
        rows = make_rows(STEPS * BATCH_SIZE * accumulation)
        run_side(side, tmp_path / side, make_model(), rows, calls.step_ended, **settings)
        assert calls.step == STEPS
        counted[side] = calls.in_a_step
    assert counted["littrainer"] - counted["raw"] <= most, counted
    assert counted["littrainer"] < counted["transformers"], counted


def calls_of_a_training(side: str, folder: Path, job: str) -> int:
    """Python functions that are called for one training of one step, which is not the first in the process."""
    make_model, make_rows = JOBS[job]
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and not frame.f_code.co_filename.endswith(STACK)

    for is_counted in (False, True):
        torch.manual_seed(0)
        model, rows = make_model(), make_rows(BATCH_SIZE)
        sys.setprofile(count if is_counted else None)
        try:
            run_side(side, folder, model, rows, lambda: None)
        finally:
            sys.setprofile(None)
    return calls


def test_a_training_of_one_step_calls_fewer_functions_than_one_of_transformers(tmp_path: Path) -> None:
    ours, theirs = (calls_of_a_training(side, tmp_path / side, "BERT") for side in SIDES[1:])
    assert ours < theirs
