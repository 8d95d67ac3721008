"""Collators: stacking of samples, and removal of columns that the model does not take."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.notes import kind_of

LABEL_NAMES = ("label", "label_ids")
TEXT_LABELS = (
    "{0!r} is text ({1!r}), and labels have to be numbers: number the classes from 0, such as with "
    "dataset.class_encode_column({0!r}), or tokenize texts that are to be generated"
)

DataCollator = Callable[[list[Any]], dict[str, Any]]
"""Type of a function that collates a list of samples."""


def default_data_collator(features: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
    """Stack samples of equal length.

    `label` (a number) and `label_ids` (a list of numbers) become `labels`; other strings and None are dropped.

    Parameters:
        features: mappings, or objects with attributes; the first sample defines the keys.
        return_tensors: `"pt"` for torch tensors, `"np"` for NumPy arrays.

    Returns:
        an array of shape `(samples, ...)` for each key.

    Raises:
        ValueError: samples differ in length and need padding, or labels are text.
        TypeError: a sample, such as a text or a tuple, has no named values.

    Examples:
        >>> from littrainer import default_data_collator
        >>> default_data_collator([{"x": [1.0, 2.0], "label": 0}, {"x": [3.0, 4.0], "label": 1}])["labels"]
        tensor([0, 1])
    """
    if return_tensors not in _STACKERS:
        raise ValueError(f"return_tensors={return_tensors!r} is not known; use 'pt' or 'np'.")
    stack = _STACKERS[return_tensors]
    try:
        samples = [feature if isinstance(feature, Mapping) else vars(feature) for feature in features]
    except TypeError:
        raise TypeError(_describe_unnamed(features)) from None
    first = samples[0]
    batch: dict[str, Any] = {}
    label_name = next((name for name in LABEL_NAMES if first.get(name) is not None), None)
    names = {name: name for name in first if name not in LABEL_NAMES and first[name] is not None}
    sources = {"labels": label_name, **names} if label_name is not None else names
    for name, source in sources.items():
        if isinstance(first[source], str) and source not in LABEL_NAMES:
            continue
        is_integer = _is_integer_label(source, first[source]) if source in LABEL_NAMES else None
        try:
            batch[name] = stack([sample[source] for sample in samples], is_integer)
        except (ValueError, TypeError, RuntimeError) as error:
            text = next(filter(None, (find_text(sample[source]) for sample in samples)), None)
            if name == "labels" and text is not None:
                raise ValueError(f"{TEXT_LABELS.format(source, text)}.") from None
            raise ValueError(
                f"The samples of a batch cannot be stacked: {source!r} differs in length or type ({error}). Pad them "
                "in the dataset, or pass a data_collator that pads (with a tokenizer: processing_class=tokenizer)."
            ) from error
    return batch


def find_text(value: Any) -> str | None:
    """Return the beginning of a text or of a list's first text."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return first[:40] if isinstance(first, str) else None


def _describe_unnamed(features: Sequence[Any]) -> str:
    sample = next(item for item in features if not isinstance(item, Mapping) and not hasattr(item, "__dict__"))
    shown = " ".join(repr(sample).split())
    return (
        f"A sample of the dataset is {kind_of(sample)} ({shown[:80]}{'...' if len(shown) > 80 else ''}), and the "
        'default data_collator makes batches of dicts such as {"input_ids": [...], "labels": 0}. Let the dataset give '
        "dicts (texts have to be tokenized), or pass a data_collator that takes such samples."
    )


def _is_integer_label(name: str, first: Any) -> bool:
    # Lists are multi-label targets (float) as `label`, and class ids as `label_ids`.
    value = first[0] if name == "label_ids" else first
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    return isinstance(value, (int, np.integer))


def _stack_torch(values: list[Any], is_integer: bool | None) -> torch.Tensor:
    first = values[0]
    if isinstance(first, torch.Tensor) and (is_integer is None or first.dim() > 0):
        return torch.stack(values)
    if is_integer is not None:
        return torch.tensor(values, dtype=torch.long if is_integer else torch.float)
    return torch.from_numpy(np.stack(values)) if isinstance(first, np.ndarray) else torch.tensor(values)


def _stack_numpy(values: list[Any], is_integer: bool | None) -> np.ndarray:
    first = values[0]
    if isinstance(first, np.ndarray) and (is_integer is None or first.ndim > 0):
        return np.stack(values)
    if is_integer is not None:
        return np.array(values, dtype=np.int64 if is_integer else np.float32)
    return np.array(values)


_STACKERS: dict[str, Callable[[list[Any], bool | None], Any]] = {"pt": _stack_torch, "np": _stack_numpy}


@dataclass
class DefaultDataCollator:
    """Collator object that calls `default_data_collator`.

    Parameters:
        return_tensors: `"pt"` for torch tensors, `"np"` for NumPy arrays.
    """

    return_tensors: str = "pt"

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> Any:
        """Stack samples of equal length."""
        return default_data_collator(features, self.return_tensors if return_tensors is None else return_tensors)


def get_default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    if processing_class is not None and is_a(processing_class, "padding class"):
        return importlib.import_module("transformers.data.data_collator").DataCollatorWithPadding(processing_class)
    return default_data_collator


class RemoveColumnsCollator:
    """Collator that drops the columns which the model's forward does not accept, and calls another collator.

    Parameters:
        signature_columns: columns to keep.
        logger: logger of a single message with the dropped columns.
    """

    def __init__(
        self,
        data_collator: Callable[[list[Any]], Any],
        signature_columns: Sequence[str],
        logger: logging.Logger | None = None,
        model_name: str | None = None,
        description: str | None = None,
    ):
        self.data_collator, self.signature_columns = data_collator, signature_columns
        self.logger, self.model_name, self.description = logger, model_name, description
        self.message_logged = False
        # Ordered set.
        self.dropped: dict[str, None] = {}

    def __call__(self, features: Sequence[Any]) -> Any:
        columns, rows = frozenset(self.signature_columns), []
        for feature in features:
            if isinstance(feature, dict) and feature.keys() <= columns:
                # A copy, since collators pop entries; inline for speed.
                rows.append(dict(feature))
            else:
                rows.append(self._remove_columns(feature, columns))
        return self.data_collator(rows)

    def _remove_columns(self, feature: Any, columns: frozenset[str]) -> Any:
        if not isinstance(feature, dict):
            return feature
        if not feature.keys() <= columns | self.dropped.keys():
            self.record_extra_columns(feature)
        return {name: value for name, value in feature.items() if name in columns}

    def record_extra_columns(self, feature: Any) -> None:
        if not isinstance(feature, dict):
            return
        extra = [name for name in feature if name not in self.signature_columns]
        self.dropped.update(dict.fromkeys(extra))
        if extra and not self.message_logged and self.logger is not None:
            self.message_logged = True
            self.logger.info(dropped_columns_message(sorted(extra), self.description, self.model_name))


def dropped_columns_message(dropped: Sequence[str], description: str | None, model_name: str | None) -> str:
    location = f" of the {description} set" if description else ""
    excluded = "signature_columns does not name" if model_name is None else f"{model_name}.forward does not take"
    return (
        f"Columns{location} that {excluded} are left out: {', '.join(dropped)}. "
        "Set remove_unused_columns=False to pass them to the collator."
    )
