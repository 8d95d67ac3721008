from __future__ import annotations

import dataclasses
import logging
import sys
import warnings
from collections import UserDict, UserList
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from littrainer.arguments import TrainingArguments
from littrainer.arguments.choices import DebugOption
from littrainer.arguments.fields import ArgumentFields
from littrainer.arguments.normalization import normalize
from littrainer.arguments.rules import validate


def make_normalized(**keywords: Any) -> ArgumentFields:
    args = ArgumentFields(**keywords)
    normalize(args, [*TrainingArguments._VALID_DICT_FIELDS, "lightning"])
    validate(args)
    return args


def get_common_values(args: Any) -> dict[str, Any]:
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(transformers.TrainingArguments)}
    values["accelerator_config"] = values["accelerator_config"].to_dict()
    # transformers deletes this entry.
    values["accelerator_config"].pop("use_configured_state", None)
    return values


SAME_VALUES: list[dict[str, Any]] = [
    {},
    {"output_dir": "~/runs/one"},
    {"eval_strategy": "steps"},
    {"eval_strategy": "steps", "eval_steps": 0, "logging_steps": 7},
    {"eval_strategy": "steps", "eval_steps": 20.0},
    {"eval_strategy": transformers.IntervalStrategy.STEPS, "eval_steps": 1},
    {"logging_steps": 10.0, "save_steps": 30.0},
    {"logging_strategy": "epoch", "logging_steps": 0},
    {"logging_strategy": "no", "save_strategy": "no", "logging_steps": 2.5, "save_steps": 2.5},
    {"save_strategy": "best"},
    {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 5, "save_steps": 15},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3},
    {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "best"},
    {"metric_for_best_model": "accuracy"},
    {"metric_for_best_model": "accuracy", "greater_is_better": False},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    {"lr_scheduler_type": "greedy", "eval_strategy": "steps", "metric_for_best_model": "f1"},
    {"lr_scheduler_kwargs": '{"num_cycles": "2", "power": "1.5", "on": "true", "deep": {"off": "False", "x": "a.b"}}'},
    {"lr_scheduler_kwargs": '{"list": ["1"], "negative": "-1", "exponent": "1e-5", "none": null}'},
    {"lr_scheduler_kwargs": {"num_cycles": "2"}},
    {"deepspeed": None, "fsdp_config": '{"min_num_params": "2000"}'},
    {"accelerator_config": {"even_batches": False, "gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    {"accelerator_config": '{"split_batches": "true"}'},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": '{"use_reentrant": "false"}'},
    {"gradient_checkpointing": True, "activation_checkpointing": False},
    {"gradient_checkpointing_kwargs": {"a": 1}, "activation_checkpointing_kwargs": {"b": 2}},
    {"torch_compile": True},
    {"torch_compile_mode": "reduce-overhead"},
    {"include_num_input_tokens_seen": True},
    {"include_num_input_tokens_seen": False},
    {"report_to": []},
    {"report_to": ["tensorboard", "wandb"]},
    {"debug": "underflow_overflow tpu_metrics_debug"},
    {"debug": [DebugOption.UNDERFLOW_OVERFLOW]},
    {"debug": None},
    {"use_cpu": True, "bf16": True},
    {"do_eval": True, "eval_strategy": "no"},
    {"warmup_steps": 10, "optim": "lion_32bit", "lr_scheduler_type": "warmup_stable_decay"},
]


def _name(keywords: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in keywords.items()) or "nothing"


@pytest.mark.parametrize("keywords", SAME_VALUES, ids=_name)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_fields_are_normalized_as_in_transformers(keywords: dict[str, Any]) -> None:
    assert get_common_values(make_normalized(**keywords)) == get_common_values(
        transformers.TrainingArguments(**keywords)
    )


