from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import littrainer
from tests.data.collators.batches import described
from tests.scenarios.data import tag_rows, tiny_tokenizer

Samples = list[dict[str, Any]]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding": "longest", "label_pad_token_id": -1},
    {"padding": "max_length", "max_length": 11},
    {"pad_to_multiple_of": 4},
    {"padding": "max_length", "max_length": 9, "pad_to_multiple_of": 4},
]


def tagged(label: str = "labels", make: Any = list) -> Samples:
    """Samples of varying length with one label for each token."""
    return [{"input_ids": row["input_ids"], label: make(row["labels"])} for row in tag_rows(3)]


def translated(label: str = "labels", make: Any = list) -> Samples:
    """Samples whose labels have lengths of their own."""
    lengths = (2, 6, 1)
    return [
        {"input_ids": row["input_ids"], label: make(row["input_ids"][:1] * length)}
        for row, length in zip(tag_rows(3), lengths, strict=True)
    ]


@pytest.fixture(params=["right", "left"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    made = tiny_tokenizer()
    made.padding_side = request.param
    return made


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["DataCollatorForTokenClassification", "DataCollatorForSeq2Seq"])
def test_labels_are_padded_as_transformers_pads_them(
    tokenizer: Any, name: str, options: dict[str, Any], kind: str
) -> None:
    samples = tagged() if "Token" in name else translated()
    theirs = getattr(transformers, name)(tokenizer, **options)(samples, return_tensors=kind)
    ours = getattr(littrainer, name)(tokenizer, **options)(samples, return_tensors=kind)
    assert described(ours) == described(theirs)


@pytest.mark.parametrize("make", [list, torch.tensor, np.array])
@pytest.mark.parametrize("label", ["label", "labels"])
@pytest.mark.parametrize("name", ["DataCollatorForTokenClassification", "DataCollatorForSeq2Seq"])
def test_labels_may_stand_under_either_name_and_in_any_kind_of_array(name: str, label: str, make: Any) -> None:
    samples = tagged(label, make) if "Token" in name else translated(label, make)
    theirs = getattr(transformers, name)(tiny_tokenizer())(samples)
    assert described(getattr(littrainer, name)(tiny_tokenizer())(samples)) == described(theirs)


def test_tokens_without_labels_are_padded_alone() -> None:
    samples = [{"input_ids": [5, 6]}, {"input_ids": [7]}]
    theirs = transformers.DataCollatorForTokenClassification(tiny_tokenizer())(samples)
    ours = littrainer.DataCollatorForTokenClassification(tiny_tokenizer())(samples)
    assert described(ours) == described(theirs) and "labels" not in ours


@pytest.mark.parametrize("samples", [[{"input_ids": [5]}], [{"input_ids": [5], "labels": None}]], ids=str)
def test_a_translation_without_labels_has_labels_of_none(samples: Samples) -> None:
    theirs = transformers.DataCollatorForSeq2Seq(tiny_tokenizer())(samples)
    ours = littrainer.DataCollatorForSeq2Seq(tiny_tokenizer())(samples)
    assert ours.pop("labels") is None and theirs.pop("labels") is None
    assert described(ours) == described(theirs)


@pytest.mark.parametrize("make", [list, np.array])
def test_without_padding_labels_of_equal_length_are_stacked(make: Any) -> None:
    samples = [{"input_ids": [5, 6], "labels": make([1])}, {"input_ids": [7, 8], "labels": make([2])}]
    theirs = transformers.DataCollatorForSeq2Seq(tiny_tokenizer(), padding=False)(samples)
    assert described(littrainer.DataCollatorForSeq2Seq(tiny_tokenizer(), padding=False)(samples)) == described(theirs)


class ShiftingModel:
    """Makes decoder inputs of labels, like an encoder-decoder model."""

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        return labels.roll(1, dims=-1)


def test_a_model_that_can_makes_the_decoders_inputs_of_the_padded_labels() -> None:
    theirs = transformers.DataCollatorForSeq2Seq(tiny_tokenizer(), model=ShiftingModel())(translated())
    ours = littrainer.DataCollatorForSeq2Seq(tiny_tokenizer(), model=ShiftingModel())(translated())
    assert described(ours) == described(theirs)
    assert "decoder_input_ids" not in littrainer.DataCollatorForSeq2Seq(tiny_tokenizer(), model=object())(translated())


def choices(label: str | None = "labels") -> Samples:
    """Samples with two choices of varying length."""
    samples: Samples = [
        {"input_ids": [[5, 6], [7, 8, 9]], "token_type_ids": [[0, 1], [0, 0, 1]]},
        {"input_ids": [[5], [6]], "token_type_ids": [[1], [0]]},
    ]
    return [{**sample, **({} if label is None else {label: number})} for number, sample in enumerate(samples)]


@pytest.mark.parametrize("label", ["label", "labels"])
@pytest.mark.parametrize("options", [{}, {"padding": "max_length", "max_length": 6}, {"pad_to_multiple_of": 4}])
def test_choices_are_padded_to_the_longest_one_as_transformers_pads_them(options: dict[str, Any], label: str) -> None:
    theirs = transformers.DataCollatorForMultipleChoice(tiny_tokenizer(), **options)(choices(label))
    ours = littrainer.DataCollatorForMultipleChoice(tiny_tokenizer(), **options)(choices(label))
    assert described(ours) == described(theirs)


def test_choices_come_as_arrays_too_and_without_labels() -> None:
    tensors = littrainer.DataCollatorForMultipleChoice(tiny_tokenizer())(choices())
    arrays = littrainer.DataCollatorForMultipleChoice(tiny_tokenizer(), return_tensors="np")(choices())
    assert {name: value.tolist() for name, value in arrays.items()} == {
        name: value.tolist() for name, value in tensors.items()
    }
    assert "labels" not in littrainer.DataCollatorForMultipleChoice(tiny_tokenizer())(choices(label=None))


@pytest.mark.parametrize(
    "name", ["DataCollatorForTokenClassification", "DataCollatorForMultipleChoice", "DataCollatorForLanguageModeling"]
)
def test_another_kind_of_tensor_is_refused_by_every_collator(name: str) -> None:
    with pytest.raises(ValueError, match=r"'tf'.*'pt'.*'np'"):
        getattr(littrainer, name)(tiny_tokenizer())(tagged(), return_tensors="tf")
