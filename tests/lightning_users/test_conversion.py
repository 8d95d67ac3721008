from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from littrainer import (
    Trainer,
    TrainerDataModule,
    TransformersCheckpointIO,
    TransformersModule,
    checkpoint_from_lightning,
    checkpoint_to_lightning,
    default_data_collator,
)
from tests.checkpoint.malicious import Creates
from tests.lightning_users.continued import (
    ACCUMULATION,
    EPOCHS,
    STEPS,
    StopAt,
    build_trainer,
    check_same,
    fresh_model,
    resumed_model,
)
from tests.lightning_users.curves import QUIET, get_weights
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Trainer's run with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("run")
    build_trainer(folder, save_strategy="steps", save_steps=1).train()
    return folder


@pytest.mark.parametrize("step", [2, 3], ids=["end of an epoch", "middle of an epoch"])
@pytest.mark.parametrize("has_plugin", [True, False], ids=["with the plugin", "as a file"])
def test_a_checkpoint_of_the_trainer_is_resumed_by_lightning(
    tmp_path: Path, run: Path, has_plugin: bool, step: int
) -> None:
    folder, other = run / f"checkpoint-{step}", build_trainer(tmp_path, resumed_model(step))
    module = TransformersModule(other.model, other.args)
    # The epoch keeps its order in spite of another seed.
    torch.manual_seed(7)
    keywords: dict[str, Any] = {"plugins": [TransformersCheckpointIO(module)]} if has_plugin else {}
    lightning_trainer = pl.Trainer(max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATION, **keywords, **QUIET)
    path = folder if has_plugin else checkpoint_to_lightning(folder, tmp_path / "new" / "step.ckpt", fresh_model())
    lightning_trainer.fit(module, datamodule=TrainerDataModule(other.train_dataset), ckpt_path=path)
    assert lightning_trainer.global_step == STEPS
    check_same(module.model)


