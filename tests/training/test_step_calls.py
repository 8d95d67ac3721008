"""A step calls few Python functions beyond those of a raw loop: what an optimizer step costs, counted and not timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scenarios.data import token_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.training.step_calls import BATCH_SIZE, SIDES, CountedCalls, run_side

STEPS, FIRST, LAST = 12, 3, 9
# Of what transformers calls over a raw loop; it is 0.3 to 0.45. Lightning's own loop brings more than transformers'.
MOST = 0.5


def bert_rows(count: int) -> list[Any]:
    return [
        {"input_ids": torch.arange(1, 7), "attention_mask": torch.ones(6, dtype=torch.long), "labels": row["labels"]}
        for row in token_rows(count)
    ]


JOBS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]], int]] = {
    "vectors": (VectorClassifier, vector_rows, 1),
    "vectors, accumulated": (VectorClassifier, vector_rows, 4),
    "BERT": (tiny_bert_classifier, bert_rows, 2),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_step_calls_far_fewer_functions_than_transformers_does(tmp_path: Path, job: str) -> None:
    make_model, make_rows, accumulation = JOBS[job]
    counted = {}
    for side in SIDES:
        calls = CountedCalls(FIRST, LAST)
        torch.manual_seed(0)
        run_side(
            side,
            tmp_path / side,
            make_model(),
            make_rows(STEPS * BATCH_SIZE * accumulation),
            calls.step_ended,
            gradient_accumulation_steps=accumulation,
            disable_tqdm=False,
            logging_strategy="steps",
            logging_steps=6,
        )
        assert calls.step == STEPS
        counted[side] = calls.in_a_step
    ours, theirs = counted["littrainer"] - counted["raw"], counted["transformers"] - counted["raw"]
    assert theirs > 300
    assert ours <= MOST * theirs, counted
