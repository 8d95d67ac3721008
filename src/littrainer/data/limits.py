"""Batch limits of a Trainer, by the keywords of `lightning.Trainer` in `lightning`.

Lightning does not apply them, since a Trainer computes the number of optimizer steps beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from littrainer.data.sharding import get_length

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

OVERFIT, DEVELOPMENT_RUN = "overfit_batches", "fast_dev_run"
# Purpose -> keywords, of which the smallest limit applies.
LIMITS: dict[str, tuple[str, ...]] = {
    "training": ("limit_train_batches",),
    "evaluation": ("limit_val_batches",),
    # A Trainer's `predict()` also computes metrics, so it is Lightning's test and predict.
    "prediction": ("limit_test_batches", "limit_predict_batches"),
}
OVERFIT_PURPOSES = ("training", "evaluation")
NO_BATCHES_HINTS = {
    "training": "leave train() out",
    "evaluation": 'set eval_strategy="no"',
    "prediction": "leave predict() out",
}
# Keywords that are not passed to `lightning.Trainer`.
LIMIT_KEYWORDS = (*(name for names in LIMITS.values() for name in names), OVERFIT)


class KeywordSource(Protocol):
    args: TrainingArguments
    lightning_keywords: dict[str, Any]


def get_lightning_keywords(source: KeywordSource) -> dict[str, Any]:
    in_arguments: Any = source.args.lightning
    return {**(in_arguments or {}), **source.lightning_keywords}


def check_limits(source: KeywordSource) -> None:
    for purpose in LIMITS:
        _get_limits(source, purpose)


def is_overfit_run(source: KeywordSource) -> bool:
    return bool(get_lightning_keywords(source).get(OVERFIT))


def count_development_batches(source: KeywordSource) -> int:
    value = get_lightning_keywords(source).get(DEVELOPMENT_RUN) or 0
    if not isinstance(value, int) or value < 0:
        raise ValueError(
            f"lightning={{{DEVELOPMENT_RUN!r}: {value!r}}} is no number of batches: give True for one, or a number."
        )
    return int(value)


def get_batch_limit(source: KeywordSource, purpose: str, loader: Any) -> int | None:
    """Return the maximum of batches for a purpose of `LIMITS`; None if there is no limit."""
    limits = _get_limits(source, purpose)
    if not limits:
        return None
    length = get_length(loader)
    numbers = [_count_batches(name, limit, length) for name, limit in limits.items()]
    return min(numbers if length is None else [*numbers, length])


def limit_batches(batches: Any, number: int | None) -> Iterator[Any]:
    """Yield the first batches of a loader, and close its iterator."""
    iterator = iter(batches)
    try:
        yield from islice(iterator, number)
    finally:
        # Closed now, since `current_loader` returns loaders with open iterators.
        if hasattr(iterator, "close"):
            iterator.close()


def check_order_is_fixed(loader: Any) -> None:
    """Raise a ValueError if the script's training loader shuffles each epoch."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (inner := getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))) is not None:
        sampler = inner
    if hasattr(sampler, "generator") or hasattr(sampler, "set_epoch"):
        raise ValueError(
            f"lightning={{{OVERFIT!r}: ...}} trains on the same batches in each epoch, and the training loader, which "
            f"get_train_dataloader() or a sampler of your own has made, draws another order for each "
            f"({type(sampler).__name__}): make it with shuffle=False."
        )


def _get_limits(source: KeywordSource, purpose: str) -> dict[str, int | float]:
    keywords = get_lightning_keywords(source)
    if not keywords:
        return {}
    names = (OVERFIT,) if keywords.get(OVERFIT) and purpose in OVERFIT_PURPOSES else LIMITS[purpose]
    limits = {name: _check_limit(name, keywords[name], purpose) for name in names if keywords.get(name) is not None}
    limits = {name: limit for name, limit in limits.items() if isinstance(limit, int) or limit < 1}
    trial = count_development_batches(source)
    return {**limits, DEVELOPMENT_RUN: trial} if trial else limits


def _check_limit(name: str, value: Any, purpose: str) -> int | float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value > 1 and value != int(value)):
        raise ValueError(
            f"lightning={{{name!r}: {value!r}}} is neither a whole number of batches nor a share of them: give an int "
            "from 1 up, or a float up to 1.0, which stands for all."
        )
    if value == 0:
        raise ValueError(
            f"lightning={{{name!r}: {value!r}}} leaves nothing for {purpose}: {NO_BATCHES_HINTS[purpose]} instead."
        )
    # As in Lightning, 1 is one batch, 1.0 is all batches, 5.0 is five.
    return int(value) if value > 1 else value


def _count_batches(name: str, limit: int | float, length: int | None) -> int:
    if isinstance(limit, int):
        return limit
    if length is None:
        raise ValueError(
            f"lightning={{{name!r}: {limit!r}}} is a share of data whose length is not known: give a number of batches."
        )
    number = int(length * limit)
    if not number and length:
        raise ValueError(
            f"lightning={{{name!r}: {limit!r}}} of {length} batches is less than one: give at least {1 / length:.4g}, "
            "or a number of batches."
        )
    return number
