from __future__ import annotations

import logging
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import littrainer
from littrainer.data.collators import (
    DefaultDataCollator,
    RemoveColumnsCollator,
    default_data_collator,
)
from tests.scenarios.data import tiny_tokenizer

Samples = list[dict[str, Any]]


def describe_batch(batch: dict[str, Any]) -> dict[str, tuple[str, str, list[Any]]]:
    """Return type, dtype and values of each entry."""
    return {name: (type(value).__name__, str(value.dtype), value.tolist()) for name, value in batch.items()}


WITHOUT_TENSORS: dict[str, Samples] = {
    "whole label": [{"label": 2}, {"label": 0}],
    "float label": [{"label": 2.0}, {"label": 0.5}],
    "boolean label": [{"label": True}, {"label": False}],
    "NumPy label": [{"label": np.int32(2)}, {"label": np.int32(1)}],
    "NumPy float label": [{"label": np.float64(0.25)}, {"label": np.float64(1)}],
    "several labels a sample": [{"label": [1, 0]}, {"label": [0, 1]}],
    "whole label_ids": [{"label_ids": [1, 2]}, {"label_ids": [3, -100]}],
    "float label_ids": [{"label_ids": [1.0, 2]}, {"label_ids": [3, 4]}],
    "label_ids array": [{"label_ids": np.array([1, 2])}, {"label_ids": np.array([3, 4])}],
    "float label_ids array": [{"label_ids": np.array([1.5, 2])}, {"label_ids": np.array([3.0, 4])}],
    "label of None beside label_ids": [{"label": None, "label_ids": [1]}, {"label": None, "label_ids": [2]}],
    "no label but None": [{"label": None, "x": 1}, {"label": None, "x": 2}],
    "label and labels": [{"label": 1, "labels": 5}, {"label": 2, "labels": 6}],
    "labels under the model's own name": [{"labels": 1.5}, {"labels": 2.5}],
    "numbers": [{"x": 1, "y": 0.5, "z": True}, {"x": 2, "y": 1, "z": False}],
    "lists": [{"x": [1, 2], "y": [0.5, 1.5]}, {"x": [3, 4], "y": [1.0, 2.0]}],
    "nested lists": [{"x": [[1, 2], [3, 4]]}, {"x": [[5, 6], [7, 8]]}],
    "arrays": [{"x": np.arange(3, dtype=np.float32)}, {"x": np.ones(3, dtype=np.float32)}],
    "texts and None are left out": [{"text": "a", "no": None, "x": 1}, {"text": "b", "no": 3, "x": 2}],
}
WITH_TENSORS: dict[str, Samples] = {
    "tensors": [{"x": torch.ones(2), "y": torch.tensor(1)}, {"x": torch.zeros(2), "y": torch.tensor(2)}],
    "tensor label": [{"label": torch.tensor(3)}, {"label": torch.tensor(4)}],
    "float tensor label": [{"label": torch.tensor(0.5)}, {"label": torch.tensor(4.0)}],
    "tensor label_ids": [{"label_ids": torch.tensor([1, 2])}, {"label_ids": torch.tensor([3, 4])}],
    "tensor label_ids of 32 bits": [{"label_ids": torch.tensor([1], dtype=torch.int32)}] * 2,
}
CASES = [
    *((name, samples, kind) for name, samples in WITHOUT_TENSORS.items() for kind in ("pt", "np")),
    *((name, samples, "pt") for name, samples in WITH_TENSORS.items()),
]


@pytest.mark.parametrize(("samples", "kind"), [case[1:] for case in CASES], ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_samples_of_equal_length_are_stacked_as_by_transformers(samples: Samples, kind: str) -> None:
    theirs = describe_batch(transformers.default_data_collator(samples, return_tensors=kind))
    assert describe_batch(default_data_collator(samples, return_tensors=kind)) == theirs


@pytest.mark.parametrize("make", [list, torch.tensor, np.array])
@pytest.mark.parametrize("name", ["input_ids", "label_ids"])
def test_samples_of_unequal_length_are_refused_with_column_and_advice(make: Any, name: str) -> None:
    samples = [{name: make([1, 2])}, {name: make([3])}]
    with pytest.raises(ValueError, match=f"(?s)'{name}'.*[Pp]ad.*data_collator.*processing_class") as caught:
        default_data_collator(samples)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("default", ["pt", "np"])
@pytest.mark.parametrize("override", [None, "pt", "np"])
def test_the_default_collator_object_has_a_default_tensor_type(default: str, override: str | None) -> None:
    samples = [{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}]
    theirs = transformers.DefaultDataCollator(return_tensors=default)(samples, return_tensors=override)
    ours = DefaultDataCollator(return_tensors=default)(samples, return_tensors=override)
    assert describe_batch(ours) == describe_batch(theirs)


# ---- Columns that the model does not take ----------------------------------------------------------------------------


def test_dropped_columns_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    collator = RemoveColumnsCollator(list, ["x"], logging.getLogger("columns"), "BertModel", "training")
    for _ in range(2):
        collator([{"x": 1, "text": "a", "id": 2}])
    (record,) = caplog.records
    for word in ("training", "BertModel", "id, text", "remove_unused_columns=False"):
        assert word in record.getMessage()


def test_a_collator_may_pop_entries_without_changing_the_data() -> None:
    rows = [{"x": 1}, {"x": 2, "text": "a"}]
    RemoveColumnsCollator(lambda samples: [sample.pop("x") for sample in samples], ["x"])(rows)
    assert rows == [{"x": 1}, {"x": 2, "text": "a"}]


# ---- transformers' own ----------------------------------------------------------------------------------------------

TRANSFORMERS_TASKS = (
    "LanguageModeling",
    "MultipleChoice",
    "PermutationLanguageModeling",
    "Seq2Seq",
    "TokenClassification",
)


def test_other_collators_are_re_exports_of_transformers() -> None:
    names = ("DataCollatorWithFlattening", "DataCollatorWithPadding", "Adafactor")
    for name in (*(f"DataCollatorFor{task}" for task in TRANSFORMERS_TASKS), *names):
        assert getattr(littrainer, name) is getattr(transformers, name), name


def test_the_earlier_name_for_whole_word_masking_works_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="whole_word_mask=True"):
        collator = littrainer.DataCollatorForWholeWordMask(tiny_tokenizer(), mlm_probability=0.5)
    again = pickle.loads(pickle.dumps(collator))
    assert (again.mlm, again.whole_word_mask, again.mlm_probability) == (True, True, 0.5)
    assert isinstance(again, transformers.DataCollatorForLanguageModeling)


@pytest.mark.parametrize(
    ("module", "name"),
    [("transformers.data.data_collator", "DataCollatorForSeq2Seq"), ("transformers.optimization", "GreedyLR")],
)
def test_without_transformers_its_names_raise_an_import_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.delitem(vars(littrainer), name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{name} is transformers' own, .* pip install -U transformers"):
        getattr(littrainer, name)
    assert littrainer.default_data_collator is default_data_collator
