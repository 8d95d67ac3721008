"""How many batches of its data a Trainer reads, where `lightning` asks for fewer than there are.

The keywords are those of `lightning.Trainer`. They are carried out here and not handed to it: what it is handed counts
otherwise than the data, and a Trainer has to know beforehand how many optimizer steps there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from littrainer.data.sharding import length_of

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

OVERFIT, DEVELOPMENT_RUN = "overfit_batches", "fast_dev_run"
# What the batches are for -> the keywords that limit them; the smallest limit counts.
LIMITS: dict[str, tuple[str, ...]] = {
    "training": ("limit_train_batches",),
    "evaluation": ("limit_val_batches",),
    # Of test data a Trainer predicts and computes metrics, so that `predict()` is both of Lightning's.
    "prediction": ("limit_test_batches", "limit_predict_batches"),
}
OVERFITTED = ("training", "evaluation")
# What to do instead of reading nothing.
INSTEAD_OF_NONE = {
    "training": "leave train() out",
    "evaluation": 'set eval_strategy="no"',
    "prediction": "leave predict() out",
}
# Carried out here, and so no keywords of the `lightning.Trainer` that is built.
CARRIED_OUT = (*(name for names in LIMITS.values() for name in names), OVERFIT)


class HasKeywords(Protocol):
    """What keywords for `lightning.Trainer` are given to; a Trainer is one."""

    args: TrainingArguments
    lightning_keywords: dict[str, Any]


def further_keywords(source: HasKeywords) -> dict[str, Any]:
    """The keywords for `lightning.Trainer` that a user gave, by the arguments or to the Trainer."""
    in_arguments: Any = source.args.lightning
    return {**(in_arguments or {}), **source.lightning_keywords}


def check_limits(source: HasKeywords) -> None:
    """Refuse limits that mean nothing.

    Raises:
        ValueError: a limit is no number of batches and no share of them.
    """
    for purpose in LIMITS:
        _limits_for(source, purpose)


def overfits(source: HasKeywords) -> bool:
    """Whether each epoch trains on the same few batches."""
    return bool(further_keywords(source).get(OVERFIT))


def development_batches(source: HasKeywords) -> int:
    """Batches of a trial run of the whole script, by `fast_dev_run`; 0 where it is no trial.

    Raises:
        ValueError: it is no number of batches.
    """
    value = further_keywords(source).get(DEVELOPMENT_RUN) or 0
    if not isinstance(value, int) or value < 0:
        raise ValueError(
            f"lightning={{{DEVELOPMENT_RUN!r}: {value!r}}} is no number of batches: give True for one, or a number."
        )
    return int(value)


def limited_number(source: HasKeywords, purpose: str, loader: Any) -> int | None:
    """Batches of a loader that are read, where `lightning` limits them; None where it does not.

    Parameters:
        purpose: `training`, `evaluation` or `prediction`.

    Raises:
        ValueError: a share of a loader without a length, or one in which no batch is.
    """
    limits = _limits_for(source, purpose)
    if not limits:
        return None
    length = length_of(loader)
    numbers = [_number(name, limit, length) for name, limit in limits.items()]
    return min(numbers if length is None else [*numbers, length])


def first_batches(batches: Any, number: int | None) -> Iterator[Any]:
    """The first batches of a loader, whose iteration ends with the last of them; all where `number` is None."""
    iterator = iter(batches)
    try:
        yield from islice(iterator, number)
    finally:
        # Not when somebody collects it: loaders note who reads them.
        close: Callable[[], None] | None = getattr(iterator, "close", None)
        if close is not None:
            close()


def check_order_stays(loader: Any) -> None:
    """Refuse, for `overfit_batches`, a script's own training loader that draws another order for each epoch.

    Raises:
        ValueError: it does.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    order: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (inner := getattr(order, "batch_sampler", getattr(order, "sampler", None))) is not None:
        order = inner
    # Samplers that draw have the generator that they draw from; the one of an order for each epoch makes its own.
    if hasattr(order, "generator") or hasattr(order, "set_epoch"):
        raise ValueError(
            f"lightning={{{OVERFIT!r}: ...}} trains on the same batches in each epoch, and the training loader, which "
            f"get_train_dataloader() or a sampler of your own has made, draws another order for each "
            f"({type(order).__name__}): make it with shuffle=False."
        )


def _limits_for(source: HasKeywords, purpose: str) -> dict[str, int | float]:
    keywords = further_keywords(source)
    names = (OVERFIT,) if keywords.get(OVERFIT) and purpose in OVERFITTED else LIMITS[purpose]
    limits = {name: _checked(name, keywords[name], purpose) for name in names if keywords.get(name) is not None}
    limits = {name: limit for name, limit in limits.items() if isinstance(limit, int) or limit < 1}
    trial = development_batches(source)
    return {**limits, DEVELOPMENT_RUN: trial} if trial else limits


def _checked(name: str, value: Any, purpose: str) -> int | float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value > 1 and value != int(value)):
        raise ValueError(
            f"lightning={{{name!r}: {value!r}}} is neither a whole number of batches nor a share of them: give an int "
            "from 1 up, or a float up to 1.0, which stands for all."
        )
    if value == 0:
        raise ValueError(
            f"lightning={{{name!r}: {value!r}}} leaves nothing for {purpose}: {INSTEAD_OF_NONE[purpose]} instead."
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
