from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import littrainer
from littrainer import TransformersCheckpointIO
from tests.lightning_users.curves import QUIET, get_weights
from tests.scenarios.data import Rows, tiny_tokenizer, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

EPOCH_STEPS = 5


class VectorModule(pl.LightningModule):
    """A module with a model, a weight outside of it, and a record of losses."""

    def __init__(self, model: nn.Module | None = None, has_temperature: bool = True, **hyper_parameters: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hyper_parameters)
        torch.manual_seed(0)
        self.model = VectorClassifier() if model is None else model
        self.temperature = nn.Parameter(torch.ones(())) if has_temperature else 1.0
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch)["loss"] * self.temperature
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch)["logits"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def batches() -> DataLoader[Any]:
    return DataLoader(Rows(vector_rows(4 * EPOCH_STEPS)), batch_size=4)  # type: ignore[arg-type]


def fit(
    folder: Path, module: pl.LightningModule, *, epochs: int, io: Any = None, resume: Any = None, save_at: int = 0
) -> pl.Trainer:
    """Fit, and save to `folder` at optimizer step `save_at`."""

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.global_step == save_at:
                trainer.save_checkpoint(folder)

    plugin = TransformersCheckpointIO(module) if io is None else io
    trainer = pl.Trainer(plugins=[plugin], callbacks=[Save()], max_epochs=epochs, **QUIET)
    trainer.fit(module, batches(), ckpt_path=resume)
    return trainer


def test_a_lightning_training_resumes_exactly_from_a_folder(tmp_path: Path) -> None:
    uninterrupted, second = VectorModule(note="a"), VectorModule()
    fit(tmp_path / "step.ckpt", uninterrupted, epochs=2, save_at=EPOCH_STEPS)
    trainer = fit(tmp_path / "unused", second, epochs=2, resume=tmp_path / "step.ckpt")
    assert trainer.global_step == 2 * EPOCH_STEPS
    assert second.losses == uninterrupted.losses[EPOCH_STEPS:]
    assert get_weights(second) == get_weights(uninterrupted)
    assert sorted(path.name for path in (tmp_path / "step.ckpt").iterdir()) == [
        "lightning_state.pt",
        "littrainer_manifest.json",
        "model.safetensors",
    ]


def test_a_transformers_model_is_saved_with_its_tokenizer_for_from_pretrained(tmp_path: Path) -> None:
    module = VectorModule(tiny_gpt2())
    trainer = pl.Trainer(plugins=[TransformersCheckpointIO(module.model, tiny_tokenizer())], **QUIET)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "model")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert get_weights(loaded) == get_weights(module.model)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model")("loss")["input_ids"]
    state = torch.load(tmp_path / "model" / "lightning_state.pt", weights_only=True)
    assert state["further_weights"]["temperature"] == 1
    assert "state_dict" not in state


