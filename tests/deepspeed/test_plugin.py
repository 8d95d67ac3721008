"""The DeepSpeed plugin, as libraries read it."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from littrainer import Trainer
from littrainer.arguments.deepspeed import DeepSpeedPlugin
from tests.deepspeed.test_training import RUN, train
from tests.deepspeed.variants import stage
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def test_a_trainer_shows_the_plugin_where_libraries_look_for_it(deepspeed: Any, tmp_path: Path) -> None:
    config = stage(2, offload_optimizer={"device": "cpu"})
    trainer = quiet_trainer(tmp_path, deepspeed=config)
    plugin = trainer.accelerator.state.deepspeed_plugin
    assert trainer.is_deepspeed_enabled and plugin is trainer.args.deepspeed_plugin
    assert trainer.accelerator.deepspeed_plugin is plugin
    assert plugin.hf_ds_config is trainer.args.hf_deepspeed_config
    assert plugin.deepspeed_config is plugin.hf_ds_config.config
    assert (plugin.zero_stage, plugin.offload_optimizer_device, plugin.offload_param_device) == (2, "cpu", "none")
    assert plugin.offload_optimizer_nvme_path is None and plugin.zero3_save_16bit_model is False
    assert plugin.gradient_accumulation_steps == 1 and plugin.gradient_clipping == 1.0
    assert not plugin.is_zero3_init_enabled()
    assert str(trainer.accelerator.distributed_type) == "DistributedType.DEEPSPEED"
    assert copy.deepcopy(trainer.args).deepspeed_plugin.zero_stage == 2
    # The original values, with "auto".
    assert json.loads(trainer.args.to_json_string())["deepspeed"] == config
    with pytest.raises(AttributeError, match="has no 'wrap'"):
        plugin.wrap  # noqa: B018


def test_the_state_of_accelerate_has_the_plugin(deepspeed: Any, tmp_path: Path) -> None:
    state = pytest.importorskip("accelerate.state")
    trainer = quiet_trainer(tmp_path, deepspeed=stage(2), bf16=True)
    shared = state.AcceleratorState()
    assert shared.deepspeed_plugin is trainer.args.deepspeed_plugin and shared.mixed_precision == "bf16"
    assert shared.distributed_type == state.DistributedType.DEEPSPEED
    quiet_trainer(tmp_path)
    assert state.AcceleratorState().deepspeed_plugin is None
    assert state.AcceleratorState().distributed_type == state.DistributedType.NO


def test_from_pretrained_shards_under_stage_3_as_long_as_the_arguments_live(deepspeed: Any, tmp_path: Path) -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    deepspeed.CALLS.clear()
    quiet_arguments(tmp_path, deepspeed=stage(2))
    assert not integration.is_deepspeed_zero3_enabled() and deepspeed.CALLS == []
    args = quiet_arguments(tmp_path, deepspeed=stage(3))
    assert [name for name, _ in deepspeed.CALLS] == ["init_distributed"] and torch.distributed.is_initialized()
    assert integration.is_deepspeed_zero3_enabled()
    assert integration.deepspeed_config() is args.hf_deepspeed_config.config
    with args.deepspeed_plugin.zero3_init_context_manager(enable=False):
        assert not integration.is_deepspeed_zero3_enabled()
    assert integration.is_deepspeed_zero3_enabled()
    del args
    gc.collect()
    assert not integration.is_deepspeed_zero3_enabled()


def test_the_environment_of_accelerate_launch_configures_it(
    deepspeed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    for name, value in {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "0.7",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }.items():
        monkeypatch.setenv(name, value)
    args = quiet_arguments(tmp_path, max_grad_norm=0.7)
    plugin = args.deepspeed_plugin
    assert args.deepspeed is None and plugin.zero_stage == 3 and plugin.zero3_save_16bit_model
    assert plugin.deepspeed_config["train_batch_size"] == 4
    assert not plugin.zero3_init_flag and not integration.is_deepspeed_zero3_enabled()
    trainer = train(tmp_path, max_grad_norm=0.7, max_steps=1)
    assert trainer.is_deepspeed_enabled and trainer.deepspeed.config["gradient_clipping"] == 0.7


def test_a_plugin_of_accelerate_that_a_script_sets_is_used(deepspeed: Any, tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, **RUN)
    args.deepspeed_plugin = SimpleNamespace(deepspeed_config=stage(1), zero_stage=1)
    torch.manual_seed(0)
    trainer = Trainer(torch.nn.Linear(2, 2), args)
    assert isinstance(trainer.args.deepspeed_plugin, DeepSpeedPlugin) and trainer.is_deepspeed_enabled
    assert trainer.args.hf_deepspeed_config.get_value("gradient_clipping") == 0.1
