"""How far the data of an epoch has been read, exactly enough to read on from there in another process.

The order of an epoch, and what workers draw, follow from where the random number generators stood when it began. The
batch that is collated ahead of the one in training was made before a checkpoint and is trained on after it, so where
they stood before that batch is kept too.

If batches are formed otherwise than when the epoch began, it goes on by the rows of its order that have been trained.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from littrainer.data.loaders import LookaheadLoader, has_length
from littrainer.data.samplers import EpochSeededSampler, LengthGroupedSampler
from littrainer.data.sharding import SharedBatches, SharedStream, tell_epoch
from littrainer.data.stream_end import CommonEnd
from littrainer.data.workers import (
    HostStates,
    WorkerStates,
    drawn_from,
    host_states,
    read_batches,
    reporting_workers,
    set_host_states,
)
from littrainer.distributed.agreement import are_several

logger = logging.getLogger(__name__)

# Parts of a `datasets.IterableDataset` whose states leave out what they hold back, and the names they nest under.
HOLDS_SAMPLES_BACK = "BufferShuffledExamplesIterable"
NESTED = ("_ex_iterable", "ex_iterable", "ex_iterables")
# What, besides generators, the order of a sampler depends on: a seed, and batches in which it sorts by length.
ORDER_ATTRIBUTES = ("initial_seed", "batch_size")


def exact_stream_in(loader: Any) -> Any:
    """A loader's dataset whose `state_dict` tells everything; None if what was read has to be read again.

    Workers read copies of the dataset, whose states do not come back; a shuffle buffer's state lacks its samples.
    """
    dataset = getattr(loader, "dataset", None)
    is_read_here = isinstance(loader, DataLoader) and isinstance(dataset, IterableDataset) and not loader.num_workers
    return dataset if is_read_here and keeps_its_state(dataset) and not holds_samples_back(dataset) else None


def keeps_its_state(loader: Any) -> bool:
    """Whether a stream, or a loader of the script as torchdata's StatefulDataLoader, reads on from its state."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def loads_safely(value: Any) -> bool:
    """Whether a value can be stored and loaded without running code."""
    stored = io.BytesIO()
    # Whatever it is that cannot be pickled or loaded.
    with suppress(Exception):
        torch.save(value, stored)
        stored.seek(0)
        torch.load(stored, weights_only=True)
        return True
    return False


def holds_samples_back(dataset: Any) -> bool:
    """Whether a `datasets.IterableDataset` shuffles in a buffer."""
    if type(dataset).__name__ == HOLDS_SAMPLES_BACK:
        return True
    nested = [vars(dataset).get(name) for name in NESTED] if hasattr(dataset, "__dict__") else []
    parts = [part for one in nested for part in (one if isinstance(one, list) else [one]) if part is not None]
    return any(holds_samples_back(part) for part in parts)


def skips_by_index(loader: Any) -> bool:
    """Whether the first batches of a loader can be left out unread: the batches are those of its batch sampler."""
    return (
        _reads_as_torch(loader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
    )


def _reads_as_torch(loader: Any) -> TypeGuard[DataLoader]:
    return isinstance(loader, DataLoader) and type(loader).__iter__ in (DataLoader.__iter__, LookaheadLoader.__iter__)


def copied_loader(loader: DataLoader) -> DataLoader:
    """A loader over the same dataset with the same settings, and its own workers."""
    copied = copy.copy(loader)
    vars(copied)["_iterator"] = None
    return copied


def without_first_batches(loader: DataLoader, number: int, keeps_turns: bool = False) -> DataLoader:
    """The same loader without the first batches of its next iteration, which are not read; later ones are complete.

    Parameters:
        loader: one that `skips_by_index`.
        number: batches to leave out; where one process reads for several, as many for each of them.
        keeps_turns: each worker gets the batches that it would have got. Empty ones may come first then, which are
            neither fetched nor collated while `reporting_workers` starts the workers.
    """
    later = copied_loader(loader)
    dispatch = getattr(loader, "dispatch", None)
    if dispatch is not None:
        number *= dispatch.batches_of_round
    # A DataLoader refuses another sampler once it stands, and a subclass may not be constructed as its parent is.
    turns = loader.num_workers if keeps_turns else 0
    vars(later)["batch_sampler"] = LaterBatches(loader.batch_sampler, number, turns)
    return later


class LaterBatches(Sampler[list[int]]):
    """The batches of another batch sampler from a number on, in the next iteration; in later ones all.

    Parameters:
        number: batches to leave out.
        turns: workers that take turns. Each of the batches left has to go to the worker that it would have gone to, so
            some empty ones go before them.
    """

    def __init__(self, batch_sampler: Any, number: int, turns: int = 0):
        self.batch_sampler = batch_sampler
        self.number = number
        self.padding = number % turns if turns else 0
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)
        self._running: Iterator[list[int]] | None = None

    def set_epoch(self, epoch: int) -> None:
        tell_epoch(epoch, self.batch_sampler, self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        self._running = iter(self.batch_sampler)
        return self._rest(self._running)

    def skip(self) -> None:
        """Leave the first batches out now, and not when the next one is asked for: a sampler draws its order then."""
        number, self.number = self.number, 0
        if self._running is not None and number:
            next(islice(self._running, number, number), None)

    def _rest(self, running: Iterator[list[int]]) -> Iterator[list[int]]:
        self.skip()
        padding, self.padding = self.padding, 0
        yield from ([] for _ in range(padding))
        yield from running

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.number, 0)


