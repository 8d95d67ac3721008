from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.lightning_users.fitting import fitted, module_of

BOUND = 0.05


class Norms(pl.Callback):
    """Notes the norm of the gradients with which each optimizer step was taken, and its learning rate."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.learning_rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.learning_rates.append(optimizer.param_groups[0]["lr"])

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        if gradients:
            self.norms.append(torch.cat(gradients).norm().item())


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_scaled_gradients_are_clipped_by_their_true_norm_and_a_step_left_out_takes_no_step_of_the_schedule(
    optim: str,
) -> None:
    seen = Norms()
    module = module_of(args={"optim": optim, "max_grad_norm": BOUND, "learning_rate": 0.5, "weight_decay": 0})

    class Breaks(pl.Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 0:
                module.model.head.weight.grad.fill_(float("inf"))

    # Loss scaling is for GPUs; it is carried out on the CPU here.
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fitted(module, callbacks=[seen, Breaks()], plugins=[plugin], max_steps=3)
    assert scaler.get_scale() == 512
    assert seen.norms[1] == pytest.approx(BOUND, rel=1e-3)
    assert seen.learning_rates == pytest.approx([0.5, 0.5, 1 / 3])
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


def test_a_sharded_root_clips_by_its_own_method(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []

    class Root(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            monkeypatch.setattr(module, "clip_grad_norm_", bounds.append, raising=False)

    fitted(module_of(args={"max_grad_norm": BOUND}), callbacks=[Root()], max_steps=2)
    assert bounds == [BOUND] * 2