def test_model_checkpoint_keeps_and_loads_the_best_folder(tmp_path: Path) -> None:
    module = VectorModule()

    class Report(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.log("score", float(trainer.current_epoch != 1))

    keeper = ModelCheckpoint(dirpath=tmp_path, monitor="score", save_last=True)
    settings = {**QUIET, "enable_checkpointing": True}
    trainer = pl.Trainer(
        plugins=[TransformersCheckpointIO(module)], callbacks=[Report(), keeper], max_epochs=3, **settings
    )
    trainer.fit(module, batches())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=1-step=10.ckpt", "last.ckpt"]
    best = load_file(tmp_path / "epoch=1-step=10.ckpt" / "model.safetensors")
    after_training = get_weights(module.model)
    trainer.validate(module, batches(), ckpt_path="best", verbose=False)
    assert get_weights(module.model) == {name: value.tolist() for name, value in best.items()} != after_training


@pytest.mark.parametrize("library", [littrainer, transformers], ids=["ours", "theirs"])
@pytest.mark.parametrize("saved_at", [EPOCH_STEPS, 3], ids=["end of an epoch", "middle of an epoch"])
def test_lightning_resumes_from_a_trainers_checkpoint(tmp_path: Path, library: Any, saved_at: int) -> None:
    class DecaysWeights(VectorModule):
        def configure_optimizers(self) -> Any:
            names = ("weight",)
            decayed = [p for name, p in self.model.named_parameters() if name.endswith(names) and "norm" not in name]
            undecayed = [p for p in self.model.parameters() if not any(p is member for member in decayed)]
            optimizer = torch.optim.AdamW([{"params": decayed}, {"params": undecayed}], lr=0.01)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    args = quiet_arguments(
        tmp_path, library.TrainingArguments, max_steps=10, save_strategy="steps", save_steps=saved_at
    )
    trained = library.Trainer(model=VectorClassifier(), args=args, train_dataset=Rows(vector_rows(4 * EPOCH_STEPS)))
    trained.train()
    folder = tmp_path / f"checkpoint-{saved_at}"
    module = DecaysWeights(has_temperature=False)
    first: list[Any] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            moments = [state["exp_avg"].tolist() for state in trainer.optimizers[0].state.values()]
            rates = trainer.lr_scheduler_configs[0].scheduler.last_epoch
            first.append((trainer.global_step, trainer.current_epoch, get_weights(module.model), moments, rates))

    trainer = pl.Trainer(plugins=[TransformersCheckpointIO(module)], callbacks=[Look()], max_epochs=2, **QUIET)
    trainer.fit(module, batches(), ckpt_path=folder)
    step, epoch, at_start, moments, rate_steps = first[0]
    stored = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    assert (step, epoch, rate_steps) == (saved_at, saved_at // EPOCH_STEPS, saved_at)
    assert at_start == {name: value.tolist() for name, value in load_file(folder / "model.safetensors").items()}
    assert sorted(map(str, moments)) == sorted(str(entry["exp_avg"].tolist()) for entry in stored.values())
    assert len(module.losses) == 2 * EPOCH_STEPS - saved_at and trainer.global_step == 2 * EPOCH_STEPS
    for use in (trainer.validate, trainer.test, trainer.predict):
        use(module, batches(), ckpt_path=folder)
        assert get_weights(module.model) == at_start


def test_a_model_only_folder_can_be_validated_but_not_resumed(tmp_path: Path) -> None:
    quiet_trainer(tmp_path).save_model()
    module = VectorModule(has_temperature=False)
    nn.init.zeros_(module.model.head.weight)
    trainer = pl.Trainer(plugins=[TransformersCheckpointIO(module)], max_epochs=1, **QUIET)
    trainer.validate(module, batches(), ckpt_path=tmp_path, verbose=False)
    assert module.model.head.weight.any()
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        trainer.fit(module, batches(), ckpt_path=tmp_path)


def test_the_trainer_resumes_from_checkpoints_of_its_lightning_callbacks(tmp_path: Path) -> None:
    uninterrupted = quiet_trainer(
        tmp_path,
        rows=20,
        num_train_epochs=2,
        trainer_kwargs={"callbacks": [ModelCheckpoint(dirpath=tmp_path / "lightning", save_top_k=-1)]},
    )
    uninterrupted.train()
    folder = tmp_path / "lightning" / "epoch=0-step=5.ckpt"
    assert {"model.safetensors", "lightning_state.pt", "trainer_state.json", "optimizer.pt"} <= {
        path.name for path in folder.iterdir()
    }
    resumed = quiet_trainer(tmp_path / "again", rows=20, num_train_epochs=2)
    output = resumed.train(resume_from_checkpoint=str(folder))
    assert output.global_step == 10
    assert get_weights(resumed.model) == get_weights(uninterrupted.model)


# ---- Bad input -------------------------------------------------------------------------------------------------------


def save(folder: Path, module: Any = None, io: Any = None) -> None:
    module = VectorModule() if module is None else module
    trainer = pl.Trainer(plugins=[TransformersCheckpointIO(module) if io is None else io], **QUIET)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(folder)


def test_a_plugin_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model.*TransformersCheckpointIO\(model\)"):
        save(tmp_path / "a", io=TransformersCheckpointIO())


def test_an_attribute_without_a_model_is_an_error_that_names_the_modules(tmp_path: Path) -> None:
    module = VectorModule()
    with pytest.raises(ValueError, match=r"has no weights below 'net' \(it has: model, temperature\)"):
        save(tmp_path / "a", module, TransformersCheckpointIO(module, attribute="net"))
    with pytest.raises(ValueError, match=r"carries no model as 'net' \(its modules: model\)"):
        TransformersCheckpointIO(module, attribute="net")._model()


def test_paths_without_a_checkpoint_folder_are_errors_that_name_them(tmp_path: Path) -> None:
    io = TransformersCheckpointIO(VectorClassifier())
    for method, arguments in (
        ("save_checkpoint", ({"state_dict": {}},)),
        ("load_checkpoint", ()),
        ("remove_checkpoint", ()),
    ):
        with pytest.raises(ValueError, match=r"s3://bucket/run is not on the local disk"):
            getattr(io, method)(*arguments, "s3://bucket/run")
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({"state_dict": {}}, tmp_path, storage_options={})
    with pytest.raises(FileNotFoundError, match=r"no checkpoint folder .*gone"):
        io.load_checkpoint(tmp_path / "gone")
    (tmp_path / "epoch=0.ckpt").touch()
    with pytest.raises(ValueError, match=r"epoch=0\.ckpt is a file"):
        io.load_checkpoint(tmp_path / "epoch=0.ckpt")
    save(tmp_path / "a")
    (tmp_path / "a" / "lightning_state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a is damaged: lightning_state\.pt"):
        io.load_checkpoint(tmp_path / "a")


def test_hyper_parameters_that_could_not_be_loaded_safely_are_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"CrossEntropyLoss.*save_hyperparameters\(ignore="):
        save(tmp_path / "a", VectorModule(loss=nn.CrossEntropyLoss()))
    assert not (tmp_path / "a").exists()


def test_paths_and_enums_in_hyper_parameters_are_saved_as_text(tmp_path: Path) -> None:
    save(tmp_path / "a", VectorModule(data=Path("somewhere"), kind=littrainer.IntervalStrategy.STEPS))
    state = torch.load(tmp_path / "a" / "lightning_state.pt", weights_only=True)
    assert state["hyper_parameters"] == {"data": "somewhere", "kind": "steps"}


def test_only_checkpoints_are_deleted(tmp_path: Path) -> None:
    io = TransformersCheckpointIO(VectorClassifier())
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"precious is not deleted"):
        io.remove_checkpoint(tmp_path / "precious")
    save(tmp_path / "a")
    (tmp_path / "last").symlink_to(tmp_path / "a")
    io.remove_checkpoint(tmp_path / "last")
    assert (tmp_path / "a").is_dir() and not (tmp_path / "last").is_symlink()
    io.remove_checkpoint(tmp_path / "a")
    io.remove_checkpoint(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_lightnings_own_checkpoint_io_is_not_replaced(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(dirpath=tmp_path / "lightning")
    plugin = TorchCheckpointIO()
    quiet_trainer(
        tmp_path, max_steps=1, trainer_kwargs={"lightning": {"plugins": [plugin], "callbacks": [keeper]}}
    ).train()
    assert Path(keeper.best_model_path).is_file()