BOTH_REFUSE: list[dict[str, Any]] = [
    {"eval_strategy": "sometimes"},
    {"save_strategy": None},
    {"logging_strategy": "best"},
    {"lr_scheduler_type": "Linear"},
    {"optim": "adam"},
    {"debug": "everything"},
    {"lr_scheduler_kwargs": '{"num_cycles": }'},
    {"logging_steps": 0},
    {"logging_steps": 1.5},
    {"eval_strategy": "steps", "eval_steps": 2.5},
    {"eval_strategy": "steps", "logging_steps": 0, "logging_strategy": "no"},
    {"load_best_model_at_end": True},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "epoch"},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 100, "save_steps": 0.5},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 6},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.2, "save_steps": 0.3},
    {"fp16": True, "bf16": True, "use_cpu": True},
    {"fp16_full_eval": True, "bf16_full_eval": True, "use_cpu": True},
    {"lr_scheduler_type": "reduce_lr_on_plateau"},
    {"lr_scheduler_type": "greedy"},
    {"warmup_steps": -1},
    {"dataloader_prefetch_factor": 2},
    {"torch_empty_cache_steps": 0},
]


@pytest.mark.parametrize("keywords", BOTH_REFUSE, ids=_name)
def test_errors_of_transformers_are_raised_in_a_single_line_that_names_the_argument(keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        transformers.TrainingArguments(**keywords)
    with pytest.raises(ValueError) as caught:
        TrainingArguments(**keywords)
    message = str(caught.value)
    assert "\n" not in message
    assert any(name in message for name in keywords) or "DebugOption" in message


def test_a_warmup_ratio_replaces_the_warmup_steps_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"write warmup_steps=0\.1, .*and warmup_steps=100 is set aside"):
        assert TrainingArguments(warmup_ratio=0.1, warmup_steps=100).warmup_steps == 0.1
    with pytest.warns(FutureWarning, match=r"write warmup_steps=100, .*share of all steps\.$"):
        assert TrainingArguments(warmup_ratio=0.0, warmup_steps=100).warmup_steps == 100


def test_report_to_none_raises_and_the_text_none_disables_trackers() -> None:
    with pytest.raises(TypeError, match=r'report_to=None is a NoneType; give .*"all" or "none"'):
        TrainingArguments(report_to=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nothing: list[Any] = [(), "none", ["none"]]
        assert TrainingArguments().report_to == []
        assert all(TrainingArguments(report_to=each).report_to == [] for each in nothing)


@pytest.mark.parametrize(("name", "shown"), [("littrainer", True), ("transformers", True), (None, False)])
def test_progress_bars_are_off_if_a_parent_logger_shows_only_errors(name: str | None, shown: bool) -> None:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        assert TrainingArguments().disable_tqdm is shown
        assert TrainingArguments(disable_tqdm=False).disable_tqdm is False
    finally:
        logger.setLevel(level)


@pytest.mark.parametrize("name", ["lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "lightning"])
def test_text_without_json_raises_if_the_field_does_not_accept_files(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not valid JSON.*num_cycles=2"):
        TrainingArguments(**{name: "num_cycles=2"})


def test_containers_of_hydra_become_dicts_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class DictConfig(UserDict[str, Any]):
        __module__ = "omegaconf.dictconfig"

    class ListConfig(UserList[Any]):
        __module__ = "omegaconf.listconfig"

    monkeypatch.setitem(sys.modules, "omegaconf", ModuleType("omegaconf"))
    config = DictConfig(
        {"transformer_layer_cls_to_wrap": ListConfig(["Layer"]), "inner": DictConfig({"a": ListConfig([1])})}
    )
    args = TrainingArguments(
        tmp_path,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs=DictConfig({"min_lr_rate": 0.1}),
        lightning=DictConfig({"callbacks": ListConfig([config])}),
        label_names=ListConfig(["labels"]),
        report_to=ListConfig(["none"]),
    )
    assert (type(args.lr_scheduler_kwargs), args.lr_scheduler_kwargs) == (dict, {"min_lr_rate": 0.1})
    assert args.lightning == {"callbacks": [{"transformer_layer_cls_to_wrap": ["Layer"], "inner": {"a": [1]}}]}
    assert args.label_names == ["labels"] and args.report_to == []

    @dataclasses.dataclass
    class WithExtraField(TrainingArguments):
        extra: Any = None

    extra = UserList([1])
    assert WithExtraField(str(tmp_path), extra=extra).extra is extra
