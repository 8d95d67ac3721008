from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import pytest
import transformers

from littrainer import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

ONLY_OURS = ["warmup_ratio", "logging_dir", "lightning"]


def test_the_fields_are_those_of_transformers_in_its_order_with_its_defaults() -> None:
    def described(cls: type, left_out: list[str]) -> list[tuple[str, object]]:
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        return [(name, default) for name, default in defaults.items() if name not in left_out][-5:]

    theirs = described(transformers.Seq2SeqTrainingArguments, [])
    assert described(Seq2SeqTrainingArguments, ONLY_OURS) == theirs
    names = [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)]
    assert names[:-5] == [field.name for field in dataclasses.fields(TrainingArguments)]


COMMAND_LINE = ["--predict_with_generate", "--generation_max_length", "7", "--generation-num-beams", "2"]


@pytest.mark.parametrize("further", [[], ["--generation_config", "some/config.json"], ["--sortish_sampler", "no"]])
def test_a_command_line_is_read_as_transformers_parser_reads_it(further: list[str]) -> None:
    line = ["--output_dir", "out", *COMMAND_LINE, *further]
    known: Any = transformers.Seq2SeqTrainingArguments
    theirs = argparse.ArgumentParser.parse_args(transformers.HfArgumentParser(known), line)
    (ours,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(line)
    for name in ("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("wanted", [None, "some/config.json", transformers.GenerationConfig(max_length=7)])
def test_a_generation_config_is_written_as_transformers_writes_it(wanted: Any) -> None:
    settings: dict[str, Any] = {"predict_with_generate": True, "generation_config": wanted, "report_to": "none"}
    theirs = transformers.Seq2SeqTrainingArguments("out", **settings).to_dict()["generation_config"]
    args = Seq2SeqTrainingArguments("out", **settings)
    assert args.to_dict()["generation_config"] == theirs
    assert json.loads(args.to_json_string())["generation_config"] == json.loads(json.dumps(theirs))
    assert args.to_sanitized_dict()["generation_config"] == str(theirs)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"generation_num_beams": 0}, ValueError, "generation_num_beams=0 is out of range; give a whole number from 1"),
        ({"generation_max_length": -1}, ValueError, "generation_max_length=-1"),
        ({"generation_max_length": "9"}, TypeError, "generation_max_length='9' is text"),
        ({"generation_num_beams": 1.5}, ValueError, "generation_num_beams=1.5"),
        ({"predict_with_generate": "yes"}, TypeError, "predict_with_generate='yes'"),
        ({"generation_config": {"max_length": 7}}, TypeError, "a path or GenerationConfig"),
        ({"generation_config": 7}, TypeError, "generation_config=7"),
        ({"generation_config": transformers.T5Config()}, TypeError, "generation_config"),
        ({"sortish_sampler": True, "train_sampling_strategy": "sequential"}, ValueError, "set one of them"),
        ({"predict_with_generat": True}, TypeError, "did you mean 'predict_with_generate'?"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_value_that_cannot_be_right_is_refused_by_name(given: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error) as caught:
        Seq2SeqTrainingArguments("out", **given)
    assert words in str(caught.value)
