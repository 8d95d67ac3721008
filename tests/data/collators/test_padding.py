from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from littrainer.data.collators import DataCollatorWithPadding, default_collator_for, default_data_collator
from tests.data.collators.batches import described
from tests.scenarios.data import tiny_tokenizer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "max_length", "max_length": 9},
        {"pad_to_multiple_of": 4},
        {"return_tensors": "np"},
    ],
)
@pytest.mark.parametrize("label", ["label", "label_ids", "labels"])
def test_tokenized_samples_are_padded_as_transformers_pads_them(options: dict[str, Any], label: str) -> None:
    tokenizer = tiny_tokenizer()
    samples = [{**tokenizer(text), label: number} for number, text in enumerate(["loss", "step batch model"])]
    theirs = transformers.DataCollatorWithPadding(tokenizer, **options)(samples)
    ours = DataCollatorWithPadding(tokenizer, **options)(samples)
    assert described(ours) == described(theirs)
    assert "labels" in ours and len(ours["input_ids"][0]) > 1


class AdvisingTokenizer:
    """Fails to pad, and notes whether its advice against `pad` was switched off at that time."""

    def __init__(self) -> None:
        self.deprecation_warnings = {"Asking-to-pad-a-fast-tokenizer": False}
        self.was_silenced: bool | None = None

    def pad(self, samples: Any, **options: Any) -> Any:
        self.was_silenced = self.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"]
        raise OverflowError


def test_a_tokenizers_advice_against_pad_is_off_while_padding_only() -> None:
    tokenizer = AdvisingTokenizer()
    with pytest.raises(OverflowError):
        DataCollatorWithPadding(tokenizer)([{"input_ids": [1]}])
    assert tokenizer.was_silenced
    assert tokenizer.deprecation_warnings == {"Asking-to-pad-a-fast-tokenizer": False}


def test_a_trainer_pads_where_its_processing_class_can() -> None:
    tokenizer = tiny_tokenizer()
    collator = default_collator_for(tokenizer)
    assert isinstance(collator, DataCollatorWithPadding) and collator.tokenizer is tokenizer


@pytest.mark.parametrize("processing_class", [None, SimpleNamespace(pad_token_id=0)])
def test_a_trainer_stacks_where_nothing_can_pad(processing_class: Any) -> None:
    assert default_collator_for(processing_class) is default_data_collator
