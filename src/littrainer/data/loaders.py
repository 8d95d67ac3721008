"""DataLoader of a Trainer, which prefetches batches and moves them to the accelerator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from littrainer.data.dispatching import NO_BATCH, Dispatch, find_batch_size
from littrainer.data.resume.worker_states import WorkerStates
from littrainer.data.samplers import EpochSeededSampler, warn_about_stream_order
from littrainer.data.sharding import ShardSpec, SharedBatches, SharedStream, find_shard, get_length, set_epoch_on
from littrainer.data.stream_end import StreamEndSync
from littrainer.data.token_batches import LengthGroups, ShuffledGroups, find_length_groups
from littrainer.data.workers import iterate_batches
from littrainer.distributed.collectives import broadcast_object
from littrainer.distributed.layout import data_parallel_rank
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.nested_values import map_nested
from littrainer.runtime.seeds import seed_worker

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


def move_batch(value: Any, device: torch.device, non_blocking: bool) -> Any:
    def move(leaf: Any) -> Any:
        if not is_movable(leaf):
            return leaf
        try:
            return leaf.to(device, non_blocking=non_blocking)
        except TypeError:
            # A script's class may accept the device only.
            return leaf.to(device)

    def is_movable(part: Any) -> bool:
        return callable(getattr(part, "to", None))

    return map_nested(move, value, is_movable)


def is_pinned(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(is_pinned, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor) and value.is_pinned()


# Loaders being iterated (training loader excluded), innermost last.
_active_loaders: list[Any] = []


def current_loader() -> Any:
    return _active_loaders[-1] if _active_loaders else None


def has_length(dataset: Any) -> TypeGuard[Sized]:
    return get_length(dataset) is not None


class PrefetchLoader(DataLoader):
    """DataLoader that prefetches a batch, so that collators draw random numbers in accelerate's order."""

    # Class attributes, since DataLoader's constructor checks assignments.
    epoch = 0
    end_of_dataloader = False
    # Number of shards; each process reads every n-th batch, or with `splits_batches` its part of each batch.
    processes = 1
    splits_batches = False
    dispatch: Dispatch | None = None
    # Generator whose state rank 0 broadcasts at the start of each epoch.
    synchronized_generator: torch.Generator | None = None
    stream_end_sync: StreamEndSync | None = None
    # Mode of sharding; a resume compares it with the checkpoint's.
    sharing: str | None = None
    _has_drawn_seed = False
    rows_in_last_batch = -1
    # Rows skipped by a resume with another batch size, and the dataset that skips them.
    rows_skipped = 0
    _dataset_read: Any = None
    # None leaves batches on the host.
    destination: torch.device | None = None
    blocking_copies = True
    # First: look for memory that the collator pinned and may reuse. Second: the last batch had such memory.
    _should_check_pinned = _is_collators_memory = False
    # Profiler hook; `id` is a no-op that costs no Python call.
    enter_section: Callable[[str], Any] = id
    # Attributes of accelerate's loaders that scripts read.
    device: torch.device | None = None
    gradient_state: Any = None
    use_stateful_dataloader = False
    skip_batches = 0
    # False with dispatch_batches=False: a stream's `remainder` is then not read from its last batch, as in accelerate.
    dispatches_streams = True

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        set_epoch_on(epoch, self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.dataset)

    def set_destination(self, device: torch.device, settings: Any) -> None:
        """Move batches to a device; without `non_blocking`, only copies of pinned memory are asynchronous."""
        self.destination = None if device.type == "cpu" else device
        has_pinned, non_blocking = self.pin_memory and device.type == "cuda", getattr(settings, "non_blocking", False)
        self.blocking_copies = not (has_pinned or non_blocking)
        self._should_check_pinned = has_pinned and not (non_blocking or self.num_workers)

    @property
    def total_batch_size(self) -> int:
        """Samples in a global batch, as in accelerate's loaders."""
        if isinstance(self.dataset, SharedStream):
            return self.dataset.global_batch_size
        for source in (self, self.batch_sampler, self.sampler):
            size = getattr(source, "batch_size", None)
            if size is not None:
                return int(size) if self.splits_batches else int(size) * self.processes
        raise AttributeError("total_batch_size is not known: the loader's batches come from a sampler without a size")

    @property
    def total_dataset_length(self) -> int:
        return len(get_full_dataset(self))

    def __len__(self) -> int:
        length = super().__len__()
        return length if self.dispatch is None else self.dispatch.count_global_batches(length)

    def samples_in_last_batch(self) -> int | None:
        """Return the samples in the last global batch if it is incomplete, else None."""
        return self.remainder if self.remainder > 0 else None

    @property
    def remainder(self) -> int:
        """Samples in the last global batch; 0 if it is full, -1 if unknown."""
        if self.dispatch is not None or (isinstance(self.dataset, IterableDataset) and self.dispatches_streams):
            return self.rows_in_last_batch
        if isinstance(self.dataset, SharedStream):
            # Not `or`, since the truth value of a stream without length raises an error.
            stream = self.dataset if self._dataset_read is None else self._dataset_read
            return stream.incomplete_global_batch_size()
        if (groups := find_length_groups(self)) is not None:
            return groups.last_global_batch_size
        batch_size = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        drops_last = self.drop_last or getattr(self.batch_sampler, "drop_last", False)
        if batch_size is None or drops_last or not has_length(self.dataset):
            return -1
        return (len(self.dataset) - self.rows_skipped) % (batch_size * (1 if self.splits_batches else self.processes))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        _active_loaders.append(self)
        try:
            yield from self.read(None)
        finally:
            # Not `pop()`, since iterators may end in any order.
            del _active_loaders[[id(loader) for loader in _active_loaders].index(id(self))]

    def read(self, progress: Any) -> Iterator[Any]:
        """Yield the batches of the epoch; the `DataProgress` of a training records each prefetch."""
        self.end_of_dataloader = False
        self.rows_in_last_batch = -1
        self.rows_skipped = 0
        if self.stream_end_sync is not None:
            self.stream_end_sync.begin()
        if self.synchronized_generator is not None:
            self.synchronized_generator.set_state(broadcast_object(self.synchronized_generator.get_state()))
        self.set_epoch(self.epoch)
        # Persistent workers may report their states in an evaluation too.
        batches = WorkerStates().batches(self._iterate()) if progress is None else progress.begin(self, self._iterate)
        if self.dispatch is not None:
            batches = self.dispatch.global_batches(batches)
        current: Any = next(batches, NO_BATCH)
        if self.dispatch is not None:
            current = self.dispatch.begin(current)
        if self._has_ended(current is NO_BATCH, progress):
            return
        while current is not NO_BATCH:
            # Moved or copied before the prefetch, in which the collator may reuse the batch's memory.
            if self.dispatch is None and self.destination is not None:
                current = self._move(current, self.destination)
            elif self.dispatch is not None and self.dispatch.reads:
                current = map_nested(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, current)
            following = next(batches, NO_BATCH) if progress is None else progress.prefetch(batches)
            if self.dispatch is not None:
                current, following = self.dispatch.scatter(current, following)
            if self.stream_end_sync is not None and self._has_ended(following is NO_BATCH, progress):
                following = NO_BATCH
            is_last = following is NO_BATCH
            if self.end_of_dataloader is not is_last:
                # Rarely, since an assignment calls DataLoader's `__setattr__`.
                self.end_of_dataloader = is_last
            if progress is not None:
                progress.is_exhausted = is_last
            if self.dispatch is not None and self.destination is not None:
                current = self._move(current, self.destination)
            if is_last:
                rows = find_batch_size(current) if self.dispatch is None else self.dispatch.last_global_batch_size
                self.rows_in_last_batch = rows or -1
            yield current
            current = following
        self.epoch += 1

    def _move(self, batch: Any, device: torch.device) -> Any:
        self.enter_section("to_device")
        batch = move_batch(batch, device, not (self.blocking_copies or self._is_collators_memory))
        self.enter_section("data")
        return batch

    def _has_ended(self, has_local_ended: bool, progress: Any) -> bool:
        sync = self.stream_end_sync
        return has_local_ended if sync is None else sync.any_rank_exhausted(has_local_ended, progress is not None)

    def _iterate(self) -> Iterator[Any]:
        if self.dispatch is None or self.dispatch.reads:
            return iterate_batches(self, self._make_torch_iterator)
        if not self.num_workers:
            # Draw the iterator's seed here too, so that the generators of all processes agree.
            super().__iter__()
        elif not (self.persistent_workers and self._has_drawn_seed):
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._has_drawn_seed = True
        return iter(())

    def _make_torch_iterator(self) -> Iterator[Any]:
        self._dataset_read = self.dataset
        batches: Any = super().__iter__()
        if self._should_check_pinned:
            # Checked in the collator, since torch's iterator pins the batch afterwards.
            fetcher = batches._dataset_fetcher
            fetcher.collate_fn = partial(self._collate_and_check, fetcher.collate_fn)
        return batches

    def _collate_and_check(self, collate: Callable[[Any], Any], samples: Any) -> Any:
        batch = collate(samples)
        self._is_collators_memory = is_pinned(batch)
        return batch


