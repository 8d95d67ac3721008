"""Groups of samples by tokens: batches up to a number of tokens, and rows into which documents are packed.

Groups are formed of positions in the order by length. The samples of one length are distributed over their positions
again for each epoch, so that the number of groups, and of optimizer steps, is the same in all epochs.
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

# Lengths are rounded up to so many binary digits, by 3 % at most: samples of one rounded length are mixed in batches.
LEADING_BITS = 6


class LengthGroups(Sampler[list[int]]):
    """Groups of samples, the longest first.

    Parameters:
        widths: the length of each sample in tokens, rounded up.
        groups: positions in the order by width, from the largest down.
        last_global_batch_size: samples of the last groups that processes read at a time; further ones repeat others.
    """

    def __init__(self, widths: np.ndarray, groups: list[np.ndarray], last_global_batch_size: int = -1):
        self.widths, self.groups = widths, groups
        self.last_global_batch_size = last_global_batch_size

    @property
    def order(self) -> np.ndarray:
        """The samples in the order in which they are read."""
        return self.by_width(np.arange(len(self.widths)))

    def by_width(self, order: np.ndarray) -> np.ndarray:
        """Return samples sorted by width, those of one width in the order given."""
        return np.asarray(order[np.argsort(-self.widths[order], kind="stable")])

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order
        return (order[group].tolist() for group in self.groups)


class ShuffledGroups(EpochSeededSampler):
    """The groups in random order, each of samples that are drawn among those of the same width."""

    def __init__(self, groups: LengthGroups, data_seed: int | None):
        super().__init__(groups.widths, data_seed=data_seed)
        self.groups = groups

    @property
    def sampler(self) -> ShuffledGroups:
        """Return itself, which has the order of the batches of a batch sampler."""
        return self

    def __len__(self) -> int:
        return len(self.groups)

    def _orders(self) -> Iterator[Iterator[Any]]:
        self.generator = generator = self.generator or torch.Generator()
        generator.manual_seed(self.epoch + self.initial_seed)
        order = self.groups.by_width(torch.randperm(len(self.groups.widths), generator=generator).numpy())
        numbers = torch.randperm(len(self.groups), generator=generator).tolist()
        yield (order[self.groups.groups[number]].tolist() for number in numbers)
        self.epoch += 1


def follow_sampler(args: TrainingArguments, groups: LengthGroups, sampler: Any, argument: str) -> Any:
    """Return groups in the kind of order of a sampler: random, or the same in each epoch.

    Raises:
        ValueError: groups cannot follow the draws of a sampler of the script; the error names the argument.
    """
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
    """Return the batch sampler of `max_tokens_per_batch`; None for a stream to evaluate, read in fixed batches.

    Parameters:
        dataset: map-style, with its column of lengths if it has one.
        sampler: the order that the dataset would be read in.
        collator: pads each batch to its longest sample, and to its `pad_to_multiple_of` if it has one.

    Raises:
        ValueError: training data without lengths, or a sample that is longer than a batch may be.
    """
    limit = args.max_tokens_per_batch
    assert limit is not None
    if isinstance(dataset, IterableDataset) or get_length(dataset) is None:
        if not is_training:
            return None
        raise ValueError(
            f"max_tokens_per_batch={limit} sorts samples by length, and the training data is a stream or has no "
            "length: pass a map-style dataset, or leave it out and set per_device_train_batch_size."
        )
    lengths = measure_lengths(args, dataset, processing_class, "max_tokens_per_batch")
    widths = np.maximum(lengths, 1)
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    padded = -(-widths // multiple) * multiple
    check_fit(padded, limit, "max_tokens_per_batch", "samples")
    step = 2 ** np.maximum(np.frexp(widths)[1] - LEADING_BITS, 0)
    widths = np.minimum(-(-(-(-widths // step) * step) // multiple) * multiple, limit)
    parts = data_parallel_size(args)
    from_longest = np.sort(widths)[::-1]
    formed = (
        (form_groups(from_longest, limit, parts),) if is_training else form_equal_groups(from_longest, limit, parts)
    )
    return follow_sampler(args, LengthGroups(widths, *formed), sampler, "max_tokens_per_batch")


def collate_up_to(limit: int, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Return the batch of samples, refused if it has more tokens than that with padding."""
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
    """Raise a ValueError if samples are longer than a limit."""
    if longer := int((lengths > limit).sum()):
        raise ValueError(
            f"{argument}={limit}: {longer} of {len(lengths)} {what} are longer, the longest has {lengths.max()} "
            f"tokens. Set {argument}={lengths.max()} or more, or cut them in the dataset."
        )


def form_groups(widths: np.ndarray, limit: int, parts: int = 1) -> list[np.ndarray]:
    """Return groups of positions, each up to a limit of tokens with padding.

    Parameters:
        widths: of the samples, from the largest down.
        parts: processes; their number divides that of the groups, unless each sample is a group by itself.
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
    """Return groups of which the processes read equally large ones at a time, and the samples of the last round."""
    groups: list[np.ndarray] = []
    start = last = 0
    while start < len(widths):
        last = min(max(1, limit // int(widths[start])) * parts, len(widths) - start)
        # Samples of an incomplete round are repeated.
        groups += np.split(np.resize(np.arange(start, start + last), -(-last // parts) * parts), parts)
        start += last
    return groups, last


def find_length_groups(loader: Any) -> LengthGroups | None:
    """Return the groups in whose order a loader reads its dataset; None if it reads otherwise, or draws them."""
    batches = getattr(loader, "batch_sampler", None)
    while batches is not None and not isinstance(batches, LengthGroups):
        batches = getattr(batches, "batch_sampler", None)
    return batches
