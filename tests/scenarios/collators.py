"""Collators for the tiny datasets."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.data import FIRST_WORD

Batch = dict[str, torch.Tensor]

MASK_TOKEN = 4


def pad_tokens(rows: list[dict[str, Any]]) -> Batch:
    """Pad token ids with 0 and labels for each token with -100, to the longest row of the batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[Any]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        gap = longest - len(ids)
        batch["input_ids"].append(ids + [0] * gap)
        batch["attention_mask"].append([1] * len(ids) + [0] * gap)
        batch["labels"].append(labels + [-100] * gap if isinstance(labels, list) else labels)
    return {name: torch.tensor(values) for name, values in batch.items()}


def pad_translations(rows: list[dict[str, Any]]) -> Batch:
    """As `pad_tokens`, for labels, if any, whose length differs from the inputs'."""
    inputs = [{"input_ids": row["input_ids"], "labels": 0} for row in rows]
    batch = {name: value for name, value in pad_tokens(inputs).items() if name != "labels"}
    if "labels" in rows[0]:
        longest = max(len(row["labels"]) for row in rows)
        batch["labels"] = torch.tensor([row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows])
    return batch


def mask_at_random(rows: list[dict[str, Any]]) -> Batch:
    """Hide about a third of the tokens, drawn from the global generator each time; only those count in the loss."""
    batch = pad_tokens([{"input_ids": row["input_ids"], "labels": list(row["input_ids"])} for row in rows])
    hidden = (torch.rand(batch["input_ids"].shape) < 0.3) & (batch["input_ids"] >= FIRST_WORD)
    # A batch with nothing hidden has a loss of 0 / 0.
    hidden[:, 0] = True
    batch["labels"] = torch.where(hidden, batch["input_ids"], torch.full_like(batch["input_ids"], -100))
    batch["input_ids"] = torch.where(hidden, torch.full_like(batch["input_ids"], MASK_TOKEN), batch["input_ids"])
    return batch
