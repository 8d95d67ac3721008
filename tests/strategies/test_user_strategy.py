"""Adaptation of the user's strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from littrainer.lightning_adapter.lightning_trainer import build_lightning_trainer
from littrainer.strategies.data_parallel import ResidentDDPStrategy
from littrainer.strategies.single_device import LaunchedProcesses, ResidentSingleDeviceStrategy
from littrainer.strategies.user_strategy import adapt_strategy
from tests.distributed.launchers import fake_gpus, set_only
from tests.scenarios.trainers import quiet_trainer


def test_auto_is_the_strategy_for_the_arguments(tmp_path: Path) -> None:
    assert isinstance(adapt_strategy("auto", quiet_trainer(tmp_path)), ResidentSingleDeviceStrategy)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook", DDPStrategy(start_method="fork")])
def test_strategies_that_start_processes_are_refused_with_advice(tmp_path: Path, strategy: Any) -> None:
    with pytest.raises(ValueError, match="littrainer run --devices N"):
        adapt_strategy(strategy, quiet_trainer(tmp_path))


def test_a_strategy_of_deepspeed_is_refused_with_the_argument_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the argument `deepspeed`"):
        adapt_strategy(DeepSpeedStrategy.__new__(DeepSpeedStrategy), quiet_trainer(tmp_path))


def test_a_parallel_strategy_uses_the_launched_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CustomStrategy(DDPStrategy):
        pass

    trainer, strategy = quiet_trainer(tmp_path), CustomStrategy(bucket_cap_mb=3)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    adapted = adapt_strategy(strategy, trainer)
    assert isinstance(adapted, CustomStrategy) and isinstance(adapted, ResidentDDPStrategy)
    assert isinstance(adapted.cluster_environment, LaunchedProcesses)
    assert (adapted.global_rank, adapted.world_size) == (2, 4)
    assert adapted._ddp_kwargs == {"bucket_cap_mb": 3}
    # The original can be passed to another training.
    assert strategy.cluster_environment is None and type(strategy) is CustomStrategy
    assert adapt_strategy("ddp", trainer).world_size == 4


def test_ddp_trains_in_a_notebook_as_its_processes_are_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.trainer.connectors import accelerator_connector

    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    built: Any = build_lightning_trainer(quiet_trainer(tmp_path, lightning={"strategy": "ddp"}), None)
    assert built.strategy.launcher is None


@pytest.mark.parametrize(
    ("visible", "index", "settings"),
    [
        (1, 0, {}),
        # More than processes.
        (8, 1, {}),
        (2, 1, {"lightning": {"strategy": "ddp"}}),
        (1, 0, {"lightning": {"strategy": DDPStrategy(bucket_cap_mb=3)}}),
        (2, 1, {"fsdp": True}),
        (1, 0, {"fsdp": True, "fsdp_config": {"version": 1}}),
    ],
)
def test_lightning_uses_the_gpu_of_the_arguments_whatever_number_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: int, index: int, settings: dict[str, Any]
) -> None:
    trainer = quiet_trainer(tmp_path)
    fake_gpus(monkeypatch, visible)
    set_only(monkeypatch, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    del trainer.args.device
    vars(trainer.args).update(use_cpu=False, **settings)
    ours: Any = build_lightning_trainer(trainer, None)
    assert trainer.args.device == ours.strategy.root_device == torch.device("cuda", index)
    assert (ours.world_size, ours.global_rank, ours.local_rank, ours.num_devices) == (2, 1, 1, 2)
