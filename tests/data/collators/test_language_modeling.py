from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from littrainer import DataCollatorForLanguageModeling, DataCollatorForWholeWordMask
from tests.data.collators.batches import described
from tests.scenarios.data import tiny_tokenizer, token_rows

Samples = list[Any]

TEXTS = ("loss step batch", "model data epoch rate norm seed rank", "world")


def rows(special_tokens: bool = False) -> Samples:
    """Token ids that begin and end with a special token."""
    samples: Samples = [{"input_ids": [2, *row["input_ids"], 3]} for row in token_rows(6, longest=12)]
    for sample in samples:
        # Not what the tokenizer would find: its own list would count other tokens.
        sample.update(
            {"special_tokens_mask": [1, 1, *[0] * (len(sample["input_ids"]) - 3), 1]} if special_tokens else {}
        )
    return samples


def words() -> Samples:
    """Tokens with offsets: some follow the one before without a gap, some after a special token."""
    offsets = [(0, 0), (0, 3), (3, 5), (6, 8), (8, 9), (9, 9), (9, 12), (12, 15), (0, 0)]
    special = [1, 0, 0, 0, 0, 1, 0, 0, 1]
    sample = {"input_ids": [2, *range(6, 13), 3], "offset_mapping": offsets, "special_tokens_mask": special}
    return [dict(sample) for _ in range(5)]


def seed_all() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def where_generators_stand() -> tuple[Any, ...]:
    return random.random(), np.random.random(), torch.rand(()).item()


CASES: dict[str, tuple[dict[str, Any], Samples]] = {
    "dicts": ({}, rows()),
    "special tokens given": ({}, rows(special_tokens=True)),
    "lists": ({}, [sample["input_ids"] for sample in rows()]),
    "padded to a multiple": ({"pad_to_multiple_of": 8}, rows()),
    "lists padded to a multiple": ({"pad_to_multiple_of": 8}, [sample["input_ids"] for sample in rows()]),
    "many tokens": ({"mlm_probability": 0.7}, rows()),
    "only masks": ({"mask_replace_prob": 1, "random_replace_prob": 0, "mlm_probability": 0.5}, rows()),
    "only random tokens": ({"mask_replace_prob": 0, "random_replace_prob": 1, "mlm_probability": 0.5}, rows()),
    "no random tokens": ({"mask_replace_prob": 0.5, "random_replace_prob": 0, "mlm_probability": 0.5}, rows()),
    "balanced": ({"mask_replace_prob": 0.5, "random_replace_prob": 0.4, "mlm_probability": 0.5}, rows()),
    "a seed": ({"seed": 11, "mlm_probability": 0.4}, rows()),
    "a seed of 0": ({"seed": 0, "mlm_probability": 0.4}, rows()),
    "whole words": ({"whole_word_mask": True, "mlm_probability": 0.4, "mask_replace_prob": 1.0}, words()),
    "whole words from a seed": ({"whole_word_mask": True, "mlm_probability": 0.4, "seed": 4}, words()),
    "causal": ({"mlm": False}, rows()),
    "causal lists": ({"mlm": False}, [sample["input_ids"] for sample in rows()]),
}


@pytest.mark.filterwarnings("ignore:.*mask_replace_prob")
@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("name", CASES)
def test_batches_and_random_draws_are_those_of_transformers(name: str, kind: str) -> None:
    options, samples = CASES[name]
    if "mask_replace_prob" in options and options["mask_replace_prob"] == 1:
        options = {**options, "random_replace_prob": 0}
    outcomes = []
    for collator_class in (transformers.DataCollatorForLanguageModeling, DataCollatorForLanguageModeling):
        collator: Any = collator_class(tiny_tokenizer(), return_tensors=kind, **options)
        seed_all()
        batches = [described(collator([dict(s) if isinstance(s, dict) else s for s in samples])) for _ in range(3)]
        outcomes.append((batches, where_generators_stand()))
    assert outcomes[0] == outcomes[1]


