"""The DataLoader that a Trainer builds from a dataset; it hands out batches on the accelerator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from littrainer.data.dispatching import NO_BATCH, Dispatch, first_dimension
from littrainer.data.samplers import EpochSeededSampler, warn_that_a_stream_has_its_own_order
from littrainer.data.sharding import Share, SharedBatches, SharedStream, length_of, share_of, tell_epoch
from littrainer.data.stream_end import CommonEnd
from littrainer.data.token_batches import DrawnGroups, LengthGroups, length_groups_of
from littrainer.data.workers import read_batches, without_reports
from littrainer.distributed.agreement import from_first
from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.seeds import seed_worker

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


def on_device(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """What a batch holds on a device, objects that move themselves as a whole.

    Parameters:
        non_blocking: the host does not wait for copies, as far as they come from pinned memory.
    """
    if callable(getattr(value, "to", None)):
        try:
            return value.to(device, non_blocking=non_blocking)
        except TypeError:
            # An object of the script, whose method need not take more than the device.
            return value.to(device)
    if isinstance(value, Mapping):
        return type(value)({name: on_device(item, device, non_blocking) for name, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        items = (on_device(item, device, non_blocking) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


# Loaders that somebody goes through at this moment, but for a training's; the last one began last.
_read_by_iteration: list[Any] = []


def innermost_loader() -> Any:
    """The loader whose iteration began last of those that go on, but for a training's; None if there is none."""
    return _read_by_iteration[-1] if _read_by_iteration else None


def has_length(dataset: Any) -> TypeGuard[Sized]:
    """Whether `len()` of a dataset or loader is known."""
    return length_of(dataset) is not None


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
    # Where the first process reads for all.
    dispatch: Dispatch | None = None
    # One that has to stand at the same place in all processes when an epoch begins.
    synchronized_generator: torch.Generator | None = None
    # Where processes tell each other at each batch whether their streams have ended.
    common_end: CommonEnd | None = None
    # How several processes share the data, in words that tell one way from the other; None in one process.
    sharing: str | None = None
    _has_drawn_seed = False
    rows_in_last_batch = -1
    # The accelerator on which batches are handed out; None leaves them on the host.
    destination: torch.device | None = None
    copies_are_waited_for = True
    # Called with the part of a training's time that begins; a builtin does nothing, and costs no Python call.
    enter_part: Callable[[str], Any] = id
    # What scripts read of accelerate's loaders: the Trainer's device, and what is never otherwise here.
    device: torch.device | None = None
    gradient_state: Any = None
    use_stateful_dataloader = False
    skip_batches = 0
    # Streams are dispatched under accelerate unless its user says no, and only then it counts their last batch.
    dispatches_streams = True

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has, and tell sampler and dataset."""
        self.epoch = epoch
        tell_epoch(epoch, self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.dataset)

    def hand_out_on(self, device: torch.device, settings: Any) -> None:
        """Hand out batches on a device; on the CPU they are there already.

        Parameters:
            settings: of the accelerator; with `non_blocking` the host waits for no copy. For one out of memory that
                this loader has pinned on CUDA it never does: that memory is not used again before it has been read.
        """
        self.destination = None if device.type == "cpu" else device
        has_pinned = self.pin_memory and device.type == "cuda"
        self.copies_are_waited_for = not (has_pinned or getattr(settings, "non_blocking", False))

    @property
    def total_batch_size(self) -> int:
        """Samples in one batch of all processes together, as accelerate's loaders name it.

        Raises:
            AttributeError: nothing says how large the batches are.
        """
        if isinstance(self.dataset, SharedStream):
            return self.dataset.samples_of_round
        for source in (self, self.batch_sampler, self.sampler):
            size = getattr(source, "batch_size", None)
            if size is not None:
                return int(size) if self.splits_batches else int(size) * self.processes
        raise AttributeError("total_batch_size is not known: the loader's batches come from a sampler without a size")

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset of all processes together."""
        return len(whole_dataset(self))

    def __len__(self) -> int:
        length = super().__len__()
        return length if self.dispatch is None else self.dispatch.length(length)

    def samples_in_last_batch(self) -> int | None:
        """Samples in the last batch of all processes together, where it is not a full one for each."""
        return self.remainder if self.remainder > 0 else None

    @property
    def remainder(self) -> int:
        """Samples in the last batch of all processes together; 0 if it is a full one, -1 if unknown.

        The number of a stream is known when its last batch has been handed out.
        """
        if self.dispatch is not None or (isinstance(self.dataset, IterableDataset) and self.dispatches_streams):
            return self.rows_in_last_batch
        if isinstance(self.dataset, SharedStream):
            return self.dataset.samples_of_incomplete_round()
        if (groups := length_groups_of(self)) is not None:
            return groups.samples_in_last_round
        batch_size = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        leaves_out = self.drop_last or self.leaves_out_last or getattr(self.batch_sampler, "drop_last", False)
        if batch_size is None or leaves_out or not has_length(self.dataset):
            return -1
        # Of an epoch that was resumed with other batches.
        left_out = getattr(getattr(self.batch_sampler, "sampler", None), "left_out", 0)
        return (len(self.dataset) - left_out) % (batch_size if self.splits_batches else batch_size * self.processes)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        _read_by_iteration.append(self)
        try:
            yield from self.read(None)
        finally:
            # Iterators may end in another order than they began.
            place = [one is self for one in _read_by_iteration].index(True)
            del _read_by_iteration[place]

    def read(self, progress: Any) -> Iterator[Any]:
        """The batches of the epoch.

        Parameters:
            progress: told about each batch that is collated ahead, in a training that can be resumed.
        """
        self.end_of_dataloader = False
        self.rows_in_last_batch = -1
        if self.common_end is not None:
            self.common_end.begin()
        if self.synchronized_generator is not None:
            self.synchronized_generator.set_state(from_first(self.synchronized_generator.get_state()))
        self.set_epoch(self.epoch)
        batches = without_reports(self._read_here()) if progress is None else progress.begin(self, self._read_here)
        if self.dispatch is not None:
            batches = self.dispatch.rounds(batches)
        current: Any = next(batches, NO_BATCH)
        if self.dispatch is not None:
            current = self.dispatch.begin(current)
        if self._ends(current is NO_BATCH, progress):
            return
        while current is not NO_BATCH:
            if progress is not None:
                progress.before_batch_ahead()
            following = next(batches, NO_BATCH)
            if self.dispatch is not None:
                current, following = self.dispatch.hand_out(current, following)
            if self.common_end is not None and self._ends(following is NO_BATCH, progress):
                following = NO_BATCH
            if progress is not None:
                progress.after_batch_ahead(is_one=following is not NO_BATCH)
            self.end_of_dataloader = following is NO_BATCH
            if self.destination is not None:
                self.enter_part("to_device")
                current = on_device(current, self.destination, not self.copies_are_waited_for)
                self.enter_part("data")
            if self.end_of_dataloader:
                rows = first_dimension(current) if self.dispatch is None else self.dispatch.rows_in_last_round
                self.rows_in_last_batch = rows or -1
            yield current
            current = following
        self.epoch += 1

    def _ends(self, ends_here: bool, progress: Any) -> bool:
        """Whether the data ends, here or in another process whose end is that of all."""
        return ends_here if self.common_end is None else self.common_end.is_reached(ends_here, progress is not None)

    def _read_here(self) -> Iterator[Any]:
        if self.dispatch is None or self.dispatch.reads:
            return read_batches(self, super().__iter__)
        if not self.num_workers:
            # An iterator draws a number when it is made, and generators stand at the same place in all processes.
            super().__iter__()
        elif not (self.persistent_workers and self._has_drawn_seed):
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._has_drawn_seed = True
        return iter(())


