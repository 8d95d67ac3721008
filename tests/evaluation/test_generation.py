from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from littrainer.evaluation.generation import (
    generates_in_step,
    inputs_to_generate_from,
    keywords_of_a_call,
    load_config,
    padding_token,
)


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        ((None, None), {}, {}),
        ((9, 2), {}, {"max_length": 9, "num_beams": 2}),
        ((9, 2), {"max_length": 4}, {"max_length": 4, "num_beams": 2}),
        ((9, 2), {"max_length": None, "num_beams": None}, {"max_length": 9, "num_beams": 2}),
        ((9, None), {"max_new_tokens": 3}, {"max_new_tokens": 3}),
        ((9, 2), {"num_beams": 1, "do_sample": True}, {"num_beams": 1, "do_sample": True, "max_length": 9}),
        ((None, None), {"synced_gpus": False}, {"synced_gpus": False}),
    ],
)
def test_a_call_decides_before_the_arguments(arguments: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    args = SimpleNamespace(generation_max_length=arguments[0], generation_num_beams=arguments[1])
    before = dict(given)
    assert keywords_of_a_call(args, given) == expected
    assert given == before


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", ["generation_config.json", "other.json"])
def test_a_config_is_copied_or_read_from_a_file(tmp_path: Path, kind: Any, name: str) -> None:
    wanted = GenerationConfig(max_length=7)
    assert load_config(wanted) is not wanted and load_config(wanted).max_length == 7
    wanted.save_pretrained(tmp_path, name)
    assert load_config(kind(tmp_path / name)).max_length == 7
    assert name == "other.json" or load_config(kind(tmp_path)).max_length == 7


def test_settings_that_contradict_each_other_are_refused_with_what_is_wrong() -> None:
    wanted = GenerationConfig(do_sample=False, num_beams=1)
    wanted.temperature = 0.5
    with pytest.raises(ValueError, match=r"(?s)generation_config is not valid.*temperature"):
        load_config(wanted)


BROKEN_FILES = {
    "no JSON": ("{", OSError, "JSON"),
    "sampling without sampling": ('{"temperature": 0.5, "do_sample": false}', ValueError, "temperature"),
}


@pytest.mark.parametrize("content", BROKEN_FILES)
def test_a_broken_file_is_refused_with_its_name_and_what_is_wrong(tmp_path: Path, content: str) -> None:
    text, error, words = BROKEN_FILES[content]
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(error) as caught:
        load_config(tmp_path / "broken.json")
    assert f"generation_config={str(tmp_path / 'broken.json')!r}" in str(caught.value)
    assert words in str(caught.value)


def test_a_path_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"generation_config='\./nowhere/at/all' cannot be read"):
        load_config("./nowhere/at/all")


@pytest.mark.parametrize("wanted", [7, {"max_length": 7}, True])
def test_a_value_of_another_type_is_refused(wanted: Any) -> None:
    with pytest.raises(TypeError, match=f"generation_config is an? {type(wanted).__name__}; give a GenerationConfig"):
        load_config(wanted)


LABELS = torch.tensor([[5, 6, 2]])


@pytest.mark.parametrize(
    ("inputs", "kept"),
    [
        ({"input_ids": LABELS, "labels": LABELS}, ["input_ids", "labels"]),
        ({"input_ids": LABELS, "labels": None}, ["input_ids"]),
        (
            {"labels": LABELS, "decoder_input_ids": LABELS, "decoder_attention_mask": LABELS, "input_ids": LABELS},
            ["labels", "input_ids"],
        ),
        ({"labels": LABELS, "decoder_input_ids": LABELS[:, :1]}, ["labels", "decoder_input_ids"]),
        ({"labels": None, "decoder_input_ids": LABELS}, ["decoder_input_ids"]),
        ({"decoder_input_ids": LABELS}, ["decoder_input_ids"]),
    ],
)
def test_decoder_inputs_made_from_the_labels_are_left_out(inputs: dict[str, Any], kept: list[str]) -> None:
    assert list(inputs_to_generate_from(inputs)) == kept


def trainer_with(processing_class: Any, pad_token_id: int | None = None) -> Any:
    model = SimpleNamespace(config=SimpleNamespace(pad_token_id=pad_token_id))
    return SimpleNamespace(processing_class=processing_class, model=model)


def test_the_padding_token_is_the_tokenizers_or_else_the_models() -> None:
    assert padding_token(trainer_with(SimpleNamespace(pad_token_id=0, eos_token_id=2), 7)) == 0
    assert padding_token(trainer_with(SimpleNamespace(pad_token_id=None, eos_token_id=2), 7)) == 2
    assert padding_token(trainer_with(SimpleNamespace(), 7)) == 7
    assert padding_token(trainer_with(None, 0)) == 0


@pytest.mark.parametrize(
    ("processing_class", "place"),
    [
        (None, "model.config.pad_token_id"),
        (SimpleNamespace(pad_token_id=None, eos_token_id=None), "SimpleNamespace.pad_token_id"),
    ],
)
def test_without_a_padding_token_the_error_says_where_to_set_one(processing_class: Any, place: str) -> None:
    with pytest.raises(ValueError, match=f"set {place}"):
        padding_token(trainer_with(processing_class))


def test_processes_generate_in_step_where_deepspeed_shards_parameters() -> None:
    model: Any = nn.Linear(2, 2)
    assert not generates_in_step(model, world_size=4)
    model.weight.ds_id = 0
    assert generates_in_step(model, world_size=4)
    assert not generates_in_step(model, world_size=1)


def test_processes_generate_in_step_where_fsdp_shards_parameters(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2))
        fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
        assert generates_in_step(model, world_size=2)
    finally:
        torch.distributed.destroy_process_group()
