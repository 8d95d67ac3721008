from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner

from littrainer import TransformersModule, set_seed
from littrainer.lightning.module import RunHooks
from tests.lightning_users.fitting import fitted, loader, module_of, trainer_for
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import language_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier, tiny_gpt2


class OptimizerWithModes(torch.optim.SGD):
    """Trains in one mode alone, as schedule-free optimizers do."""

    mode = "eval"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def step(self, closure: Any = None) -> Any:
        assert self.mode == "train"
        return super().step(closure)


class WithHooksOfItsOwn(TransformersModule):
    """Has each hook that Lightning leaves empty, and calls `super()` in none, as is usual there."""

    def setup(self, stage: str) -> None: ...

    def on_fit_start(self) -> None: ...

    def on_fit_end(self) -> None: ...

    def on_train_start(self) -> None: ...

    def on_train_end(self) -> None: ...

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self) -> None: ...

    def on_test_epoch_start(self) -> None: ...

    def on_test_epoch_end(self) -> None: ...

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        assert self.model.training
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        assert all(optimizer.mode == "eval" for optimizer in self.trainer.optimizers)  # type: ignore[attr-defined]
        return super().validation_step(batch, batch_idx, dataloader_idx)


def test_a_subclass_may_have_hooks_of_its_own_without_calling_super(tmp_path: Any) -> None:
    set_seed(0)
    model = tiny_gpt2().eval()
    args = {"gradient_checkpointing": True, "num_train_epochs": 7}
    module = WithHooksOfItsOwn(model, args, optimizer_cls_and_kwargs=(OptimizerWithModes, {"lr": 0.1}))
    batches = loader(language_rows(4), 2, pad_tokens)
    with pytest.warns(UserWarning, match="num_train_epochs"):
        trainer = fitted(module, batches, batches)
    assert model.is_gradient_checkpointing
    assert "val_loss" in trainer.callback_metrics and trainer.optimizers[0].mode == "eval"  # type: ignore[attr-defined]
    assert "test_loss" in trainer.test(module, batches, verbose=False)[0]
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = WithHooksOfItsOwn.load_from_checkpoint(tmp_path / "one.ckpt")
    assert type(loaded.model) is type(model)


def test_what_was_done_to_the_model_is_undone_where_a_training_fails() -> None:
    class Fails(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            raise RuntimeError("on purpose")

    model = tiny_gpt2()
    with pytest.raises(RuntimeError, match="on purpose"):
        fitted(
            module_of(model, {"neftune_noise_alpha": 5.0}), loader(language_rows(4), 4, pad_tokens), callbacks=[Fails()]
        )
    assert not model.get_input_embeddings()._forward_hooks


def test_a_lightning_trainer_has_them_once_and_may_run_other_modules_afterwards() -> None:
    module = module_of()
    trainer = fitted(module, val=loader())
    trainer.validate(module, loader(), verbose=False)
    assert sum(isinstance(callback, RunHooks) for callback in trainer.callbacks) == 1  # type: ignore[attr-defined]
    trainer.test(BoringModel(), verbose=False)


def test_callbacks_of_a_subclass_go_beside_them_and_not_in_their_place() -> None:
    class Careless(TransformersModule):
        def configure_callbacks(self) -> Any:
            return [pl.callbacks.LearningRateMonitor()]

    with pytest.raises(TypeError, match=r"Careless\.configure_callbacks\(\).*super\(\)"):
        fitted(Careless(VectorClassifier()))


def test_a_trial_without_callbacks_trains_an_optimizer_with_modes(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    module = module_of(optimizer_cls_and_kwargs=(OptimizerWithModes, {"lr": 0.1}))
    assert Tuner(trainer_for()).lr_find(module, loader(), num_training=3, update_attr=False) is not None


def test_callbacks_see_the_metrics_of_an_evaluation_at_its_end() -> None:
    seen: list[set[str]] = []

    class Looks(pl.Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append({"val_loss", "val_accuracy"} & set(trainer.callback_metrics))

        def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append({"test_loss", "test_accuracy"} & set(trainer.callback_metrics))

    module = module_of(compute_metrics=accuracy)
    trainer = fitted(module, val=loader(), callbacks=[Looks()], num_sanity_val_steps=0)
    trainer.test(module, loader(), verbose=False)
    assert seen == [{"val_loss", "val_accuracy"}, {"test_loss", "test_accuracy"}]


def test_callbacks_find_an_optimizer_with_modes_in_evaluation_mode_for_as_long_as_a_validation_takes() -> None:
    modes: list[str] = []

    class Looks(pl.Callback):
        def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
            modes.append(trainer.optimizers[0].mode)

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            modes.append(trainer.optimizers[0].mode)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            modes.append(trainer.optimizers[0].mode)

    module = module_of(optimizer_cls_and_kwargs=(OptimizerWithModes, {"lr": 0.1}))
    fitted(module, val=loader(), callbacks=[Looks()], num_sanity_val_steps=0)
    assert modes == ["eval", "eval", "train"]


def test_a_validation_computes_its_metrics_once_per_run() -> None:
    calls: list[int] = []

    def counted(prediction: Any) -> dict[str, float]:
        calls.append(len(prediction.label_ids))
        return accuracy(prediction)

    module = module_of(compute_metrics=counted)
    fitted(module, val=loader(), max_epochs=2, num_sanity_val_steps=0)
    assert calls == [10, 10]
