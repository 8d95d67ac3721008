"""A look at the rows of a dataset: lengths, missing values, labels and token ids, each finding with its row number."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from littrainer.data.loaders import has_length
from littrainer.errors.lazy_isinstance import is_a
from littrainer.model.facts import base_model

SECONDS_TO_LOOK = 10.0
LABELS = ("labels", "label", "label_ids")
# Padding of labels; kinds of values of a column, one row of each of which is tried; and how many times as many rows as
# have the length below it may be cut off at the greatest one.
PADDING, MOST_KINDS, TIMES_AS_MANY = -100, 6, 3
# Least and greatest number of a value; what says why they are outside of what the model takes, or None.
Limits = tuple[float, float]
Rule = Callable[[Any, Limits], str | None]


@dataclass
class RowLook:
    """What a look at rows has found.

    Attributes:
        total: rows of the dataset.
        lengths: by the row's number, the length of the model's input.
        notable: rows that stand out, which are worth a try, and what about them.
        failing: rows that cannot be trained or evaluated on, and why, by column.
        without_labels: rows without any label.
    """

    total: int
    lengths: dict[int, int] = field(default_factory=dict)
    notable: dict[int, str] = field(default_factory=dict)
    failing: dict[str, dict[int, str]] = field(default_factory=dict)
    without_labels: int = 0

    def good(self, rows: Collection[int]) -> list[int]:
        """Return those of the rows that were not found to fail."""
        bad = {row for found in self.failing.values() for row in found}
        return [row for row in rows if row not in bad]

    def longest(self, number: int) -> list[int]:
        """Return the longest good rows."""
        return sorted(self.good(self.lengths), key=lambda row: -self.lengths[row])[:number]

    def __str__(self) -> str:
        counts, seen = Counter(self.lengths.values()), len(self.lengths)
        greatest = max(counts)
        words = f"{seen:,} of {self.total:,} rows looked at"
        mean = sum(self.lengths.values()) / seen
        words += f"; lengths from {min(counts):,} to {greatest:,}, {mean:,.0f} on average" * (greatest > 1)
        # Without a limit few are as long as the longest one.
        if len(counts) > 1 and counts[greatest] > TIMES_AS_MANY * max(counts[greatest - 1], 1):
            words += f"; {counts[greatest] / seen:.0%} have the greatest one, and may be cut off"
        return words + (f"; {self.without_labels / seen:.0%} without labels" if self.without_labels else "")


class SelectedRows(Subset[Any]):
    """Some rows of a map-style dataset, with its attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "indices"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def selected(dataset: Any, rows: list[int]) -> Any:
    """Return a dataset of some rows, of the same kind if it is one of the library datasets."""
    return dataset.select(rows) if is_a(dataset, "datasets.Dataset") else SelectedRows(dataset, rows)


def can_select(dataset: Any) -> bool:
    """Return whether there are rows, and single ones can be read."""
    is_map = has_length(dataset) and not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")
    return is_map and len(dataset) > 0


