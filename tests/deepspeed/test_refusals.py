"""Refusals of settings that conflict with DeepSpeed, before any computation, with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from littrainer import Trainer
from tests.deepspeed.test_training import TORCH_OPTIMIZER
from tests.deepspeed.variants import ENGINE_SCHEDULE, stage
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def test_an_error_says_that_deepspeed_is_not_installed_and_which_setting_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImportError, match="DeepSpeed is not installed: run `pip install deepspeed`"):
        quiet_arguments(tmp_path, deepspeed=stage(2))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ImportError, match="ACCELERATE_USE_DEEPSPEED"):
        quiet_arguments(tmp_path)


def test_a_device_that_deepspeed_does_not_use_is_refused(
    deepspeed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed.accelerator, "DEVICE", "cuda")
    trainer = quiet_trainer(tmp_path, deepspeed=stage(2))
    with pytest.raises(RuntimeError, match=r"DeepSpeed works on cuda, and this training on cpu.*DS_ACCELERATOR=cpu"):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "trainer_kwargs", "complaint"),
    [
        (
            {"deepspeed": stage(2), "save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "epoch"},
            {},
            "save_only_model=True together with load_best_model_at_end=True",
        ),
        ({"deepspeed": stage(3), "auto_find_batch_size": True}, {}, "auto_find_batch_size=True in stage 3"),
        ({"deepspeed": stage(2), "async_save": True}, {}, "async_save=True"),
        ({"deepspeed": stage(2, {"tensor_parallel": {"autotp_size": 2}})}, {}, '"tensor_parallel" in its'),
        ({"deepspeed": stage(2)}, {"lightning": {"strategy": "ddp"}}, "lightning={'strategy': ...}"),
    ],
)
def test_conflicting_arguments_are_refused_by_the_constructor(
    deepspeed: Any, tmp_path: Path, changes: dict[str, Any], trainer_kwargs: dict[str, Any], complaint: str
) -> None:
    best = {"save_strategy": "epoch"} if changes.get("load_best_model_at_end") else {}
    with pytest.raises(ValueError, match=r"`deepspeed` does not go with .*") as refused:
        quiet_trainer(tmp_path, trainer_kwargs=trainer_kwargs, **{**changes, **best})
    assert complaint in str(refused.value)


def test_two_optimizers_or_two_schedules_are_refused(deepspeed: Any, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, deepspeed=stage(2, TORCH_OPTIMIZER))
    other = trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match='"optimizer" of the DeepSpeed configuration, and the one given as'):
        trainer.train()
    trainer = quiet_trainer(tmp_path, deepspeed=stage(2, TORCH_OPTIMIZER))
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(other)
    with pytest.raises(ValueError, match="drives another optimizer than the one that DeepSpeed makes"):
        trainer.train()

    class OverriddenSchedule(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return super().create_scheduler(num_training_steps, optimizer)

    trainer = quiet_trainer(tmp_path, kind=OverriddenSchedule, deepspeed=stage(2, ENGINE_SCHEDULE))
    with pytest.raises(
        ValueError, match=r'"scheduler" of the DeepSpeed configuration, and OverriddenSchedule.create_scheduler'
    ):
        trainer.train()


def test_a_second_trained_model_needs_another_engine(deepspeed: Any, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, deepspeed=stage(2))
    with pytest.raises(NotImplementedError, match=r"accelerator\.prepare\(Linear\): DeepSpeed's engine holds"):
        trainer.accelerator.prepare(nn.Linear(1, 1))
    reference = nn.Linear(1, 1)
    assert trainer.accelerator.prepare_model(reference, evaluation_mode=True) is reference


def test_a_configuration_after_construction_or_with_fsdp_is_refused(deepspeed: Any, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    trainer.args.deepspeed = stage(2)
    with pytest.raises(ValueError, match="`deepspeed` was set after the Trainer was made"):
        trainer.train()
    with pytest.raises(ValueError, match="fsdp"):
        quiet_arguments(tmp_path, deepspeed=stage(2), fsdp="full_shard")


def test_checkpoints_of_the_engine_are_not_thinned(deepspeed: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DeepSpeed reads weights and optimizer from the same files: leave it unset"):
        quiet_trainer(tmp_path, deepspeed=stage(2), keep_optimizer_states=1).train()


def test_arguments_without_effect_under_the_configuration_are_warned_of(
    deepspeed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = stage(2, {**TORCH_OPTIMIZER, **ENGINE_SCHEDULE})
    del config["gradient_clipping"]
    changes = {"max_grad_norm": 0.5, "optim": "adamw_torch", "lr_scheduler_type": "cosine", "max_steps": 1}
    quiet_trainer(tmp_path, deepspeed=config, **changes).train()
    for name, value in changes.items():
        assert (f"{name}={value} has no effect under `deepspeed`" in caplog.text) is (name != "max_steps")
    caplog.clear()
    quiet_trainer(tmp_path, deepspeed=stage(2), **changes).train()
    assert "has no effect" not in caplog.text


def test_an_optimizer_that_updates_during_backward_is_refused(deepspeed: Any, tmp_path: Path) -> None:
    class Fused(torch.optim.SGD):
        def fused_backward(self, loss: Any, rate: float) -> None: ...

    trainer = quiet_trainer(tmp_path, deepspeed=stage(2))
    trainer.optimizer = Fused(trainer.model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="Fused updates the weights during the backward pass"):
        trainer.train()
