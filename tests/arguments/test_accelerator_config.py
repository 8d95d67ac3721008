from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_pt_utils import AcceleratorConfig as TransformersConfig

from littrainer.arguments import TrainingArguments
from littrainer.arguments.accelerator_config import AcceleratorConfig


def test_the_entries_and_their_defaults_are_those_of_transformers() -> None:
    assert AcceleratorConfig().to_dict() == TransformersConfig().to_dict()


def test_nothing_given_becomes_a_config_of_defaults() -> None:
    assert TrainingArguments().accelerator_config == AcceleratorConfig()


def test_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "accelerator.json"
    path.write_text(json.dumps({"use_seedable_sampler": False}))
    for given in (str(path), path):
        args = TrainingArguments(accelerator_config=given)  # type: ignore[arg-type]
        assert args.accelerator_config == AcceleratorConfig(use_seedable_sampler=False)


def test_a_config_object_of_transformers_is_taken_over() -> None:
    given: Any = TransformersConfig(use_seedable_sampler=False)
    args = TrainingArguments(accelerator_config=given)
    assert args.accelerator_config == AcceleratorConfig(use_seedable_sampler=False)


def test_an_unknown_key_in_a_dict_suggests_the_nearest_known_one() -> None:
    with pytest.raises(ValueError, match=r"'even_batch' .did you mean 'even_batches'"):
        TrainingArguments(accelerator_config={"even_batch": True})


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "accelerator.json"
    path.write_text('{"even_batch": true}')
    with pytest.raises(ValueError, match=r"accelerator.json.*'even_batch'"):
        TrainingArguments(accelerator_config=str(path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "cannot be read: No such file"), (b"{", "not valid JSON"), (b"[1]", "JSON object"), (b"\xff", "UTF-8")],
)
def test_a_file_that_holds_no_config_is_refused_in_one_sentence(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "accelerator.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        TrainingArguments(accelerator_config=str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [AcceleratorConfig, 3])
def test_a_class_or_a_number_is_no_config(given: Any) -> None:
    with pytest.raises(TypeError, match=r"accelerator_config=.* not usable"):
        TrainingArguments(accelerator_config=given)


def test_changing_the_dict_of_a_config_leaves_the_config_alone() -> None:
    config = AcceleratorConfig(gradient_accumulation_kwargs={"num_steps": 2})
    config.to_dict()["gradient_accumulation_kwargs"]["num_steps"] = 9
    assert config.gradient_accumulation_kwargs == {"num_steps": 2}
