"""The DataLoader that a Trainer builds from a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from littrainer.data.samplers import EpochSeededSampler
from littrainer.seeds import seed_worker

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


def has_length(dataset: Any) -> bool:
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

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has, and tell sampler and dataset."""
        self.epoch = epoch
        # An iterable dataset has an endless placeholder for a sampler, which knows no epochs.
        for candidate in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.dataset):
            if callable(getattr(candidate, "set_epoch", None)):
                candidate.set_epoch(epoch)

    @property
    def samples_in_last_batch(self) -> int | None:
        """Samples in the last batch; 0 where it is a full one, None where the length is not known."""
        if not has_length(self.dataset) or self.drop_last:
            return None
        batch_size = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        return None if batch_size is None else len(self.dataset) % batch_size

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
    sampler: Sampler[int] | None,
    is_training: bool,
) -> LookaheadLoader:
    """The loader for a dataset, as the `dataloader_*` arguments describe it.

    Parameters:
        collate: turns a list of samples into a batch.
        batch_size: samples of a micro-batch on one device.
        sampler: the order of a map-style dataset; None for the dataset's own order.
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
    if not isinstance(dataset, IterableDataset):
        if isinstance(sampler, RandomSampler) and args.accelerator_config.use_seedable_sampler:
            sampler = EpochSeededSampler.replacing(sampler, args.data_seed)
        keywords["sampler"] = sampler
        keywords["drop_last"] = args.dataloader_drop_last
        if is_training:
            keywords["worker_init_fn"] = partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            )
    return LookaheadLoader(dataset, **keywords)


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
