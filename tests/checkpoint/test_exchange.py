"""A checkpoint that one library wrote resumes in the other. Neither knows that the other is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import littrainer
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.trainers import quiet_arguments

STEPS = 7
BREAK = 4


def trained(
    library: Any, folder: Path, resume: Path | None = None, stop_after: int | None = None
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train with dropout, batch norm and a warm-up; the logs (no times) and the weights at the end."""

    class Stop(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step == stop_after

    args = quiet_arguments(
        folder,
        library.TrainingArguments,
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        warmup_steps=3,
        logging_strategy="steps",
        logging_steps=1,
        save_strategy="steps",
        save_steps=BREAK,
    )
    torch.manual_seed(0)
    trainer = library.Trainer(model=NoisyClassifier(), args=args, train_dataset=Rows(vector_rows(20)), callbacks=[Stop])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logs = [
        {name: value for name, value in log.items() if "_per_second" not in name and "_runtime" not in name}
        for log in trainer.state.log_history
    ]
    return logs, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    ("writer", "reader"), [(littrainer, transformers), (transformers, littrainer)], ids=["to", "from"]
)
def test_a_training_goes_on_in_the_other_library_with_the_same_numbers(
    tmp_path: Path, writer: Any, reader: Any
) -> None:
    whole_logs, whole_weights = trained(writer, tmp_path / "whole")
    trained(writer, tmp_path / "first", stop_after=BREAK)
    checkpoint = tmp_path / "first" / f"checkpoint-{BREAK}"
    logs, weights = trained(reader, tmp_path / "second", resume=checkpoint)
    steps = [log for log in logs if "loss" in log]
    assert [log["step"] for log in steps] == [*range(1, STEPS + 1)]
    assert steps == [log for log in whole_logs if "loss" in log]
    assert all(torch.equal(tensor, whole_weights[name]) for name, tensor in weights.items())
