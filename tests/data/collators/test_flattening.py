from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from littrainer import DataCollatorWithFlattening


def comparable(batch: dict[str, Any]) -> dict[str, Any]:
    """Entries in their order; the longest lengths are plain numbers."""
    return {
        name: value if isinstance(value, int) else (type(value).__name__, str(value.dtype), value.tolist())
        for name, value in batch.items()
    }


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_position_ids": False},
        {"separator_id": 0, "position_ids_start": 2},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
@pytest.mark.parametrize("labelled", [False, True])
def test_samples_become_the_row_that_transformers_makes_of_them(
    options: dict[str, Any], kind: str, make: Any, labelled: bool
) -> None:
    samples = [{"input_ids": make(ids)} for ids in ([5, 6, 7], [8], [9, 10])]
    if labelled:
        samples = [{**sample, "labels": make([1] * len(sample["input_ids"]))} for sample in samples]
    theirs = transformers.DataCollatorWithFlattening(return_tensors=kind, **options)(samples)
    ours = DataCollatorWithFlattening(return_tensors=kind, **options)(samples)
    assert comparable(ours) == comparable(theirs) and list(ours) == list(theirs)


def test_settings_may_be_given_for_one_batch() -> None:
    samples = [{"input_ids": [5, 6]}, {"input_ids": [7]}]
    batch = DataCollatorWithFlattening()(samples, return_tensors="np", separator_id=-1)
    assert isinstance(batch["labels"], np.ndarray) and batch["labels"].tolist() == [[-1, 6, -1]]


def test_another_kind_of_tensor_is_refused_with_the_kinds_there_are() -> None:
    with pytest.raises(ValueError, match=r"'tf'.*'pt'.*'np'"):
        DataCollatorWithFlattening()([{"input_ids": [1]}], return_tensors="tf")
