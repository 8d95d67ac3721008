from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.data.data_collator import _numpy_collate_batch, _torch_collate_batch

from littrainer.data.collators.token_rows import padded_token_rows
from tests.data.collators.batches import described
from tests.scenarios.data import tiny_tokenizer

THEIRS: dict[str, Any] = {"pt": _torch_collate_batch, "np": _numpy_collate_batch}
EQUAL = ([1, 2], [3, 4])
UNEQUAL = ([1, 2, 3], [4], [5, 6])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [None, 2, 4])
@pytest.mark.parametrize(
    ("kind", "make"),
    [("pt", list), ("pt", np.array), ("pt", torch.tensor), ("np", list), ("np", tuple), ("np", np.array)],
)
@pytest.mark.parametrize("samples", [EQUAL, UNEQUAL])
def test_token_ids_are_padded_as_transformers_pads_them(
    samples: Any, kind: str, make: Any, multiple: int | None, side: str
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    rows = [make(sample) for sample in samples]
    theirs = {"rows": THEIRS[kind](rows, tokenizer, multiple)}
    assert described({"rows": padded_token_rows(rows, tokenizer, kind, multiple)}) == described(theirs)


def test_a_tokenizer_without_padding_token_is_refused_only_where_there_is_something_to_pad() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    assert padded_token_rows(EQUAL, tokenizer, "pt").tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"padding token.*pad_token = "):
        padded_token_rows(UNEQUAL, tokenizer, "pt")


def test_the_samples_themselves_are_not_changed_by_what_is_done_to_the_batch() -> None:
    sample = torch.tensor([1, 2])
    padded_token_rows([sample, sample], tiny_tokenizer(), "pt")[0, 0] = 9
    assert sample.tolist() == [1, 2]
