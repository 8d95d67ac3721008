"""DeepSpeed configurations: reading, `auto` values, and contradictions of the arguments."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from littrainer.arguments.deepspeed import DeepSpeedConfig
from tests.deepspeed.variants import AUTO_BUCKETS, AUTO_SIZES, ENGINE_OPTIMIZER, ENGINE_SCHEDULE
from tests.scenarios.trainers import quiet_arguments

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.5,
    "learning_rate": 3e-4,
    "adam_beta1": 0.8,
    "adam_beta2": 0.97,
    "adam_epsilon": 1e-7,
    "weight_decay": 0.02,
    "warmup_steps": 5,
}
ALL_AUTO = {**AUTO_SIZES, **ENGINE_OPTIMIZER, **ENGINE_SCHEDULE, "zero_optimization": {"stage": 3, **AUTO_BUCKETS}}


class WithHiddenSize(nn.Module):
    config: Any = SimpleNamespace(hidden_size=10)


def resolve(source: dict[str, Any], steps: int = 100, model: Any = None, **changes: Any) -> dict[str, Any]:
    config = DeepSpeedConfig(source)
    args = quiet_arguments("unused", **{**ARGUMENTS, **changes})
    config.trainer_config_process(args)
    config.trainer_config_finalize(args, model or WithHiddenSize(), steps)
    return config.config


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, {"hidden_size": 10}),
        ({"save_on_each_node": True}, {"text_config": SimpleNamespace(hidden_sizes=[4, 20])}),
    ],
)
def test_auto_values_are_those_of_transformers(changes: dict[str, Any], sizes: dict[str, Any]) -> None:
    model = WithHiddenSize()
    model.config = SimpleNamespace(**sizes)
    reference = pytest.importorskip("transformers.integrations.deepspeed")
    accelerates = pytest.importorskip("accelerate.utils.deepspeed")

    class Theirs(accelerates.HfDeepSpeedConfig):
        pass

    for name, member in vars(reference.HfTrainerDeepSpeedConfig).items():
        if callable(member) or name == "fill_only":
            setattr(Theirs, name, member)
    theirs = Theirs.__new__(Theirs)
    accelerates.HfDeepSpeedConfig.__init__(theirs, ALL_AUTO)
    theirs.mismatches = []
    args = quiet_arguments("unused", **{**ARGUMENTS, **changes})
    theirs.trainer_config_process(args)
    theirs.trainer_config_finalize(args, model, 100)
    ours = resolve(ALL_AUTO, model=model, **changes)
    # accelerate adds these when it prepares the model.
    added = {"fp16": {"enabled": False}, "bf16": {"enabled": False}, "steps_per_print": float("inf")}
    assert ours == {**theirs.config, **added}


def test_all_values_that_differ_from_the_arguments_are_named_at_once() -> None:
    config_dict = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_clipping": 2.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 7}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    with pytest.raises(ValueError) as refused:
        resolve(config_dict)
    for theirs, ours in (
        ("train_micro_batch_size_per_gpu=5", "per_device_train_batch_size=3"),
        ("gradient_clipping=2.0", "max_grad_norm=0.5"),
        ("optimizer.params.lr=0.1", "learning_rate=0.0003"),
        ("scheduler.params.total_num_steps=7", "optimizer steps of the training=100"),
        ("bf16.enabled=True", "bf16 or bf16_full_eval=False"),
    ):
        assert f"deepspeed {theirs}, and {ours}" in str(refused.value)
    # auto_find_batch_size overrides the batch size.
    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": 2}})
    config.trainer_config_process(quiet_arguments("unused", **ARGUMENTS), auto_find_batch_size=True)
    assert config.mismatches == []


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_switches_its_section_on(precision: str) -> None:
    config = DeepSpeedConfig({"zero_optimization": {"stage": 2}})
    args = SimpleNamespace(**{**vars(quiet_arguments("unused")), "mixed_precision": precision, "world_size": 1})
    config.trainer_config_process(args)
    assert config.is_true(f"{precision}.enabled")
    assert config.dtype() is {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert config.config["fp16"].get("auto_cast") is (True if precision == "fp16" else None)


def test_a_pair_equals_a_list_and_a_training_without_warmup_has_a_warmup_step() -> None:
    pair = {"optimizer": {"type": "AdamW", "params": {"betas": (0.8, 0.97)}}, "zero_optimization": {"stage": 1}}
    assert resolve(pair)["optimizer"]["params"]["betas"] == (0.8, 0.97)
    config = resolve({**ENGINE_SCHEDULE, "zero_optimization": {"stage": 1}}, warmup_steps=0)
    assert config["scheduler"]["params"]["warmup_num_steps"] == 1


def test_a_model_without_hidden_size_names_the_values_to_write() -> None:
    with pytest.raises(ValueError, match=r"zero_optimization.reduce_bucket_size.*Linear has neither"):
        resolve({"zero_optimization": {"stage": 3, **AUTO_BUCKETS}}, model=nn.Linear(1, 1))


def test_an_auto_value_without_a_source_is_named() -> None:
    with pytest.raises(ValueError, match=r"zero_optimization.sub_group_size, flops_profiler.top_modules"):
        resolve(
            {"zero_optimization": {"stage": 1, "sub_group_size": "auto"}, "flops_profiler": {"top_modules": "auto"}}
        )


def test_a_configuration_is_a_dict_a_file_or_text(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}}
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps(config))
    for source in (config, file, str(file), json.dumps(config)):
        assert DeepSpeedConfig(source).config == config


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("missing.json", "deepspeed='missing.json' cannot be read: No such file"),
        ('{"zero_optimization": ', "deepspeed is not valid JSON"),
        ({"train_batch_size": 8}, 'no section "zero_optimization"'),
    ],
)
def test_an_invalid_configuration_is_refused(given: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DeepSpeedConfig(given)


def test_queries_of_libraries_are_supported() -> None:
    config = DeepSpeedConfig(
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "fp16": {"enabled": False}}
    )
    assert config.is_zero3() and not config.is_zero2() and config.is_offload()
    assert config.get_value("zero_optimization.stage") == 3 and config.get_value("a.b", 5) == 5
    config.del_config_sub_tree("fp16")
    assert "fp16" not in config.config