def test_hidden_tokens_are_labels_and_no_others() -> None:
    seed_all()
    samples = rows()
    batch = DataCollatorForLanguageModeling(tiny_tokenizer(), mlm_probability=0.5)(samples)
    longest = batch["labels"].shape[1]
    tokens = torch.tensor([sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples])
    hidden = batch["labels"] != -100
    assert hidden.any() and torch.equal(batch["labels"][hidden], tokens[hidden])
    assert torch.equal(batch["input_ids"][~hidden], tokens[~hidden])
    assert not hidden[tokens < 5].any()


def test_words_are_hidden_whole_or_not_at_all() -> None:
    collator = DataCollatorForLanguageModeling(
        tiny_tokenizer(), whole_word_mask=True, mlm_probability=0.5, mask_replace_prob=1, random_replace_prob=0
    )
    seed_all()
    hidden = collator(words() * 10)["labels"] != -100
    for first, second in ((1, 2), (3, 4), (6, 7)):
        assert torch.equal(hidden[:, first], hidden[:, second])
    assert not hidden[:, [0, 5, 8]].any()
    assert 0 < hidden[:, 1].sum() < len(hidden)


class Indices:
    """A dataset whose samples are the same, so that only the collator's draws differ."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[int]:
        return list(range(6, 30))


def test_each_worker_draws_from_its_own_seed_and_each_epoch_anew() -> None:
    collator = DataCollatorForLanguageModeling(tiny_tokenizer(), seed=5, mlm_probability=0.5)
    dataset: Any = Indices()
    loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=collator)
    first, second = ([batch["labels"].tolist() for batch in loader] for _ in range(2))
    assert first == second
    samples = [dataset[0]] * 2
    expected = [
        DataCollatorForLanguageModeling(tiny_tokenizer(), seed=5 + worker, mlm_probability=0.5) for worker in (0, 1)
    ]
    assert first == [expected[batch % 2](samples)["labels"].tolist() for batch in range(4)]


@pytest.mark.parametrize(
    ("options", "words_in_message"),
    [
        ({"mlm_probability": 1.5}, "mlm_probability=1.5"),
        ({"mlm_probability": -0.1}, "mlm_probability=-0.1"),
        ({"mlm_probability": None}, "mlm_probability=None"),
        ({"mask_replace_prob": 2, "random_replace_prob": -1}, "mask_replace_prob=2"),
        ({"random_replace_prob": -0.5}, "random_replace_prob=-0.5"),
        ({"mask_replace_prob": 0.8, "random_replace_prob": 0.3}, "together exceed 1"),
        ({"whole_word_mask": True, "mlm": False}, "set mlm=True"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused_by_name(options: dict[str, Any], words_in_message: str) -> None:
    with pytest.raises(ValueError, match=words_in_message):
        DataCollatorForLanguageModeling(tiny_tokenizer(), **options)


def test_a_tokenizer_without_mask_token_serves_causal_models_only() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    DataCollatorForLanguageModeling(tokenizer, mlm=False)
    with pytest.raises(ValueError, match=r"mask token.*mlm=False"):
        DataCollatorForLanguageModeling(tokenizer)


def test_whole_words_without_offsets_are_refused_with_what_to_ask_the_tokenizer_for() -> None:
    collator = DataCollatorForLanguageModeling(
        tiny_tokenizer(), whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0
    )
    with pytest.raises(ValueError, match=r"return_offsets_mapping=True.*remove_unused_columns=False"):
        collator(rows())


def test_whole_words_are_replaced_by_the_mask_token_only_and_that_is_told() -> None:
    with pytest.warns(UserWarning, match="mask_replace_prob is taken as 1"):
        collator = DataCollatorForLanguageModeling(tiny_tokenizer(), whole_word_mask=True)
    assert (collator.mask_replace_prob, collator.random_replace_prob) == (1.0, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataCollatorForLanguageModeling(
            tiny_tokenizer(), whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0
        )


def test_the_earlier_name_for_whole_words_still_hides_them_and_names_the_new_one() -> None:
    with pytest.warns(FutureWarning, match="whole_word_mask=True"):
        collator = DataCollatorForWholeWordMask(tiny_tokenizer(), mlm_probability=0.5)
    seed_all()
    batch = collator(words() * 10)
    hidden = batch["labels"] != -100
    assert torch.equal(hidden[:, 1], hidden[:, 2]) and hidden.any()
    assert (batch["input_ids"][hidden] != 4).any(), "some words are replaced by random tokens"
