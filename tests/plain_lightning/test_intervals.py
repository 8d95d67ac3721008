from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from littrainer import TrainerCallback
from littrainer.checkpoint.layout import LIGHTNING_STATE_NAME
from tests.plain_lightning.crossed import BEHIND, check_same, stopped, trainer_of, whole


class NotesEvaluations(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


class NotesValidations(pl.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.has_gradients: list[bool] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.has_gradients.append(any(parameter.grad is not None for parameter in pl_module.parameters()))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps.append(trainer.global_step)


def metrics_in_turn() -> Any:
    """A function that computes a metric with a value for each evaluation."""
    values = iter((0.3, 0.1, 0.5, 0.4, 0.6, 0.2))
    return lambda prediction: {"score": next(values)}


def saved_steps(folder: Path, pattern: str) -> list[int]:
    return sorted(int(path.stem.rpartition(pattern)[2]) for path in folder.iterdir() if pattern in path.name)


def fitted(trainer: Any, **keywords: Any) -> tuple[Any, pl.Trainer]:
    module, datamodule, lightning_trainer = trainer.to_lightning(**keywords)
    lightning_trainer.fit(module, datamodule=datamodule)
    return datamodule, lightning_trainer


@pytest.mark.parametrize(
    ("changes", "from_step"),
    [
        ({"eval_strategy": "steps", "eval_steps": 2}, 0),
        ({"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 2}, 0),
        # The last step is no multiple.
        ({"eval_strategy": "steps", "eval_steps": 4}, 3),
        ({"eval_strategy": "no"}, 3),
    ],
)
def test_fit_validates_at_the_steps_at_which_a_trainer_evaluates(
    tmp_path: Path, changes: dict[str, Any], from_step: int
) -> None:
    evaluations, validations = NotesEvaluations(), NotesValidations()
    trainer_of(tmp_path, given={"callbacks": [evaluations]}, **changes).train()
    fitted(stopped(trainer_of(tmp_path, **changes), from_step), callbacks=[validations])
    assert validations.steps == [step for step in evaluations.steps if step > from_step]
    assert not any(validations.has_gradients)


BY_STEPS = {"eval_strategy": "steps", "save_strategy": "steps"}
SCORED = {"metric_for_best_model": "score", "greater_is_better": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 1},
        {"save_strategy": "epoch", "save_total_limit": 2},
        {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "epoch"},
        {**BY_STEPS, "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True},
        {**BY_STEPS, **SCORED, "eval_steps": 1, "save_steps": 2, "load_best_model_at_end": True},
        {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, **SCORED},
        {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 1, **SCORED},
        {"save_strategy": "best", "eval_strategy": "epoch", **SCORED},
    ],
)
def test_fit_saves_at_the_steps_at_which_a_trainer_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    here, there = (
        trainer_of(tmp_path / name, given={"compute_metrics": metrics_in_turn()}, **changes)
        for name in ("here", "there")
    )
    here.train()
    fitted(there)
    expected = saved_steps(tmp_path / "here", "checkpoint-")
    assert expected and saved_steps(tmp_path / "there", "step=") == expected


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_training_goes_on_from_what_was_saved_after_a_validation(tmp_path: Path, step: int) -> None:
    settings = {**BY_STEPS, "eval_steps": 1, "save_steps": 1}
    module, datamodule, lightning_trainer = trainer_of(tmp_path, **settings).to_lightning()
    lightning_trainer.fit(module, datamodule=datamodule)
    validations, resumed = NotesValidations(), trainer_of(tmp_path / "resumed", **settings)
    file = tmp_path / f"epoch={(step - 1) // 2}-step={step}.ckpt"
    module_of_resumed, datamodule, lightning_trainer = resumed.to_lightning(callbacks=[validations])
    lightning_trainer.fit(module_of_resumed, datamodule=datamodule, ckpt_path=file, weights_only=False)
    assert validations.steps == list(range(step + 1, 7))
    assert resumed.model.losses == module.model.losses[BEHIND[step] :]


def test_the_best_one_is_that_of_the_metric_at_the_same_step(tmp_path: Path) -> None:
    settings = {**BY_STEPS, **SCORED, "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    trainer = trainer_of(tmp_path, given={"compute_metrics": metrics_in_turn()}, save_total_limit=1, **settings)
    _, lightning_trainer = fitted(trainer)
    saver: Any = lightning_trainer.checkpoint_callback
    assert Path(saver.best_model_path).name == "epoch=2-step=5.ckpt"
    assert saver.best_model_score == torch.tensor(0.6)
    # The one to resume from is there too.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=2-step=5.ckpt", "last.ckpt"]


def test_a_checkpoint_of_the_model_alone_has_no_states_of_an_optimizer(tmp_path: Path) -> None:
    kept = {}
    for only_model in (True, False):
        folder = tmp_path / str(only_model)
        fitted(trainer_of(folder, save_strategy="steps", save_steps=4, save_only_model=only_model))
        state = torch.load(folder / "epoch=1-step=4.ckpt" / LIGHTNING_STATE_NAME, weights_only=True)
        kept[only_model] = bool(state.get("optimizer_states"))
    assert kept == {True: False, False: True}


def test_validate_has_its_data_where_fit_does_not_validate(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    module, datamodule, lightning_trainer = trainer.to_lightning()
    lightning_trainer.fit(module, datamodule=datamodule)
    check_same(trainer.model)
    assert lightning_trainer.validate(module, datamodule, verbose=False)[0].keys() == {"val_loss"}


def test_ones_own_times_to_validate_come_before_the_arguments(tmp_path: Path) -> None:
    for changes in ({}, {"eval_strategy": "steps", "eval_steps": 2}):
        validations, trainer = NotesValidations(), trainer_of(tmp_path, **changes)
        fitted(trainer, callbacks=[validations], check_val_every_n_epoch=3, val_check_interval=1.0)
        assert validations.steps == [6]
        assert len(trainer.model.losses) == len(whole().losses)
