"""Tiny datasets, each the same on every call."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from tests.scenarios.models import CLASSES, END_TOKEN, FEATURES, VOCABULARY_SIZE

FIRST_WORD = 5
"""Token ids below this one are special: padding, unknown, classification, separator, mask."""

WORDS = ("loss", "step", "batch", "model", "data", "epoch", "rate", "norm", "seed", "rank", "world", "token")

Row = dict[str, Any]


def vector_rows(count: int, seed: int = 0) -> list[Row]:
    """Float vectors `x` with an integer class `labels`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return [{"x": x[index], "labels": int(labels[index])} for index in range(count)]


def token_rows(count: int, seed: int = 0, shortest: int = 3, longest: int = 9) -> list[Row]:
    """Token ids of varying length with a class each."""
    source = random.Random(seed)
    rows = []
    for _ in range(count):
        length = source.randint(shortest, longest)
        ids = [source.randrange(FIRST_WORD, VOCABULARY_SIZE) for _ in range(length)]
        rows.append({"input_ids": ids, "labels": source.randrange(CLASSES)})
    return rows


def language_rows(count: int, seed: int = 0, most_masked: int = 3) -> list[Row]:
    """Token ids of varying length; the labels repeat them, except the first tokens of most rows.

    Parameters:
        most_masked: Largest number of leading tokens whose label is -100. Some rows mask none: their first label is
            there, and is still no target of a model that predicts the next token.
    """
    source = random.Random(seed + 2)
    rows = token_rows(count, seed, shortest=most_masked + 2)
    for row in rows:
        masked = source.randint(0, most_masked)
        row["labels"] = [-100] * masked + row["input_ids"][masked:]
    return rows


def tag_rows(count: int, seed: int = 0) -> list[Row]:
    """Token ids of varying length with a class for each token."""
    source = random.Random(seed + 1)
    rows = token_rows(count, seed)
    for row in rows:
        row["labels"] = [source.randrange(CLASSES) for _ in row["input_ids"]]
    return rows


def translation_rows(count: int, seed: int = 0, longest_answer: int = 7) -> list[Row]:
    """Token ids of varying length; the labels are some of them in reverse order, and the end token of `tiny_t5`."""
    source = random.Random(seed + 3)
    rows = token_rows(count, seed)
    for row in rows:
        row["labels"] = [*row["input_ids"][::-1][: source.randint(0, longest_answer)], END_TOKEN]
    return rows


def text_rows(count: int, seed: int = 0) -> list[Row]:
    """Sentences of varying length, made of `WORDS`, with a class each."""
    source = random.Random(seed)
    return [
        {"text": " ".join(source.choices(WORDS, k=source.randint(2, 7))), "label": source.randrange(CLASSES)}
        for _ in range(count)
    ]


class Rows(Dataset[Row]):
    """A map-style dataset over a list of rows."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self.rows[index])


class AugmentedRows(Rows):
    """Adds noise to `x` when a row is read, drawn from all three global generators."""

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        noise = torch.rand(FEATURES) + random.random() + float(np.random.random())
        return {**row, "x": row["x"] + 0.1 * noise}


class Stream(IterableDataset[Row]):
    """Rows in order, with no length."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        for row in self.rows:
            yield dict(row)


class SizedStream(Stream):
    """A stream that knows how many rows it holds."""

    def __len__(self) -> int:
        return len(self.rows)


def tiny_tokenizer() -> Any:
    """A word-level tokenizer over `WORDS`, with padding and the special tokens of BERT."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