def warn_of_another_loader(args: TrainingArguments, loader: Any) -> None:
    """Warn if batches are asked for that only a loader made here can form, and a script has made another one."""
    for name in ("max_tokens_per_batch", "pack_to_length"):
        if getattr(args, name) is not None and not isinstance(loader, LookaheadLoader):
            made = type(loader).__name__
            logger.warning("%s has no effect in training: get_train_dataloader returns a %s.", name, made)


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
    settings = args.accelerator_config if settings is None else settings
    if is_training and sampler is None:
        warn_that_a_stream_has_its_own_order(args)
    if not isinstance(dataset, IterableDataset):
        forms_batches = isinstance(sampler, (LengthGroups, DrawnGroups)) and args.max_tokens_per_batch is not None
        if forms_batches or is_a(sampler, "rebalancing sampler"):
            del keywords["batch_size"]
            keywords["batch_sampler"] = sampler
        else:
            keywords.update(sampler=_seeded_by_epoch(args, sampler, settings), drop_last=args.dataloader_drop_last)
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


def lookahead_version(
    args: TrainingArguments, loader: DataLoader, settings: Any = None, cut: Callable[..., Any] | None = None
) -> DataLoader:
    """A LookaheadLoader over this process's part of a loader's data, as accelerate prepares loaders.

    Its random order is seeded by epoch where the arguments have it so. One that is a LookaheadLoader already is
    returned as it is. So is a loader of another class in one process; several share out its dataset and batches.

    Parameters:
        settings: how processes share the data; by default `accelerator_config` of the arguments.
        cut: cuts a process's part out of a batch that the first process has read, as `Dispatch` calls it.
    """
    settings = args.accelerator_config if settings is None else settings
    is_of_own_class = type(loader) is not DataLoader
    if isinstance(loader, LookaheadLoader) or (is_of_own_class and share_of(args, settings) is None):
        return loader
    keywords: dict[str, Any] = {name: getattr(loader, name) for name in CARRIED_OVER}
    batches: Any = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        keywords.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    elif batches is None:
        keywords.update(batch_size=None, sampler=loader.sampler)
    elif type(batches) is BatchSampler and isinstance(batches.sampler, RandomSampler):
        sampler = _seeded_by_epoch(args, batches.sampler, settings)
        keywords.update(batch_size=batches.batch_size, drop_last=batches.drop_last, sampler=sampler)
    else:
        # A batch sampler of another class may hold a random order of samples.
        if isinstance(getattr(batches, "sampler", None), RandomSampler):
            batches.sampler = _seeded_by_epoch(args, batches.sampler, settings)
        keywords["batch_sampler"] = batches
    return _lookahead_loader(args, loader.dataset, keywords, settings, cut)


