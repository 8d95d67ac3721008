"""Check of a dataset's rows: lengths, missing values, labels and token ids."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from littrainer.data.loaders import has_length
from littrainer.model.facts import base_model
from littrainer.runtime.lazy_isinstance import is_a

MAX_SECONDS = 10.0
LABELS = ("labels", "label", "label_ids")
LABEL_PADDING = -100
# Truncated, if the greatest length is this many times as frequent as the length below it.
TRUNCATION_RATIO = 3


@dataclass
class RowSummary:
    """Facts about a dataset's rows, by row number.

    Attributes:
        total: rows of the dataset.
        lengths: row -> length of the model's input.
        notable: extreme row -> the feature that it is an extreme of.
        failing: column -> row that training or evaluation would fail on -> reason.
        without_labels: number of rows without any label.
    """

    total: int
    lengths: dict[int, int] = field(default_factory=dict)
    notable: dict[int, str] = field(default_factory=dict)
    failing: dict[str, dict[int, str]] = field(default_factory=dict)
    without_labels: int = 0

    def exclude_failing(self, rows: Collection[int]) -> list[int]:
        bad = {row for reasons in self.failing.values() for row in reasons}
        return [row for row in rows if row not in bad]

    def get_longest(self, count: int) -> list[int]:
        return sorted(self.exclude_failing(self.lengths), key=lambda row: -self.lengths[row])[:count]

    def __str__(self) -> str:
        counts, checked = Counter(self.lengths.values()), len(self.lengths)
        greatest, mean = max(counts), sum(self.lengths.values()) / checked
        text = f"{checked:,} of {self.total:,} rows looked at"
        text += f"; lengths from {min(counts):,} to {greatest:,}, {mean:,.0f} on average" * (greatest > 1)
        if len(counts) > 1 and counts[greatest] > TRUNCATION_RATIO * max(counts[greatest - 1], 1):
            text += f"; {counts[greatest] / checked:.0%} have the greatest one, and may be cut off"
        if self.without_labels:
            text += f"; {self.without_labels / checked:.0%} without labels"
        return text + ", unless the collator makes them" * (self.without_labels == checked)


class SelectedRows(Subset[Any]):
    """Some rows of a map-style dataset, with its attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "indices"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def select_rows(dataset: Any, rows: list[int]) -> Any:
    return dataset.select(rows) if is_a(dataset, "datasets.Dataset") else SelectedRows(dataset, rows)


def can_select(dataset: Any) -> bool:
    """Return whether there are rows that can be read by number."""
    is_map = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return is_map and has_length(dataset) and len(dataset) > 0


def summarize_rows(
    dataset: Any, columns: Collection[str] | None, model: Any, own_loss: bool = False, labels: Collection[str] = LABELS
) -> RowSummary:
    """Summarize all rows, or as many as ten seconds allow, spread evenly over the dataset.

    Parameters:
        columns: used columns; None for all.
        own_loss: whether a custom loss may give labels another meaning.
    """
    deadline = time.monotonic() + MAX_SECONDS
    total, summary = len(dataset), RowSummary(len(dataset))
    # Feature -> its extreme amount, and the row.
    notable: dict[str, tuple[float, int]] = {}
    bounds, main_input = _get_id_bounds(model, own_loss), getattr(model, "main_input_name", "input_ids")
    # Golden-ratio stride: spreads any number of rows evenly.
    candidates = range(max(round(total * 0.618), 1), 2 * total + 1)
    stride = next(number for number in candidates if math.gcd(number, total) == 1)
    for number in (index * stride % total for index in range(total)):
        if time.monotonic() > deadline and summary.lengths:
            break
        try:
            row = dataset[number]
        except Exception as error:
            summary.failing.setdefault("cannot be read", {})[number] = f"{type(error).__name__}: {error}"
            summary.lengths[number] = 0
            continue
        values = dict(row) if isinstance(row, Mapping) else {"row": row}
        used = {name: value for name, value in values.items() if columns is None or name in columns} or values
        amounts: dict[str, float] = {f"its columns: {', '.join(used)}": 0}
        lengths: dict[str, int] = {}
        for name, value in used.items():
            kind, length, numbers = _describe_value(value)
            lengths[name] = length
            amounts |= {f"{name}: {kind}": 0, f"the shortest {name}": -length, f"the longest {name}": length}
            if numbers is None:
                continue
            amounts |= {f"the least {name}": -numbers.min().item(), f"the greatest {name}": numbers.max().item()}
            if name in bounds and numbers.dtype.kind != "f":
                bound, padding, what = bounds[name]
                outside = numbers[((numbers < 0) | (numbers >= bound)) & (numbers != padding)]
                if outside.size:
                    reason = f"it has {outside.max():,}, and {what}, for 0 to {bound - 1:,}"
                    summary.failing.setdefault(name, {})[number] = reason
        for feature, amount in amounts.items():
            if feature not in notable or amount > notable[feature][0]:
                notable[feature] = amount, number
        summary.without_labels += not any(values.get(name) is not None for name in labels)
        summary.lengths[number] = lengths.get(main_input, max(lengths.values(), default=0))
    # Prefer the kinds of a row's values to extremes ("the longest ...").
    for feature in sorted(notable, key=lambda feature: feature.startswith("the ")):
        summary.notable.setdefault(notable[feature][1], feature)
    return summary


def _describe_value(value: Any) -> tuple[str, int, Any]:
    """Return a value's kind, its number of elements, and an array of numbers."""
    if value is None:
        return "None", 0, None
    name = type(value).__name__
    try:
        numbers = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError):
        # Ragged lists, and dtypes that NumPy lacks.
        return name, len(value) if hasattr(value, "__len__") else 1, None
    length = len(value) if isinstance(value, str) else numbers.size
    if numbers.dtype.kind not in "biuf" or not numbers.size:
        has_gaps = numbers.dtype.kind == "O" and any(element is None for element in numbers.ravel())
        return f"{name}{' with None' * has_gaps}{'' if numbers.size else ', empty'}", length, None
    kind = f"{numbers.ndim}-dimensional, {'real' if numbers.dtype.kind == 'f' else 'whole'} numbers"
    return kind + ("" if np.isfinite(numbers).all() else ", not all finite"), length, numbers


def _get_id_bounds(model: Any, own_loss: bool) -> dict[str, tuple[int, int, str]]:
    """Return, by column, the exclusive upper bound of ids, an additional valid id, and the reason."""
    inner = base_model(model)
    kind, classes = type(inner).__name__, getattr(getattr(inner, "config", None), "num_labels", None)
    # Encoder-decoder models may have separate vocabularies for input and output.
    tokens = predicted = 0
    with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
        tokens = int(inner.get_input_embeddings().weight.shape[0])
        predicted = int(inner.get_output_embeddings().weight.shape[0])
    bounds = {"input_ids": (tokens, 0, f"{kind} has {tokens:,} token embeddings")} if tokens else {}
    if own_loss or not inner.forward.__module__.startswith("transformers."):
        return bounds
    if "Classification" in kind and isinstance(classes, int) and classes > 1:
        predicted, what = classes, f"{kind} has {classes} classes (config.num_labels)"
    else:
        what = f"{kind} predicts one of {predicted:,} tokens"
    return bounds | (dict.fromkeys(LABELS, (predicted, LABEL_PADDING, what)) if predicted else {})
