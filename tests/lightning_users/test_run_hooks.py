from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from datasets import Dataset
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner

from littrainer import TransformersModule, set_seed
from littrainer.lightning.module import RunHooks
from tests.lightning_users.curves import QUIET
from tests.lightning_users.fitting import fit_module, loader, make_module, make_trainer
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import language_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_gpt2


class OptimizerWithModes(torch.optim.SGD):
    """An optimizer that steps only in training mode, as schedule-free optimizers do."""

    mode = "eval"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def step(self, closure: Any = None) -> Any:
        assert self.mode == "train"
        return super().step(closure)


MODES: dict[str, Any] = {"optimizer_cls_and_kwargs": (OptimizerWithModes, {"lr": 0.1})}
EMPTY_IN_LIGHTNING = (
    *("setup", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_save_checkpoint"),
    *(f"on_{stage}_epoch_{end}" for stage in ("validation", "test") for end in ("start", "end")),
)


class ModuleWithHooks(TransformersModule):
    """A module that overrides each empty hook of Lightning without `super()`."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        assert self.model.training
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        assert all(optimizer.mode == "eval" for optimizer in self.trainer.optimizers)  # type: ignore[attr-defined]
        return super().validation_step(batch, batch_idx, dataloader_idx)


for hook in EMPTY_IN_LIGHTNING:
    setattr(ModuleWithHooks, hook, lambda self, *args, **kwargs: None)


def test_a_subclass_may_override_hooks_without_super(tmp_path: Any) -> None:
    set_seed(0)
    model = tiny_gpt2().eval()
    module = ModuleWithHooks(model, {"gradient_checkpointing": True, "num_train_epochs": 7}, **MODES)
    batches = loader(language_rows(4), 2, pad_tokens)
    with pytest.warns(UserWarning, match="num_train_epochs"):
        trainer = fit_module(module, batches, batches)
    assert model.is_gradient_checkpointing
    assert "val_loss" in trainer.callback_metrics and trainer.optimizers[0].mode == "eval"  # type: ignore[attr-defined]
    assert "test_loss" in trainer.test(module, batches, verbose=False)[0]
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert type(ModuleWithHooks.load_from_checkpoint(tmp_path / "saved.ckpt").model) is type(model)


def test_preparations_of_the_model_are_undone_if_a_training_fails() -> None:
    class Fails(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            raise RuntimeError("on purpose")

    model = tiny_gpt2()
    module = make_module(model, {"neftune_noise_alpha": 5.0})
    with pytest.raises(RuntimeError, match="on purpose"):
        fit_module(module, loader(language_rows(4), 4, pad_tokens), callbacks=[Fails()])
    assert not model.get_input_embeddings()._forward_hooks


def test_an_error_shows_the_users_calls_and_the_last_internal_call_alone() -> None:
    class Fails(VectorClassifier):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose") as caught:
        fit_module(make_module(Fails()), loader())
    packages = [str(entry.frame.f_globals["__name__"]).partition(".")[0] for entry in caught.traceback]
    # `fit`, Lightning's handler of errors, and the last call of littrainer or Lightning.
    assert len([package for package in packages if package in ("littrainer", "lightning")]) <= 3


def test_lists_in_a_batch_and_a_folder_without_the_plugin_are_explained(tmp_path: Path) -> None:
    model = tiny_bert_classifier()
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 4, "labels": [0, 1, 0, 1]})
    with pytest.raises(AttributeError, match="size") as caught:
        fit_module(TransformersModule(model), torch.utils.data.DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert "'input_ids' of the batch is a list and no tensor: give the DataLoader" in caught.value.__notes__[0]
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    with pytest.raises(IsADirectoryError) as raised:
        pl.Trainer(max_epochs=1, **QUIET).fit(make_module(), loader(), ckpt_path=folder)
    assert f"{folder} is a checkpoint of a Trainer: pass plugins=[Tran" in raised.value.__notes__[0]


def test_a_lightning_trainer_has_run_hooks_once_and_may_run_other_modules_later() -> None:
    module = make_module()
    trainer = fit_module(module, val=loader())
    trainer.validate(module, loader(), verbose=False)
    assert sum(isinstance(callback, RunHooks) for callback in trainer.callbacks) == 1  # type: ignore[attr-defined]
    trainer.test(BoringModel(), verbose=False)


def test_callbacks_of_a_subclass_must_not_replace_run_hooks() -> None:
    class Careless(TransformersModule):
        def configure_callbacks(self) -> Any:
            return [pl.callbacks.LearningRateMonitor()]

    with pytest.raises(TypeError, match=r"Careless\.configure_callbacks\(\).*super\(\)"):
        fit_module(Careless(VectorClassifier()))


def test_a_trial_without_callbacks_trains_an_optimizer_with_modes(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert Tuner(make_trainer()).lr_find(make_module(**MODES), loader(), num_training=3, update_attr=False) is not None


def test_callbacks_see_the_metrics_of_an_evaluation_at_its_end_and_the_optimizer_in_its_mode() -> None:
    records: list[Any] = []

    class Recorder(pl.Callback):
        def record(self, trainer: pl.Trainer, module: Any) -> None:
            names = {"val_loss", "val_accuracy", "test_loss", "test_accuracy"} & set(trainer.callback_metrics)
            records.append((trainer.optimizers[0].mode, len(names)))

        on_validation_epoch_start = on_validation_epoch_end = on_validation_end = on_test_epoch_end = record

    calls: list[int] = []

    def count_calls(prediction: Any) -> dict[str, float]:
        calls.append(len(prediction.label_ids))
        return accuracy(prediction)

    module = make_module(compute_metrics=count_calls, **MODES)
    trainer = fit_module(module, val=loader(), callbacks=[Recorder()], num_sanity_val_steps=0)
    trainer.test(module, loader(), verbose=False)
    assert records == [("eval", 0), ("eval", 2), ("train", 2), ("eval", 2)]
    assert calls == [10] * 2