def test_a_model_of_transformers_is_created_from_its_description(tmp_path: Path) -> None:
    model = tiny_gpt2()
    trainer = quiet_trainer(
        tmp_path,
        model,
        trainer_kwargs={"train_dataset": Rows(language_rows(8)), "data_collator": pad_tokens},
        save_strategy="steps",
        save_steps=1,
        max_steps=2,
    )
    trainer.train()
    arguments = {"learning_rate": 0.5}
    file = checkpoint_to_lightning(tmp_path / "checkpoint-2", tmp_path / "saved.ckpt", args=arguments)
    loaded = TransformersModule.load_from_checkpoint(file)
    assert get_weights(loaded.model) == get_weights(model) and loaded.args.learning_rate == 0.5
    checkpoint_from_lightning(file, tmp_path / "back")
    assert get_weights(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back")) == get_weights(model)
    stored = [torch.load(tmp_path / name / "optimizer.pt", weights_only=True) for name in ("checkpoint-2", "back")]
    assert str(stored[0]) == str(stored[1])


def test_a_checkpoint_of_transformers_resumes_at_its_position_in_the_data(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    rows, models = Rows(vector_rows(22)), [fresh_model(0.0), fresh_model(0.0)]
    args = quiet_arguments(tmp_path, transformers.TrainingArguments, **settings)
    transformers.Trainer(model=models[0], args=args, train_dataset=rows).train()  # type: ignore[arg-type]
    module = TransformersModule(models[1], quiet_trainer(tmp_path, models[1], **settings).args)
    plugin = TransformersCheckpointIO(module, accumulate_grad_batches=2)
    lightning_trainer = pl.Trainer(max_steps=4, accumulate_grad_batches=2, plugins=[plugin], **QUIET)
    lightning_trainer.fit(module, datamodule=TrainerDataModule(rows), ckpt_path=tmp_path / "checkpoint-2")
    assert models[1].losses == models[0].losses[4:]


# ---- Bad input -------------------------------------------------------------------------------------------------------


def test_missing_and_existing_files_are_named(tmp_path: Path, run: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint folder .*nowhere"):
        checkpoint_to_lightning(tmp_path / "nowhere", tmp_path / "a.ckpt", VectorClassifier())
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*nowhere"):
        checkpoint_from_lightning(tmp_path / "nowhere", tmp_path / "a")
    file = checkpoint_to_lightning(run / "checkpoint-1", tmp_path / "a.ckpt", fresh_model())
    with pytest.raises(FileExistsError, match="Delete it, or name another folder"):
        checkpoint_from_lightning(file, tmp_path, fresh_model())
    with pytest.raises(ValueError, match=r"a\.ckpt does not say how its model is made"):
        checkpoint_from_lightning(file, tmp_path / "b")
    with pytest.raises(ValueError, match=r"has no config\.json, .* checkpoint_to_lightning\(folder, file, model\)"):
        checkpoint_to_lightning(run / "checkpoint-1", tmp_path / "b.ckpt")


def test_a_checkpoint_without_optimizer_state_cannot_be_resumed(tmp_path: Path) -> None:
    quiet_trainer(tmp_path, save_strategy="steps", save_steps=1, save_only_model=True, max_steps=1).train()
    folder, module = tmp_path / "checkpoint-1", TransformersModule(VectorClassifier())
    data = TrainerDataModule(Rows(vector_rows(8)), Rows(vector_rows(8)))
    plugin = TransformersCheckpointIO(module)
    with pytest.raises(KeyError, match="contains only the model"):
        pl.Trainer(max_epochs=1, plugins=[plugin], **QUIET).fit(module, datamodule=data, ckpt_path=folder)
    pl.Trainer(plugins=[plugin], **QUIET).validate(module, datamodule=data, ckpt_path=folder, verbose=False)
    file = checkpoint_to_lightning(folder, tmp_path / "a.ckpt", VectorClassifier())
    with pytest.raises(KeyError, match="contains only the model"):
        pl.Trainer(max_epochs=1, **QUIET).fit(module, datamodule=data, ckpt_path=file)
    with pytest.raises(ValueError, match="holds a model alone"):
        checkpoint_from_lightning(file, tmp_path / "b", VectorClassifier())


def fit_with_lightning(trainer: Trainer, plugin: Any = None, **keywords: Any) -> tuple[nn.Module, pl.Trainer]:
    """Train a Trainer's model in a `lightning.Trainer`."""
    module = TransformersModule(trainer.model, trainer.args)
    lightning_trainer = pl.Trainer(
        **{**QUIET, "accumulate_grad_batches": trainer.args.gradient_accumulation_steps, **keywords},
        plugins=[TransformersCheckpointIO(module) if plugin is None else plugin()],
    )
    lightning_trainer.fit(module, datamodule=TrainerDataModule(trainer.train_dataset))
    return module.model, lightning_trainer


@pytest.mark.parametrize("step", [2, 3], ids=["end of an epoch", "middle of an epoch"])
@pytest.mark.parametrize("plugin", [TorchCheckpointIO, None], ids=["file", "folder"])
def test_a_checkpoint_of_lightning_is_resumed_by_the_trainer(tmp_path: Path, plugin: Any, step: int) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    keywords = {"callbacks": [saver], "enable_checkpointing": True, "plugin": plugin}
    model, _ = fit_with_lightning(build_trainer(tmp_path), max_epochs=EPOCHS, **keywords)
    check_same(model)
    saved = tmp_path / f"step={step}.ckpt"
    assert saved.is_file() if plugin else (saved / "model.safetensors").is_file()
    # The epoch keeps its order in spite of another seed.
    resumed = build_trainer(tmp_path, resumed_model(step), seed=7, save_strategy="steps", save_steps=1)
    assert resumed.train(resume_from_checkpoint=str(saved)).global_step == STEPS
    check_same(resumed.model)
    assert not list(tmp_path.glob(".littrainer_from*"))
    # A checkpoint of the resumed training.
    again = build_trainer(tmp_path, resumed_model(4), seed=7)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    check_same(again.model)


def test_a_checkpoint_with_a_plain_loader_is_resumed_by_its_optimizer_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, settings = vector_rows(24), {"train_sampling_strategy": "sequential"}
    uninterrupted = build_trainer(
        tmp_path / "uninterrupted", fresh_model(0.0), {"train_dataset": Rows(rows)}, **settings
    )
    uninterrupted.train()
    module = TransformersModule(fresh_model(0.0), uninterrupted.args)
    loader = DataLoader(rows, batch_size=4, collate_fn=default_data_collator)  # type: ignore[arg-type]
    stop = StopAt(3)
    lightning_trainer = pl.Trainer(max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATION, callbacks=[stop], **QUIET)
    lightning_trainer.fit(module, loader)
    file = tmp_path / "saved.ckpt"
    lightning_trainer.save_checkpoint(file)
    resumed = build_trainer(tmp_path, fresh_model(0.0), {"train_dataset": Rows(rows)}, **settings)
    resumed.train(resume_from_checkpoint=str(file))
    assert "does not hold the state of random numbers" in caplog.text and "seed=42" in caplog.text
    assert resumed.state.global_step == STEPS
    assert resumed.model.losses == pytest.approx(uninterrupted.model.losses[10:], rel=1e-4)


def test_a_resumed_training_logs_by_the_arguments_of_the_trainer(tmp_path: Path) -> None:
    file = saved_file(tmp_path)
    resumed = quiet_trainer(tmp_path, logging_strategy="steps", logging_steps=1, max_steps=4)
    resumed.train(resume_from_checkpoint=str(file))
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [2, 3, 4]


# ---- Bad input -------------------------------------------------------------------------------------------------------


def saved_file(folder: Path, change: Any = None, model: nn.Module | None = None, **keywords: Any) -> Path:
    """Return a .ckpt after an optimizer step, with a change."""
    _, lightning_trainer = fit_with_lightning(quiet_trainer(folder, model), TorchCheckpointIO, max_steps=1)
    file = folder / "saved.ckpt"
    lightning_trainer.save_checkpoint(file, **keywords)
    if change is not None:
        checkpoint = torch.load(file, weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, file)
    return file


def check_refused(file: Path, message: str) -> None:
    """Check that a Trainer refuses a file and is unchanged."""
    trainer = quiet_trainer(file.parent)
    before = get_weights(trainer.model)
    with pytest.raises((ValueError, RuntimeError), match=message):
        trainer.train(resume_from_checkpoint=str(file))
    assert get_weights(trainer.model) == before
    assert not list(file.parent.glob(".littrainer_from*"))


@pytest.mark.parametrize(
    ("change", "saved", "message"),
    [
        (lambda content: content.pop("transformers_module"), {}, r"another LightningModule .* \(its weights: model\)"),
        (lambda content: content["optimizer_states"].append({}), {}, "has 2 optimizers and 1 schedules"),
        (lambda content: content["state_dict"].update(head=torch.zeros(1)), {}, "a Trainer does not train: head"),
        (None, {"model": VectorClassifier(hidden=5)}, r"saved\.ckpt are not those of this model(.|\n)*is \(5, 6\) in"),
        (None, {"weights_only": True}, r"holds a model alone \(save_weights_only=True\)"),
    ],
)
def test_a_ckpt_that_cannot_be_resumed_is_refused(tmp_path: Path, change: Any, saved: Any, message: str) -> None:
    check_refused(saved_file(tmp_path, change, **saved), message)


def test_foreign_damaged_and_sharded_files_are_refused_without_running_code(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pt")
    check_refused(tmp_path / "weights.pt", r"weights\.pt is no checkpoint of Lightning")
    (tmp_path / "damaged.ckpt").write_bytes(b"nothing of the kind")
    check_refused(tmp_path / "damaged.ckpt", r"damaged\.ckpt is damaged")
    evil = {"pytorch-lightning_version": "2.6", "state_dict": Creates(tmp_path / "created")}
    torch.save(evil, tmp_path / "evil.ckpt")
    check_refused(tmp_path / "evil.ckpt", "could run code")
    assert not (tmp_path / "created").exists()
    (tmp_path / "parts.ckpt").mkdir()
    (tmp_path / "parts.ckpt" / ".metadata").touch()
    check_refused(tmp_path / "parts.ckpt", "consolidate_checkpoint")
