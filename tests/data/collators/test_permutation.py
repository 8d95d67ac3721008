from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from littrainer import DataCollatorForPermutationLanguageModeling
from tests.data.collators.batches import described
from tests.scenarios.data import tiny_tokenizer


def samples(length: int = 12) -> list[dict[str, Any]]:
    """Token ids with special tokens and padding among them."""
    return [{"input_ids": [2, *range(5, length + 3 - padding), 3, *[0] * padding]} for padding in (0, 1, 4)]


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("options", [{}, {"plm_probability": 0.5, "max_span_length": 2}, {"plm_probability": 1.0}])
@pytest.mark.parametrize("as_lists", [False, True])
def test_batches_and_random_draws_are_those_of_transformers(kind: str, options: dict[str, Any], as_lists: bool) -> None:
    outcomes = []
    for collator_class in (
        transformers.DataCollatorForPermutationLanguageModeling,
        DataCollatorForPermutationLanguageModeling,
    ):
        collator: Any = collator_class(tiny_tokenizer(), return_tensors=kind, **options)
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        given = [sample["input_ids"] if as_lists else sample for sample in samples()]
        batches = [described(collator(given)) for _ in range(4)]
        outcomes.append((batches, random.random(), np.random.random(), torch.rand(()).item()))
    assert outcomes[0] == outcomes[1]


def test_no_position_may_see_itself_where_it_is_hidden() -> None:
    torch.manual_seed(0)
    batch = DataCollatorForPermutationLanguageModeling(tiny_tokenizer(), plm_probability=0.5)(samples())
    hidden = batch["labels"] != -100
    assert hidden.any()
    assert torch.equal(batch["perm_mask"].diagonal(dim1=1, dim2=2).bool(), hidden)
    assert (batch["input_ids"][hidden] == tiny_tokenizer().mask_token_id).all()


def test_samples_of_odd_length_are_refused_with_that_length() -> None:
    with pytest.raises(ValueError, match=r"have 11 tokens.*even length"):
        DataCollatorForPermutationLanguageModeling(tiny_tokenizer())(samples(length=11))


def test_a_tokenizer_without_mask_token_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="mask token"):
        DataCollatorForPermutationLanguageModeling(tokenizer)(samples())
