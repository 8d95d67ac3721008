"""Fields and choices equal those of transformers."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import pytest
import transformers
import transformers.debug_utils
import transformers.trainer_utils
import transformers.training_args
from transformers import HfArgumentParser

from littrainer import Seq2SeqTrainingArguments
from littrainer.arguments import TrainingArguments, choices
from littrainer.arguments.fields import AdditionalFields
from littrainer.arguments.parser import HfArgumentParser as OurParser

ONLY_OURS = [field.name for field in dataclasses.fields(AdditionalFields)]
# transformers' default, False, also disables early stopping's restore here.
OTHER_DEFAULTS = {"restore_callback_states_from_checkpoint": None}


def _name_and_default(field: dataclasses.Field) -> tuple[str, object]:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return field.name, default


def test_the_fields_are_those_of_transformers_in_its_order_with_its_defaults_and_then_ours() -> None:
    chosen = {"eval_loss_weighting": "batches", "on_nonfinite": "warn", "loss_normalization": "transformers"}
    switches = ("async_save", "log_speed", "auto_micro_batch", "chunked_loss", "log_loss_terms", "eval_at_end")
    defaults = {**dict.fromkeys(switches, False), "ema_use": "both", **chosen}
    added = [(name, defaults.get(name)) for name in ONLY_OURS]
    theirs = [_name_and_default(field) for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)]
    theirs = [(name, OTHER_DEFAULTS.get(name, default)) for name, default in theirs]
    ours = [_name_and_default(field) for field in dataclasses.fields(Seq2SeqTrainingArguments)]
    assert ours == theirs[:-5] + added + theirs[-5:]
    assert [_name_and_default(field) for field in dataclasses.fields(TrainingArguments)] == ours[:-5]


CHOICES: dict[str, Any] = {
    **dict.fromkeys(
        ("IntervalStrategy", "SaveStrategy", "HubStrategy", "SchedulerType", "HPSearchBackend", "FSDPOption"),
        transformers.trainer_utils,
    ),
    **dict.fromkeys(("OptimizerNames", "ParallelMode"), transformers.training_args),
    "DebugOption": transformers.debug_utils,
}


@pytest.mark.parametrize("name", CHOICES)
def test_each_choice_has_the_members_and_values_of_transformers(name: str) -> None:
    theirs, ours = getattr(CHOICES[name], name), getattr(choices, name)
    added = {"MUON": "muon"} if name == "OptimizerNames" else {}
    assert {member.name: member.value for member in ours} == {member.name: member.value for member in theirs} | added


def test_a_member_behaves_as_its_string_where_that_of_transformers_does() -> None:
    theirs, ours = transformers.trainer_utils.IntervalStrategy.EPOCH, choices.IntervalStrategy.EPOCH
    assert ours == "epoch" == ours.value and ours == choices.SaveStrategy.EPOCH and hash(ours) == hash("epoch")
    assert json.dumps(ours) == json.dumps(theirs) == '"epoch"'
    assert (str(ours), f"{ours}", repr(ours)) == (str(theirs), f"{theirs}", repr(theirs))
    assert choices.EvaluationStrategy is choices.IntervalStrategy
    with pytest.warns(FutureWarning, match="write 'adamw_torch_fused'"):
        assert choices.OptimizerNames("adamw_apex_fused") is choices.OptimizerNames.ADAMW_TORCH_FUSED


def test_every_field_has_a_line_of_help_unlike_transformers() -> None:
    theirs = {field.name: field.metadata["help"] for field in dataclasses.fields(transformers.TrainingArguments)}
    for field in dataclasses.fields(TrainingArguments):
        text = field.metadata["help"]
        assert text and "\n" not in text and text.endswith("."), field.name
        assert text != theirs.get(field.name), field.name


def test_parser_options_in_the_metadata_are_those_of_transformers() -> None:
    def options(cls: type) -> dict[str, dict]:
        options_of: dict[str, dict] = {}
        for field in dataclasses.fields(cls):
            rest = {key: value for key, value in field.metadata.items() if key != "help"}
            if "choices" in rest:
                rest["choices"] = list(rest["choices"])
            options_of[field.name] = rest
        return {name: rest for name, rest in options_of.items() if name not in ONLY_OURS}

    assert options(TrainingArguments) == options(transformers.TrainingArguments)


COMMAND_LINES = [
    [],
    ["--output_dir", "there", "--num_train_epochs", "1.5", "--learning_rate", "3e-4", "--warmup_steps", "0.1"],
    ["--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", '{"num_cycles": "0.5"}', "--optim", "sgd"],
    ["--eval_strategy", "steps", "--eval-steps", "0.25", "--save_strategy", "steps", "--save_steps", "0.5"],
    ["--do_train", "--no_dataloader_pin_memory", "--logging_first_step", "true", "--tf32", "no"],
    ["--label_names", "a", "b", "--include_for_metrics", "inputs", "loss", "--report_to", "wandb"],
    ["--gradient_checkpointing", "--fsdp", "--accelerator_config", "a.json", "--trackio_static_space_id", "x"],
    ["--optim_target_modules", "attn", "--debug", "underflow_overflow", "--train_sampling_strategy", "sequential"],
    ["--predict_with_generate", "--generation_max_length", "7", "--generation-num-beams", "2"],
    ["--generation_config", "some/config.json", "--sortish_sampler", "no"],
    ["--hub_strategy", "end", "--ddp_backend", "gloo"],
]


@pytest.mark.parametrize("command_line", COMMAND_LINES, ids=" ".join)
def test_both_parsers_parse_equal_values_for_both_argument_classes(command_line: list[str]) -> None:
    def parse(parser_class: Any, cls: Any) -> dict[str, Any]:
        return vars(argparse.ArgumentParser.parse_args(parser_class(cls), command_line))

    theirs = parse(HfArgumentParser, transformers.Seq2SeqTrainingArguments)
    for parser_class in (HfArgumentParser, OurParser):
        ours = parse(parser_class, Seq2SeqTrainingArguments)
        assert {name: ours[name] for name in theirs} == {**theirs, **OTHER_DEFAULTS}


def test_lightning_keywords_can_be_json_on_the_command_line() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--lightning", '{"limit_val_batches": "4", "profiler": "simple"}']
    )
    assert args.lightning == {"limit_val_batches": 4, "profiler": "simple"}
