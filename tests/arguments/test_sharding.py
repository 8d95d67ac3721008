from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from littrainer.arguments.sharding import KEY_ALIASES, KEYS, ShardingPlan, check_processes, get_sharding_plan
from tests.scenarios.trainers import quiet_arguments

# Key -> non-default value, and required keys.
OTHER_VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "version": (1, {}),
    "reshard_after_forward": (False, {}),
    "cpu_offload": (True, {}),
    "auto_wrap_policy": ("NO_WRAP", {}),
    "transformer_layer_cls_to_wrap": (["LlamaDecoderLayer"], {}),
    "min_num_params": (100, {}),
    "state_dict_type": ("SHARDED_STATE_DICT", {}),
    "activation_checkpointing": (True, {}),
    "activation_checkpointing_offload": (True, {"activation_checkpointing": True}),
    "cpu_ram_efficient_loading": (True, {}),
    "sync_module_states": (False, {}),
    "forward_prefetch": (True, {}),
    "backward_prefetch": ("BACKWARD_POST", {"version": 1}),
    "limit_all_gathers": (False, {"version": 1}),
    "use_orig_params": (False, {"version": 1}),
    "ignored_modules": (r"model\.norm", {}),
}


def make_plan(config: Any = None, **changes: Any) -> Any:
    return get_sharding_plan(quiet_arguments("unused", **{"fsdp": True, "fsdp_config": config, **changes}))


@pytest.mark.parametrize("nothing", [None, False, "", [], "false"])
def test_fsdp_is_off_by_default(nothing: Any) -> None:
    args = quiet_arguments("unused", fsdp=nothing)
    assert get_sharding_plan(args) is None and args.fsdp_plugin_args is None


def test_normalized_arguments_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import TrainingArguments as Theirs

    keywords: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "A", "fsdp_cpu_offload": "true"},
    }
    ours = quiet_arguments(tmp_path, **keywords)
    theirs = quiet_arguments(tmp_path, Theirs, **keywords)
    assert ours.fsdp is theirs.fsdp is True
    assert ours.fsdp_config == theirs.fsdp_config
    assert ours.fsdp_plugin_args == theirs.fsdp_plugin_args
    assert make_plan().sync_module_states and not make_plan().has_sharded_checkpoints


def test_options_of_transformers_4_and_files_are_accepted_also_after_construction(tmp_path: Path) -> None:
    options = "full_shard auto_wrap offload"
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"fsdp_state_dict_type": "sharded_state_dict", "fsdp_min_num_params": 2000}))
    args = quiet_arguments("unused")
    args.fsdp, args.fsdp_config = options, str(path)
    for plan in (
        make_plan(str(path), fsdp=options),
        make_plan(str(path), fsdp=options.split()),
        get_sharding_plan(args),
    ):
        assert plan.cpu_offload and plan.reshard_after_forward is True and plan.has_sharded_checkpoints
        assert (plan.auto_wrap_policy, plan.min_num_params) == ("SIZE_BASED_WRAP", 2000)
    assert make_plan(None, fsdp="shard_grad_op").reshard_after_forward is False
    assert make_plan({"version": 1}, fsdp="hybrid_shard").reshard_after_forward == "HYBRID_SHARD"


def test_every_key_is_documented_and_tested() -> None:
    assert OTHER_VALUES.keys() == KEYS.keys() >= set(KEY_ALIASES.values())
    page = Path(__file__).parents[2].joinpath("docs", "strategies.md").read_text(encoding="utf-8")
    for name, default in ((field.name, field.default) for field in dataclasses.fields(ShardingPlan)):
        shown = "none" if default is None or name == "auto_wrap_policy" else f"`{default}`"
        assert f"\n| `{name}` | {shown} | " in page


@pytest.mark.parametrize("name", KEYS)
def test_every_key_changes_the_plan(name: str) -> None:
    value, further = OTHER_VALUES[name]
    assert getattr(make_plan({name: value, **further}), name) != getattr(make_plan(further), name)


