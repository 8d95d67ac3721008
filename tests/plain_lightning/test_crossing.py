from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from littrainer import (
    Trainer,
    TrainerCallback,
    TrainerDataModule,
    TransformersCheckpointIO,
    TransformersModule,
    checkpoint_from_lightning,
    checkpoint_to_lightning,
)
from tests.scenarios.data import AugmentedRows, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

# Six micro-batches of 4 in an epoch, and windows of 4 and 2.
ROWS, ACCUMULATION, EPOCHS, STEPS = 22, 4, 3, 6
# Optimizer step -> micro-batches behind it.
BEHIND = {0: 0, 1: 4, 2: 6, 3: 10, 4: 12, 5: 16, 6: 18}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class DropsOut(VectorClassifier):
    """Draws random numbers in its forward pass, and notes the losses of its training."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        outputs = super().forward(nn.functional.dropout(x, 0.2, self.training), labels)
        if self.training:
            self.losses.append(outputs["loss"].item())
        return outputs


def fresh_model() -> DropsOut:
    torch.manual_seed(0)
    return DropsOut()


class StopsAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step or control.should_training_stop


def trainer_of(folder: Path, model: Any = None, stop: int = 0, kind: type[Trainer] = Trainer, **changes: Any) -> Any:
    given = {
        "train_dataset": AugmentedRows(vector_rows(ROWS)),
        "callbacks": [StopsAt(stop)] if stop else [],
        **changes.pop("given", {}),
    }
    settings = {"num_train_epochs": EPOCHS, "gradient_accumulation_steps": ACCUMULATION, "warmup_steps": 2, **changes}
    return quiet_trainer(folder, fresh_model() if model is None else model, given=given, kind=kind, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> DropsOut:
    """A model of a training that never crossed over."""
    trainer = trainer_of(tmp_path_factory.mktemp("whole"))
    trainer.train()
    assert trainer.state.global_step == STEPS
    return trainer.model


def same(model: Any, whole: Any) -> None:
    assert model.losses == whole.losses
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in whole.state_dict().items()
    }


# ---- From where the other one stands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 2, 3, STEPS], ids=lambda step: f"after step {step}")
def test_a_lightning_trainer_goes_on_where_the_trainer_stands(tmp_path: Path, whole: DropsOut, stop: int) -> None:
    trainer = trainer_of(tmp_path, stop=stop)
    if stop:
        trainer.train()
        assert trainer.state.global_step == stop
        trainer.pop_callback(StopsAt)
    module, datamodule, lightning_trainer = trainer.to_lightning()
    assert module.model is trainer.model
    lightning_trainer.fit(module, datamodule=datamodule)
    assert lightning_trainer.global_step == STEPS
    same(trainer.model, whole)


@pytest.mark.parametrize("step", [1, 2, 3], ids=lambda step: f"at step {step}")
@pytest.mark.parametrize("plugin", [TorchCheckpointIO, None], ids=["file", "folder"])
def test_what_lightning_saves_is_resumed_by_the_trainer(
    tmp_path: Path, whole: DropsOut, plugin: Any, step: int
) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    keywords = {"callbacks": [saver], "enable_checkpointing": True, "plugins": [plugin()] if plugin else []}
    module, datamodule, lightning_trainer = trainer_of(tmp_path).to_lightning(**keywords)
    lightning_trainer.fit(module, datamodule=datamodule)
    same(module.model, whole)
    saved = tmp_path / f"step={step}.ckpt"
    assert saved.is_file() if plugin else (saved / "model.safetensors").is_file()
    resumed = trainer_of(tmp_path)
    resumed.model.losses = whole.losses[: BEHIND[step]]
    assert resumed.train(resume_from_checkpoint=str(saved)).global_step == STEPS
    same(resumed.model, whole)
    assert not list(tmp_path.glob("from-*"))


@pytest.mark.parametrize("stop", [0, 1, 2, 3, STEPS], ids=lambda step: f"after step {step}")
def test_a_trainer_goes_on_where_the_lightning_trainer_stands(tmp_path: Path, whole: DropsOut, stop: int) -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
            trainer.should_stop = trainer.global_step == stop

    module, datamodule, lightning_trainer = trainer_of(tmp_path).to_lightning(callbacks=[Stops()])
    if stop:
        lightning_trainer.fit(module, datamodule=datamodule)
        assert lightning_trainer.global_step == stop
    trainer = Trainer.from_lightning(module, datamodule, lightning_trainer)
    assert (trainer.model, trainer.state.global_step) == (module.model, stop)
    assert trainer.train().global_step == STEPS
    same(trainer.model, whole)


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def loaded_by_plugin(folder: Path, module: Any) -> dict[str, Any]:
    return {"plugins": [TransformersCheckpointIO(module)], "ckpt_path": folder}


def made_a_file(folder: Path, module: Any) -> dict[str, Any]:
    return {"ckpt_path": checkpoint_to_lightning(folder, folder.with_suffix(".ckpt"), fresh_model())}


@pytest.mark.parametrize("step", [1, 2, 3], ids=lambda step: f"at step {step}")
@pytest.mark.parametrize("way", [loaded_by_plugin, made_a_file])
def test_a_checkpoint_of_the_trainer_is_resumed_by_lightning(
    tmp_path: Path, whole: DropsOut, way: Any, step: int
) -> None:
    trainer_of(tmp_path, save_strategy="steps", save_steps=step).train()
    other = trainer_of(tmp_path)
    module = TransformersModule(other.model, other.args)
    other.model.losses = whole.losses[: BEHIND[step]]
    given = way(tmp_path / f"checkpoint-{step}", module)
    lightning_trainer = pl.Trainer(
        max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATION, plugins=given.pop("plugins", None), **QUIET
    )
    lightning_trainer.fit(module, datamodule=TrainerDataModule(other.train_dataset), **given)
    assert lightning_trainer.global_step == STEPS
    same(module.model, whole)


def test_a_checkpoint_goes_there_and_back_again(tmp_path: Path, whole: DropsOut) -> None:
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=3)
    trainer.train()
    file = checkpoint_to_lightning(tmp_path / "checkpoint-3", tmp_path / "there.ckpt", fresh_model(), trainer.args)
    folder = checkpoint_from_lightning(file, tmp_path / "back" / "checkpoint-3", fresh_model())
    resumed = trainer_of(tmp_path / "back")
    resumed.model.losses = whole.losses[: BEHIND[3]]
    assert resumed.train(resume_from_checkpoint=True).global_step == STEPS
    same(resumed.model, whole)
    assert folder == tmp_path / "back" / "checkpoint-3"
