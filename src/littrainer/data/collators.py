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
"""What turns a list of samples into a batch, for annotations."""


def default_data_collator(features: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
    """Stack samples that are already of equal length.

    `label` (one number a sample) and `label_ids` (a list of them) become `labels`; other strings and None are left out.

    Parameters:
        features: samples, mappings or objects with attributes; the first one decides which keys there are.
        return_tensors: `"pt"` for torch tensors, `"np"` for NumPy arrays.

    Returns:
        an array of shape `(samples, ...)` for each key.

    Raises:
        ValueError: samples of different length, which need a collator that pads; labels that are text.
        TypeError: a sample without named values, as a text or a tuple is.
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
        whole = _labels_are_whole(source, first[source]) if source in LABEL_NAMES else None
        try:
            batch[name] = stack([sample[source] for sample in samples], whole)
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
    """Return the beginning of a text, or of the first text of a list; None if there is none."""
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


def _labels_are_whole(name: str, first: Any) -> bool:
    # A `label` that is a list of numbers stays a float, for it is several yes-or-no labels; `label_ids` are classes.
    value = first[0] if name == "label_ids" else first
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    return isinstance(value, (int, np.integer))


def _stack_torch(values: list[Any], whole: bool | None) -> torch.Tensor:
    first = values[0]
    if isinstance(first, torch.Tensor) and (whole is None or first.dim() > 0):
        return torch.stack(values)
    if whole is not None:
        return torch.tensor(values, dtype=torch.long if whole else torch.float)
    return torch.from_numpy(np.stack(values)) if isinstance(first, np.ndarray) else torch.tensor(values)


def _stack_numpy(values: list[Any], whole: bool | None) -> np.ndarray:
    first = values[0]
    if isinstance(first, np.ndarray) and (whole is None or first.ndim > 0):
        return np.stack(values)
    if whole is not None:
        return np.array(values, dtype=np.int64 if whole else np.float32)
    return np.array(values)


_STACKERS: dict[str, Callable[[list[Any], bool | None], Any]] = {"pt": _stack_torch, "np": _stack_numpy}


@dataclass
class DefaultDataCollator:
    """`default_data_collator` as an object, with a kind of tensor.

    Parameters:
        return_tensors: `"pt"` for torch tensors, `"np"` for NumPy arrays.
    """

    return_tensors: str = "pt"

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> Any:
        """Stack samples that are of equal length."""
        return default_data_collator(features, self.return_tensors if return_tensors is None else return_tensors)


def get_default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Return the default collator: it pads if the processing class can, else it stacks."""
    if processing_class is not None and is_a(processing_class, "padding class"):
        # It is of transformers' own classes, so that transformers is loaded.
        return importlib.import_module("transformers.data.data_collator").DataCollatorWithPadding(processing_class)
    return default_data_collator


class RemoveColumnsCollator:
    """A collator around another collator, which drops the columns that the model's forward does not take.

    Parameters:
        data_collator: the collator that is called with the remaining columns.
        signature_columns: the names to keep.
        logger: gets one message that names the columns which were dropped.
        model_name, description: named in that message.
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
        # An ordered set.
        self.dropped: dict[str, None] = {}

    def __call__(self, features: Sequence[Any]) -> Any:
        """Drop the columns and collate."""
        kept, rows = frozenset(self.signature_columns), []
        for feature in features:
            if isinstance(feature, dict) and feature.keys() <= kept:
                # A copy, since collators take entries out of their samples. A call for each sample would be slow.
                rows.append(dict(feature))
            else:
                rows.append(self._remove_columns(feature, kept))
        return self.data_collator(rows)

    def _remove_columns(self, feature: Any, kept: frozenset[str]) -> Any:
        if not isinstance(feature, dict):
            return feature
        if not feature.keys() <= kept | self.dropped.keys():
            self.note_extra_columns(feature)
        return {name: value for name, value in feature.items() if name in kept}

    def note_extra_columns(self, feature: Any) -> None:
        """Record the columns of a sample that are dropped, and log those of the first sample that has any."""
        if not isinstance(feature, dict):
            return
        extra = [name for name in feature if name not in self.signature_columns]
        self.dropped.update(dict.fromkeys(extra))
        if extra and not self.message_logged and self.logger is not None:
            self.message_logged = True
            self.logger.info(dropped_columns_message(sorted(extra), self.description, self.model_name))


def dropped_columns_message(dropped: Sequence[str], description: str | None, model_name: str | None) -> str:
    """Return a sentence that names the columns which are not passed to the model, and how to keep them."""
    where = f" of the {description} set" if description else ""
    return (
        f"Columns{where} that {model_name}.forward does not take are left out: {', '.join(dropped)}. "
        "Set remove_unused_columns=False to pass them to the collator."
    )
