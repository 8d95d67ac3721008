"""`ema_decay`: averaged weights in evaluations, checkpoints and the model after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from safetensors.torch import load_file

from littrainer import Trainer, TrainerCallback
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

DECAY = 0.75
# Three optimizer steps an epoch.
SAVING = {"num_train_epochs": 2, "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
Weights = dict[str, torch.Tensor]


def copy_weights(model: Any) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class WeightRecorder(TrainerCallback):
    """A callback that records the weights, their averages and the weights of evaluations."""

    def __init__(self) -> None:
        self.raw: dict[int, Weights] = {}
        self.averaged: dict[int, Weights] = {}
        self.evaluated: dict[int, Weights] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        weights = self.raw[state.global_step] = copy_weights(model)
        before = self.averaged.get(state.global_step - 1)
        floats = {name for name, value in weights.items() if value.is_floating_point()}
        self.averaged[state.global_step] = {
            name: value if before is None or name not in floats else torch.lerp(before[name], value, 1 - DECAY)
            for name, value in weights.items()
        }

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.evaluated.setdefault(state.global_step, copy_weights(model))


class ModelWithBuffers(VectorClassifier):
    """A model with buffers of integers and floats."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(50))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training:
            self.mean += x.mean()
        return super().forward(x, labels)


def train_averaged(
    folder: Path, use: str | None = "both", resume: int | None = None, kind: Any = Trainer, **changes: Any
) -> Any:
    recorder = WeightRecorder()
    torch.manual_seed(0)
    averaging = {} if use is None else {"ema_decay": DECAY, "ema_use": use}
    trainer = quiet_trainer(
        folder,
        ModelWithBuffers(),
        kind=kind,
        trainer_kwargs={"callbacks": [recorder]},
        **{**SAVING, **averaging, **changes},
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    trainer.recorder = recorder
    return trainer


def assert_equal(actual: Weights, expected: Weights) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("use", "kind"), [("both", StepwiseTrainer), ("evaluate", Trainer), ("save", Trainer)])
def test_ema_use_selects_the_weights_of_evaluations_and_checkpoints(tmp_path: Path, use: str, kind: Any) -> None:
    trainer = train_averaged(tmp_path / "averaged", use, kind=kind)
    plain = train_averaged(tmp_path / "plain", None, kind=kind)
    recorder = trainer.recorder
    for step in recorder.raw:
        assert_equal(recorder.raw[step], plain.recorder.raw[step])
    saved = recorder.raw if use == "evaluate" else recorder.averaged
    for step in (2, 4, 6):
        assert_equal(recorder.evaluated[step], recorder.raw[step] if use == "save" else recorder.averaged[step])
        assert_equal(load_file(tmp_path / "averaged" / f"checkpoint-{step}" / "model.safetensors"), saved[step])
    assert_equal(copy_weights(trainer.model), saved[6])
    assert not torch.equal(recorder.raw[6]["inner.weight"], recorder.averaged[6]["inner.weight"])


@pytest.mark.parametrize(
    ("kind", "use", "then", "changes"),
    [
        (Trainer, "evaluate", "save", {}),
        (StepwiseTrainer, "save", "evaluate", {}),
        (Trainer, "both", "both", {"async_save": True}),
        (StepwiseTrainer, "both", None, {}),
    ],
)
def test_a_resumed_training_ends_as_an_uninterrupted_training(
    tmp_path: Path, kind: Any, use: str, then: str | None, changes: dict[str, Any]
) -> None:
    uninterrupted = train_averaged(tmp_path / "uninterrupted", then, kind=kind)
    train_averaged(tmp_path / "cut", use, kind=kind, **changes)
    resumed = train_averaged(tmp_path / "cut", then, resume=4, kind=kind, **changes)
    for step in (5, 6):
        assert_equal(resumed.recorder.raw[step], uninterrupted.recorder.raw[step])
    assert_equal(resumed.recorder.evaluated[6], uninterrupted.recorder.evaluated[6])
    assert_equal(copy_weights(resumed.model), copy_weights(uninterrupted.model))


def test_the_best_model_is_the_average_that_was_evaluated(tmp_path: Path) -> None:
    trainer = train_averaged(tmp_path, load_best_model_at_end=True, metric_for_best_model="loss", learning_rate=0.5)
    assert_equal(copy_weights(trainer.model), trainer.recorder.averaged[trainer.state.best_global_step])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-7)


def test_save_model_within_a_training_writes_the_weights_that_are_saved(tmp_path: Path) -> None:
    class Saving(Trainer):
        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            if self.state.global_step == 3:
                self.save_model(str(tmp_path / "own"))
            super()._maybe_log_save_evaluate(*args, **kwargs)

    trainer = train_averaged(tmp_path, kind=Saving)
    assert_equal(load_file(tmp_path / "own" / "model.safetensors"), trainer.recorder.averaged[3])


def test_an_overridden_evaluate_has_the_average_and_saves_the_trained_weights(tmp_path: Path) -> None:
    class EvaluatingTrainer(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self.evaluated = copy_weights(self.model)
            self.save_model(str(tmp_path / "own"))
            return {"eval_loss": 1.0}

    trainer = train_averaged(tmp_path, "evaluate", kind=EvaluatingTrainer)
    assert_equal(trainer.evaluated, trainer.recorder.averaged[6])
    assert_equal(load_file(tmp_path / "own" / "model.safetensors"), trainer.recorder.raw[6])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ema_decay": 1.0}, "ema_decay=1.0 is out of range"),
        ({"ema_use": "eval"}, "ema_use='eval' is not valid"),
        (
            {**SAVING, "ema_decay": 0.9, "ema_use": "save", "load_best_model_at_end": True},
            'set ema_use="both"',
        ),
    ],
)
def test_invalid_values_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, **changes)


def test_two_averages_and_sharded_weights_are_refused_before_training(tmp_path: Path) -> None:
    options = {"callbacks": [EMAWeightAveraging()]}
    with pytest.raises(ValueError, match="averages weights too"):
        quiet_trainer(tmp_path, trainer_kwargs=options, ema_decay=0.9).train()
    trainer = quiet_trainer(tmp_path, ema_decay=0.9)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="ema_decay averages whole weights"):
        trainer.train()


def test_trained_weights_are_evaluated_until_an_average_begins(tmp_path: Path) -> None:
    recorder = WeightRecorder()
    averaging = EMAWeightAveraging(decay=DECAY, update_starting_at_step=3)
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [averaging, recorder]}, **SAVING)
    trainer.train()
    assert all(torch.equal(value, recorder.raw[2][name]) for name, value in recorder.evaluated[2].items())
    assert not all(torch.equal(value, recorder.raw[6][name]) for name, value in recorder.evaluated[6].items())
    averaging = EMAWeightAveraging(update_starting_at_step=5, update_every_n_steps=4)
    with pytest.raises(ValueError, match=r"never averages in this training of 6 .*update_starting_at_step=5"):
        quiet_trainer(tmp_path / "late", trainer_kwargs={"callbacks": [averaging]}, **SAVING).train()


def test_an_average_that_never_begins_does_not_replace_the_trained_weights(
    tmp_path: Path,
) -> None:
    class Stopping(WeightRecorder):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, model)
            control.should_training_stop = True

    recorder = Stopping()
    averaging = EMAWeightAveraging(update_starting_at_step=100, update_starting_at_epoch=1)
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [averaging, recorder]}, num_train_epochs=2)
    trainer.train()
    assert all(torch.equal(value, recorder.raw[1][name]) for name, value in copy_weights(trainer.model).items())