def look_at_rows(dataset: Any, columns: Collection[str] | None, model: Any, has_own_loss: bool) -> RowLook:
    """Look at all rows, or at as many as fit in ten seconds, spread over the whole.

    Parameters:
        columns: names that count; None for all.
        model: the model that gets the rows.
        has_own_loss: whether labels may mean something else than to the model's own loss.
    """
    ends, total, found = time.monotonic() + SECONDS_TO_LOOK, len(dataset), RowLook(len(dataset))
    # By column and what is extreme: how much, and the row.
    extremes: dict[str, tuple[float, int]] = {}
    kinds: dict[str, set[str]] = {}
    rules, main_input = _rules_for(model, has_own_loss), getattr(model, "main_input_name", "input_ids")
    # Each beginning of this order is spread over the whole.
    stride = max(round(total * 0.618), 1)
    while math.gcd(stride, total) > 1:
        stride += 1
    for number in (place * stride % total for place in range(total)):
        try:
            row = dataset[number]
        except Exception as error:
            # It fails in a batch too.
            found.failing.setdefault("cannot be read", {})[number] = f"{type(error).__name__}: {error}"
            found.lengths[number] = 0
            continue
        values = dict(row) if isinstance(row, Mapping) else {"row": row}
        kept = {name: value for name, value in values.items() if columns is None or name in columns} or values
        lengths: dict[str, int] = {}
        for name, value in [*kept.items(), ("its columns", ", ".join(kept))]:
            kind, length, limits = _facts(value) if name in kept else (value, 0, None)
            known = kinds.setdefault(name, set())
            if kind not in known and len(known) < MOST_KINDS:
                known.add(kind)
                found.notable[number] = f"{name}: {kind}"
            lengths[name] = length
            sizes: dict[str, float] = {"shortest": -length, "longest": length}
            sizes |= {} if limits is None else {"least": -limits[0], "greatest": limits[1]}
            for which, size in sizes.items():
                if size > extremes.get(f"the {which} {name}", (-math.inf, 0))[0]:
                    extremes[f"the {which} {name}"] = size, number
            reason = rules[name](value, limits) if name in rules and limits is not None else None
            if reason is not None:
                found.failing.setdefault(name, {})[number] = reason
        found.without_labels += not any(values.get(name) is not None for name in LABELS)
        found.lengths[number] = lengths.get(main_input, max(lengths.values()))
        if time.monotonic() > ends:
            break
    for what, (_, number) in extremes.items():
        found.notable.setdefault(number, what)
    return found


def _facts(value: Any) -> tuple[str, int, Limits | None]:
    """Return the kind of a value, its length, and the least and greatest of its numbers."""
    name = "None" if value is None else type(value).__name__
    if value is None or isinstance(value, str):
        return name, len(value or ""), None
    try:
        numbers = _as_array(value)
    except (TypeError, ValueError):
        # Lists of unequal lengths, and number formats that NumPy does not know.
        return name, len(value) if hasattr(value, "__len__") else 1, None
    length = len(numbers) if numbers.ndim else 1
    if numbers.dtype.kind not in "biuf" or not numbers.size:
        has_gaps = numbers.dtype.kind == "O" and any(one is None for one in numbers.ravel())
        return f"{name}{' with None' * has_gaps}{'' if numbers.size else ', empty'}", length, None
    inner = "".join(f" x {size}" for size in numbers.shape[1:])
    kind = f"{numbers.ndim}-dimensional{inner}, {'real' if numbers.dtype.kind == 'f' else 'whole'} numbers"
    limits = numbers.min().item(), numbers.max().item()
    return kind if math.isfinite(sum(limits)) else f"{kind}, not all finite", length, limits


def _as_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _rules_for(model: Any, has_own_loss: bool) -> dict[str, Rule]:
    """Return the rules for columns whose numbers have bounds that the model sets."""
    inner, rules = base_model(model), dict[str, Rule]()
    kind, classes = type(inner).__name__, getattr(getattr(inner, "config", None), "num_labels", None)
    try:
        tokens = int(inner.get_input_embeddings().weight.shape[0])
        predicts_tokens = inner.get_output_embeddings() is not None
    except (AttributeError, NotImplementedError, TypeError):
        tokens, predicts_tokens = 0, False
    if tokens:
        rules["input_ids"] = _rule(tokens, f"{kind} has {tokens:,} token embeddings", may_be_padding=False)
    if has_own_loss:
        return rules
    if "Classification" in kind and isinstance(classes, int) and classes > 1:
        rules |= dict.fromkeys(LABELS, _rule(classes, f"{kind} has {classes} classes (config.num_labels)"))
    elif predicts_tokens:
        rules |= dict.fromkeys(LABELS, _rule(tokens, f"{kind} predicts one of {tokens:,} tokens"))
    return rules


def _rule(bound: int, what: str, may_be_padding: bool = True) -> Rule:
    def outside(value: Any, limits: Limits) -> str | None:
        # Labels with a point are not numbers of classes.
        if (limits[0] >= 0 and limits[1] < bound) or isinstance(limits[0], float):
            return None
        numbers = np.unique(_as_array(value)).tolist()
        found = [one for one in numbers if not 0 <= one < bound and not (may_be_padding and one == PADDING)]
        return f"it has {found[-1]:,}, and {what}, for 0 to {bound - 1:,}" if found else None

    return outside
