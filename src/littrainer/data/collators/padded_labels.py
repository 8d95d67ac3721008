"""Collators that pad labels too, which a tokenizer's `pad` leaves alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from littrainer.data.collators.default import DataCollatorMixin
from littrainer.data.collators.padding import PADDING_OPTIONS, pad_quietly

IGNORED_LABEL = -100


def _label_name(samples: Sequence[Any]) -> str:
    return "label" if "label" in samples[0] else "labels"


def _without(samples: Sequence[Any], left_out: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in sample.items() if name != left_out} for sample in samples]


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _padded(labels: Sequence[Any], length: int, filling: int, side: str) -> list[list[Any]]:
    rows = []
    for label in labels:
        values, gap = _as_list(label), [filling] * (length - len(label))
        rows.append(values + gap if side == "right" else gap + values)
    return rows


def _whole_numbers(rows: Any, kind: str) -> Any:
    return torch.tensor(rows, dtype=torch.int64) if kind == "pt" else np.array(rows, dtype=np.int64)


@dataclass
class DataCollatorForTokenClassification(DataCollatorMixin):
    """Pads tokens, and one label for each token, to the longest sample of the batch.

    Parameters:
        tokenizer: anything with the `pad` method and `padding_side` of transformers' tokenizers.
        padding: `True` or `"longest"`, `"max_length"`, or `False` for no padding.
        max_length: tokens to pad to with `"max_length"`.
        pad_to_multiple_of: round the padded length up to a multiple of this.
        label_pad_token_id: label of the padding; -100 does not count in the loss.
        return_tensors: `"pt"` or `"np"`.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED_LABEL
    return_tensors: str = "pt"

    def torch_call(self, features: Sequence[dict[str, Any]]) -> Any:
        """A batch of torch tensors."""
        return self._batch(features, "pt")

    def numpy_call(self, features: Sequence[dict[str, Any]]) -> Any:
        """A batch of NumPy arrays."""
        return self._batch(features, "np")

    def _batch(self, features: Sequence[dict[str, Any]], kind: str) -> Any:
        name = _label_name(features)
        options = {option: getattr(self, option) for option in PADDING_OPTIONS}
        batch = pad_quietly(self.tokenizer, _without(features, name), **{**options, "return_tensors": kind})
        if name in features[0]:
            labels = [feature[name] for feature in features]
            length = np.shape(batch["input_ids"])[1]
            rows = _padded(labels, length, self.label_pad_token_id, self.tokenizer.padding_side)
            batch[name] = _whole_numbers(rows, kind)
        return batch


@dataclass
class DataCollatorForSeq2Seq:
    """Pads inputs and labels, each to their own longest sequence of the batch.

    Parameters:
        tokenizer: anything with the `pad` method and `padding_side` of transformers' tokenizers.
        model: where it has `prepare_decoder_input_ids_from_labels`, that makes `decoder_input_ids` of the labels, which
            label smoothing needs.
        padding: `True` or `"longest"`, `"max_length"`, or `False` for no padding.
        max_length: tokens to pad to with `"max_length"`, inputs and labels alike.
        pad_to_multiple_of: round the padded lengths up to a multiple of this.
        label_pad_token_id: label of the padding; -100 does not count in the loss.
        return_tensors: `"pt"` or `"np"`.
    """

    tokenizer: Any
    model: Any = None
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED_LABEL
    return_tensors: str = "pt"

    def __call__(self, features: Sequence[dict[str, Any]], return_tensors: str | None = None) -> Any:
        """Pad one batch.

        Parameters:
            features: tokenized samples, with labels of their own length under `label` or `labels`, or without.
            return_tensors: `"pt"` or `"np"`; the collator's own setting by default.

        Returns:
            the batch; its `labels` are None where the samples have none.
        """
        kind = self.return_tensors if return_tensors is None else return_tensors
        name = _label_name(features)
        labels = [feature.get(name) for feature in features]
        has_labels = any(label is not None for label in labels)
        options = {option: getattr(self, option) for option in PADDING_OPTIONS}
        batch = pad_quietly(self.tokenizer, _without(features, name), **{**options, "return_tensors": kind})
        batch["labels"] = _whole_numbers(self._label_rows(labels), kind) if has_labels else None
        if has_labels and hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            batch["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return batch

    def _label_rows(self, labels: list[Any]) -> list[list[Any]]:
        if self.padding is False or self.padding == "do_not_pad":
            return [_as_list(label) for label in labels]
        longest = max(len(label) for label in labels)
        if self.padding == "max_length" and self.max_length is not None:
            longest = self.max_length
        if self.pad_to_multiple_of is not None:
            longest += -longest % self.pad_to_multiple_of
        return _padded(labels, longest, self.label_pad_token_id, self.tokenizer.padding_side)


@dataclass
class DataCollatorForMultipleChoice(DataCollatorMixin):
    """Pads samples that hold several choices each to the longest choice of the batch.

    Parameters:
        tokenizer: anything with the `pad` method of transformers' tokenizers.
        padding: `True` or `"longest"`, `"max_length"`, or `False` for no padding.
        max_length: tokens to pad to with `"max_length"`.
        pad_to_multiple_of: round the padded length up to a multiple of this.
        return_tensors: `"pt"` or `"np"`.

    Every value of a sample is a list with one entry for each choice, but for `label` or `labels`, the number of the
    right choice. Every sample has as many choices as the first one.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch of torch tensors, of shape (samples, choices, tokens)."""
        return self._batch(examples, "pt")

    def numpy_call(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch of NumPy arrays, of shape (samples, choices, tokens)."""
        return self._batch(examples, "np")

    def _batch(self, examples: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
        name = _label_name(examples)
        choices = len(examples[0]["input_ids"])
        one_by_one = [
            {key: values[choice] for key, values in example.items()}
            for example in _without(examples, name)
            for choice in range(choices)
        ]
        options = {option: getattr(self, option) for option in PADDING_OPTIONS}
        padded = pad_quietly(self.tokenizer, one_by_one, **{**options, "return_tensors": kind})
        batch = {key: values.reshape(len(examples), choices, -1) for key, values in padded.items()}
        if name in examples[0]:
            batch["labels"] = _whole_numbers([example[name] for example in examples], kind)
        return batch
