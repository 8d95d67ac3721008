"""Loss scaling, carried out on the CPU in the place of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from littrainer import Trainer
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

SCALE = 2.0**10


class Overflowing(VectorClassifier):
    """Its gradient is infinite in the micro-batches of training, counted from 0, that are named."""

    def __init__(self, *broken: int) -> None:
        super().__init__()
        self.broken = broken
        self.micro_batches = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x, labels)
        if self.training:
            if self.micro_batches in self.broken:
                outputs["loss"] = outputs["loss"] * torch.tensor(3e38)
            self.micro_batches += 1
        return outputs


class StepwiseTrainer(Trainer):
    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return super().training_step(*arguments, **keywords)


@pytest.fixture(autouse=True)
def scaling_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("arguments.destinations", "mixed_precision"):
        monkeypatch.setattr(f"littrainer.{module}.lightning_precision", lambda args: "16-mixed")
    monkeypatch.setitem(_keyword_table(), "precision", lambda args: "16-mixed")


def _keyword_table() -> dict[str, Any]:
    from littrainer import engine

    return engine.DERIVED_KEYWORDS


def scaled_trainer(folder: Path, model: nn.Module, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {"optim": "sgd", "num_train_epochs": 1, "logging_strategy": "steps", "logging_steps": 1}
    given = {"train_dataset": Rows(vector_rows(20))}
    trainer = quiet_trainer(folder, model, kind=kind, given=given, **{**settings, **changes})
    trainer.accelerator._scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return trainer


def values(trainer: Trainer, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "adamw_torch_fused"])
def test_scaling_changes_neither_losses_nor_norms_nor_steps(tmp_path: Path, kind: type[Trainer], optim: str) -> None:
    torch.manual_seed(0)
    scaled_model = VectorClassifier()
    plain_model = VectorClassifier()
    plain_model.load_state_dict(scaled_model.state_dict())
    scaled = scaled_trainer(tmp_path, scaled_model, kind, optim=optim, max_grad_norm=0.5)
    scaled.train()
    unscaled = scaled_trainer(tmp_path, plain_model, kind, optim=optim, max_grad_norm=0.5)
    # A scale of 1 that never grows is no scaling at all.
    unscaled.accelerator._scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    unscaled.train()
    for name in ("loss", "grad_norm", "learning_rate"):
        assert values(scaled, name) == pytest.approx(values(unscaled, name), rel=1e-3)
    for one, other in zip(scaled_model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert len(values(scaled, "loss")) == 5


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_a_step_whose_gradients_overflow_is_left_out_with_its_step_of_the_schedule(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    model = Overflowing(1)
    trainer = scaled_trainer(tmp_path, model, kind)
    seen: list[torch.Tensor] = []

    def note(*_: Any) -> None:
        seen.append(model.head.weight.detach().clone())

    trainer.callback_handler.on_step_end = _after(trainer.callback_handler.on_step_end, note)  # type: ignore[method-assign]
    trainer.train()
    assert not torch.equal(seen[1], seen[2]) and torch.equal(seen[0], seen[1])
    rates = values(trainer, "learning_rate")
    assert rates[1] == rates[2] and rates[0] > rates[1] and rates[2] > rates[3]
    assert trainer.accelerator.scaler is not None
    assert trainer.accelerator.scaler.get_scale() == SCALE / 2
    assert trainer.state.global_step == 5


def _after(method: Any, then: Any) -> Any:
    def both(*arguments: Any) -> Any:
        then()
        return method(*arguments)

    return both


def test_the_scale_is_saved_in_checkpoints_and_resumed(tmp_path: Path) -> None:
    first = scaled_trainer(tmp_path, Overflowing(1), save_strategy="steps", save_steps=3)
    first.train()
    assert torch.load(tmp_path / "checkpoint-3" / "scaler.pt")["scale"] == SCALE / 2
    resumed = scaled_trainer(tmp_path, VectorClassifier())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.accelerator.scaler is not None
    assert resumed.accelerator.scaler.get_scale() == SCALE / 2
