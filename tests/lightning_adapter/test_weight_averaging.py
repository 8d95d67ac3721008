"""`ema_decay`: what evaluations, checkpoints and the model after training have of the averaged weights."""

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


def copied(model: Any) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Notes(TrainerCallback):
    """Notes the weights of each optimizer step and their average, and those that evaluations have."""

    def __init__(self) -> None:
        self.raw: dict[int, Weights] = {}
        self.averaged: dict[int, Weights] = {}
        self.evaluated: dict[int, Weights] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        now = self.raw[state.global_step] = copied(model)
        before = self.averaged.get(state.global_step - 1)
        floats = {name for name, value in now.items() if value.is_floating_point()}
        self.averaged[state.global_step] = {
            name: value if before is None or name not in floats else torch.lerp(before[name], value, 1 - DECAY)
            for name, value in now.items()
        }

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.evaluated.setdefault(state.global_step, copied(model))


class CountingRows(VectorClassifier):
    """Has buffers of integers, and of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(50))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training:
            self.mean += x.mean()
        return super().forward(x, labels)


def trained(
    folder: Path, use: str | None = "both", resume: int | None = None, kind: Any = Trainer, **changes: Any
) -> Any:
    notes = Notes()
    torch.manual_seed(0)
    averaging = {} if use is None else {"ema_decay": DECAY, "ema_use": use}
    trainer = quiet_trainer(
        folder, CountingRows(), kind=kind, given={"callbacks": [notes]}, **{**SAVING, **averaging, **changes}
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    trainer.notes = notes
    return trainer


def assert_equal(one: Weights, other: Weights) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
@pytest.mark.parametrize("use", ["both", "evaluate", "save"])
def test_evaluations_and_checkpoints_have_the_weights_that_ema_use_says_and_training_its_own(
    tmp_path: Path, use: str, kind: Any
) -> None:
    trainer, plain = trained(tmp_path / "averaged", use, kind=kind), trained(tmp_path / "plain", None, kind=kind)
    notes = trainer.notes
    for step in notes.raw:
        assert_equal(notes.raw[step], plain.notes.raw[step])
    saved = notes.raw if use == "evaluate" else notes.averaged
    for step in (2, 4, 6):
        assert_equal(notes.evaluated[step], notes.raw[step] if use == "save" else notes.averaged[step])
        assert_equal(load_file(tmp_path / "averaged" / f"checkpoint-{step}" / "model.safetensors"), saved[step])
    assert_equal(copied(trainer.model), saved[6])
    assert not torch.equal(notes.raw[6]["inner.weight"], notes.averaged[6]["inner.weight"])


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
@pytest.mark.parametrize(
    ("use", "then", "changes"),
    [
        ("both", "both", {}),
        ("evaluate", "save", {}),
        ("save", "evaluate", {}),
        ("both", "both", {"async_save": True}),
        ("both", None, {}),
    ],
)
def test_a_resumed_training_ends_as_the_one_in_one_go(
    tmp_path: Path, kind: Any, use: str, then: str | None, changes: dict[str, Any]
) -> None:
    whole = trained(tmp_path / "whole", then, kind=kind)
    trained(tmp_path / "cut", use, kind=kind, **changes)
    resumed = trained(tmp_path / "cut", then, resume=4, kind=kind, **changes)
    for step in (5, 6):
        assert_equal(resumed.notes.raw[step], whole.notes.raw[step])
    assert_equal(resumed.notes.evaluated[6], whole.notes.evaluated[6])
    assert_equal(copied(resumed.model), copied(whole.model))


def test_the_best_model_is_the_averaged_one_that_was_evaluated(tmp_path: Path) -> None:
    trainer = trained(tmp_path, load_best_model_at_end=True, metric_for_best_model="loss", learning_rate=0.5)
    assert_equal(copied(trainer.model), trainer.notes.averaged[trainer.state.best_global_step])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-7)


def test_save_model_within_a_training_writes_the_weights_that_are_saved(tmp_path: Path) -> None:
    class Saving(Trainer):
        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            if self.state.global_step == 3:
                self.save_model(str(tmp_path / "own"))
            super()._maybe_log_save_evaluate(*args, **kwargs)

    trainer = trained(tmp_path, kind=Saving)
    assert_equal(load_file(tmp_path / "own" / "model.safetensors"), trainer.notes.averaged[3])


def test_a_subclass_that_evaluates_has_the_average_to_evaluate_and_its_own_weights_to_save(tmp_path: Path) -> None:
    class OwnEvaluation(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self.evaluated = copied(self.model)
            self.save_model(str(tmp_path / "own"))
            return {"eval_loss": 1.0}

    trainer = trained(tmp_path, "evaluate", kind=OwnEvaluation)
    assert_equal(trainer.evaluated, trainer.notes.averaged[6])
    assert_equal(load_file(tmp_path / "own" / "model.safetensors"), trainer.notes.raw[6])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ema_decay": 1.0}, "ema_decay=1.0 is out of range"),
        ({"ema_use": "eval"}, "ema_use='eval' is not valid"),
        (
            {**SAVING, "ema_decay": 0.9, "ema_use": "save", "load_best_model_at_end": True},
            'set ema_use="both"',
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quiet_trainer(tmp_path, **changes)


def test_two_averages_and_split_weights_are_refused_before_training(tmp_path: Path) -> None:
    given = {"callbacks": [EMAWeightAveraging()]}
    with pytest.raises(ValueError, match="averages weights too"):
        quiet_trainer(tmp_path, given=given, ema_decay=0.9).train()
    trainer = quiet_trainer(tmp_path, ema_decay=0.9)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="ema_decay averages whole weights"):
        trainer.train()


def test_until_an_average_begins_the_trained_weights_are_evaluated_and_kept(tmp_path: Path) -> None:
    notes = Notes()
    averaging = EMAWeightAveraging(decay=DECAY, update_starting_at_step=3)
    trainer = quiet_trainer(tmp_path, given={"callbacks": [averaging, notes]}, **SAVING)
    trainer.train()
    assert all(torch.equal(value, notes.raw[2][name]) for name, value in notes.evaluated[2].items())
    assert not all(torch.equal(value, notes.raw[6][name]) for name, value in notes.evaluated[6].items())
    averaging = EMAWeightAveraging(update_starting_at_step=5, update_every_n_steps=4)
    with pytest.raises(ValueError, match=r"never averages in this training of 6 .*update_starting_at_step=5"):
        quiet_trainer(tmp_path / "late", given={"callbacks": [averaging]}, **SAVING).train()


def test_an_average_that_begins_with_an_epoch_leaves_the_trained_weights_when_training_ends_before(
    tmp_path: Path,
) -> None:
    class Stopping(Notes):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, model)
            control.should_training_stop = True

    notes = Stopping()
    averaging = EMAWeightAveraging(update_starting_at_step=100, update_starting_at_epoch=1)
    trainer = quiet_trainer(tmp_path, given={"callbacks": [averaging, notes]}, num_train_epochs=2)
    trainer.train()
    assert all(torch.equal(value, notes.raw[1][name]) for name, value in copied(trainer.model).items())
