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


MODES: dict[str, Any] = {"optimizer_cls_and_kwargs": (OptimizerWithModes, {"lr": 0.1})}
EMPTY_IN_LIGHTNING = (
    *("setup", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_save_checkpoint"),
    *(f"on_{stage}_epoch_{end}" for stage in ("validation", "test") for end in ("start", "end")),
)


class WithHooksOfItsOwn(TransformersModule):
    """Has each hook that Lightning leaves empty, and calls `super()` in none, as is usual there."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        assert self.model.training
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        assert all(optimizer.mode == "eval" for optimizer in self.trainer.optimizers)  # type: ignore[attr-defined]
        return super().validation_step(batch, batch_idx, dataloader_idx)


for hook in EMPTY_IN_LIGHTNING:
    setattr(WithHooksOfItsOwn, hook, lambda self, *given, **named: None)


def test_a_subclass_may_have_hooks_of_its_own_without_calling_super(tmp_path: Any) -> None:
    set_seed(0)
    model = tiny_gpt2().eval()
    module = WithHooksOfItsOwn(model, {"gradient_checkpointing": True, "num_train_epochs": 7}, **MODES)
    batches = loader(language_rows(4), 2, pad_tokens)
    with pytest.warns(UserWarning, match="num_train_epochs"):
        trainer = fitted(module, batches, batches)
    assert model.is_gradient_checkpointing
    assert "val_loss" in trainer.callback_metrics and trainer.optimizers[0].mode == "eval"  # type: ignore[attr-defined]
    assert "test_loss" in trainer.test(module, batches, verbose=False)[0]
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert type(WithHooksOfItsOwn.load_from_checkpoint(tmp_path / "one.ckpt").model) is type(model)


def test_what_was_done_to_the_model_is_undone_where_a_training_fails() -> None:
    class Fails(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            raise RuntimeError("on purpose")

    model = tiny_gpt2()
    module = module_of(model, {"neftune_noise_alpha": 5.0})
    with pytest.raises(RuntimeError, match="on purpose"):
        fitted(module, loader(language_rows(4), 4, pad_tokens), callbacks=[Fails()])
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
    assert Tuner(trainer_for()).lr_find(module_of(**MODES), loader(), num_training=3, update_attr=False) is not None


def test_callbacks_see_the_metrics_of_an_evaluation_at_its_end_and_the_optimizer_in_its_mode() -> None:
    seen: list[Any] = []

    class Looks(pl.Callback):
        def note(self, trainer: Any, module: Any) -> None:
            names = {"val_loss", "val_accuracy", "test_loss", "test_accuracy"} & set(trainer.callback_metrics)
            seen.append((trainer.optimizers[0].mode, len(names)))

        on_validation_epoch_start = on_validation_epoch_end = on_validation_end = on_test_epoch_end = note

    calls: list[int] = []

    def counted(prediction: Any) -> dict[str, float]:
        calls.append(len(prediction.label_ids))
        return accuracy(prediction)

    module = module_of(compute_metrics=counted, **MODES)
    trainer = fitted(module, val=loader(), callbacks=[Looks()], num_sanity_val_steps=0)
    trainer.test(module, loader(), verbose=False)
    assert seen == [("eval", 0), ("eval", 2), ("train", 2), ("eval", 2)]
    assert calls == [10] * 2
