"""Groups of samples by tokens: batches with a maximum of tokens, and rows of packed documents.

A group contains positions in the order by length. Each epoch shuffles samples of equal length among their positions, so
that the number of groups and of optimizer steps is the same in all epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler

from littrainer.data.samplers import EpochSeededSampler, measure_lengths
from littrainer.data.sharding import get_length
from littrainer.distributed.layout import data_parallel_size

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

# Significant bits of rounded lengths (an increase of 3 % at most); samples of equal rounded length are shuffled.
LEADING_BITS = 6


class LengthGroups(Sampler[list[int]]):
    """Batch sampler of groups in descending length.

    Parameters:
        widths: tokens of each sample, rounded up.
        groups: positions in the order by descending width.
        last_global_batch_size: samples of the last global batch without padding; -1 if unknown.
    """

    def __init__(self, widths: np.ndarray, groups: list[np.ndarray], last_global_batch_size: int = -1):
        self.widths, self.groups = widths, groups
        self.last_global_batch_size = last_global_batch_size

    @property
    def order(self) -> np.ndarray:
        return self.sort_by_width(np.arange(len(self.widths)))

    def sort_by_width(self, order: np.ndarray) -> np.ndarray:
        return np.asarray(order[np.argsort(-self.widths[order], kind="stable")])

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order
        return (order[group].tolist() for group in self.groups)


class ShuffledGroups(EpochSeededSampler):
    """Random order of groups, whose samples are shuffled among samples of equal width."""

    def __init__(self, groups: LengthGroups, data_seed: int | None):
        super().__init__(groups.widths, data_seed=data_seed)
        self.groups = groups

    @property
    def sampler(self) -> ShuffledGroups:
        return self

    def __len__(self) -> int:
        return len(self.groups)

    def _draw_order(self) -> Iterator[Iterator[Any]]:
        self.generator = generator = self.generator or torch.Generator()
        generator.manual_seed(self.epoch + self.initial_seed)
        order = self.groups.sort_by_width(torch.randperm(len(self.groups.widths), generator=generator).numpy())
        numbers = torch.randperm(len(self.groups), generator=generator).tolist()
        yield (order[self.groups.groups[number]].tolist() for number in numbers)
        self.epoch += 1


def follow_sampler(args: TrainingArguments, groups: LengthGroups, sampler: Any, argument: str) -> Any:
    """Return groups in random order for a random sampler, or in fixed order for a sequential sampler."""
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    if is_random and sampler.num_samples == len(sampler.data_source):
        return ShuffledGroups(groups, args.data_seed)
    if sampler is None or type(sampler) is SequentialSampler:
        return groups
    raise ValueError(
        f"{argument}={getattr(args, argument)} draws its own order, and cannot follow the {type(sampler).__name__} "
        f"that _get_train_sampler or _get_eval_sampler returns: leave that override out, or {argument}."
    )


def make_token_batch_sampler(
    args: TrainingArguments, dataset: Any, sampler: Any, processing_class: Any, collator: Any, is_training: bool
) -> Any:
    """Return the batch sampler of `max_tokens_per_batch`; None for an evaluation stream, which has fixed batches."""
    limit = args.max_tokens_per_batch
    assert limit is not None
    if isinstance(dataset, IterableDataset) or get_length(dataset) is None:
        if not is_training:
            return None
        raise ValueError(
            f"max_tokens_per_batch={limit} sorts samples by length, and the training data is a stream or has no "
            "length: pass a map-style dataset, or set only per_device_train_batch_size."
        )
    lengths = measure_lengths(args, dataset, processing_class, "max_tokens_per_batch")
    widths = np.maximum(lengths, 1)
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    padded = -(-widths // multiple) * multiple
    check_fit(padded, limit, "max_tokens_per_batch", "samples")
    step = 2 ** np.maximum(np.frexp(widths)[1] - LEADING_BITS, 0)
    widths = np.minimum(-(-(-(-widths // step) * step) // multiple) * multiple, limit)
    processes = data_parallel_size(args)
    sorted_widths = np.sort(widths)[::-1]
    if is_training:
        groups = LengthGroups(widths, form_groups(sorted_widths, limit, processes))
    else:
        groups = LengthGroups(widths, *form_equal_groups(sorted_widths, limit, processes))
    return follow_sampler(args, groups, sampler, "max_tokens_per_batch")


def collate_up_to(limit: int, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    batch = collate(samples)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(ids, torch.Tensor) and ids.numel() > limit:
        raise ValueError(
            f"max_tokens_per_batch={limit}: data_collator made a batch of {' x '.join(map(str, ids.shape))} tokens. "
            "Let it pad to the longest sample of a batch. If samples are longer than when they were measured, or than "
            "the lengths that the dataset gives, make a new dataset."
        )
    return batch


def check_fit(lengths: np.ndarray, limit: int, argument: str, what: str) -> None:
    if longer := int((lengths > limit).sum()):
        raise ValueError(
            f"{argument}={limit}: {longer} of {len(lengths)} {what} are longer, the longest has {lengths.max()} "
            f"tokens. Set {argument}={lengths.max()} or more, or cut them in the dataset."
        )


def form_groups(widths: np.ndarray, limit: int, parts: int = 1) -> list[np.ndarray]:
    """Return groups of positions with at most `limit` tokens each, including padding.

    Parameters:
        widths: tokens of the samples in descending order.
        parts: number of processes, which divides the number of groups unless each group has a single sample.
    """
    groups, start = [], 0
    while start < len(widths):
        end = start + max(1, limit // int(widths[start]))
        groups.append(np.arange(start, min(end, len(widths))))
        start = end
    while len(groups) % parts:
        largest = max(range(len(groups)), key=lambda number: len(groups[number]))
        if len(groups[largest]) == 1:
            break
        groups[largest : largest + 1] = np.array_split(groups[largest], 2)
    return groups


def form_equal_groups(widths: np.ndarray, limit: int, parts: int) -> tuple[list[np.ndarray], int]:
    """Return groups that are equally large in all processes at a time, and the size of the last global batch."""
    groups: list[np.ndarray] = []
    start = last = 0
    while start < len(widths):
        last = min(max(1, limit // int(widths[start])) * parts, len(widths) - start)
        # `resize` repeats samples.
        groups += np.split(np.resize(np.arange(start, start + last), -(-last // parts) * parts), parts)
        start += last
    return groups, last


def find_length_groups(loader: Any) -> LengthGroups | None:
    """Return the groups if a loader reads them in fixed order, else None."""
    batches = getattr(loader, "batch_sampler", None)
    while batches is not None and not isinstance(batches, LengthGroups):
        batches = getattr(batches, "batch_sampler", None)
    return batches
