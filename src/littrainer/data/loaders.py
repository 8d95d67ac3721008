"""The DataLoader that a Trainer builds from a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from littrainer.data.batch_rebalance import BatchRebalanceSampler
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.sampling import warn_that_a_stream_has_its_own_order
from littrainer.seeds import seed_worker

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


def _tell_epoch(epoch: int, *candidates: Any) -> None:
    for candidate in candidates:
        if callable(getattr(candidate, "set_epoch", None)):
            candidate.set_epoch(epoch)


def has_length(dataset: Any) -> TypeGuard[Sized]:
    """Whether `len()` of a dataset or loader is known."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError, NotImplementedError):
        return False


class LookaheadLoader(DataLoader):
    """A DataLoader that collates one batch ahead of the one it hands out.

    It knows when it hands out the last batch, and collators that draw random numbers draw them in the order in which
    they do under accelerate's loader.
    """

    # Class attributes, so that DataLoader's own constructor, which watches assignments, need not know them.
    epoch = 0
    end_of_dataloader = False
    # Streams are dispatched under accelerate unless its user says no, and only then it counts their last batch.
    dispatches_streams = True

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has, and tell sampler and dataset."""
        self.epoch = epoch
        _tell_epoch(epoch, self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.dataset)

    def samples_in_last_batch(self, last_batch: Any) -> int | None:
        """Samples in the last batch where it is not a full one; they are counted in it where the data is a stream."""
        if isinstance(self.dataset, IterableDataset) and self.dispatches_streams:
            return first_dimension(last_batch)
        batch_size = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        if batch_size is None or self.drop_last or not has_length(self.dataset):
            return None
        return len(self.dataset) % batch_size or None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.end_of_dataloader = False
        self.set_epoch(self.epoch)
        batches = super().__iter__()
        try:
            current = next(batches)
        except StopIteration:
            return
        for following in batches:
            yield current
            current = following
        self.end_of_dataloader = True
        yield current
        self.epoch += 1


def build_loader(
    args: TrainingArguments,
    dataset: Any,
    *,
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    sampler: Sampler[Any] | None,
    is_training: bool,
) -> LookaheadLoader:
    """The loader for a dataset, as the `dataloader_*` arguments describe it.

    Parameters:
        collate: turns a list of samples into a batch.
        batch_size: samples of a micro-batch on one device.
        sampler: the order of a map-style dataset, or its batches; None for the dataset's own order.
        is_training: training loaders seed their workers.
    """
    keywords: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collate,
        "num_workers": args.dataloader_num_workers,
        # Pinned memory only speeds up copies to an accelerator; without one torch warns at every loader.
        "pin_memory": args.dataloader_pin_memory and args.device.type != "cpu",
        "persistent_workers": args.dataloader_persistent_workers,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "in_order": args.dataloader_in_order,
    }
    if is_training and sampler is None:
        warn_that_a_stream_has_its_own_order(args)
    if not isinstance(dataset, IterableDataset):
        if isinstance(sampler, BatchRebalanceSampler):
            del keywords["batch_size"]
            keywords["batch_sampler"] = sampler
        else:
            keywords.update(sampler=_seeded_by_epoch(args, sampler), drop_last=args.dataloader_drop_last)
        if is_training:
            keywords["worker_init_fn"] = partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            )
    return _lookahead_loader(args, dataset, keywords)


# What a DataLoader was built with, besides dataset, collator and the order of samples.
CARRIED_OVER = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def lookahead_version(args: TrainingArguments, loader: DataLoader) -> DataLoader:
    """A LookaheadLoader over the same data, whose random order is seeded by epoch where the arguments have it so.

    One that is already, or a loader of a class of its own, is returned as it is.
    """
    if type(loader) is not DataLoader:
        return loader
    keywords: dict[str, Any] = {name: getattr(loader, name) for name in CARRIED_OVER}
    batches: Any = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or batches is None:
        keywords.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    elif type(batches) is BatchSampler and isinstance(batches.sampler, RandomSampler):
        sampler = _seeded_by_epoch(args, batches.sampler)
        keywords.update(batch_size=batches.batch_size, drop_last=batches.drop_last, sampler=sampler)
    else:
        keywords["batch_sampler"] = batches
    return _lookahead_loader(args, loader.dataset, keywords)


def _lookahead_loader(args: TrainingArguments, dataset: Any, keywords: dict[str, Any]) -> LookaheadLoader:
    loader = LookaheadLoader(dataset, **keywords)
    loader.dispatches_streams = getattr(args.accelerator_config, "dispatch_batches", None) is not False
    return loader


def _seeded_by_epoch(args: TrainingArguments, sampler: Any) -> Any:
    if isinstance(sampler, RandomSampler) and getattr(args.accelerator_config, "use_seedable_sampler", True):
        return EpochSeededSampler.replacing(sampler, args.data_seed)
    return sampler


def without_first_batches(loader: Any, number: int) -> Any:
    """The same loader without its first batches.

    Parameters:
        number: batches to leave out.

    Samples of a map-style dataset are left out by index, without being read: skipping many takes no longer than few.
    Any other loader is read and its first batches dropped.
    """
    by_index = type(loader) in (DataLoader, LookaheadLoader) and not isinstance(loader.dataset, IterableDataset)
    if not by_index or loader.batch_sampler is None:
        return _Dropping(loader, number)
    keywords = {name: getattr(loader, name) for name in CARRIED_OVER}
    return type(loader)(loader.dataset, batch_sampler=_LaterBatches(loader.batch_sampler, number), **keywords)


class _LaterBatches(Sampler[list[int]]):
    """The batches of another batch sampler from a number on."""

    def __init__(self, batch_sampler: Any, number: int):
        self.batch_sampler = batch_sampler
        self.number = number
        self.batch_size = getattr(batch_sampler, "batch_size", None)

    def set_epoch(self, epoch: int) -> None:
        _tell_epoch(epoch, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batch_sampler), self.number, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.number, 0)


class _Dropping:
    """Another loader, read from its start, whose first batches are dropped."""

    def __init__(self, loader: Any, number: int):
        self.loader = loader
        self.number = number

    def set_epoch(self, epoch: int) -> None:
        _tell_epoch(epoch, self.loader)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self.number, None)


def count_examples(loader: Any, batch_size: int) -> int:
    """Samples in a loader: the length of its dataset, else estimated from its length in batches of `batch_size`."""
    dataset = getattr(loader, "dataset", None)
    return len(dataset) if has_length(dataset) else len(loader) * batch_size


def first_dimension(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor found in a nested batch: the samples in it."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() > 0 else None
    if hasattr(batch, "shape"):
        return batch.shape[0] if len(batch.shape) > 0 else None
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for size in map(first_dimension, values) if size is not None), None)
