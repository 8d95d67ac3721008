from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from littrainer import Trainer, TrainerCallback
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
@pytest.mark.parametrize("window", [1, 3, 49])
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
