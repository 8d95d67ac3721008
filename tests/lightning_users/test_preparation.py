from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from littrainer import TrainerDataModule
from tests.lightning_users.fitting import fit_module, make_module, record_fit
from tests.scenarios.data import vector_rows


def test_accumulation_is_refused_if_the_strategy_accumulates() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(handles_gradient_accumulation=True))
    trainer.accumulate_grad_batches = 2
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=2 with SimpleNamespace.*use FSDP"):
        make_module().check_run(trainer, "fit")


@pytest.mark.parametrize(("limits", "steps"), [({"max_epochs": 4}, 2 * 3 + 2 * 2), ({"max_steps": 5}, 5)])
@pytest.mark.parametrize("has_windows", [False, True])
def test_a_schedule_has_the_length_of_a_changing_accumulation(
    limits: dict[str, int], steps: int, has_windows: bool
) -> None:
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 1, 2: 2})
    data = TrainerDataModule(vector_rows(10), args={"per_device_train_batch_size": 4})
    module = make_module(args={"learning_rate": 1.0})
    recorder = record_fit(module, data if has_windows else None, callbacks=[schedule], **{"max_epochs": 4, **limits})
    assert recorder.learning_rates == pytest.approx([1 - step / steps for step in range(steps)])


def test_an_optimizer_with_a_backward_pass_is_refused() -> None:
    class Fused(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
            raise AssertionError

    with pytest.raises(ValueError, match=r"does not call.*Train with littrainer\.Trainer"):
        make_module(optimizer_cls_and_kwargs=(Fused, {"lr": 0.1})).optimizer_and_schedule(3)


BOUND = 0.05


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_scaled_gradients_are_clipped_by_their_true_norm_and_a_skipped_step_skips_the_schedule(
    optim: str,
) -> None:
    module = make_module(args={"optim": optim, "max_grad_norm": BOUND, "learning_rate": 0.5, "weight_decay": 0})

    class Overflow(pl.Callback):
        def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
            if trainer.global_step == 0:
                module.model.head.weight.grad.fill_(float("inf"))

    # On the CPU instead of a GPU.
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    recorder = record_fit(module, callbacks=[Overflow()], plugins=[plugin], max_steps=3)
    assert scaler.get_scale() == 512
    assert recorder.clipped[1].norm() == pytest.approx(BOUND, rel=1e-3)
    assert recorder.learning_rates == pytest.approx([0.5, 0.5, 1 / 3])
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


def test_a_sharded_root_clips_by_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []

    class Root(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            monkeypatch.setattr(module, "clip_grad_norm_", bounds.append, raising=False)

    fit_module(make_module(args={"max_grad_norm": BOUND}), callbacks=[Root()], max_steps=2)
    assert bounds == [BOUND] * 2
