from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import GenerationConfig

from littrainer.evaluation.generation import (
    generates_in_step,
    load_config,
    padding_token,
)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", ["generation_config.json", "other.json"])
def test_a_config_is_copied_or_read_from_a_file(tmp_path: Path, kind: Any, name: str) -> None:
    wanted = GenerationConfig(max_length=7)
    assert load_config(wanted) is not wanted and load_config(wanted).max_length == 7
    wanted.save_pretrained(tmp_path, name)
    assert load_config(kind(tmp_path / name)).max_length == 7
    assert name == "other.json" or load_config(kind(tmp_path)).max_length == 7


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [("{", OSError, "JSON"), ('{"temperature": 0.5, "do_sample": false}', ValueError, "temperature")],
)
def test_a_broken_file_is_refused_with_its_name_and_what_is_wrong(
    tmp_path: Path, text: str, error: type[Exception], words: str
) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(error, match=words) as caught:
        load_config(tmp_path / "broken.json")
    assert f"generation_config={str(tmp_path / 'broken.json')!r}" in str(caught.value)


def test_a_path_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"generation_config='\./nowhere/at/all' cannot be read"):
        load_config("./nowhere/at/all")


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="generation_config is a dict; give a GenerationConfig"):
        load_config({"max_length": 7})


def test_the_padding_token_is_the_tokenizers_or_else_the_models() -> None:
    def token(tokenizer: Any, of_model: int | None = None) -> int:
        return padding_token(SimpleNamespace(config=SimpleNamespace(pad_token_id=of_model)), tokenizer)

    assert token(SimpleNamespace(pad_token_id=0, eos_token_id=2), 7) == 0
    assert token(SimpleNamespace(pad_token_id=None, eos_token_id=2), 7) == 2
    assert token(SimpleNamespace(), 7) == 7 and token(None, 0) == 0
    without = SimpleNamespace(pad_token_id=None, eos_token_id=None)
    for tokenizer, place in ((None, "model.config.pad_token_id"), (without, "SimpleNamespace.pad_token_id")):
        with pytest.raises(ValueError, match=f"set {place}"):
            token(tokenizer)


def test_processes_generate_in_step_where_deepspeed_shards_parameters() -> None:
    model: Any = nn.Linear(2, 2)
    assert not generates_in_step(model, world_size=4)
    model.weight.ds_id = 0
    assert generates_in_step(model, world_size=4)
    assert not generates_in_step(model, world_size=1)
