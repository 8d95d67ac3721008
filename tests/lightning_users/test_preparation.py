from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from littrainer import TrainerDataModule
from tests.lightning_users.fitting import fitted, module_of, seen_in
from tests.scenarios.data import vector_rows


def test_accumulation_is_refused_where_the_strategy_hides_the_gradients() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(handles_gradient_accumulation=True))
    trainer.accumulate_grad_batches = 2
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=2 with SimpleNamespace.*use FSDP"):
        module_of().check_run(trainer, "fit")


@pytest.mark.parametrize(("limits", "steps"), [({"max_epochs": 4}, 2 * 3 + 2 * 2), ({"max_steps": 5}, 5)])
@pytest.mark.parametrize("brings_windows", [False, True])
def test_a_schedule_is_as_long_as_a_changing_accumulation_makes_it(
    limits: dict[str, int], steps: int, brings_windows: bool
) -> None:
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 1, 2: 2})
    data = TrainerDataModule(vector_rows(10), args={"per_device_train_batch_size": 4})
    module = module_of(args={"learning_rate": 1.0})
    seen = seen_in(module, data if brings_windows else None, callbacks=[schedule], **{"max_epochs": 4, **limits})
    assert seen.learning_rates == pytest.approx([1 - step / steps for step in range(steps)])


def test_an_optimizer_with_a_backward_pass_of_its_own_is_refused() -> None:
    class Fused(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
            raise AssertionError

    with pytest.raises(ValueError, match=r"does not call.*Train with littrainer\.Trainer"):
        module_of(optimizer_cls_and_kwargs=(Fused, {"lr": 0.1})).optimizer_and_schedule(3)


BOUND = 0.05


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_scaled_gradients_are_clipped_by_their_true_norm_and_a_step_left_out_takes_no_step_of_the_schedule(
    optim: str,
) -> None:
    module = module_of(args={"optim": optim, "max_grad_norm": BOUND, "learning_rate": 0.5, "weight_decay": 0})

    class Breaks(pl.Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 0:
                module.model.head.weight.grad.fill_(float("inf"))

    # Loss scaling is for GPUs; it is carried out on the CPU here.
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    seen = seen_in(module, callbacks=[Breaks()], plugins=[plugin], max_steps=3)
    assert scaler.get_scale() == 512
    assert seen.clipped[1].norm() == pytest.approx(BOUND, rel=1e-3)
    assert seen.learning_rates == pytest.approx([0.5, 0.5, 1 / 3])
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


def test_a_sharded_root_clips_by_its_own_method(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []

    class Root(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            monkeypatch.setattr(module, "clip_grad_norm_", bounds.append, raising=False)

    fitted(module_of(args={"max_grad_norm": BOUND}), callbacks=[Root()], max_steps=2)
    assert bounds == [BOUND] * 2
