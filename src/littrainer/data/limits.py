"""Limits of the batches that a Trainer reads, by the keywords of `lightning.Trainer` in `lightning`.

They are applied here and not passed to `lightning.Trainer`, since a Trainer has to know beforehand how many optimizer
steps there are.
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
# Purpose of the batches -> the keywords that limit them; the smallest limit counts.
LIMITS: dict[str, tuple[str, ...]] = {
    "training": ("limit_train_batches",),
    "evaluation": ("limit_val_batches",),
    # `predict()` of a Trainer is both of Lightning's, since it also computes metrics.
    "prediction": ("limit_test_batches", "limit_predict_batches"),
}
OVERFITTED = ("training", "evaluation")
# Purpose -> the advice instead of reading nothing.
NO_BATCHES_HINTS = {
    "training": "leave train() out",
    "evaluation": 'set eval_strategy="no"',
    "prediction": "leave predict() out",
}
# Applied here, and so no keywords of the `lightning.Trainer` that is built.
LIMIT_KEYWORDS = (*(name for names in LIMITS.values() for name in names), OVERFIT)


class KeywordSource(Protocol):
    """An object with keywords for `lightning.Trainer`, as a Trainer is."""

    args: TrainingArguments
    lightning_keywords: dict[str, Any]


def get_lightning_keywords(source: KeywordSource) -> dict[str, Any]:
    """Return the keywords for `lightning.Trainer` that a user passed, in the arguments or to the Trainer."""
    in_arguments: Any = source.args.lightning
    return {**(in_arguments or {}), **source.lightning_keywords}


def check_limits(source: KeywordSource) -> None:
    """Raise a ValueError if a limit is no number of batches and no share of them."""
    for purpose in LIMITS:
        _limits_for(source, purpose)


def is_overfit_run(source: KeywordSource) -> bool:
    """Whether each epoch trains on the same few batches."""
    return bool(get_lightning_keywords(source).get(OVERFIT))


def count_development_batches(source: KeywordSource) -> int:
    """Return the batches of a trial run by `fast_dev_run`, 0 if it is none; raise a ValueError if it is no number."""
    value = get_lightning_keywords(source).get(DEVELOPMENT_RUN) or 0
    if not isinstance(value, int) or value < 0:
        raise ValueError(
            f"lightning={{{DEVELOPMENT_RUN!r}: {value!r}}} is no number of batches: give True for one, or a number."
        )
    return int(value)


def get_batch_limit(source: KeywordSource, purpose: str, loader: Any) -> int | None:
    """Return the batches of a loader that are read for a purpose of `LIMITS`; None if `lightning` does not limit them.

    Raises:
        ValueError: the limit is a share of a loader without a length, or less than a batch.
    """
    limits = _limits_for(source, purpose)
    if not limits:
        return None
    length = get_length(loader)
    numbers = [_number(name, limit, length) for name, limit in limits.items()]
    return min(numbers if length is None else [*numbers, length])


def limit_batches(batches: Any, number: int | None) -> Iterator[Any]:
    """Yield the first batches of a loader, whose iteration ends with the last of them; all if `number` is None."""
    iterator = iter(batches)
    try:
        yield from islice(iterator, number)
    finally:
        # Not when it is collected, since loaders record that they are read.
        if hasattr(iterator, "close"):
            iterator.close()


def check_order_is_fixed(loader: Any) -> None:
    """Raise a ValueError if, under `overfit_batches`, a script's own training loader draws an order for each epoch."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    order: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (inner := getattr(order, "batch_sampler", getattr(order, "sampler", None))) is not None:
        order = inner
    # Samplers that draw have a generator, or make one for each epoch.
    if hasattr(order, "generator") or hasattr(order, "set_epoch"):
        raise ValueError(
            f"lightning={{{OVERFIT!r}: ...}} trains on the same batches in each epoch, and the training loader, which "
            f"get_train_dataloader() or a sampler of your own has made, draws another order for each "
            f"({type(order).__name__}): make it with shuffle=False."
        )


def _limits_for(source: KeywordSource, purpose: str) -> dict[str, int | float]:
    keywords = get_lightning_keywords(source)
    names = (OVERFIT,) if keywords.get(OVERFIT) and purpose in OVERFITTED else LIMITS[purpose]
    limits = {name: _check(name, keywords[name], purpose) for name in names if keywords.get(name) is not None}
    limits = {name: limit for name, limit in limits.items() if isinstance(limit, int) or limit < 1}
    trial = count_development_batches(source)
    return {**limits, DEVELOPMENT_RUN: trial} if trial else limits


def _check(name: str, value: Any, purpose: str) -> int | float:
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
    # As in Lightning, 1 is one batch and 1.0 are all of them, and 5.0 are five.
    return int(value) if value > 1 else value


def _number(name: str, limit: int | float, length: int | None) -> int:
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
