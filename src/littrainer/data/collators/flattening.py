"""The collator that puts all samples of a micro-batch into one row, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from littrainer.data.collators.default import DefaultDataCollator, unknown_kind_message

IGNORED_LABEL = -100


class DataCollatorWithFlattening(DefaultDataCollator):
    """Concatenates the samples of a micro-batch to one row of tokens, for attention that keeps them apart.

    Parameters:
        return_tensors: `"pt"` or `"np"`.
        return_position_ids: add `position_ids`, which begin anew with each sample.
        separator_id: label of the first token of each sample, which no token predicts.
        return_flash_attn_kwargs: add the boundaries that flash attention takes: `cu_seq_lens_q` and `_k`,
            `max_length_q` and `_k`.
        return_seq_idx: add `seq_idx`, the number of the sample each token belongs to.
        position_ids_start: position of the first token of a sample; models like RoBERTa count from 2.
    """

    def __init__(
        self,
        return_tensors: str = "pt",
        *,
        return_position_ids: bool = True,
        separator_id: int = IGNORED_LABEL,
        return_flash_attn_kwargs: bool = False,
        return_seq_idx: bool = False,
        position_ids_start: int = 0,
    ):
        super().__init__(return_tensors)
        self.separator_id, self.position_ids_start = separator_id, position_ids_start
        self.return_position_ids, self.return_seq_idx = return_position_ids, return_seq_idx
        self.return_flash_attn_kwargs = return_flash_attn_kwargs

    def __call__(
        self, features: Sequence[Any], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict[str, Any]:
        """Concatenate one micro-batch.

        Parameters:
            features: samples with `input_ids`, and `labels` or none: then the tokens are the labels.
            return_tensors, separator_id: in place of the collator's own settings.

        Raises:
            ValueError: another kind of tensor than `"pt"` or `"np"` is asked for.
        """
        kind = self.return_tensors if return_tensors is None else return_tensors
        if kind not in ("pt", "np"):
            raise ValueError(unknown_kind_message(kind))
        separator = self.separator_id if separator_id is None else separator_id
        tokens = [_as_list(sample["input_ids"]) for sample in features]
        labels = [_as_list(sample["labels"]) for sample in features] if "labels" in features[0] else tokens
        lengths = [len(row) for row in tokens]

        batch: dict[str, Any] = {
            "input_ids": _row(_joined(tokens), kind),
            "labels": _row(_joined([[separator, *row[1:]] for row in labels]), kind),
        }
        if self.return_position_ids:
            first = self.position_ids_start
            batch["position_ids"] = _row(_joined([range(first, first + length) for length in lengths]), kind)
        if self.return_seq_idx:
            numbers = [[number] * length for number, length in enumerate(lengths)]
            batch["seq_idx"] = _row(_joined(numbers), kind, bits=32)
        if self.return_flash_attn_kwargs:
            ends = list(accumulate(lengths, initial=0))
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = _row(ends, kind, bits=32)[0]
            batch["max_length_q"] = batch["max_length_k"] = max(lengths)
        return batch


def _as_list(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _joined(rows: Sequence[Sequence[int]]) -> list[int]:
    return [value for row in rows for value in row]


def _row(values: list[int], kind: str, bits: int = 64) -> Any:
    if kind == "pt":
        return torch.tensor([values], dtype=torch.int64 if bits == 64 else torch.int32)
    return np.array([values], dtype=np.int64 if bits == 64 else np.int32)
