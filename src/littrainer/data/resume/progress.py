"""Progress in the training data, with the states from which a later training continues exactly.

An epoch's order and its workers' draws follow from the generator states at its beginning. At a save the prefetched
batch is read but not trained, and a resume reads it again, so the states before it are stored too. If batch sizes have
changed, a resume skips the trained rows.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from littrainer.data.dispatching import NO_BATCH
from littrainer.data.loaders import PrefetchLoader, has_length
from littrainer.data.resume.position import DataPosition, LayoutChange
from littrainer.data.resume.rng import (
    GENERATORS,
    decode_rng_states,
    encode_rng_states,
    find_advanced_generators,
    get_rng_states,
    set_rng_states,
)
from littrainer.data.resume.skipping import (
    MAX_REMEMBERED_BATCHES,
    RemainingBatches,
    build_skipping_attributes,
    can_skip_by_index,
    count_stream_shards,
    global_batch_size,
    replace_attributes,
)
from littrainer.data.resume.worker_states import ReportingCollator, ResumedWorkerInit, StatesByWorker, WorkerStates
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.sharding import SharedBatches
from littrainer.data.stream_end import StreamEndSync
from littrainer.data.workers import iterate_batches, shut_down_workers
from littrainer.distributed.collectives import is_distributed

logger = logging.getLogger(__name__)

# Class in `datasets` whose state lacks the buffer's samples, and attributes of datasets that may contain instances.
SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"
NESTED_ITERABLES = ("_ex_iterable", "ex_iterable", "ex_iterables")
# Sampler attributes that determine the order.
ORDER_ATTRIBUTES = ("initial_seed", "batch_size")
# All generators are compared before and after each of this many batches, to find those that reading changes.
NUM_WATCHED_BATCHES = 4


def find_stateful_stream(loader: Any) -> Any:
    """Return a loader's dataset if its `state_dict` is complete, else None.

    The state is incomplete if workers read the dataset, since they read copies, or if a buffer shuffles the samples,
    since the state lacks the buffer.
    """
    dataset = getattr(loader, "dataset", None)
    is_read_here = isinstance(loader, DataLoader) and isinstance(dataset, IterableDataset) and not loader.num_workers
    return dataset if is_read_here and is_stateful(dataset) and not has_shuffle_buffer(dataset) else None


def is_stateful(source: Any) -> bool:
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


def can_be_stored(value: Any) -> bool:
    """Return whether `torch.load(weights_only=True)` can load a saved value."""
    buffer = io.BytesIO()
    # Pickling runs code of the value, which may raise any error.
    with suppress(Exception):
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
        return True
    return False


def has_shuffle_buffer(dataset: Any) -> bool:
    if type(dataset).__name__ == SHUFFLE_BUFFER:
        return True
    nested = [vars(dataset).get(name) for name in NESTED_ITERABLES] if hasattr(dataset, "__dict__") else []
    parts = [part for value in nested for part in (value if isinstance(value, list) else [value]) if part is not None]
    return any(has_shuffle_buffer(part) for part in parts)


class DataProgress:
    """Record of the batches that a training loader has read, from which a training resumes."""

    def __init__(self, loader: Any = None) -> None:
        self.epoch = 0
        # None outside of a resume, and after `finish_resuming`.
        self.position: DataPosition | None = None
        self.workers = WorkerStates()
        self.batches_skipped = 0
        self.is_exhausted = False
        self._restore_random_states: Callable[[], None] | None = None
        self._loader = loader
        self._remaining = RemainingBatches()
        self._stream: Any = None
        self._has_warned_of_states = False
        self._epoch_start: dict[str, Any] | None = None
        self._generators_at_start: dict[str, torch.Tensor] = {}
        self._workers_at_start: StatesByWorker = {}
        self._before_prefetch: dict[str, Any] | None = None
        self._stream_before_prefetch: Any = None
        self._workers_before_prefetch: StatesByWorker = {}
        self._stream_end_sync = StreamEndSync()
        self._batches_watched = 0
        self._batches_drawn = 0
        # Generators from which reading has drawn.
        self._advanced: set[str] = set()
        # Generators whose states are read before each prefetch.
        self._followed = {*GENERATORS}
        # True if the order follows the checkpoint's seed instead of this training's.
        self._has_checkpoint_order = False
        self._change: LayoutChange | None = None
        # Order attributes and generator states before those of the checkpoint replaced them.
        self._initial_order: dict[str, Any] = {}
        self._initial_rng_states: dict[str, Any] | None = None

    def resume_at(self, position: DataPosition, restore_random_states: Callable[[], None] | None = None) -> None:
        self.position = position
        self._restore_random_states = restore_random_states

    # ---- State -------------------------------------------------------------------------------------------------------

    def state(self, batches_done: int, epoch_is_over: bool) -> dict[str, Any]:
        """Return the current `DataPosition.data`: tensors, numbers, texts and containers of them.

        Parameters:
            epoch_is_over: the training continues with the next epoch.
        """
        loader = self._loader
        common: dict[str, Any] = {"num_workers": getattr(loader, "num_workers", 0)}
        sampler = find_epoch_seeded_sampler(loader)
        if sampler is not None:
            common["order_seed"] = sampler.initial_seed
        if self._has_checkpoint_order:
            common["order_is_kept"] = True
        if epoch_is_over:
            is_persistent = getattr(loader, "persistent_workers", False)
            return {
                **common,
                "generators": get_generator_states(loader),
                "workers_at_start": dict(self.workers.latest) if is_persistent else {},
            }
        # An interrupt within a step leaves drawn batches untrained.
        is_at_step_end = batches_done == self._batches_drawn
        dispatch, stream = self._dispatch, self._stream if is_at_step_end else None
        if self._change is not None:
            common["layout_change"] = asdict(self._change)
        if is_at_step_end and is_stateful(loader):
            common["loader"] = self._drop_unstorable(loader, loader.state_dict())
        before = self._before_prefetch if is_at_step_end else None
        return {
            **common,
            "rows": self._count_trained_rows(batches_done),
            "order": get_order_attributes(loader),
            "epoch_start": None if self._epoch_start is None else encode_rng_states(self._epoch_start),
            "generators": self._generators_at_start,
            "workers_at_start": self._workers_at_start,
            # Reading does not advance generators outside `_followed`, so their current states are stored.
            "before_ahead": None if before is None else encode_rng_states({**get_rng_states(gpu=False), **before}),
            "stream": None if stream is None else self._drop_unstorable(stream, self._stream_before_prefetch),
            "workers": self._workers_before_prefetch if is_at_step_end else {},
            "dispatch": None if dispatch is None else dispatch.first_rows,
            "sharing": getattr(loader, "sharing", None),
        }

    def _drop_unstorable(self, source: Any, state: Any) -> Any:
        if can_be_stored(state):
            return state
        if not self._has_warned_of_states:
            self._has_warned_of_states = True
            logger.warning(
                "%s.state_dict() holds objects that no checkpoint stores: a resume will read the data again from its "
                "beginning. Return tensors, numbers, texts and containers of them to avoid that.",
                type(source).__name__,
            )
        return None

    def find_batch_rows(self, epoch: int, number: int) -> list[int] | None:
        """Return the row indices of a batch; None for streams and for batches read long ago."""
        return None if self._dispatch is not None else self._remaining.find_rows(epoch, number)

    def _count_trained_rows(self, batches_done: int) -> list[int] | None:
        """Return the number of rows that all processes together have trained, by stream shard; None if unknown."""
        change, loader, dispatch = self._change or LayoutChange(), self._loader, self._dispatch
        size, shards = global_batch_size(loader), range(count_stream_shards(loader))
        if size is None:
            return None
        # Batches that rank 0 reads for each global batch.
        units = 1 if dispatch is None else dispatch.batches_per_global_batch
        batches = (batches_done - change.batches) * units
        # Workers take turns: worker i of n gives batches i, i + n, ...
        rows = [len(range(shard, batches, len(shards))) * size // units for shard in shards]
        if len(shards) > 1 and has_reporting_workers(loader) and self._is_reader:
            # Workers whose shards end early give fewer batches than the others.
            received = self.workers.received[: 2 * batches]
            pairs = [*zip(received[::2], received[1::2], strict=True)]
            readers = loader.processes if dispatch is None else 1
            rows = [readers * sum(number for worker, number in pairs if worker == shard) for shard in shards]
        return [sum(pair) for pair in zip(change.rows, rows, strict=True)] if change.rows else rows

    @property
    def _dispatch(self) -> Any:
        return getattr(self._loader, "dispatch", None)

    @property
    def _is_reader(self) -> bool:
        return self._dispatch is None or self._dispatch.reads

    # ---- Reading -----------------------------------------------------------------------------------------------------

    def batches(self, loader: Any) -> Iterator[Any]:
        position = self.position
        if position is not None and position.data is None and not position.micro_batches:
            # There is nothing to skip and no order to restore.
            self.finish_resuming()
        return loader.read(self) if isinstance(loader, PrefetchLoader) else self._iterate_unprefetched(loader)

    def _iterate_unprefetched(self, loader: Any) -> Iterator[Any]:
        batches = self.begin(loader, lambda: iterate_batches(loader))
        self._finish_resuming_with_data()
        end = self._stream_end_sync if is_distributed() and not has_length(loader) else None
        if end is not None:
            end.begin()
        for batch in batches:
            if end is not None and end.any_rank_exhausted(False, is_training=True):
                return
            self._batches_drawn += 1
            self._remaining.rows.pop(self._batches_drawn - MAX_REMEMBERED_BATCHES, None)
            yield batch
        if end is not None:
            end.any_rank_exhausted(True, is_training=True)

    def begin(self, loader: Any, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the epoch's iterator, and record the states of its beginning.

        In a resumed epoch, restore the checkpoint's states, order and generators before the iterator is made, and skip
        the trained batches afterwards.
        """
        self._loader = loader
        position, data = self.position, self._get_data(loader)
        num_to_skip = 0 if position is None else position.batches_to_skip
        is_by_index = can_skip_by_index(loader)
        self._restore_order(data)
        set_generator_states(loader, data.get("generators", {}))
        if data.get("epoch_start") is not None:
            set_rng_states(decode_rng_states(data["epoch_start"]))
        started_workers: StatesByWorker = {}
        if position is not None and data.get("num_workers") == getattr(loader, "num_workers", 0):
            # Workers start at the position if batches are skipped by index, else at the beginning of the epoch.
            started_workers = data.get("workers" if num_to_skip and is_by_index else "workers_at_start", {})
        self._epoch_start = get_rng_states(gpu=False)
        self._generators_at_start = get_generator_states(loader)
        if not getattr(loader, "persistent_workers", False) or started_workers:
            self.workers = WorkerStates(dict(started_workers))
        self._workers_at_start = data.get("workers_at_start", dict(self.workers.latest))
        self._workers_before_prefetch = dict(self.workers.latest)
        self._before_prefetch = self._stream_before_prefetch = None
        self.is_exhausted = False
        self._batches_drawn = position.micro_batches if position is not None else 0
        # Watch one batch of each later epoch, since reading may begin to use another generator.
        self._batches_watched = min(self._batches_watched, NUM_WATCHED_BATCHES - 1)
        self._followed = {*GENERATORS}
        attributes = self._skip_rows(loader, data)
        self._load_states(loader, data, skips_rows=bool(attributes))
        if is_by_index:
            self._remaining.begin(
                attributes.get("batch_sampler", loader.batch_sampler),
                epoch=self.epoch,
                position=self._batches_drawn,
                num_to_skip=num_to_skip * (1 if self._dispatch is None else self._dispatch.batches_per_global_batch),
                num_workers=loader.num_workers if has_reporting_workers(loader) else 0,
            )
            attributes["batch_sampler"] = self._remaining
        attributes |= self._continue_workers(loader, data, started_workers)
        with replace_attributes(loader, attributes):
            batches = make_iterator()
        if has_reporting_workers(loader):
            batches = self.workers.batches(batches)
        if position is not None:
            self._reach_position(batches, num_to_skip, data, is_by_index)
        return batches

    def _get_data(self, loader: Any) -> dict[str, Any]:
        data = (self.position.data if self.position is not None else None) or {}
        if data.get("sharing") == getattr(loader, "sharing", None):
            return data
        # With another mode of sharding, the states of readers do not apply.
        return {**data, **dict.fromkeys(("stream", "dispatch", "num_workers"))}

    def _restore_order(self, data: dict[str, Any]) -> None:
        loader = self._loader
        if data.get("order_is_kept") and (sampler := find_epoch_seeded_sampler(loader)) is not None:
            sampler.initial_seed, self._has_checkpoint_order = data["order_seed"], True
        set_order_attributes(loader, self._initial_order)
        self._initial_order = {}
        self._change = None if self.position is None else self.position.layout_change
        if self._change is not None:
            self._initial_order, self._initial_rng_states = get_order_attributes(loader), get_rng_states(gpu=False)
            set_order_attributes(loader, data.get("order", {}))

    def _skip_rows(self, loader: Any, data: dict[str, Any]) -> dict[str, Any]:
        if self._change is None or not self._change.rows or _can_load_state(loader, data):
            return {}
        if isinstance(loader, PrefetchLoader):
            loader.rows_skipped = sum(self._change.rows)
        return build_skipping_attributes(loader, self._change.rows) or {}

    def _load_states(self, loader: Any, data: dict[str, Any], skips_rows: bool) -> None:
        self._stream = find_stateful_stream(loader) if self._is_reader and not skips_rows else None
        if self._stream is not None and data.get("stream") is not None:
            self._stream.load_state_dict(data["stream"])
        if self._dispatch is not None and self.position is not None:
            self._dispatch.resume(data.get("dispatch"))
        if data.get("loader") is not None and _can_load_state(loader, data):
            loader.load_state_dict(data["loader"])

    def _continue_workers(self, loader: Any, data: dict[str, Any], states: StatesByWorker) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        if has_reporting_workers(loader):
            attributes["collate_fn"] = ReportingCollator(loader.collate_fn)
            has_empty_batches = self._remaining.padding > 0
            if states or has_empty_batches:
                attributes["worker_init_fn"] = ResumedWorkerInit(loader.worker_init_fn, states, has_empty_batches)
        if self.position is not None and getattr(loader, "persistent_workers", False):
            shut_down_workers(loader)
            if loader.generator is None and data.get("workers_at_start"):
                # Persistent workers drew no seed in this epoch before the save, so the seed of the new workers must not
                # advance the global generator.
                attributes["generator"] = torch.Generator()
        return attributes

    def _reach_position(self, batches: Iterator[Any], number: int, data: dict[str, Any], is_by_index: bool) -> None:
        if is_by_index:
            if self._is_reader:
                self._remaining.skip()
        elif not _can_load_state(self._loader, data):
            batches = self._count_skipped(batches)
            if self._dispatch is not None:
                self._dispatch.skip(batches, number)
            else:
                next(islice(batches, number, number), None)
        if data.get("before_ahead") is not None:
            set_rng_states(decode_rng_states(data["before_ahead"]))

    def _count_skipped(self, batches: Iterator[Any]) -> Iterator[Any]:
        for self.batches_skipped, batch in enumerate(batches, 1):
            yield batch

    def prefetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch or `NO_BATCH`, and record the states before it."""
        if self.position is not None:
            self._finish_resuming_with_data()
        self._batches_drawn += 1
        self._remaining.rows.pop(self._batches_drawn - MAX_REMEMBERED_BATCHES, None)
        if self._loader.num_workers:
            self._workers_before_prefetch = dict(self.workers.latest)
            return next(batches, NO_BATCH)
        self._before_prefetch = get_rng_states(gpu=False, names=self._followed)
        if self._stream is not None:
            # A stream may modify the state that it returned.
            self._stream_before_prefetch = copy.deepcopy(self._stream.state_dict())
        batch = next(batches, NO_BATCH)
        if self._batches_watched < NUM_WATCHED_BATCHES:
            self._batches_watched += 1
            self._advanced |= find_advanced_generators(self._before_prefetch, get_rng_states(gpu=False))
            if self._batches_watched == NUM_WATCHED_BATCHES:
                self._followed = {"cpu", *self._advanced}
        return batch

    def _finish_resuming_with_data(self) -> None:
        if self.position is not None and self.position.data is not None:
            self.finish_resuming()

    def finish_resuming(self) -> None:
        """End the resume: restore the checkpoint's generators, from which training continues.

        Called before the first batch that was unread at the save; in mid-epoch without `data`, after the first window.
        """
        if self.position is None:
            return
        if self._initial_rng_states is not None:
            # If the number of processes has changed, the checkpoint's states are not restored, and these states stay.
            set_rng_states(self._initial_rng_states)
            self._initial_rng_states = None
        if self._restore_random_states is not None:
            self._restore_random_states()
        self.position = None
        # The bound method would keep the training alive.
        self._restore_random_states = None


def _can_load_state(loader: Any, data: dict[str, Any]) -> bool:
    """Return whether a stored stream or loader state makes skipping unnecessary."""
    if data.get("loader") is not None and data.get("num_workers") == getattr(loader, "num_workers", 0):
        return is_stateful(loader)
    return data.get("stream") is not None and find_stateful_stream(loader) is not None


def has_reporting_workers(loader: Any) -> bool:
    return isinstance(loader, PrefetchLoader) and loader.num_workers > 0 and loader.batch_sampler is not None


def _find_generator_owners(loader: Any) -> dict[str, Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    while isinstance(batch_sampler, SharedBatches):
        batch_sampler = batch_sampler.batch_sampler
    sampler = getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)
    return {"loader": loader, "batch_sampler": batch_sampler, "sampler": sampler}


def find_epoch_seeded_sampler(loader: Any) -> EpochSeededSampler | None:
    sampler = _find_generator_owners(loader)["sampler"]
    return sampler if isinstance(sampler, EpochSeededSampler) else None


def _find_generators(loader: Any) -> dict[str, torch.Generator]:
    owners = _find_generator_owners(loader).items()
    return {
        name: own for name, owner in owners if isinstance(own := getattr(owner, "generator", None), torch.Generator)
    }


def get_generator_states(loader: Any) -> dict[str, torch.Tensor]:
    return {name: generator.get_state() for name, generator in _find_generators(loader).items()}


def set_generator_states(loader: Any, states: dict[str, torch.Tensor]) -> None:
    for name, generator in _find_generators(loader).items():
        if name in states:
            generator.set_state(states[name])


def get_order_attributes(loader: Any) -> dict[str, int]:
    sampler = _find_generator_owners(loader)["sampler"]
    return {name: value for name in ORDER_ATTRIBUTES if isinstance(value := getattr(sampler, name, None), int)}


def set_order_attributes(loader: Any, values: dict[str, int]) -> None:
    for name in values.keys() & get_order_attributes(loader).keys():
        setattr(_find_generator_owners(loader)["sampler"], name, values[name])