def warn_about_ignored_batching(args: TrainingArguments, loader: Any) -> None:
    for name in ("max_tokens_per_batch", "pack_to_length"):
        if getattr(args, name) is not None and not isinstance(loader, PrefetchLoader):
            kind = type(loader).__name__
            logger.warning("%s has no effect in training: get_train_dataloader returns a %s.", name, kind)


def build_loader(
    args: TrainingArguments,
    dataset: Any,
    *,
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    sampler: Sampler[Any] | None,
    is_training: bool,
    settings: Any = None,
) -> PrefetchLoader:
    """Return the loader for this process's shard of a dataset, by the `dataloader_*` arguments.

    Parameters:
        sampler: sampler or batch sampler; None for the dataset's order.
        settings: `accelerator_config` of the arguments by default.
    """
    keywords: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collate,
        "num_workers": args.dataloader_num_workers,
        # Without an accelerator torch warns of pinned memory at every loader.
        "pin_memory": args.dataloader_pin_memory and args.device.type != "cpu",
        "persistent_workers": args.dataloader_persistent_workers,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "in_order": args.dataloader_in_order,
    }
    if is_training and sampler is None:
        warn_about_stream_order(args)
    if not isinstance(dataset, IterableDataset):
        forms_batches = isinstance(sampler, (LengthGroups, ShuffledGroups)) and args.max_tokens_per_batch is not None
        if forms_batches or is_a(sampler, "rebalancing sampler"):
            del keywords["batch_size"]
            keywords["batch_sampler"] = sampler
        else:
            keywords.update(sampler=sampler, drop_last=args.dataloader_drop_last)
        if is_training:
            keywords["worker_init_fn"] = partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=data_parallel_rank(args)
            )
    loader: Any = prepare_loader(args, DataLoader(dataset, **keywords), settings)
    return loader


