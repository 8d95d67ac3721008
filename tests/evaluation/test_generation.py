from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from littrainer.evaluation.generation import (
    extract_prompts,
    find_padding_token,
    load_config,
    needs_synced_gpus,
)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", ["generation_config.json", "other.json"])
def test_a_config_is_copied_or_read_from_a_file(tmp_path: Path, kind: Any, name: str) -> None:
    config = GenerationConfig(max_length=7)
    assert load_config(config) is not config and load_config(config).max_length == 7
    config.save_pretrained(tmp_path, name)
    assert load_config(kind(tmp_path / name)).max_length == 7
    assert name == "other.json" or load_config(kind(tmp_path)).max_length == 7


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [("{", OSError, "JSON"), ('{"temperature": 0.5, "do_sample": false}', ValueError, "temperature")],
)
def test_a_broken_file_is_refused_with_its_name_and_the_cause(
    tmp_path: Path, text: str, error: type[Exception], words: str
) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(error, match=words) as caught:
        load_config(tmp_path / "broken.json")
    assert f"generation_config={str(tmp_path / 'broken.json')!r}" in str(caught.value)


def test_a_missing_path_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"generation_config='\./nowhere/at/all' cannot be read"):
        load_config("./nowhere/at/all")


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="generation_config is a dict; give a GenerationConfig"):
        load_config({"max_length": 7})


def test_the_padding_token_is_the_tokenizers_or_the_models() -> None:
    def token(tokenizer: Any, model_padding: int | None = None) -> int:
        return find_padding_token(SimpleNamespace(config=SimpleNamespace(pad_token_id=model_padding)), tokenizer)

    assert token(SimpleNamespace(pad_token_id=0, eos_token_id=2), 7) == 0
    assert token(SimpleNamespace(pad_token_id=None, eos_token_id=2), 7) == 2
    assert token(SimpleNamespace(), 7) == 7 and token(None, 0) == 0
    without = SimpleNamespace(pad_token_id=None, eos_token_id=None)
    for tokenizer, place in ((None, "model.config.pad_token_id"), (without, "SimpleNamespace.pad_token_id")):
        with pytest.raises(ValueError, match=f"set {place}"):
            token(tokenizer)


def test_generation_is_synchronized_if_deepspeed_shards_parameters() -> None:
    model: Any = nn.Linear(2, 2)
    assert not needs_synced_gpus(model, world_size=4)
    model.weight.ds_id = 0
    assert needs_synced_gpus(model, world_size=4)
    assert not needs_synced_gpus(model, world_size=1)


# Tokens, mask, labels and prompt of a row.
PROMPTS: dict[str, tuple[list[int], list[int], list[int], list[int]]] = {
    "answer": ([5, 6, 7, 8], [1, 1, 1, 1], [-100, -100, 7, 8], [5, 6]),
    "a longer prompt, padded on the right": ([3, 4, 5, 0], [1, 1, 1, 0], [-100, -100, -100, -100], [3, 4, 5]),
    "padded on the left": ([0, 5, 6, 7], [0, 1, 1, 1], [-100, -100, 6, 7], [5]),
    "all of it is labels": ([5, 6, 7, 0], [1, 1, 1, 0], [5, 6, 7, -100], [5, 6, 7]),
    "labels of an answer that is not in the row": ([0, 5, 6, 7], [0, 1, 1, 1], [-100, -100, 8, 9], [5, 6, 7]),
}


def test_prompts_end_before_the_labels_and_are_padded_on_the_left() -> None:
    ids, mask, labels = (torch.tensor([row[part] for row in PROMPTS.values()]) for part in range(3))
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "token_type_ids": ids + 10, "pixels": ids[0]}
    prompts = extract_prompts(batch, lambda: 99)
    expected = [row[-1] for row in PROMPTS.values()]
    assert prompts["input_ids"].tolist() == [[99] * (3 - len(prompt)) + prompt for prompt in expected]
    assert prompts["attention_mask"].sum(1).tolist() == [len(prompt) for prompt in expected]
    assert (prompts["token_type_ids"] - 10)[0, 1:].tolist() == [5, 6] and prompts["pixels"] is batch["pixels"]
    assert "labels" not in prompts
    # Without shorter prompts or labels no padding token is required.
    assert extract_prompts({name: value[:1] for name, value in batch.items()}, lambda: 1 // 0)[
        "input_ids"
    ].tolist() == [[5, 6]]
    questions = {"input_ids": ids}
    assert extract_prompts(questions, lambda: 99) is questions
    padded = extract_prompts({"input_ids": ids, "attention_mask": mask}, lambda: 99)
    assert padded["input_ids"].tolist()[1:3] == [[99, 3, 4, 5], [99, 5, 6, 7]]
