"""What a training calls beside its steps, counted and not timed: from the arguments to the return of `train()`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.scenarios.data import token_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.training.step_calls import BATCH_SIZE, run_side

# 6,700 where two layers are trained. Reading the metadata of installed packages would be 60 more for each of them.
MOST = 7_500
# torch notes at each seeding who called it, which takes the longer the deeper a test lies.
STACK = ("traceback.py", "linecache.py")


def bert_rows(count: int) -> list[Any]:
    return [{"input_ids": torch.arange(1, 7), "labels": row["labels"]} for row in token_rows(count)]


def calls_of_a_training(
    side: str, folder: Path, make_model: Callable[[], Any], make_rows: Callable[[int], list[Any]]
) -> int:
    """Python functions that are called for one training of one step, which is not the first in the process."""
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
    ours, theirs = (
        calls_of_a_training(side, tmp_path / side, tiny_bert_classifier, bert_rows)
        for side in ("littrainer", "transformers")
    )
    assert ours < theirs


def test_a_training_of_one_step_of_a_model_of_two_layers_calls_few_functions(tmp_path: Path) -> None:
    assert calls_of_a_training("littrainer", tmp_path, VectorClassifier, vector_rows) < MOST
