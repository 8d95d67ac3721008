"""Stacking samples of equal length, and the choice between torch and NumPy that collators share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from littrainer.errors.notes import kind_of

LABEL_NAMES = ("label", "label_ids")
TEXT_LABELS = (
    "{0!r} is text ({1!r}), and labels have to be numbers: number the classes from 0, such as with "
    "dataset.class_encode_column({0!r}), or tokenize texts that are to be generated"
)

DataCollator = Callable[[list[Any]], dict[str, Any]]
"""What turns a list of samples into a batch, for annotations."""


class DataCollatorMixin:
    """Base of collators that make torch tensors in `torch_call` and NumPy arrays in `numpy_call`."""

    return_tensors: str
    torch_call: Callable[[Any], Any]
    numpy_call: Callable[[Any], Any]

    def __call__(self, features: Any, return_tensors: str | None = None) -> Any:
        """Make a batch.

        Parameters:
            features: the samples.
            return_tensors: `"pt"` or `"np"`; the collator's own setting by default.

        Raises:
            ValueError: another kind of tensor is asked for.
        """
        kind = self.return_tensors if return_tensors is None else return_tensors
        if kind not in _STACKERS:
            raise ValueError(unknown_kind_message(kind))
        return self.torch_call(features) if kind == "pt" else self.numpy_call(features)


def unknown_kind_message(kind: Any) -> str:
    """What to say about a kind of tensor that no collator makes."""
    return f"return_tensors={kind!r} is not known; use 'pt' or 'np'."


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
        raise ValueError(unknown_kind_message(return_tensors))
    stack = _STACKERS[return_tensors]
    try:
        samples = [feature if isinstance(feature, Mapping) else vars(feature) for feature in features]
    except TypeError:
        raise TypeError(_without_names(features)) from None
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
            text = next(filter(None, (text_in(sample[source]) for sample in samples)), None)
            if name == "labels" and text is not None:
                raise ValueError(f"{TEXT_LABELS.format(source, text)}.") from None
            raise ValueError(
                f"The samples of a batch cannot be stacked: {source!r} differs in length or type ({error}). Pad them "
                "in the dataset, or pass a data_collator that pads (with a tokenizer: processing_class=tokenizer)."
            ) from error
    return batch


def text_in(value: Any) -> str | None:
    """How the text begins that a value is, or the first of a list that begins with one; None where it is none."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return first[:40] if isinstance(first, str) else None


def _without_names(features: Sequence[Any]) -> str:
    sample = next(one for one in features if not isinstance(one, Mapping) and not hasattr(one, "__dict__"))
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
class DefaultDataCollator(DataCollatorMixin):
    """`default_data_collator` as an object, which remembers the kind of tensor.

    Parameters:
        return_tensors: `"pt"` for torch tensors, `"np"` for NumPy arrays.
    """

    return_tensors: str = "pt"

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> Any:
        """Stack samples that are of equal length."""
        return default_data_collator(features, self.return_tensors if return_tensors is None else return_tensors)
