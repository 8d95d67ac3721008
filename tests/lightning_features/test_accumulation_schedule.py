"""`GradientAccumulationScheduler`: optimizer steps that take more micro-batches in later epochs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from littrainer import Trainer, TrainerCallback
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import CountingClassifier, VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

ROWS = 18  # five micro-batches, the last of two samples
PLAIN: dict[str, Any] = {
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential",
    "logging_strategy": "steps",
    "logging_steps": 1,
}
WINDOWS = {0: [[0], [1], [2], [3], [4]], 1: [[0, 1], [2, 3], [4]], 2: [[0, 1, 2], [3, 4]]}


def scheduled(folder: Path, model: Any = None, *, schedule: Any = None, **changes: Any) -> Trainer:
    callback = GradientAccumulationScheduler(schedule or {1: 2, 2: 3})
    return quiet_trainer(folder, model, **{"rows": ROWS, "given": {"callbacks": [callback]}, **changes})


def trained_by_hand(model: Any, counts_samples: bool) -> list[torch.Tensor]:
    rows = vector_rows(ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for window in WINDOWS[epoch]:
            optimizer.zero_grad()
            batches = [rows[place * 4 : place * 4 + 4] for place in window]
            number = sum(map(len, batches))
            for batch in batches:
                x = torch.stack([row["x"] for row in batch])
                loss = model(x, torch.tensor([row["labels"] for row in batch]))["loss"]
                (loss * len(batch) / number if counts_samples else loss / len(batches)).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
@pytest.mark.parametrize("model_class", [VectorClassifier, CountingClassifier])
def test_each_step_is_normalised_by_its_own_window(tmp_path: Path, kind: type[Trainer], model_class: Any) -> None:
    torch.manual_seed(0)
    model = model_class()
    by_hand = trained_by_hand(copy.deepcopy(model), model_class is CountingClassifier)
    trainer = scheduled(tmp_path, model, kind=kind, num_train_epochs=3, **PLAIN)
    assert trainer.train().global_step == 5 + 3 + 2
    for own, expected in zip(model.parameters(), by_hand, strict=True):
        torch.testing.assert_close(own.detach(), expected)
    epochs = [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
    assert epochs == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1.4, 1.8, 2, 2.6, 3])


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_a_scheduled_training_resumes_as_if_it_had_not_stopped(tmp_path: Path, kind: type[Trainer]) -> None:
    changes: dict[str, Any] = {"num_train_epochs": 3, "kind": kind, "logging_strategy": "steps", "logging_steps": 1}
    whole = scheduled(tmp_path, **changes, save_strategy="steps", save_steps=7)
    whole.train()
    resumed = scheduled(tmp_path, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    found, expected = (
        [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in one.state.log_history if "loss" in entry]
        for one in (resumed, whole)
    )
    assert found == expected and len(found) == 10


def test_a_checkpoint_that_knows_no_place_is_resumed_where_its_steps_stand(tmp_path: Path) -> None:
    scheduled(tmp_path, num_train_epochs=3, save_strategy="steps", save_steps=6).train()
    folder = tmp_path / "checkpoint-6"
    (folder / "littrainer_resume.pt").unlink()
    (folder / "littrainer_manifest.json").unlink()
    positions: list[float] = []

    class Noting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            positions.append(state.epoch)

    trainer = scheduled(tmp_path, num_train_epochs=3)
    trainer.add_callback(Noting())
    trainer.train(resume_from_checkpoint=str(folder))
    assert positions == pytest.approx([1.8, 2, 2.6, 3])


@pytest.mark.parametrize(
    ("length", "steps", "epoch"),
    [({"max_steps": 7}, 7, 1.8), ({"num_train_epochs": 1.5}, 7, 1.8), ({"max_steps": 8}, 8, 2.0)],
)
def test_the_length_of_the_training_is_counted_by_it(
    tmp_path: Path, length: dict[str, Any], steps: int, epoch: float
) -> None:
    trainer = scheduled(tmp_path, **length)
    trainer.train()
    assert (trainer.state.global_step, trainer.state.max_steps) == (steps, steps)
    assert trainer.state.epoch == pytest.approx(epoch)
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-9)


def test_it_holds_for_a_stream_and_for_limited_epochs_too(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Noting(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            drawn = super().get_batch_samples(epoch_iterator, num_batches, device)
            sizes.append(len(drawn[0]))
            return drawn

    def sizes_of(rows: Any, **changes: Any) -> list[int]:
        sizes.clear()
        given = {"callbacks": [GradientAccumulationScheduler({1: 2})], "train_dataset": rows}
        quiet_trainer(tmp_path, kind=Noting, given=given, **changes).train()
        return [size for size in sizes if size]

    # A stream may end within a window, whose optimizer step is never taken.
    assert sizes_of(Stream(vector_rows(12)), max_steps=5) == [1, 1, 1, 2, 1, 2]
    limited = {"limit_train_batches": 3}
    assert sizes_of(Rows(vector_rows(40)), num_train_epochs=2, lightning=limited) == [1, 1, 1, 2, 1]


def test_a_class_of_ones_own_may_choose_the_number_itself(tmp_path: Path) -> None:
    class Doubling(GradientAccumulationScheduler):
        def get_accumulate_grad_batches(self, epoch: int) -> int:
            return int(2**epoch)

    given = {"lightning": {"callbacks": [Doubling({0: 1})]}}
    assert quiet_trainer(tmp_path, rows=16, given=given, num_train_epochs=3).train().global_step == 4 + 2 + 1


def test_the_argument_beside_it_and_a_second_schedule_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"asks for another number. .* leave that argument at 1"):
        scheduled(tmp_path, gradient_accumulation_steps=2, max_steps=1).train()
    trainer = scheduled(tmp_path, max_steps=1)
    trainer.add_callback(GradientAccumulationScheduler({0: 1}))
    with pytest.raises(ValueError, match="There are 2 callbacks of the kind GradientAccumulationScheduler"):
        trainer.train()
