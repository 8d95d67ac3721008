"""The DataLoader that a Trainer builds from a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from littrainer.data.batch_rebalance import BatchRebalanceSampler
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.sampling import warn_that_a_stream_has_its_own_order
from littrainer.data.sharding import Share, SharedBatches, share_of
from littrainer.data.worker_states import without_reports
from littrainer.seeds import seed_worker

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

# What `next` gives after the last batch.
NO_BATCH = object()
# Keywords of a DataLoader that say which samples come in which batch.
ORDERING = ("batch_size", "drop_last", "sampler", "batch_sampler")


def tell_epoch(epoch: int, *candidates: Any) -> None:
    """Choose the epoch of samplers and datasets that have one."""
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
    # Processes that share the data, each of which has every n-th batch of it, or its part of each batch.
    processes = 1
    splits_batches = False
    # Whether an incomplete last batch is left out, also where a batch sampler does that.
    leaves_out_last = False
    rows_in_last_batch = -1
    # Streams are dispatched under accelerate unless its user says no, and only then it counts their last batch.
    dispatches_streams = True

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has, and tell sampler and dataset."""
        self.epoch = epoch
        tell_epoch(epoch, self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.dataset)

    def samples_in_last_batch(self, last_batch: Any) -> int | None:
        """Samples in the last batch of all processes together, where it is not a full one for each.

        They are counted in it where the data is a stream.
        """
        if isinstance(self.dataset, IterableDataset) and self.dispatches_streams:
            return first_dimension(last_batch)
        samples = self.samples_of_incomplete_batch()
        return samples if samples > 0 else None

    def samples_of_incomplete_batch(self) -> int:
        """Samples in the last batch of all processes together; 0 where it is a full one, -1 where nobody knows.

        Those of a stream are known when its last batch has been handed out.
        """
        if isinstance(self.dataset, IterableDataset) and self.dispatches_streams:
            return self.rows_in_last_batch
        batch_size = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        if batch_size is None or self.drop_last or self.leaves_out_last or not has_length(self.dataset):
            return -1
        return len(self.dataset) % (batch_size if self.splits_batches else batch_size * self.processes)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.read(None)

    def read(self, progress: Any) -> Iterator[Any]:
        """The batches of the epoch.

        Parameters:
            progress: told about each batch that is collated ahead, in a training that can be resumed.
        """
        self.end_of_dataloader = False
        self.rows_in_last_batch = -1
        self.set_epoch(self.epoch)
        batches = without_reports(super().__iter__()) if progress is None else progress.begin(self, super().__iter__)
        current = next(batches, NO_BATCH)
        if current is NO_BATCH:
            return
        while current is not NO_BATCH:
            if progress is not None:
                progress.before_batch_ahead()
            following = next(batches, NO_BATCH)
            if progress is not None:
                progress.after_batch_ahead(is_one=following is not NO_BATCH)
            self.end_of_dataloader = following is NO_BATCH
            if self.end_of_dataloader:
                self.rows_in_last_batch = first_dimension(current) or -1
            yield current
            current = following
        self.epoch += 1


def build_loader(
    args: TrainingArguments,
    dataset: Any,
    *,
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    sampler: Sampler[Any] | None,
    is_training: bool,
    settings: Any = None,
) -> LookaheadLoader:
    """The loader for this process's part of a dataset, as the `dataloader_*` arguments describe it.

    Parameters:
        collate: turns a list of samples into a batch.
        batch_size: samples of a micro-batch on one device.
        sampler: the order of a map-style dataset, or its batches; None for the dataset's own order.
        is_training: training loaders seed their workers.
        settings: how processes share the data; by default `accelerator_config` of the arguments.
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
    return _lookahead_loader(args, dataset, keywords, settings)


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


def lookahead_version(args: TrainingArguments, loader: DataLoader, settings: Any = None) -> DataLoader:
    """A LookaheadLoader over this process's part of a loader's data, as accelerate prepares loaders.

    Its random order is seeded by epoch where the arguments have it so. One that is a LookaheadLoader already, or a
    loader of a class of its own, is returned as it is.

    Parameters:
        settings: how processes share the data; by default `accelerator_config` of the arguments.
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
        keywords["batch_sampler"] = _with_seeded_order(args, batches)
    return _lookahead_loader(args, loader.dataset, keywords, settings)


def _lookahead_loader(
    args: TrainingArguments, dataset: Any, keywords: dict[str, Any], settings: Any = None
) -> LookaheadLoader:
    settings = args.accelerator_config if settings is None else settings
    dispatches_streams = getattr(settings, "dispatch_batches", None) is not False
    share = share_of(args, settings)
    leaves_out_last = keywords.get("drop_last", False)
    if share is not None:
        keywords = _keywords_of_part(dataset, keywords, share)
    loader = LookaheadLoader(dataset, **keywords)
    loader.dispatches_streams = dispatches_streams
    if share is not None:
        loader.processes, loader.splits_batches = share.of, share.split_batches
        loader.leaves_out_last = leaves_out_last
    return loader


def _keywords_of_part(dataset: Any, keywords: dict[str, Any], share: Share) -> dict[str, Any]:
    """What a loader over a map-style dataset is built with, so that it gives one process's part of the batches."""
    others = {name: value for name, value in keywords.items() if name not in ORDERING}
    batches = keywords.get("batch_sampler")
    if isinstance(batches, BatchRebalanceSampler):
        # It knows which process it is for.
        return keywords
    if batches is None:
        sampler = keywords.get("sampler")
        order = SequentialSampler(dataset) if sampler is None else sampler
        batches = BatchSampler(order, keywords["batch_size"], keywords.get("drop_last", False))
    return {**others, "batch_sampler": SharedBatches(batches, share)}


def _seeded_by_epoch(args: TrainingArguments, sampler: Any) -> Any:
    if isinstance(sampler, RandomSampler) and getattr(args.accelerator_config, "use_seedable_sampler", True):
        return EpochSeededSampler.replacing(sampler, args.data_seed)
    return sampler


def _with_seeded_order(args: TrainingArguments, batch_sampler: Any) -> Any:
    """A batch sampler of a class of its own, whose random order of samples, if it holds one, is seeded by epoch."""
    order = getattr(batch_sampler, "sampler", None)
    if isinstance(order, RandomSampler):
        batch_sampler.sampler = _seeded_by_epoch(args, order)
    return batch_sampler


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
