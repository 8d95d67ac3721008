"""How far the data of an epoch has been read, exactly enough to read on from there in another process.

The order of an epoch, and what workers draw, follow from where the random number generators stood when it began. The
batch that is collated ahead of the one in training was made before a checkpoint and is trained on after it, so where
they stood before that batch is kept too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from littrainer.data.ends import CommonEnd
from littrainer.data.generators import HostStates, drawn_from, host_states, set_host_states
from littrainer.data.loaders import LookaheadLoader, has_length
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.sharding import SharedBatches
from littrainer.data.skipping import LaterBatches, copied_loader, skips_by_index, without_first_batches
from littrainer.data.stream_states import ExactStreamState
from littrainer.data.worker_states import WorkerStates, reporting_workers
from littrainer.data.workers import read_batches
from littrainer.processes.agreement import are_several

logger = logging.getLogger(__name__)

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


class DataProgress:
    """Follows the reading of a training loader, and reads on where an interrupted training stopped.

    Parameters:
        expects_checkpoint: asked before a batch is collated ahead; a checkpoint may be written before it is used.
    """

    def __init__(self, expects_checkpoint: Callable[[], bool] = lambda: False):
        self.expects_checkpoint = expects_checkpoint
        self.point: ResumePoint | None = None
        self.workers = WorkerStates()
        self._loader: Any = None
        self._stream: ExactStreamState | None = None
        self._epoch_start: HostStates | None = None
        self._generators_at_start: dict[str, torch.Tensor] = {}
        self._workers_at_start: dict[int, HostStates] = {}
        self._before_ahead: HostStates | None = None
        self._stream_before_ahead: Any = None
        self._latest_before_ahead: dict[int, HostStates] | None = None
        self._common_end = CommonEnd()
        self._batches_watched = 0
        self._batches_in_hand = 0
        self.data_has_ended = False
        self._drawn_from: set[str] = set()
        # Whether the order goes by the seed of the training that wrote the checkpoint, and not by this one's.
        self._order_is_kept = False

    # ---- What a checkpoint keeps -------------------------------------------------------------------------------------

    def state(self, batches_done: int, epoch_is_over: bool) -> dict[str, Any]:
        """What reading on needs, in tensors, numbers, texts and containers of them.

        Parameters:
            batches_done: batches of the epoch that have been trained on.
            epoch_is_over: the next epoch comes next, from its first batch.
        """
        num_workers = getattr(self._loader, "num_workers", 0)
        order = self._seed_of_order()
        if epoch_is_over:
            lives_on = getattr(self._loader, "persistent_workers", False)
            return {
                "num_workers": num_workers,
                **order,
                "generators": generator_states(self._loader),
                "workers_at_start": dict(self.workers.latest) if lives_on else {},
            }
        dispatch = getattr(self._loader, "dispatch", None)
        # After an interrupt within a step, batches have been read that are not yet trained on.
        is_at_step_end = batches_done == self._batches_in_hand
        return {
            "num_workers": num_workers,
            **order,
            "epoch_start": self._epoch_start,
            "generators": self._generators_at_start,
            "workers_at_start": self._workers_at_start,
            "before_ahead": self._all_before_ahead() if is_at_step_end else None,
            "stream": self._stream_before_ahead if is_at_step_end else None,
            "workers": self._workers_before_ahead() if is_at_step_end else {},
            "dispatch": None if dispatch is None else dispatch.state(),
            "sharing": getattr(self._loader, "sharing", None),
        }

    def _seed_of_order(self) -> dict[str, Any]:
        sampler = epoch_seeded_sampler(self._loader)
        seed = {} if sampler is None else {"order_seed": sampler.initial_seed}
        return {**seed, "order_is_kept": True} if self._order_is_kept else seed

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
            self.finish_resuming()
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
            yield batch
        if end is not None:
            end.is_reached(True, is_training=True)

    def resumed_loader(self, loader: Any) -> Any:
        """The loader whose next iteration begins where training is resumed, and whose later ones are complete."""
        point = self.point
        if point is None or not isinstance(loader, DataLoader):
            return loader
        kept = point.kept or {}
        if skips_by_index(loader) and point.batches:
            loader = without_first_batches(loader, point.batches, keeps_turns=workers_report(loader))
        elif loader.persistent_workers:
            loader = copied_loader(loader)
        if loader.persistent_workers and loader.generator is None and kept.get("workers_at_start"):
            # Its workers were started in an earlier epoch, so none of this one's draws went to their seed.
            loader.generator = torch.Generator()
        return loader

    def begin(self, loader: Any, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an epoch: an iterator over its batches, or over those that are left of it."""
        self._loader = loader
        kept = self._kept_for(loader)
        started_workers: dict[int, HostStates] = {}
        if kept is not None:
            self._keep_order(loader, kept)
            set_generator_states(loader, kept.get("generators", {}))
            if kept.get("epoch_start") is not None:
                set_host_states(kept["epoch_start"])
            if kept.get("num_workers") == getattr(loader, "num_workers", 0):
                by_index = self.point is not None and self.point.batches and skips_by_index(loader)
                started_workers = kept.get("workers" if by_index else "workers_at_start", {})
        self._epoch_start = host_states()
        self._generators_at_start = generator_states(loader)
        if not getattr(loader, "persistent_workers", False) or started_workers:
            self.workers = WorkerStates(dict(started_workers))
        self._workers_at_start = (kept or {}).get("workers_at_start", dict(self.workers.latest))
        self._before_ahead, self._stream_before_ahead, self.data_has_ended = None, None, False
        self._batches_in_hand = self.point.batches if self.point is not None else 0
        # What reading draws from was seen in the first epoch; one batch of each later one says whether that changed.
        self._batches_watched = min(self._batches_watched, WATCHED_BATCHES - 1)
        dispatch = getattr(loader, "dispatch", None)
        reads = dispatch is None or dispatch.reads
        self._stream = ExactStreamState.of(loader) if reads else None
        if self._stream is not None and kept is not None and kept.get("stream") is not None:
            self._stream.load(kept["stream"])
        self._latest_before_ahead = None
        if dispatch is not None and self.point is not None:
            dispatch.resume((kept or {}).get("dispatch"))
        reports = workers_report(loader)
        sampler = getattr(loader, "batch_sampler", None)
        has_empty_batches = isinstance(sampler, LaterBatches) and sampler.padding > 0
        with reporting_workers(loader, started_workers, has_empty_batches) if reports else nullcontext():
            batches = make_iterator()
        if reports:
            batches = self.workers.batches(batches)
        if self.point is not None:
            self._skip(loader, batches, self.point, kept or {})
        return batches

    def _keep_order(self, loader: Any, kept: dict[str, Any]) -> None:
        sampler = epoch_seeded_sampler(loader)
        self._order_is_kept = sampler is not None and "order_seed" in kept and kept.get("order_is_kept", False)
        if sampler is not None and self._order_is_kept:
            sampler.initial_seed = kept["order_seed"]

    def _kept_for(self, loader: Any) -> dict[str, Any] | None:
        kept = self.point.kept if self.point is not None else None
        if kept is None or kept.get("sharing") == getattr(loader, "sharing", None):
            return kept
        # What this process reads is not what it read then, so it has to be read again.
        return {**kept, **dict.fromkeys(("stream", "dispatch")), "num_workers": None}

    def _skip(self, loader: Any, batches: Iterator[Any], point: ResumePoint, kept: dict[str, Any]) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        dispatch = getattr(loader, "dispatch", None)
        if isinstance(sampler, LaterBatches):
            # An order is drawn where it is read.
            if dispatch is None or dispatch.reads:
                sampler.skip()
        elif self._stream is None or kept.get("stream") is None:
            if dispatch is not None:
                dispatch.skip(batches, point.batches)
            else:
                next(islice(batches, point.batches, point.batches), None)
        if kept.get("before_ahead") is not None:
            set_host_states(kept["before_ahead"])

    def before_batch_ahead(self) -> None:
        """A batch is in hand, and the one after it is about to be collated."""
        self._reach_checkpoint()
        self._batches_in_hand += 1
        if self._loader.num_workers:
            if getattr(self._loader, "dispatch", None) is not None:
                # Several batches are read ahead, by several workers.
                self._latest_before_ahead = dict(self.workers.latest)
            return
        everything = self._batches_watched < WATCHED_BATCHES or self.expects_checkpoint()
        self._before_ahead = host_states(
            python=everything or "python" in self._drawn_from, numpy=everything or "numpy" in self._drawn_from
        )
        if self._stream is not None:
            self._stream_before_ahead = self._stream.save()

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
            self.point.restore_random_states()
            self.point = None

    def finish_resuming(self) -> None:
        """The first window of a resumed epoch has been drawn; generators stand where the checkpoint left them."""
        if self.point is not None:
            self.point.restore_random_states()
            self.point = None


def workers_report(loader: Any) -> bool:
    """Whether the workers of a loader report, in a training, on where their generators stand."""
    return isinstance(loader, LookaheadLoader) and loader.num_workers > 0 and loader.batch_sampler is not None


def _owners_of_generators(loader: Any) -> dict[str, Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    while isinstance(batch_sampler, (LaterBatches, SharedBatches)):
        batch_sampler = batch_sampler.batch_sampler
    sampler = getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)
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