def _lookahead_loader(
    args: TrainingArguments, dataset: Any, keywords: dict[str, Any], settings: Any, cut: Any = None
) -> LookaheadLoader:
    dispatches = getattr(settings, "dispatch_batches", None)
    share, is_stream = share_of(args, settings), isinstance(dataset, IterableDataset)
    if share is None:
        loader = LookaheadLoader(dataset, **keywords)
    elif is_stream if dispatches is None else dispatches:
        share.check_divides(keywords.get("batch_size", getattr(keywords.get("batch_sampler"), "batch_size", None)))
        loader = LookaheadLoader(dataset, **{**keywords, "generator": None})
        loader.dispatch = Dispatch(share, args.process_index == 0, keywords.get("drop_last", False), cut)
        loader.sharing = "dispatched"
    elif is_stream:
        loader = _loader_of_stream(dataset, keywords, share)
        loader.sharing = "read by each"
    else:
        loader = _loader_of_part(dataset, keywords, share, settings)
        loader.sharing = "by index"
    if share is not None:
        loader.processes, loader.splits_batches = share.of, share.split_batches
        loader.leaves_out_last = keywords.get("drop_last", False)
    loader.dispatches_streams = dispatches is not False
    loader.device = args.device
    return loader


def _loader_of_stream(dataset: Any, keywords: dict[str, Any], share: Share) -> LookaheadLoader:
    batch_size = keywords["batch_size"]
    if batch_size is None:
        raise ValueError(
            "A stream whose DataLoader has batch_size=None gives whole batches, and these are not shared out between "
            "processes. Set dispatch_batches=True in accelerator_config, or give the DataLoader a batch_size."
        )
    if is_a(dataset, "datasets.IterableDataset") and not share.split_batches and dataset.n_shards >= share.of:
        # Each process opens its own files.
        part: Any = dataset.shard(num_shards=share.of, index=share.number)
    else:
        part = SharedStream(dataset, batch_size, share, keywords.get("drop_last", False))
    loader = LookaheadLoader(part, **{**keywords, "batch_size": share.samples_of_part(batch_size)})
    loader.common_end = None if has_length(part) else CommonEnd()
    generator = getattr(dataset, "generator", None)
    if isinstance(part, SharedStream) and isinstance(generator, torch.Generator):
        loader.synchronized_generator = generator
    return loader


def _loader_of_part(dataset: Any, keywords: dict[str, Any], share: Share, settings: Any) -> LookaheadLoader:
    if is_a(keywords.get("batch_sampler"), "rebalancing sampler"):
        # It knows which process it is for.
        return LookaheadLoader(dataset, **keywords)
    others = dict(keywords)
    batch_size, drop_last = others.pop("batch_size", None), others.pop("drop_last", False)
    batches, sampler = others.pop("batch_sampler", None), others.pop("sampler", None)
    if batches is None and batch_size is None:
        # The dataset is asked for whole batches.
        if not isinstance(sampler, BatchSampler):
            raise ValueError(
                "A DataLoader with batch_size=None and no batch sampler cannot be shared out between processes: give "
                "it a batch_size, or a BatchSampler as its sampler."
            )
        return LookaheadLoader(dataset, **others, batch_size=None, sampler=SharedBatches(sampler, share))
    if batches is None:
        order = SequentialSampler(dataset) if sampler is None else sampler
        batches = BatchSampler(order, batch_size, drop_last)
    generator = _generator_to_synchronize(batches, settings)
    loader = LookaheadLoader(dataset, **others, batch_sampler=SharedBatches(batches, share))
    loader.synchronized_generator = generator
    return loader


def _generator_to_synchronize(batches: Any, settings: Any) -> torch.Generator | None:
    """The generator of a random order that is not seeded by epoch, made if there is none."""
    sampler: Any = getattr(batches, "sampler", None)
    if isinstance(sampler, EpochSeededSampler) or not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None and not getattr(settings, "use_seedable_sampler", True):
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator = torch.Generator().manual_seed(seed)
    return sampler.generator


def _seeded_by_epoch(args: TrainingArguments, sampler: Any, settings: Any) -> Any:
    is_seeded = isinstance(sampler, EpochSeededSampler)
    if isinstance(sampler, RandomSampler) and not is_seeded and getattr(settings, "use_seedable_sampler", True):
        return EpochSeededSampler.replacing(sampler, args.data_seed)
    return sampler


def whole_dataset(loader: Any) -> Any:
    """The dataset of a loader, and where the loader has one process's part of it, all of it; None where it has none."""
    dataset = getattr(loader, "dataset", None)
    return dataset.dataset if isinstance(dataset, SharedStream) else dataset


def count_examples(loader: Any, batch_size: int) -> int:
    """Samples in a loader: the length of its dataset, else estimated from its length in batches of `batch_size`."""
    dataset = whole_dataset(loader)
    return len(dataset) if has_length(dataset) else len(loader) * batch_size
