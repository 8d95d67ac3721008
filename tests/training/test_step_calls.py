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

STEPS, FIRST, LAST = 24, 6, 16
# Of what transformers calls over a raw loop.
MOST = 0.5


def bert_rows(count: int) -> list[Any]:
    return [
        {"input_ids": torch.arange(1, 7), "attention_mask": torch.ones(6, dtype=torch.long), "labels": row["labels"]}
        for row in token_rows(count)
    ]


JOBS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]]]] = {
    "vectors": (VectorClassifier, vector_rows),
    "bert": (tiny_bert_classifier, bert_rows),
}


# A third of transformers' calls over a raw loop, or fewer; a walk through a model's modules, hooks that nobody has or
# Lightning's own loop would each bring more than the rest up to that.
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("with_defaults", [False, True], ids=["bare", "default callbacks"])
def test_a_step_calls_far_fewer_functions_than_transformers_does(
    tmp_path: Path, job: str, accumulation: int, with_defaults: bool
) -> None:
    make_model, make_rows = JOBS[job]
    logs = {"disable_tqdm": False, "logging_strategy": "steps", "logging_steps": 10} if with_defaults else {}
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
            **logs,
        )
        assert calls.step == STEPS
        counted[side] = calls.in_a_step
    ours, theirs = counted["littrainer"] - counted["raw"], counted["transformers"] - counted["raw"]
    print(f"{job} {accumulation} {with_defaults}: {counted}, {ours / theirs:.2f}")
    assert ours <= MOST * theirs
