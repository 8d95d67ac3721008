"""Notes on errors with a batch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import get_worker_info

from littrainer import Trainer, TrainingArguments
from littrainer.loop.batch_errors import ErrorContext, advise
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer


class Failing(VectorClassifier):
    """A model that fails in the third forward pass of training or evaluation."""

    def __init__(self, in_evaluation: bool) -> None:
        super().__init__()
        self.in_evaluation, self.passes = in_evaluation, 0

    def forward(self, x: Any, labels: Any = None) -> Any:
        self.passes += self.training is not self.in_evaluation
        if self.passes == 3:
            raise OverflowError("own")
        return super().forward(x, labels)


def catch_notes(trainer: Trainer, kind: type[BaseException], method: str = "train") -> list[str]:
    with pytest.raises(kind) as caught:
        getattr(trainer, method)()
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("kind", [{}, {"kind": StepwiseTrainer}], ids=["automatic", "manual"])
def test_a_failed_forward_pass_names_the_step_and_the_batch(tmp_path: Path, kind: dict[str, Any]) -> None:
    (note,) = catch_notes(quiet_trainer(tmp_path, Failing(False), max_steps=4, **kind), OverflowError)
    assert note.startswith("It came up with a batch of optimizer step 3 of 4: x float32 (2, 6) from ")
    assert note.endswith("; labels int64 (2,), all 1.") or "; labels int64 (2,) from " in note


def test_a_failed_evaluation_names_the_step_at_which_it_is(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, Failing(True), max_steps=4, eval_strategy="steps", eval_steps=2)
    (note,) = catch_notes(trainer, OverflowError)
    assert note.startswith("It came up with a batch of the evaluation at optimizer step 2 of 4: x float32 (1, 6) from ")


def get_advice(
    error: BaseException, model: nn.Module, batch: Any, evaluates: bool = False, **changes: Any
) -> list[str]:
    return advise(ErrorContext(error, model, batch, TrainingArguments("out", use_cpu=True, **changes), evaluates))


OUT_OF_RANGE = IndexError("index out of range in self")


def test_there_is_no_advice_if_batch_and_model_fit() -> None:
    batch = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([1])}
    model = tiny_bert_classifier()
    assert get_advice(OUT_OF_RANGE, model, batch) == []
    # Numbers on a device that may have failed are not read.
    assert get_advice(OUT_OF_RANGE, model, {"input_ids": torch.zeros(1, 2, dtype=torch.long, device="meta")}) == []
    assert get_advice(IndexError("Target 1 is out of bounds."), model, batch) == []
    assert get_advice(ValueError("something else"), model, batch) == []


def test_positions_of_roberta_begin_after_the_padding_token() -> None:
    class Roberta(nn.Module):
        class config:
            model_type, max_position_embeddings, pad_token_id = "roberta", 514, 1

    (sentence,) = get_advice(OUT_OF_RANGE, Roberta(), {"input_ids": torch.zeros(1, 513, dtype=torch.long)})
    assert "513 tokens" in sentence and "max_length=512" in sentence


def test_an_out_of_memory_error_has_other_advice_in_an_evaluation() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    (training,) = get_advice(error, VectorClassifier(), {}, per_device_train_batch_size=5)
    (evaluation,) = get_advice(error, VectorClassifier(), {}, evaluates=True, per_device_eval_batch_size=7)
    assert "per_device_train_batch_size (5)" in training and "gradient_accumulation_steps" in training
    assert "per_device_eval_batch_size (7)" in evaluation and "eval_accumulation_steps" in evaluation


def test_a_pickling_error_has_advice_about_workers_if_there_are_workers() -> None:
    error = AttributeError("Can't pickle local object 'main.<locals>.<lambda>'")
    assert get_advice(error, VectorClassifier(), None) == []
    (sentence,) = get_advice(error, VectorClassifier(), None, dataloader_num_workers=2)
    assert "dataloader_num_workers=2 starts processes" in sentence and "dataloader_num_workers=0" in sentence


@pytest.mark.parametrize(
    ("exit_message", "part"),
    [
        ("is killed by signal: Killed. ", "memory ran out: lower dataloader_num_workers (1)"),
        ("is killed by signal: Bus error. It is possible that", "/dev/shm"),
        ("is killed by signal: Terminated. ", "a signal from outside"),
        ("exited unexpectedly with exit code 3.", "run once with dataloader_num_workers=0 (it is 1)"),
    ],
)
def test_the_advice_about_a_lost_worker_follows_from_its_exit(exit_message: str, part: str) -> None:
    error = RuntimeError(f"DataLoader worker (pid 5) {exit_message}")
    (advice,) = get_advice(error, VectorClassifier(), None, dataloader_num_workers=1)
    assert part in advice


def test_a_lost_worker_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A library of another test may have replaced torch's handler of SIGCHLD.
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)

    class Killed(Rows):
        def __getitem__(self, index: int) -> Any:
            if get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    data = {"train_dataset": Killed(vector_rows(4))}
    trainer = quiet_trainer(tmp_path, trainer_kwargs=data, max_steps=2, dataloader_num_workers=1)
    *_, advice = catch_notes(trainer, RuntimeError)
    assert "memory ran out" in advice