LOADER_SETTINGS = (
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


def prepare_loader(args: TrainingArguments, loader: DataLoader, settings: Any = None) -> DataLoader:
    """Return a PrefetchLoader over this process's shard of a loader's data, as accelerate does.

    Without sharding only a plain DataLoader is replaced, and a PrefetchLoader never.
    """
    settings = args.accelerator_config if settings is None else settings
    shard, dispatches = find_shard(args, settings), getattr(settings, "dispatch_batches", None)
    if isinstance(loader, PrefetchLoader) or (type(loader) is not DataLoader and shard is None):
        return loader
    dataset, is_stream = loader.dataset, isinstance(loader.dataset, IterableDataset)
    keywords = {name: getattr(loader, name) for name in LOADER_SETTINGS} | _get_batching(args, loader, settings)
    if shard is None:
        prepared = PrefetchLoader(dataset, **keywords)
    elif is_stream if dispatches is None else dispatches:
        batches = keywords.get("batch_sampler")
        shard.check_divides(keywords.get("batch_size", getattr(batches, "batch_size", None)))
        prepared = PrefetchLoader(dataset, **{**keywords, "generator": None})
        prepared.dispatch = Dispatch(shard, args.process_index == 0, keywords.get("drop_last", False))
        prepared.sharing = "dispatched"
    elif is_stream:
        prepared = _shard_stream(dataset, keywords, shard)
        prepared.sharing = "read by each"
    else:
        prepared = _shard_batches(dataset, keywords, shard, settings)
        prepared.sharing = "by index"
    if shard is not None:
        prepared.processes, prepared.splits_batches = shard.count, shard.split_batches
    prepared.dispatches_streams = dispatches is not False
    prepared.device = args.device
    return prepared


def _get_batching(args: TrainingArguments, loader: DataLoader, settings: Any) -> dict[str, Any]:
    """Return a loader's batching keywords; a random order is seeded by epoch."""
    batches: Any = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if batches is None:
        return {"batch_size": None, "sampler": loader.sampler}
    sampler: Any = getattr(batches, "sampler", None)
    is_random = isinstance(sampler, RandomSampler) and not isinstance(sampler, EpochSeededSampler)
    should_seed = is_random and getattr(settings, "use_seedable_sampler", True)
    if should_seed:
        sampler = EpochSeededSampler.replace(sampler, args.data_seed)
    if type(batches) is BatchSampler:
        return {"batch_size": batches.batch_size, "drop_last": batches.drop_last, "sampler": sampler}
    if should_seed:
        batches.sampler = sampler
    return {"batch_sampler": batches}


def _shard_stream(dataset: Any, keywords: dict[str, Any], shard: ShardSpec) -> PrefetchLoader:
    batch_size = keywords["batch_size"]
    if batch_size is None:
        raise ValueError(
            "A stream whose DataLoader has batch_size=None gives whole batches, and these are not shared out between "
            "processes. Set dispatch_batches=True in accelerator_config, or give the DataLoader a batch_size."
        )
    if is_a(dataset, "datasets.IterableDataset") and not shard.split_batches and dataset.n_shards >= shard.count:
        local: Any = dataset.shard(num_shards=shard.count, index=shard.index)
    else:
        local = SharedStream(dataset, batch_size, shard, keywords["drop_last"])
    loader = PrefetchLoader(local, **{**keywords, "batch_size": shard.local_batch_size(batch_size)})
    loader.stream_end_sync = None if has_length(local) else StreamEndSync()
    generator = getattr(dataset, "generator", None)
    if isinstance(local, SharedStream) and isinstance(generator, torch.Generator):
        loader.synchronized_generator = generator
    return loader


def _shard_batches(dataset: Any, keywords: dict[str, Any], shard: ShardSpec, settings: Any) -> PrefetchLoader:
    if is_a(keywords.get("batch_sampler"), "rebalancing sampler"):
        return PrefetchLoader(dataset, **keywords)
    if "batch_size" in keywords and keywords["batch_size"] is None:
        # The dataset itself returns batches.
        if not isinstance(keywords["sampler"], BatchSampler):
            raise ValueError(
                "A DataLoader with batch_size=None and no batch sampler cannot be shared out between processes: give "
                "it a batch_size, or a BatchSampler as its sampler."
            )
        return PrefetchLoader(dataset, **{**keywords, "sampler": SharedBatches(keywords["sampler"], shard)})
    batches = keywords.get("batch_sampler")
    if batches is None:
        batches = BatchSampler(*(keywords.pop(name) for name in ("sampler", "batch_size", "drop_last")))
    keywords["batch_sampler"] = SharedBatches(batches, shard)
    sampler: Any = getattr(batches, "sampler", None)
    generator: torch.Generator | None = None
    if hasattr(sampler, "generator") and not isinstance(sampler, EpochSeededSampler):
        if sampler.generator is None and not getattr(settings, "use_seedable_sampler", True):
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            sampler.generator = torch.Generator().manual_seed(seed)
        generator = sampler.generator
    loader = PrefetchLoader(dataset, **keywords)
    loader.synchronized_generator = generator
    return loader


def get_full_dataset(loader: Any) -> Any:
    dataset = getattr(loader, "dataset", None)
    return dataset.dataset if isinstance(dataset, SharedStream) else dataset


def count_examples(loader: Any, batch_size: int) -> int:
    """Return the length of a loader's dataset, or an estimate."""
    length = get_length(get_full_dataset(loader))
    return len(loader) * batch_size if length is None else length
