from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from littrainer.arguments.sharding import KEYS, OTHER_NAMES, ShardingPlan, check_processes, get_sharding_plan
from tests.scenarios.trainers import quiet_arguments

# Key -> a value other than its default, and further keys that it needs.
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


def plan_of(config: Any = None, **changes: Any) -> Any:
    return get_sharding_plan(quiet_arguments("unused", **{"fsdp": True, "fsdp_config": config, **changes}))


@pytest.mark.parametrize("nothing", [None, False, "", [], "false"])
def test_nothing_is_sharded_where_nobody_asks_for_it(nothing: Any) -> None:
    args = quiet_arguments("unused", fsdp=nothing)
    assert get_sharding_plan(args) is None and args.fsdp_plugin_args is None


def test_arguments_read_as_those_of_transformers(tmp_path: Path) -> None:
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
    assert plan_of().sync_module_states and not plan_of().has_sharded_checkpoints


def test_words_of_transformers_4_and_files_are_understood_also_if_they_are_set_afterwards(tmp_path: Path) -> None:
    words = "full_shard auto_wrap offload"
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"fsdp_state_dict_type": "sharded_state_dict", "fsdp_min_num_params": 2000}))
    args = quiet_arguments("unused")
    args.fsdp, args.fsdp_config = words, str(path)
    for plan in (plan_of(str(path), fsdp=words), plan_of(str(path), fsdp=words.split()), get_sharding_plan(args)):
        assert plan.cpu_offload and plan.reshard_after_forward is True and plan.has_sharded_checkpoints
        assert (plan.auto_wrap_policy, plan.min_num_params) == ("SIZE_BASED_WRAP", 2000)
    assert plan_of(None, fsdp="shard_grad_op").reshard_after_forward is False
    assert plan_of({"version": 1}, fsdp="hybrid_shard").reshard_after_forward == "HYBRID_SHARD"


def test_every_key_has_another_value_here() -> None:
    assert OTHER_VALUES.keys() == KEYS.keys() >= set(OTHER_NAMES.values())
    page = Path(__file__).parents[2].joinpath("docs", "scale.md").read_text(encoding="utf-8")
    for name, default in ((field.name, field.default) for field in dataclasses.fields(ShardingPlan)):
        shown = "none" if default is None or name == "auto_wrap_policy" else f"`{default}`"
        assert f"\n| `{name}` | {shown} | " in page


@pytest.mark.parametrize("name", KEYS)
def test_every_key_changes_the_plan(name: str) -> None:
    value, further = OTHER_VALUES[name]
    assert getattr(plan_of({name: value, **further}), name) != getattr(plan_of(further), name)


@pytest.mark.parametrize(
    ("words", "config", "message"),
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
def test_what_cannot_be_meant_is_refused_with_what_can(words: Any, config: Any, message: str) -> None:
    with pytest.raises((ValueError, OSError)) as raised:
        plan_of(config, fsdp=words)
    assert message in str(raised.value)


def test_what_shards_by_itself_or_recomputes_too_and_tpus_are_refused() -> None:
    with pytest.raises(ValueError, match="recomputed twice"):
        plan_of({"activation_checkpointing": True}, gradient_checkpointing=True)
    with pytest.raises(ValueError, match="FULL_STATE_DICT"):
        plan_of({"state_dict_type": "SHARDED_STATE_DICT"}, save_only_model=True)
    for key in ("xla", "xla_fsdp_settings"):
        with pytest.raises(NotImplementedError, match=key):
            plan_of({key: {"compute_dtype": "float16"} if key == "xla_fsdp_settings" else True})


def test_a_config_without_fsdp_is_told_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="fsdp is not switched on"):
        quiet_arguments("unused", fsdp_config={"cpu_offload": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_arguments("unused", fsdp_config={"min_num_params": 0, "xla": False})


def test_accelerate_launch_asks_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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
    # What the arguments say goes before it.
    assert plan_of().transformer_layer_cls_to_wrap is None


def test_one_process_alone_and_version_1_on_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = quiet_arguments("unused", fsdp=True, fsdp_config={"version": 1})
    with pytest.raises(ValueError, match="littrainer run --devices 2"):
        check_processes(args)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="'version': 2"):
        check_processes(args)


def test_arguments_without_sharding_leave_what_others_ask_of_from_pretrained() -> None:
    plan_of({"cpu_ram_efficient_loading": True})
    quiet_arguments("unused")
    assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    # The process was not launched with it.
    assert get_sharding_plan(quiet_arguments("unused")) is None
    plan_of({"cpu_ram_efficient_loading": False})
    assert "ACCELERATE_USE_FSDP" not in os.environ
