"""A look at the rows of a dataset: lengths, missing values, labels and token ids, each finding with its row number."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from littrainer.data.loaders import has_length
from littrainer.errors.lazy_isinstance import is_a
from littrainer.model.facts import base_model

SECONDS_TO_LOOK = 10.0
# Padding of labels that losses leave out.
LEFT_OUT = -100
LABELS = ("labels", "label", "label_ids")
# Kinds of values of a column, one row of each of which is tried.
MOST_KINDS = 6
# As against the length below it, from when on rows of the greatest length may be cut off.
TIMES_AS_MANY = 3


@dataclass
class RowLook:
    """What a look at rows has found.

    Attributes:
        total: rows of the dataset.
        seconds: how long it took.
        lengths: by the row's number, the length of the model's input.
        notable: rows that stand out, which are worth a try, and what about them.
        failing: rows that cannot be trained or evaluated on, and why; by the kind of the reason.
        without_labels: rows without any label.
    """

    total: int
    seconds: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)
    notable: dict[int, str] = field(default_factory=dict)
    failing: dict[str, dict[int, str]] = field(default_factory=dict)
    without_labels: int = 0

    @property
    def bad_rows(self) -> set[int]:
        """Return the rows that would fail."""
        return {row for rows in self.failing.values() for row in rows}

    def longest(self, number: int) -> list[int]:
        """Return the longest rows that would not fail for another reason."""
        good = [row for row in self.lengths if row not in self.bad_rows]
        return sorted(good, key=lambda row: -self.lengths[row])[:number]

    def described(self) -> str:
        """Return what was looked at, in a line."""
        lengths, seen = self.lengths.values(), len(self.lengths)
        words = f"{seen:,} of {self.total:,} rows looked at"
        if lengths and max(lengths) > 1:
            counts, greatest = Counter(lengths), max(lengths)
            words += f"; lengths from {min(lengths):,} to {greatest:,}, {sum(lengths) / seen:,.0f} on average"
            # Without a limit few are as long as the longest one.
            if len(counts) > 1 and counts[greatest] > TIMES_AS_MANY * max(counts[greatest - 1], 1):
                words += f"; {counts[greatest] / seen:.0%} have the greatest one, and may be cut off"
        if self.without_labels > 0:
            words += f"; {self.without_labels / max(seen, 1):.0%} without labels"
        return words


class SelectedRows(Dataset[Any]):
    """Some rows of a map-style dataset, with its attributes.

    Parameters:
        dataset: whose rows they are.
        rows: their numbers, in order.
    """

    def __init__(self, dataset: Any, rows: list[int]):
        self.dataset, self.rows = dataset, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.rows[index]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "rows"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def selected(dataset: Any, rows: list[int]) -> Any:
    """Return a dataset of some rows, of the same kind if it is one of the library datasets."""
    return dataset.select(rows) if is_a(dataset, "datasets.Dataset") else SelectedRows(dataset, rows)


def can_select(dataset: Any) -> bool:
    """Return whether single rows can be read."""
    return has_length(dataset) and not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")


def look_at_rows(dataset: Any, columns: Collection[str] | None, model: Any, has_own_loss: bool) -> RowLook:
    """Look at all rows, or at as many as fit in ten seconds, spread over the whole.

    Parameters:
        columns: names that count; None for all.
        model: the model that gets the rows.
        has_own_loss: whether labels may mean something else than to the model's own loss.
    """
    started, found = time.monotonic(), RowLook(len(dataset))
    extremes: dict[tuple[str, str], tuple[float, int]] = {}
    kinds: Counter[str] = Counter()
    rules = _rules_for(model, has_own_loss)
    main_input = getattr(model, "main_input_name", "input_ids")
    for number in _spread(len(dataset)):
        try:
            row = dataset[number]
        except Exception as error:
            # It fails in a batch too; the error is the user's, and tells more than this look could.
            found.failing.setdefault("cannot be read", {})[number] = f"{type(error).__name__}: {error}"
            found.lengths[number] = 0
            continue
        values = dict(row) if isinstance(row, Mapping) else {"": row}
        kept = {name: value for name, value in values.items() if columns is None or name in columns}
        kept = kept or values
        lengths = {}
        for name, value in kept.items():
            kind, lengths[name], limits = _facts(value)
            if kinds[f"{name} {kind}"] == 0 and sum(key.startswith(f"{name} ") for key in kinds) < MOST_KINDS:
                found.notable[number] = f"{name} is {kind}"
            kinds[f"{name} {kind}"] += 1
            _keep_extremes(extremes, name, number, lengths[name], limits)
            reason = rules[name](value, limits) if name in rules and limits is not None else None
            if reason is not None:
                found.failing.setdefault(name, {})[number] = reason
        columns_of_row = ", ".join(kept)
        if kinds[columns_of_row] == 0:
            found.notable[number] = f"it has {columns_of_row}"
        kinds[columns_of_row] += 1
        found.without_labels += not any(values.get(name) is not None for name in LABELS)
        found.lengths[number] = lengths.get(main_input, max(lengths.values(), default=0))
        if time.monotonic() - started > SECONDS_TO_LOOK:
            break
    for (name, which), (_, number) in extremes.items():
        found.notable.setdefault(number, f"{name} is the {which} one")
    found.seconds = time.monotonic() - started
    return found


def _spread(total: int) -> Iterator[int]:
    """Yield all numbers below `total`, in an order of which each beginning is spread over the whole."""
    stride = max(round(total * 0.618), 1)
    while math.gcd(stride, total) > 1:
        stride += 1
    return ((place * stride) % total for place in range(total))


def _facts(value: Any) -> tuple[str, int, tuple[float, float] | None]:
    """Return the kind of a value, its length, and the least and greatest of its numbers."""
    if value is None or isinstance(value, str):
        return type(value).__name__.replace("NoneType", "None"), len(value or ""), None
    try:
        numbers = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError):
        # Lists of unequal lengths, and number formats that NumPy does not know.
        return type(value).__name__, len(value) if hasattr(value, "__len__") else 1, None
    length = len(numbers) if numbers.ndim else 1
    if numbers.dtype.kind == "O" and any(one is None for one in numbers.ravel()):
        return "None in a list", length, None
    if numbers.dtype.kind not in "biuf":
        return type(value).__name__, length, None
    inner = "".join(f" x {size}" for size in numbers.shape[1:])
    names = {"b": "truth values", "f": "floating-point numbers"}
    kind = f"{numbers.ndim}-dimensional{inner} {names.get(numbers.dtype.kind, 'whole numbers')}"
    if not numbers.size:
        return f"empty, {kind}", length, None
    least, greatest = numbers.min().item(), numbers.max().item()
    return kind if math.isfinite(least + greatest) else f"{kind}, not all finite", length, (least, greatest)


def _keep_extremes(
    extremes: dict[tuple[str, str], tuple[float, int]],
    name: str,
    row: int,
    length: int,
    limits: tuple[float, float] | None,
) -> None:
    found = {"shortest": -length, "longest": length}
    if limits is not None:
        found |= {"least": -limits[0], "greatest": limits[1]}
    for which, size in found.items():
        if (name, which) not in extremes or size > extremes[name, which][0]:
            extremes[name, which] = (size, row)


def _rules_for(model: Any, has_own_loss: bool) -> dict[str, Callable[[Any, tuple[float, float]], str | None]]:
    """Return, for columns with bounds that the model sets, what says why a value is outside; None if it is not."""
    inner, kind = base_model(model), type(base_model(model)).__name__
    rules: dict[str, Callable[[Any, tuple[float, float]], str | None]] = {}
    tokens, classes = _embeddings(inner), getattr(getattr(inner, "config", None), "num_labels", None)
    if tokens is not None:
        what = f"{kind} has {tokens:,} token embeddings, for 0 to {tokens - 1:,}"
        rules["input_ids"] = lambda value, limits: _outside(value, limits, tokens, what, may_be_left_out=False)
    bound, of_labels = tokens if _predicts_tokens(inner) else None, f"{kind} predicts one of {tokens} tokens"
    if "Classification" in kind and isinstance(classes, int) and classes > 1:
        bound, of_labels = classes, f"{kind} has {classes} classes (config.num_labels), for 0 to {classes - 1}"
    if bound is not None and not has_own_loss:
        for name in LABELS:
            rules[name] = lambda value, limits: _outside(value, limits, bound, of_labels, may_be_left_out=True)
    return rules


def _embeddings(model: Any) -> int | None:
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _predicts_tokens(model: Any) -> bool:
    try:
        return model.get_output_embeddings() is not None
    except (AttributeError, NotImplementedError, TypeError):
        return False


def _outside(value: Any, limits: tuple[float, float], bound: int, what: str, may_be_left_out: bool) -> str | None:
    # Numbers with a point are another kind of label.
    if any(isinstance(one, float) for one in limits):
        return None
    found = [limits[1]] if limits[1] >= bound else []
    if limits[0] < 0:
        numbers = np.unique(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value))
        found += [one for one in numbers.tolist() if one < 0 and not (may_be_left_out and one == LEFT_OUT)]
    return f"it has {found[0]:,}, and {what}" if found else None
