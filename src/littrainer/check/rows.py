"""A look at the rows of a dataset: lengths, missing values, labels and token ids, each finding with its row number."""

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
# Padding of labels; and how many times as many rows as have the length below it may be cut off at the greatest one.
PADDING, TIMES_AS_MANY = -100, 3


@dataclass
class RowSummary:
    """What a look at rows has found.

    Attributes:
        total: rows of the dataset.
        lengths: by the row's number, how many values the model's input has.
        notable: rows that stand out, which are worth a try, and what about them.
        failing: rows that cannot be trained or evaluated on, and why, by column.
        without_labels: rows without any label.
    """

    total: int
    lengths: dict[int, int] = field(default_factory=dict)
    notable: dict[int, str] = field(default_factory=dict)
    failing: dict[str, dict[int, str]] = field(default_factory=dict)
    without_labels: int = 0

    def sound(self, rows: Collection[int]) -> list[int]:
        """Return those of the rows that were not found to fail."""
        bad = {row for found in self.failing.values() for row in found}
        return [row for row in rows if row not in bad]

    def longest(self, number: int) -> list[int]:
        """Return the longest good rows."""
        return sorted(self.sound(self.lengths), key=lambda row: -self.lengths[row])[:number]

    def __str__(self) -> str:
        counts, seen = Counter(self.lengths.values()), len(self.lengths)
        greatest, mean = max(counts), sum(self.lengths.values()) / seen
        words = f"{seen:,} of {self.total:,} rows looked at"
        words += f"; lengths from {min(counts):,} to {greatest:,}, {mean:,.0f} on average" * (greatest > 1)
        # Without a limit few are as long as the longest one.
        if len(counts) > 1 and counts[greatest] > TIMES_AS_MANY * max(counts[greatest - 1], 1):
            words += f"; {counts[greatest] / seen:.0%} have the greatest one, and may be cut off"
        if self.without_labels:
            words += f"; {self.without_labels / seen:.0%} without labels"
        return words + ", unless the collator makes them" * (self.without_labels == seen)


class SelectedRows(Subset[Any]):
    """Some rows of a map-style dataset, with its attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "indices"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def select_rows(dataset: Any, rows: list[int]) -> Any:
    """Return a dataset of some rows, of the same kind if it is one of the library datasets."""
    return dataset.select(rows) if is_a(dataset, "datasets.Dataset") else SelectedRows(dataset, rows)


def can_select(dataset: Any) -> bool:
    """Return whether there are rows, and single ones can be read."""
    is_map = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return is_map and has_length(dataset) and len(dataset) > 0


def summarize_rows(
    dataset: Any, columns: Collection[str] | None, model: Any, own_loss: bool = False, labels: Collection[str] = LABELS
) -> RowSummary:
    """Summarize all rows, or as many as fit in ten seconds, spread over the whole.

    Parameters:
        columns: names that count; None for all.
        model: the model that gets the rows.
        own_loss: whether labels may mean something else than to the model's own loss.
        labels: columns one of which is a label.
    """
    ends, total, found = time.monotonic() + MAX_SECONDS, len(dataset), RowSummary(len(dataset))
    # What a row may stand out by -> how much the row does that stands out most, and its number.
    notable: dict[str, tuple[float, int]] = {}
    bounds, main_input = _bounds(model, own_loss), getattr(model, "main_input_name", "input_ids")
    # Each beginning of this order is spread over the whole.
    stride = next(one for one in range(max(round(total * 0.618), 1), 2 * total + 1) if math.gcd(one, total) == 1)
    for number in (place * stride % total for place in range(total)):
        if time.monotonic() > ends and found.lengths:
            break
        try:
            row = dataset[number]
        except Exception as error:
            # It fails in a batch too.
            found.failing.setdefault("cannot be read", {})[number] = f"{type(error).__name__}: {error}"
            found.lengths[number] = 0
            continue
        values = dict(row) if isinstance(row, Mapping) else {"row": row}
        kept = {name: value for name, value in values.items() if columns is None or name in columns} or values
        amounts: dict[str, float] = {f"its columns: {', '.join(kept)}": 0}
        lengths: dict[str, int] = {}
        for name, value in kept.items():
            kind, length, numbers = _facts(value)
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
                    found.failing.setdefault(name, {})[number] = reason
        for what, amount in amounts.items():
            if what not in notable or amount > notable[what][0]:
                notable[what] = amount, number
        found.without_labels += not any(values.get(name) is not None for name in labels)
        found.lengths[number] = lengths.get(main_input, max(lengths.values(), default=0))
    # Of one row the kind of its values says more than how long it is.
    for what in sorted(notable, key=lambda what: what.startswith("the ")):
        found.notable.setdefault(notable[what][1], what)
    return found


def _facts(value: Any) -> tuple[str, int, Any]:
    """Return the kind of a value, how many values are in it, and these as an array if they are numbers."""
    if value is None:
        return "None", 0, None
    name = type(value).__name__
    try:
        numbers = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError):
        # Lists of unequal lengths, and number formats that NumPy does not know.
        return name, len(value) if hasattr(value, "__len__") else 1, None
    length = len(value) if isinstance(value, str) else numbers.size
    if numbers.dtype.kind not in "biuf" or not numbers.size:
        has_gaps = numbers.dtype.kind == "O" and any(one is None for one in numbers.ravel())
        return f"{name}{' with None' * has_gaps}{'' if numbers.size else ', empty'}", length, None
    kind = f"{numbers.ndim}-dimensional, {'real' if numbers.dtype.kind == 'f' else 'whole'} numbers"
    return kind + ("" if np.isfinite(numbers).all() else ", not all finite"), length, numbers


def _bounds(model: Any, own_loss: bool) -> dict[str, tuple[int, int, str]]:
    """Return, by column, how many whole numbers the model takes, one besides these, and the reason."""
    inner = base_model(model)
    kind, classes = type(inner).__name__, getattr(getattr(inner, "config", None), "num_labels", None)
    # Two models in one have a vocabulary for what they read and another for what they write.
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
    return bounds | (dict.fromkeys(LABELS, (predicted, PADDING, what)) if predicted else {})
