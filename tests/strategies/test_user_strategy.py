"""Strategies that a user hands over."""

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


def test_auto_is_what_the_arguments_ask_for(tmp_path: Path) -> None:
    assert isinstance(adapt_strategy("auto", quiet_trainer(tmp_path)), ResidentSingleDeviceStrategy)


@pytest.mark.parametrize("given", ["ddp_spawn", "ddp_notebook", DDPStrategy(start_method="fork")])
def test_strategies_that_start_processes_are_refused_with_what_to_do(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ValueError, match="littrainer run --devices N"):
        adapt_strategy(given, quiet_trainer(tmp_path))


def test_a_strategy_of_deepspeed_is_refused_with_the_argument_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the argument `deepspeed`"):
        adapt_strategy(DeepSpeedStrategy.__new__(DeepSpeedStrategy), quiet_trainer(tmp_path))


def test_a_strategy_of_several_processes_gets_those_that_were_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(DDPStrategy):
        pass

    trainer, given = quiet_trainer(tmp_path), Own(bucket_cap_mb=3)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    fitted = adapt_strategy(given, trainer)
    assert isinstance(fitted, Own) and isinstance(fitted, ResidentDDPStrategy)
    assert isinstance(fitted.cluster_environment, LaunchedProcesses)
    assert (fitted.global_rank, fitted.world_size) == (2, 4)
    assert fitted._ddp_kwargs == {"bucket_cap_mb": 3}
    # It may be handed over again, for another training.
    assert given.cluster_environment is None and type(given) is Own
    assert adapt_strategy("ddp", trainer).world_size == 4


def test_ddp_trains_in_a_notebook_as_its_processes_are_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.trainer.connectors import accelerator_connector

    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    built: Any = build_lightning_trainer(quiet_trainer(tmp_path, lightning={"strategy": "ddp"}), None)
    assert built.strategy.launcher is None


@pytest.mark.parametrize(
    ("visible", "index"), [(1, 0), (2, 1), (8, 1)], ids=["each its own", "all of the node", "more than processes"]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lightning": {"strategy": "ddp"}},
        {"lightning": {"strategy": DDPStrategy(bucket_cap_mb=3)}},
        {"fsdp": True},
        {"fsdp": True, "fsdp_config": {"version": 1}},
    ],
    ids=["auto", "a name", "an instance", "FSDP", "FSDP version 1"],
)
def test_lightning_takes_the_gpu_that_the_arguments_have_found_however_many_are_visible(
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