@pytest.mark.parametrize(
    ("fsdp", "config", "message"),
    [
        ("full_shart", None, "did you mean 'full_shard'"),
        ("full_shard shard_grad_op", None, "names 2 ways"),
        ("hybrid_shard", None, "dp_replicate_size"),
        ("no_shard", None, "DDP"),
        (True, {"min_num_parms": 3}, "did you mean 'min_num_params'"),
        (True, {"version": 3}, "choose from 1, 2"),
        (True, {"reshard_after_forward": "perhaps"}, "give true or false"),
        (True, {"auto_wrap_policy": "SIZED"}, "choose from TRANSFORMER_BASED_WRAP"),
        (True, {"auto_wrap_policy": "SIZE_BASED_WRAP"}, "needs min_num_params"),
        (True, {"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "A"}, "not NO_WRAP"),
        (True, {"min_num_params": 3, "transformer_layer_cls_to_wrap": "A"}, "Leave one of them out"),
        (True, {"min_num_params": -1}, "from 0 up"),
        (True, {"backward_prefetch": "backward_post"}, "version to 1"),
        (True, {"use_orig_params": False}, "version to 1"),
        (True, {"limit_all_gathers": "false"}, "version to 1"),
        (True, {"state_dict_type": "LOCAL_STATE_DICT"}, "FULL_STATE_DICT or SHARDED_STATE_DICT"),
        (True, {"activation_checkpointing_offload": True}, "set both"),
        (True, {"version": 1, "activation_checkpointing": 1, "activation_checkpointing_offload": 1}, "version to 2"),
        (True, {"cpu_ram_efficient_loading": True, "sync_module_states": False}, "sync_module_states"),
        (True, {"ignored_modules": 3}, "regular expression"),
        (True, {"cpu_offload": True, "offload_params": False}, "gives cpu_offload twice"),
        (True, "{}[", "JSON"),
    ],
)
def test_an_invalid_config_raises_with_valid_values(fsdp: Any, config: Any, message: str) -> None:
    with pytest.raises((ValueError, OSError)) as raised:
        make_plan(config, fsdp=fsdp)
    assert message in str(raised.value)


def test_conflicting_arguments_and_tpu_keys_raise() -> None:
    with pytest.raises(ValueError, match="recomputed twice"):
        make_plan({"activation_checkpointing": True}, gradient_checkpointing=True)
    with pytest.raises(ValueError, match="FULL_STATE_DICT"):
        make_plan({"state_dict_type": "SHARDED_STATE_DICT"}, save_only_model=True)
    for key in ("xla", "xla_fsdp_settings"):
        with pytest.raises(NotImplementedError, match=key):
            make_plan({key: {"compute_dtype": "float16"} if key == "xla_fsdp_settings" else True})


def test_a_config_without_fsdp_warns() -> None:
    with pytest.warns(UserWarning, match="fsdp is not switched on"):
        quiet_arguments("unused", fsdp_config={"cpu_offload": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_arguments("unused", fsdp_config={"min_num_params": 0, "xla": False})


def test_the_environment_of_accelerate_launch_enables_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_USE_ORIG_PARAMS": "false",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    args = quiet_arguments("unused")
    plan = get_sharding_plan(args)
    assert plan is not None and args.fsdp_plugin_args is None
    assert plan.transformer_layer_cls_to_wrap == ("A", "B") and plan.reshard_after_forward is False
    assert not plan.has_sharded_checkpoints
    # Arguments take precedence.
    assert make_plan().transformer_layer_cls_to_wrap is None


def test_a_single_process_and_version_1_on_a_cpu_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    args = quiet_arguments("unused", fsdp=True, fsdp_config={"version": 1})
    with pytest.raises(ValueError, match="littrainer run --devices 2"):
        check_processes(args)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="'version': 2"):
        check_processes(args)


def test_arguments_without_fsdp_keep_the_environment_for_from_pretrained() -> None:
    make_plan({"cpu_ram_efficient_loading": True})
    quiet_arguments("unused")
    assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    # Not by a launcher.
    assert get_sharding_plan(quiet_arguments("unused")) is None
    make_plan({"cpu_ram_efficient_loading": False})
    assert "ACCELERATE_USE_FSDP" not in os.environ