# ---- Rows instead of batches -----------------------------------------------------------------------------------------


def rows_of_round(loader: Any) -> int | None:
    """Rows that all processes together train while each takes one batch; None if nothing says so."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(loader, LookaheadLoader):
        # Each process may have opened its own files of a stream.
        has_files = loader.sharing == "read by each" and not isinstance(loader.dataset, SharedStream)
        size = None if size is None or has_files else loader.total_batch_size
    elif are_several():
        # Nobody knows what the other processes read with a loader of the script's own.
        return None
    return size if isinstance(size, int) else None


def parts_read(loader: Any) -> int:
    """Parts of a stream that worker processes read side by side; 1 for other data."""
    dataset = getattr(loader, "dataset", None)
    while isinstance(dataset, (LaterRows, SharedStream)):
        dataset = dataset.dataset
    if not isinstance(dataset, IterableDataset):
        return 1
    # Workers of a `datasets.IterableDataset` beyond its files read nothing.
    return max(1, min(loader.num_workers, getattr(dataset, "n_shards", loader.num_workers)))


def without_first_rows(loader: Any, rows: list[int]) -> DataLoader | None:
    """The same loader without the first rows of its next iteration, whose batches are formed of the rows after them.

    Parameters:
        rows: rows trained for each of the `parts_read`, also with other batches or in another number of processes.

    Returns:
        None if the batches are not formed of rows in an order, or a stream is read in another number of parts.
    """
    if not _reads_as_torch(loader) or len(rows) != parts_read(loader):
        return None
    later = copied_loader(loader)
    parts = vars(later)
    if isinstance(loader.dataset, SharedStream):
        parts["dataset"] = copy.copy(loader.dataset)
        parts["dataset"].dataset = LaterRows(loader.dataset.dataset, rows)
    elif isinstance(loader.dataset, IterableDataset):
        parts["dataset"] = LaterRows(loader.dataset, rows)
    else:
        innermost = parts["batch_sampler"] = copy.copy(loader.batch_sampler)
        if isinstance(innermost, SharedBatches):
            innermost.batch_sampler = innermost = copy.copy(innermost.batch_sampler)
        if type(innermost) is not BatchSampler:
            return None
        innermost.sampler = LaterRows(innermost.sampler, rows)
    return later


class LaterRows(IterableDataset[Any]):
    """A stream, or the order of a sampler, from a row on in the next iteration; in later ones all.

    Parameters:
        dataset: the stream, or the sampler.
        rows: rows to leave out, for each worker that reads a stream.
    """

    def __init__(self, dataset: Any, rows: list[int]):
        self.dataset, self.rows = dataset, rows
        self.generator = getattr(dataset, "generator", None)

    def set_epoch(self, epoch: int) -> None:
        tell_epoch(epoch, self.dataset)

    def __iter__(self) -> Iterator[Any]:
        worker = getattr(get_worker_info(), "id", 0)
        left_out, self.rows = sum(self.rows[worker : worker + 1]), []
        return islice(iter(self.dataset), left_out, None)

    def __len__(self) -> int:
        return max(len(self.dataset) - sum(self.rows), 0)


@dataclass(frozen=True)
class LayoutChange:
    """Where an epoch goes on with other batches, optimizer steps or processes than it began with.

    Parameters:
        rows: rows trained before, for each of the `parts_read`; none if only the accumulation is another.
        batches, share: micro-batches of the new size that they stand for, and their share of the epoch.
        window: the micro-batch, counted from the epoch's beginning, at which the first optimizer step begins.
    """

    rows: list[int]
    batches: int
    window: int
    share: float


# Batches at which is seen which generators reading draws from.
WATCHED_BATCHES = 4


@dataclass
class ResumePoint:
    """Where a resumed epoch goes on.

    Parameters:
        batches: batches of the epoch that have been trained on.
        kept: what `DataProgress.state()` returned at the checkpoint; None where the checkpoint has none.
        restore_random_states: puts the generators where the checkpoint left them.
    """

    batches: int
    kept: dict[str, Any] | None
    restore_random_states: Callable[[], None]

    @property
    def change(self) -> LayoutChange | None:
        """Where the epoch was resumed with another layout, now or before; None if it never was."""
        change = (self.kept or {}).get("layout_change")
        return None if change is None else LayoutChange(**change)

    @property
    def batches_to_skip(self) -> int:
        """Batches that have been trained on since the layout is what it is."""
        return self.batches - (0 if self.change is None else self.change.batches)


class DataProgress:
    """Follows the reading of a training loader, and reads on where an interrupted training stopped."""

    def __init__(self, loader: Any = None) -> None:
        self.point: ResumePoint | None = None
        self.workers = WorkerStates()
        self._loader = loader
        self._stream: Any = None
        self._has_told_of_states = False
        self._epoch_start: HostStates | None = None
        self._generators_at_start: dict[str, torch.Tensor] = {}
        self._workers_at_start: dict[int, HostStates] = {}
        self._before_ahead: HostStates | None = None
        self._stream_before_ahead: Any = None
        self._latest_before_ahead: dict[int, HostStates] | None = None
        self._common_end = CommonEnd()
        self._batches_watched = self._batches_in_hand = 0
        self.batches_skipped = 0
        self.data_has_ended = False
        self._drawn_from: set[str] = set()
        # Whether the order follows the seed of the training that wrote the checkpoint, and not of this one.
        self._order_is_kept = False
        self._change: LayoutChange | None = None
        self._was_changed = False
        # What the sampler's order depends on when it does not follow a checkpoint.
        self._own_order: dict[str, Any] = {}
        self._before_order: HostStates | None = None

    # ---- What a checkpoint keeps -------------------------------------------------------------------------------------

    def state(self, batches_done: int, epoch_is_over: bool) -> dict[str, Any]:
        """What reading on needs, in tensors, numbers, texts and containers of them.

        Parameters:
            batches_done: batches of the epoch that have been trained on.
            epoch_is_over: the next epoch comes next, from its first batch.
        """
        common: dict[str, Any] = {"num_workers": getattr(self._loader, "num_workers", 0)}
        sampler = epoch_seeded_sampler(self._loader)
        if sampler is not None:
            common["order_seed"] = sampler.initial_seed
        if self._order_is_kept:
            common["order_is_kept"] = True
        if epoch_is_over:
            lives_on = getattr(self._loader, "persistent_workers", False)
            return {
                **common,
                "generators": generator_states(self._loader),
                "workers_at_start": dict(self.workers.latest) if lives_on else {},
            }
        # After an interrupt within a step, batches have been read that are not yet trained on.
        is_at_step_end = batches_done == self._batches_in_hand
        dispatch, stream = self._dispatch, self._stream if is_at_step_end else None
        if self._change is not None:
            common["layout_change"] = asdict(self._change)
        if is_at_step_end and keeps_its_state(self._loader):
            common["loader"] = self._storable(self._loader, self._loader.state_dict())
        return {
            **common,
            "rows": self._rows_trained(batches_done),
            "order": order_attributes(self._loader),
            "epoch_start": self._epoch_start,
            "generators": self._generators_at_start,
            "workers_at_start": self._workers_at_start,
            "before_ahead": self._all_before_ahead() if is_at_step_end else None,
            "stream": None if stream is None else self._storable(stream, self._stream_before_ahead),
            "workers": self._workers_before_ahead() if is_at_step_end else {},
            "dispatch": None if dispatch is None else dispatch.state(),
            "sharing": getattr(self._loader, "sharing", None),
        }

    def _storable(self, source: Any, state: Any) -> Any:
        if loads_safely(state):
            return state
        if not self._has_told_of_states:
            self._has_told_of_states = True
            logger.warning(
                "%s.state_dict() holds objects that no checkpoint stores: resuming will read the data again up to "
                "where it stood. Return tensors, numbers, texts and containers of them to avoid that.",
                type(source).__name__,
            )
        return None

    def rows_of_batch(self, epoch: int, number: int, is_current: bool) -> list[int] | None:
        """The indices of a batch's rows, which are drawn once more; None for streams and for samplers of a script.

        Parameters:
            epoch, number: counted from 0.
            is_current: it is the epoch that is being read; of earlier ones an order is known that follows from a seed.
        """
        loader = self._loader
        # Of an earlier epoch it is not known any more where another layout began.
        if not skips_by_index(loader) or self._dispatch is not None or (self._was_changed and not is_current):
            return None
        batches, sampler = loader.batch_sampler, _owners_of_generators(loader)["sampler"]
        while isinstance(batches, LaterBatches):
            batches = batches.batch_sampler
        own, known = getattr(batches, "batch_sampler", batches), {EpochSeededSampler, SequentialSampler}
        if is_current and not loader.persistent_workers:
            known |= {RandomSampler, LengthGroupedSampler}
        if type(own) is not BatchSampler or type(sampler) not in known:
            return None
        if isinstance(own.sampler, LaterRows) and self._change is not None and is_current:
            own.sampler.rows, number = self._change.rows, number - self._change.batches
        states, generators, epoch_then = host_states(), generator_states(loader), getattr(sampler, "epoch", None)
        try:
            if self._epoch_start is not None:
                set_host_states(self._epoch_start)
            set_generator_states(loader, self._generators_at_start)
            # As an iterator of a DataLoader does first.
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            tell_epoch(epoch, sampler)
            return next(islice(batches, number, None), None)
        finally:
            set_host_states(states)
            set_generator_states(loader, generators)
            if epoch_then is not None:
                tell_epoch(epoch_then, sampler)

    def _rows_trained(self, batches_done: int) -> list[int] | None:
        """Return the rows that all processes have trained, for each of the `parts_read`; None if nobody knows."""
        change, loader, dispatch = self._change or LayoutChange([], 0, 0, 0.0), self._loader, self._dispatch
        size, parts = rows_of_round(loader), range(parts_read(loader))
        if size is None:
            return None
        units = 1 if dispatch is None else dispatch.batches_of_round
        batches = (batches_done - change.batches) * units
        rows = [len(range(part, batches, len(parts))) * size // units for part in parts]
        if len(parts) > 1 and workers_report(loader) and self._reads:
            # A worker that has read all of its part leaves its turns to the others.
            given = self.workers.given[: 2 * batches]
            pairs = [*zip(given[::2], given[1::2], strict=True)]
            shares = loader.processes if dispatch is None else 1
            rows = [shares * sum(number for worker, number in pairs if worker == part) for part in parts]
        return [sum(pair) for pair in zip(change.rows, rows, strict=True)] if change.rows else rows

    @property
    def _dispatch(self) -> Any:
        return getattr(self._loader, "dispatch", None)

    def _workers_before_ahead(self) -> dict[int, HostStates]:
        if self._latest_before_ahead is not None and not self.data_has_ended:
            return self._latest_before_ahead
        return self.workers.before_last_batch()

    def _all_before_ahead(self) -> HostStates | None:
        # One that was not read is one that reading has not been seen to draw from. Where it does after all, now and
        # then, the batch ahead is most likely not the one that did, so that it stood there then as it does now.
        return None if self._before_ahead is None else {**host_states(), **self._before_ahead}

    # ---- Reading -----------------------------------------------------------------------------------------------------

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch, from the point on at which it is resumed."""
        point = self.point
        if point is not None and point.kept is None and not point.batches:
            self.finish_resuming(point)
        return loader.read(self) if isinstance(loader, LookaheadLoader) else self._without_looking_ahead(loader)

    def _without_looking_ahead(self, loader: Any) -> Iterator[Any]:
        batches = self.begin(loader, lambda: read_batches(loader))
        self._before_ahead = None
        self._reach_checkpoint()
        end = self._common_end if are_several() and not has_length(loader) else None
        if end is not None:
            end.begin()
        for batch in batches:
            if end is not None and end.is_reached(False, is_training=True):
                return
            self._batches_in_hand += 1
            yield batch
        if end is not None:
            end.is_reached(True, is_training=True)

    def resumed_loader(self, loader: Any) -> Any:
        """The loader whose next iteration begins where training is resumed, and whose later ones are complete."""
        point = self.point
        if point is None or not isinstance(loader, DataLoader):
            return loader
        kept = self._kept_for(loader)
        if point.change is not None and point.change.rows and not self._goes_on_from_state(loader, kept):
            loader = without_first_rows(loader, point.change.rows)
        if skips_by_index(loader) and point.batches_to_skip:
            loader = without_first_batches(loader, point.batches_to_skip, keeps_turns=workers_report(loader))
        elif loader.persistent_workers:
            loader = copied_loader(loader)
        if loader.persistent_workers and loader.generator is None and kept.get("workers_at_start"):
            # Its workers were started in an earlier epoch, so none of this one's draws went to their seed.
            loader.generator = torch.Generator()
        return loader

    @staticmethod
    def _goes_on_from_state(loader: Any, kept: dict[str, Any]) -> bool:
        """Whether the state of a stream, or of a loader of the script's own, stands for what has been read."""
        if kept.get("loader") is not None and kept.get("num_workers") == getattr(loader, "num_workers", 0):
            return keeps_its_state(loader)
        return kept.get("stream") is not None and exact_stream_in(loader) is not None

    def begin(self, loader: Any, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an epoch: an iterator over its batches, or over those that are left of it."""
        self._loader, point, kept = loader, self.point, self._kept_for(loader)
        started_workers: dict[int, HostStates] = {}
        if kept.get("order_is_kept") and (sampler := epoch_seeded_sampler(loader)) is not None:
            sampler.initial_seed, self._order_is_kept = kept["order_seed"], True
        set_order_attributes(loader, self._own_order)
        self._own_order, self._change = {}, None if point is None else point.change
        self._was_changed = self._was_changed or self._change is not None
        if self._change is not None:
            self._own_order, self._before_order = order_attributes(loader), host_states()
            set_order_attributes(loader, kept.get("order", {}))
        set_generator_states(loader, kept.get("generators", {}))
        if kept.get("epoch_start") is not None:
            set_host_states(kept["epoch_start"])
        if point is not None and kept.get("num_workers") == getattr(loader, "num_workers", 0):
            by_index = point.batches_to_skip and skips_by_index(loader)
            started_workers = kept.get("workers" if by_index else "workers_at_start", {})
        self._epoch_start = host_states()
        self._generators_at_start = generator_states(loader)
        if not getattr(loader, "persistent_workers", False) or started_workers:
            self.workers = WorkerStates(dict(started_workers))
        self._workers_at_start = kept.get("workers_at_start", dict(self.workers.latest))
        self._before_ahead, self._stream_before_ahead, self.data_has_ended = None, None, False
        self._latest_before_ahead = None
        self._batches_in_hand = point.batches if point is not None else 0
        # What reading draws from was seen in the first epoch; one batch of each later one says whether that changed.
        self._batches_watched = min(self._batches_watched, WATCHED_BATCHES - 1)
        self._stream = exact_stream_in(loader) if self._reads else None
        if self._stream is not None and kept.get("stream") is not None:
            self._stream.load_state_dict(kept["stream"])
        if self._dispatch is not None and point is not None:
            self._dispatch.resume(kept.get("dispatch"))
        if kept.get("loader") is not None and self._goes_on_from_state(loader, kept):
            loader.load_state_dict(kept["loader"])
        reports, batch_sampler = workers_report(loader), getattr(loader, "batch_sampler", None)
        has_empty_batches = isinstance(batch_sampler, LaterBatches) and batch_sampler.padding > 0
        with reporting_workers(loader, started_workers, has_empty_batches) if reports else nullcontext():
            batches = make_iterator()
        if reports:
            batches = self.workers.batches(batches)
        if point is not None:
            self._skip(batches, point.batches_to_skip, kept)
        return batches

    @property
    def _reads(self) -> bool:
        return self._dispatch is None or self._dispatch.reads

    def _kept_for(self, loader: Any) -> dict[str, Any]:
        kept = (self.point.kept if self.point is not None else None) or {}
        if kept.get("sharing") == getattr(loader, "sharing", None):
            return kept
        # What this process reads is not what it read then, so it has to be read again.
        return {**kept, **dict.fromkeys(("stream", "dispatch", "num_workers"))}

    def _skip(self, batches: Iterator[Any], number: int, kept: dict[str, Any]) -> None:
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        if isinstance(batch_sampler, LaterBatches):
            # An order is drawn where it is read.
            if self._reads:
                batch_sampler.skip()
        elif not self._goes_on_from_state(self._loader, kept):
            batches = self._counted(batches)
            if self._dispatch is not None:
                self._dispatch.skip(batches, number)
            else:
                next(islice(batches, number, number), None)
        if kept.get("before_ahead") is not None:
            set_host_states(kept["before_ahead"])

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for self.batches_skipped, batch in enumerate(batches, 1):
            yield batch

    def before_batch_ahead(self) -> None:
        """A batch has been drawn, and the one after it is about to be collated."""
        if self.point is not None:
            self._reach_checkpoint()
        self._batches_in_hand += 1
        if self._loader.num_workers:
            if self._dispatch is not None:
                # Several batches are read ahead, by several workers.
                self._latest_before_ahead = dict(self.workers.latest)
            return
        is_watched = self._batches_watched < WATCHED_BATCHES
        self._before_ahead = host_states(
            python=is_watched or "python" in self._drawn_from, numpy=is_watched or "numpy" in self._drawn_from
        )
        if self._stream is not None:
            # A stream may go on changing what it returned.
            self._stream_before_ahead = copy.deepcopy(self._stream.state_dict())

    def after_batch_ahead(self, is_one: bool) -> None:
        """The batch ahead has been collated.

        Parameters:
            is_one: there was one; else the data has ended.
        """
        if not is_one:
            self.data_has_ended = True
            self.workers.before_last = None
        if self._batches_watched < WATCHED_BATCHES:
            self._batches_watched += 1
            if self._before_ahead is not None:
                self._drawn_from |= drawn_from(self._before_ahead, host_states())

    def _reach_checkpoint(self) -> None:
        # From here on every draw comes after the checkpoint.
        if self.point is not None and self.point.kept is not None:
            self.finish_resuming(self.point)

    def finish_resuming(self, point: ResumePoint) -> None:
        """The first window of a resumed epoch has been drawn; generators stand where the checkpoint left them."""
        if self._before_order is not None:
            # The checkpoint has no states for a process that it does not know.
            set_host_states(self._before_order)
            self._before_order = None
        point.restore_random_states()
        self.point = None


def workers_report(loader: Any) -> bool:
    """Whether the workers of a loader report, in a training, on where their generators stand."""
    return isinstance(loader, LookaheadLoader) and loader.num_workers > 0 and loader.batch_sampler is not None


def _owners_of_generators(loader: Any) -> dict[str, Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    while isinstance(batch_sampler, (LaterBatches, SharedBatches)):
        batch_sampler = batch_sampler.batch_sampler
    sampler = getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)
    if isinstance(sampler, LaterRows):
        sampler = sampler.dataset
    return {"loader": loader, "batch_sampler": batch_sampler, "sampler": sampler}


def epoch_seeded_sampler(loader: Any) -> EpochSeededSampler | None:
    """The sampler of a loader whose order follows from a seed and the epoch; None where it has another one."""
    sampler = _owners_of_generators(loader)["sampler"]
    return sampler if isinstance(sampler, EpochSeededSampler) else None


def generator_states(loader: Any) -> dict[str, torch.Tensor]:
    """The states of a loader's own torch generators, which go on from epoch to epoch, by who holds them."""
    owners = _owners_of_generators(loader).items()
    generators = {name: getattr(owner, "generator", None) for name, owner in owners}
    return {name: one.get_state() for name, one in generators.items() if isinstance(one, torch.Generator)}


def set_generator_states(loader: Any, states: dict[str, torch.Tensor]) -> None:
    """Put a loader's own generators where `generator_states` found them."""
    owners = _owners_of_generators(loader)
    for name, state in states.items():
        generator = getattr(owners[name], "generator", None)
        if isinstance(generator, torch.Generator):
            generator.set_state(state)


def order_attributes(loader: Any) -> dict[str, int]:
    """What, besides generators, the order of a loader's sampler depends on, by the attribute's name."""
    sampler = _owners_of_generators(loader)["sampler"]
    values = {name: getattr(sampler, name, None) for name in ORDER_ATTRIBUTES}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def set_order_attributes(loader: Any, values: dict[str, int]) -> None:
    """Let the order of a loader's sampler depend on what `order_attributes` found."""
    for name in values.keys() & order_attributes(loader).keys():
        setattr(_owners_of_generators(loader)["sampler"], name, values[name])
