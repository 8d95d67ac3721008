from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from littrainer import Trainer, TrainerCallback
from tests.optim import libraries
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

LAYERWISE: dict[str, Any] = {
    "optim": "galore_adamw_layerwise",
    "optim_target_modules": "all-linear",
    "optim_args": "rank=2",
    "max_grad_norm": 0.0,
    "max_steps": 6,
    "learning_rate": 0.05,
    "warmup_steps": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
}


class AdamWithProjection(torch.optim.AdamW):
    """AdamW that accepts projection settings and ignores them."""


def seeded_model() -> NoisyClassifier:
    torch.manual_seed(0)
    return NoisyClassifier()


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = quiet_trainer(tmp_path, seeded_model(), rows=24, **LAYERWISE)
    install(monkeypatch)
    return trainer


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.install(monkeypatch, "galore_torch")
    monkeypatch.setattr("galore_torch.GaLoreAdamW", AdamWithProjection)


def weights(trainer: Trainer | transformers.Trainer) -> list[Any]:
    return [parameter.tolist() for parameter in trainer.model.parameters()]


def history(trainer: Trainer | transformers.Trainer) -> list[Any]:
    names = ("loss", "grad_norm", "learning_rate", "step")
    return [{name: entry.get(name) for name in names} for entry in trainer.state.log_history]


def test_weights_losses_and_rates_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: Trainer
) -> None:
    # transformers steps only the placeholder's learning rate, which a constant schedule does not change.
    trainer.args.lr_scheduler_type = "constant"
    start = weights(trainer)
    trainer.train()
    args = quiet_arguments(tmp_path, transformers.TrainingArguments, **{**LAYERWISE, "lr_scheduler_type": "constant"})
    theirs = transformers.Trainer(seeded_model(), args, train_dataset=Rows(vector_rows(24)))
    install(monkeypatch)
    theirs.train()
    assert weights(trainer) == weights(theirs) != start
    assert history(trainer) == history(theirs)


def test_the_schedule_drives_the_optimizer_of_each_parameter(trainer: Trainer) -> None:
    start = weights(trainer)
    records = []

    class Watcher(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates = {member.param_groups[0]["lr"] for member in kwargs["optimizer"].optimizer_dict.values()}
            records.append((sorted(rates), weights(trainer) == start))

    trainer.add_callback(Watcher)
    trainer.train()
    # The first step has the rate 0; each record has the rate of the following step.
    expected = [[pytest.approx(rate)] for rate in (0.025, 0.05, 0.0375, 0.025, 0.0125, 0)]
    assert [rates for rates, _ in records] == expected
    assert [is_unchanged for _, is_unchanged in records] == [True] + [False] * 5
    assert [entry["learning_rate"] for entry in history(trainer)][:3] == [0, 0.025, 0.05]


def test_a_resumed_training_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: Trainer
) -> None:
    trainer.args.set_save(strategy="steps", steps=3)
    trainer.train()
    resumed = quiet_trainer(tmp_path, seeded_model(), rows=24, **LAYERWISE)
    install(monkeypatch)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert weights(resumed) == weights(trainer)
    assert history(resumed)[:6] == history(trainer)[:6]


def test_a_warning_names_what_layerwise_optimizers_cannot_do(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.args.max_grad_norm = 1.0
    trainer.create_optimizer_and_scheduler(6)
    for part in (trainer.optimizer, trainer.lr_scheduler):
        part.load_state_dict({name: value for name, value in part.state_dict().items() if name != "layerwise"})
    for warning in ("max_grad_norm has no effect", "layer-wise optimizers", "layer-wise schedules"):
        assert warning in caplog.text
