from __future__ import annotations

from typing import Any

import pytest
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

from littrainer import TrainingArguments
from littrainer.processes.accelerate_launch import (
    REFUSED_VARIABLES,
    SHARDING_STRATEGIES,
    launcher_settings,
    refused_variables,
)
from tests.processes.launchers import set_only

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer,GPT2Block",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
FSDP1 = {**FSDP2, "FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_SYNC_MODULE_STATES": "false"}
DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}


def test_without_a_launcher_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, ACCELERATE_USE_FSDP="false", ACCELERATE_USE_DEEPSPEED="False", FSDP_VERSION="2")
    assert launcher_settings() == {}


def test_settings_of_fsdp_2_are_those_that_accelerate_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **FSDP2)
    ours = launcher_settings()["fsdp"]
    theirs = FullyShardedDataParallelPlugin()
    assert ours == {
        "version": theirs.fsdp_version,
        "reshard_after_forward": theirs.reshard_after_forward,
        "cpu_offload": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": theirs.transformer_cls_names_to_wrap,
        "min_num_params": 100_000_000,
        "state_dict_type": theirs.state_dict_type.name,
        "cpu_ram_efficient_loading": theirs.cpu_ram_efficient_loading,
        "activation_checkpointing": theirs.activation_checkpointing,
    }
    assert theirs.cpu_offload is not False and ours["reshard_after_forward"] is False


def test_settings_of_fsdp_1_are_those_that_accelerate_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **{**FSDP1, "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_SHARDING_STRATEGY": "4"})
    ours = launcher_settings()["fsdp"]
    theirs: Any = FullyShardedDataParallelPlugin()
    assert ours["reshard_after_forward"] == theirs.sharding_strategy.name.lower() == "hybrid_shard"
    assert ours["backward_prefetch"] == theirs.backward_prefetch.name.lower()
    assert ours["state_dict_type"] == theirs.state_dict_type.name
    for name in ("forward_prefetch", "use_orig_params", "sync_module_states", "activation_checkpointing"):
        assert ours[name] == getattr(theirs, name)


@pytest.mark.parametrize("version", ["1", "2"])
def test_what_the_launcher_leaves_open_is_as_accelerate_has_it(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    set_only(monkeypatch, ACCELERATE_USE_FSDP="1", FSDP_VERSION=version)
    ours, theirs = launcher_settings()["fsdp"], FullyShardedDataParallelPlugin()
    assert ours["auto_wrap_policy"] == "NO_WRAP" and theirs.auto_wrap_policy is None
    assert ours["state_dict_type"] == theirs.state_dict_type.name
    assert ours["reshard_after_forward"] is True or ours["reshard_after_forward"] == SHARDING_STRATEGIES[0]


def test_deepspeeds_configuration_is_the_one_that_accelerate_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **DEEPSPEED)
    found = launcher_settings()
    ours, theirs = found["deepspeed"], DeepSpeedPlugin().deepspeed_config
    assert found["zero3_init"] is False
    assert ours["zero_optimization"]["stage"] == theirs["zero_optimization"]["stage"] == 3
    assert ours["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in ours["zero_optimization"]
    for name in ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"):
        assert ours[name] == theirs[name]
    key = "stage3_gather_16bit_weights_on_model_save"
    assert ours["zero_optimization"][key] is theirs["zero_optimization"][key] is True


def test_deepspeed_alone_means_stage_2_and_open_values_from_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, ACCELERATE_USE_DEEPSPEED="true")
    config = launcher_settings()["deepspeed"]
    assert config["zero_optimization"]["stage"] == DeepSpeedPlugin().zero_stage == 2
    assert config["gradient_accumulation_steps"] == config["gradient_clipping"] == config["train_batch_size"] == "auto"


def test_a_file_of_deepspeeds_is_handed_on_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE="zero3.json")
    assert launcher_settings()["deepspeed"] == "zero3.json"


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"ACCELERATE_USE_FSDP": "perhaps"}, "ACCELERATE_USE_FSDP='perhaps' is neither true nor false"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "3"}, "FSDP_VERSION=3 is no version"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "two"}, "FSDP_VERSION='two' must be a whole number"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_AUTO_WRAP_POLICY": "SOME"},
            "FSDP_AUTO_WRAP_POLICY='SOME' is not valid; choose one of TRANSFORMER_BASED_WRAP",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_CLIPPING": "much"},
            "ACCELERATE_GRADIENT_CLIPPING='much' must be a number",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_by_variable(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], complaint: str
) -> None:
    set_only(monkeypatch, **variables)
    with pytest.raises(ValueError, match=complaint):
        launcher_settings()


@pytest.mark.parametrize("name", REFUSED_VARIABLES)
def test_what_is_not_carried_out_is_refused_by_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_only(monkeypatch, **{name: "true"})
    needs_switch = name.startswith(("FSDP_", "ACCELERATE_DEEPSPEED_"))
    assert refused_variables() == ({} if needs_switch else {name: "true"})
    if not needs_switch:
        with pytest.raises(NotImplementedError, match=f"environment variable {name}=true"):
            TrainingArguments("out", use_cpu=True)


def test_a_variable_of_fsdp_is_refused_where_fsdp_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, **{**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"})
    assert refused_variables() == {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}
