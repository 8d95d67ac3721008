from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from littrainer import Trainer, TrainerCallback
from littrainer.data.windows import MicroBatch
from littrainer.engine.module import DO_NOT_STEP, STEP_NOW, TrainerModule
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

BOTH_MODES = pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer], ids=["automatic", "manual"])


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer is about to step with."""

    def __init__(self) -> None:
        self.of_steps: list[list[torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.of_steps.append([parameter.grad.clone() for parameter in model.parameters()])


def raw_gradients(model: nn.Module, micro_batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """What a loop of forward and backward over the micro-batches accumulates, each loss divided by their number."""
    for batch in micro_batches:
        (model(**batch)["loss"] / len(micro_batches)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@BOTH_MODES
@pytest.mark.parametrize("window", [1, 3, 7, 49])
def test_gradients_of_a_window_are_bit_for_bit_those_of_a_plain_loop(
    tmp_path: Path, kind: type[Trainer], window: int
) -> None:
    gradients = Gradients()
    rows = vector_rows(2 * (window + 2))
    trainer = quiet_trainer(
        tmp_path,
        kind=kind,
        given={"train_dataset": Rows(rows), "callbacks": [gradients]},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=window,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
        optim="sgd",
        learning_rate=0.0,
    )
    trainer.train()
    batches = [
        {"x": torch.stack([row["x"] for row in pair]), "labels": torch.tensor([row["labels"] for row in pair])}
        for pair in zip(rows[::2], rows[1::2], strict=True)
    ]
    windows = [batches[start : start + window] for start in range(0, len(batches), window)]
    assert len(windows) == len(gradients.of_steps) > 1
    for micro_batches, found in zip(windows, gradients.of_steps, strict=True):
        copy = VectorClassifier()
        copy.load_state_dict(trainer.model.state_dict())
        expected = raw_gradients(copy, micro_batches)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@BOTH_MODES
def test_the_mode_of_optimization_follows_from_who_calls_backward(tmp_path: Path, kind: type[Trainer]) -> None:
    trainer = quiet_trainer(tmp_path, kind=kind)
    assert TrainerModule(trainer).automatic_optimization is (kind is Trainer)
    assert trainer.overrides_training_step() is (kind is not Trainer)


def test_a_training_step_put_on_the_object_counts_as_an_override(tmp_path: Path) -> None:
    trainer: Any = quiet_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=2, rows=16)
    original, calls = trainer.training_step, []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(len(calls))
        return original(*arguments, **keywords)

    trainer.training_step = counted
    trainer.train()
    assert len(calls) == 4


def test_a_training_step_may_call_loss_backward_itself(tmp_path: Path) -> None:
    class OwnBackward(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()  # type: ignore[union-attr]
            return loss.detach()  # type: ignore[union-attr]

    results = []
    for kind in (Trainer, OwnBackward):
        torch.manual_seed(0)
        trainer = quiet_trainer(tmp_path, kind=kind, max_steps=3)
        results.append((trainer.train().training_loss, trainer.model.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


@BOTH_MODES
def test_the_optimizer_steps_once_for_each_window_and_gradients_are_seen_after_it(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    events: list[tuple[str, bool]] = []

    def has_gradients(model: nn.Module) -> bool:
        return all(parameter.grad is not None for parameter in model.parameters())

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            events.append(("begin", has_gradients(model)))

        def on_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            events.append(("stepped", has_gradients(model)))

        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            events.append(("end", has_gradients(model)))

    trainer = quiet_trainer(
        tmp_path, kind=kind, given={"callbacks": [Watch()]}, rows=20, gradient_accumulation_steps=3, num_train_epochs=1
    )
    trainer.train()
    assert events == [("begin", False), ("stepped", True), ("end", False)] * 2


def micro_batch(closes_window: bool) -> MicroBatch:
    return MicroBatch({}, True, closes_window, 3, None, 0.5)


def test_lightning_is_told_to_step_exactly_where_a_window_closes(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, gradient_accumulation_steps=3, max_steps=1, rows=12)
    asked: list[int] = []

    class Look(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            asked.append(trainer.lightning_trainer.accumulate_grad_batches)  # type: ignore[union-attr]

        on_step_end = on_substep_end

    trainer.add_callback(Look())
    trainer.train()
    assert asked == [DO_NOT_STEP, DO_NOT_STEP, STEP_NOW]
    # No batch index that Lightning could reach is a multiple of it.
    assert all(number % DO_NOT_STEP for number in (1, 2**31, 2**53))


def test_a_batch_is_not_moved_by_lightning(tmp_path: Path) -> None:
    batch = micro_batch(True)
    assert TrainerModule(quiet_trainer(tmp_path)).transfer_batch_to_device(batch, torch.device("meta"), 0) is batch


def test_inputs_are_prepared_by_the_trainers_own_method(tmp_path: Path) -> None:
    class Doubling(Trainer):
        prepared = 0

        def _prepare_inputs(self, inputs: Any) -> Any:
            self.prepared += 1
            return super()._prepare_inputs(inputs)

    trainer: Any = quiet_trainer(tmp_path, kind=Doubling, max_steps=2)
    trainer.train()
    assert trainer.prepared == 2


def test_a_plateau_schedule_is_stepped_by_evaluations_and_not_by_lightning(tmp_path: Path) -> None:
    model = VectorClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
    trainer = quiet_trainer(
        tmp_path,
        model,
        given={"optimizers": (optimizer, schedule)},
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        logging_strategy="steps",
        logging_steps=1,
    )
    trainer.train()
    rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    # No evaluation is ever good enough, so each of the two lowers the rate.
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005) and schedule.last_epoch == 2


@BOTH_MODES
def test_gradients_are_clipped_to_the_norm_asked_for(tmp_path: Path, kind: type[Trainer]) -> None:
    gradients = Gradients()
    trainer = quiet_trainer(
        tmp_path,
        kind=kind,
        given={"callbacks": [gradients]},
        max_steps=1,
        max_grad_norm=0.01,
        logging_strategy="steps",
        logging_steps=1,
    )
    trainer.train()
    norm = torch.stack([gradient.norm() for gradient in gradients.of_steps[0]]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)
    assert trainer.state.log_history[0]["grad_norm"] > 0.1


def test_dropout_is_on_in_training_also_where_the_model_came_in_evaluation_mode(tmp_path: Path) -> None:
    modes: list[bool] = []

    class Noting(VectorClassifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            modes.append(self.training and self.head.training)
            return super().forward(x, labels)

    trainer = quiet_trainer(tmp_path, Noting().eval(), max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert modes == [True, False, False, False] * 2
