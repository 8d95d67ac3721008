"""A training calls few Python functions, at its steps and around them: what it costs, counted and not timed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loop.step_calls import BATCH_SIZE, CountedCalls, run_side
from tests.scenarios.data import token_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier

STEPS, FIRST, LAST = 12, 3, 9
MAX_CALLS_OF_A_TRAINING = 10_000
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


@pytest.mark.parametrize(("job", "accumulation", "most"), [("vectors", 1, 150), ("vectors", 4, 370), ("BERT", 2, 0)])
def test_a_step_calls_few_functions_more_than_a_raw_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, accumulation: int, most: int
) -> None:
    # A slow machine would draw the bars, and look for files in the run's folder, more often.
    monkeypatch.setattr("tqdm.std.time", itertools.repeat(0.0).__next__)
    monkeypatch.setattr("littrainer.loop.clock.FILE_CHECK_INTERVAL_S", 1e6)
    make_model, make_rows = JOBS[job]
    settings = {"gradient_accumulation_steps": accumulation, "disable_tqdm": False}
    settings |= {"logging_strategy": "steps", "logging_steps": 6}
    counted = {}
    for side in ("raw", "littrainer"):
        calls = CountedCalls(FIRST, LAST)
        torch.manual_seed(0)
        rows = make_rows(STEPS * BATCH_SIZE * accumulation)
        run_side(side, tmp_path / side, make_model(), rows, calls.step_ended, **settings)
        assert calls.step == STEPS
        counted[side] = calls.in_a_step
    assert counted["littrainer"] - counted["raw"] <= most, counted


def test_a_training_of_one_step_calls_few_functions(tmp_path: Path) -> None:
    make_model, make_rows = JOBS["BERT"]
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and not frame.f_code.co_filename.endswith(STACK)

    # The first training in a process imports more.
    for is_counted in (False, True):
        torch.manual_seed(0)
        model, rows = make_model(), make_rows(BATCH_SIZE)
        sys.setprofile(count if is_counted else None)
        try:
            run_side("littrainer", tmp_path, model, rows, lambda: None)
        finally:
            sys.setprofile(None)
    assert calls <= MAX_CALLS_OF_A_TRAINING
