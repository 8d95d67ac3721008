"""The batches of a lightning.Trainer; no DataLoaders, so that Lightning neither rebuilds nor shards them."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from littrainer.checkpoint.lightning_format import DATA_VERSION
from littrainer.data.loaders import PrefetchLoader, count_examples, has_length
from littrainer.data.resume.position import DataPosition, describe_sizes, find_changed_sizes
from littrainer.data.resume.progress import DataProgress, find_epoch_seeded_sampler
from littrainer.data.resume.rng import (
    decode_rng_states,
    encode_rng_states,
    get_rng_states,
    set_rng_states,
)
from littrainer.data.windows import MicroBatch, WindowLoader
from littrainer.distributed.collectives import broadcast_object
from littrainer.lightning_adapter.lightning_internals import (
    disable_prefetch,
    end_epoch_after_batch,
    skip_to_next_epoch,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.lightning.arguments import ArgumentsUnderLightning


logger = logging.getLogger(__name__)

# Returns the divisor of a window's loss.
CountItems = Callable[[list[Any]], Any]
SAVED_FIELDS = ("epoch", "micro_batches", "sizes", "data", "random", "order_seed")


def parse_positions(state: dict[str, Any]) -> list[DataPosition]:
    """Return the positions by rank; raise a ValueError for another version."""
    if state.get("version") != DATA_VERSION:
        raise ValueError(
            f"The state of the data has version {state.get('version')!r}, and this littrainer reads version "
            f"{DATA_VERSION}. Use the littrainer that wrote it, or resume without TrainerDataModule."
        )
    return [DataPosition.load_fields(saved) for saved in state["processes"]]


def _restore_random_states(position: DataPosition) -> None:
    if position.random is not None:
        set_rng_states(decode_rng_states(position.random))


class TrainingBatches:
    """The batches of a training, which Lightning iterates once in each epoch.

    Parameters:
        count_items: counts the items of a window; None reads single batches.
        take_position: returns a checkpoint's position once, then None.
    """

    def __init__(
        self,
        loader: PrefetchLoader,
        args: ArgumentsUnderLightning,
        pl_trainer: pl.Trainer,
        *,
        count_items: CountItems | None,
        take_position: Callable[[], DataPosition | None],
    ):
        self.loader: Any = loader
        sampler = find_epoch_seeded_sampler(loader)
        if sampler is not None:
            # Without a common seed, processes would share samples.
            sampler.initial_seed = broadcast_object(sampler.initial_seed)
        self.args = args
        self.pl_trainer = pl_trainer
        self.count_items = count_items
        self.progress = DataProgress()
        self._take_position = take_position
        # A checkpoint's position until reading begins, and whether Lightning has not announced its epoch.
        self._position: DataPosition | None = None
        self._is_unannounced = False
        self._is_epoch_exhausted = False
        self._windows: WindowLoader | None = None
        self._epoch: int | None = None
        # Lightning announces an epoch before or after its first batch.
        self._epochs_announced = self._epochs_begun = 0
        self._window_start: DataPosition | None = None
        # `batch_idx` -> place in a window.
        self.handed_out: dict[int, MicroBatch] = {}

    def __len__(self) -> int:
        # Lightning applies its limits to this length.
        return len(self.loader)

    @property
    def sizes(self) -> dict[str, int | None]:
        is_sized = has_length(self.loader)
        return {
            "micro_batch": self.args.train_batch_size,
            "world_size": self.args.world_size,
            "epoch_length": self._batches_to_read if is_sized else None,
            "num_examples": count_examples(self.loader, self.args.train_batch_size) if is_sized else None,
        }

    @property
    def _batches_to_read(self) -> int:
        """Count batches of an epoch up to Lightning's limit; a huge number if unknown."""
        length = len(self) if has_length(self) else sys.maxsize
        return int(min(length, self.pl_trainer.num_training_batches))

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Return the object on which Lightning calls `sampler.set_epoch`, and DeepSpeed reads `batch_size`."""
        # Lightning would warn of a sampler under `overfit_batches`.
        return SimpleNamespace(sampler=self, batch_size=self.args.train_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the data module stores the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    # ---- Position ----------------------------------------------------------------------------------------------------

    def position(self) -> DataPosition:
        """Return the position of the window's beginning, since checkpoints have no gradients."""
        position, windows = self._position_to_resume(), self._windows
        if position is not None:
            return position
        if windows is None or self._epoch is None:
            return self._make_position(self._next_epoch, 0, epoch_is_over=True)
        done = windows.micro_batches_done = self._count.current.processed
        is_read = windows.is_epoch_complete and done == windows.micro_batches_read
        if self._epochs_announced > self._epochs_begun or is_read:
            return self._make_position(self._epoch + 1, 0, epoch_is_over=True)
        in_window, start = done % self.args.gradient_accumulation_steps, self._window_start
        if in_window and start is not None and start.micro_batches == done - in_window:
            return start
        return self._make_position(self._epoch, done, epoch_is_over=False)

    def _make_position(self, epoch: int, micro_batches: int, epoch_is_over: bool) -> DataPosition:
        sampler, is_read = find_epoch_seeded_sampler(self.loader), self._epoch is not None
        return DataPosition(
            epoch,
            micro_batches,
            data=self.progress.state(micro_batches, epoch_is_over=epoch_is_over) if is_read else None,
            sizes=self.sizes,
            random=encode_rng_states(get_rng_states()),
            order_seed=None if sampler is None else sampler.initial_seed,
        )

    @property
    def _count(self) -> Any:
        return self.pl_trainer.fit_loop.epoch_loop.batch_progress

    @property
    def _next_epoch(self) -> int:
        # Lightning may count a resumed epoch twice.
        return self._epoch_of_lightning if self._epoch is None else self._epoch + 1

    @property
    def _epoch_of_lightning(self) -> int:
        progress: Any = self.pl_trainer.fit_loop.epoch_progress
        return progress.current.processed

    # ---- Resume ------------------------------------------------------------------------------------------------------

    def _position_to_resume(self) -> DataPosition | None:
        position = self._take_position()
        if position is not None:
            self._position = self._match_to_sizes(position)
            self._is_unannounced = True
            sampler = find_epoch_seeded_sampler(self.loader)
            if sampler is not None and position.order_seed is not None:
                sampler.initial_seed = position.order_seed
        return self._position

    def _match_to_sizes(self, position: DataPosition) -> DataPosition:
        # An incomplete last batch may change `num_examples`.
        now, then = self.sizes, position.sizes or {}
        changed = find_changed_sizes(now, then, ignored=("num_examples",))
        if not changed:
            return position
        same_processes = "world_size" not in changed
        micro_batches = self._rescale_micro_batches(position.micro_batches, then)
        if position.micro_batches or not same_processes:
            logger.warning(
                "The checkpoint was written with other data: there are now %s. Training continues after %d of these "
                "micro-batches in epoch %d%s.%s",
                describe_sizes(now, then, changed),
                micro_batches,
                position.epoch,
                ", which has no more" if micro_batches >= self._batches_to_read else "",
                "" if same_processes else " Random numbers continue from the seed.",
            )
        random = position.random if same_processes else None
        return replace(position, micro_batches=micro_batches, data=None, random=random)

    def _rescale_micro_batches(self, micro_batches: int, then: Mapping[str, int | None]) -> int:
        # Rounds down to complete windows, within the epoch.
        for name, now in (("micro_batch", self.args.train_batch_size), ("world_size", self.args.world_size)):
            micro_batches = micro_batches * (then.get(name) or now)
        micro_batches //= self.args.train_batch_size * self.args.world_size
        if micro_batches >= self._batches_to_read:
            return self._batches_to_read
        return micro_batches - micro_batches % self.args.gradient_accumulation_steps

    def set_epoch(self, epoch: int) -> None:
        self._epochs_announced += 1
        self._is_epoch_exhausted = False
        position, is_new = self._position_to_resume(), self._is_unannounced
        self._is_unannounced = False
        if position is None or not is_new:
            return
        if not position.micro_batches:
            # The checkpoint's generators set the order of the data, and draws of callbacks before it.
            _restore_random_states(position)
        self._restore_lightning_progress(position)
        if position.micro_batches >= self._batches_to_read:
            # Lightning ends the epoch, possibly without an iterator.
            _restore_random_states(position)
            self._position = None
            self._epoch = position.epoch
            self._is_epoch_exhausted = True

    def _restore_lightning_progress(self, position: DataPosition) -> None:
        count = self._count
        if not position.micro_batches:
            if self._has_undetected_end():
                skip_to_next_epoch(self.pl_trainer)
                return
            is_sized = has_length(self.loader)
            if not is_sized and count.is_last_batch and self.pl_trainer.fit_loop.restarted_mid_epoch:
                # The checkpoint is from after the epoch's validation: Lightning announces the epoch, then ends it.
                self._epochs_announced -= 1
        # Otherwise Lightning ends the epoch by its counts.
        is_in_first_window = 0 < count.current.processed < self.args.gradient_accumulation_steps
        is_at_its_beginning = (
            is_in_first_window and not count.is_last_batch and position.epoch == self._epoch_of_lightning
        )
        if position.micro_batches or is_at_its_beginning or self.pl_trainer.fit_loop.restarted_on_epoch_start:
            count.increment_by(position.micro_batches - count.current.processed)

    def _has_undetected_end(self) -> bool:
        fit_loop, count = self.pl_trainer.fit_loop, self._count
        if has_length(self.loader):
            # Lightning detects an unchanged number of micro-batches, unless `max_steps` restarts an epoch after its end
            # hooks.
            has_same_length = count.current.ready == self._batches_to_read and not fit_loop.restarted_on_epoch_end
            is_detected = has_same_length or fit_loop.restarted_on_epoch_start
            return fit_loop.epoch_loop.restarting and count.is_last_batch and not is_detected
        # Lightning detects the last batch, unless the checkpoint seems to be from within the epoch.
        return count.is_last_batch and (
            fit_loop.epoch_loop.restarted_on_train_batch_end or fit_loop.restarted_on_epoch_end
        )

    # ---- Reading -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if not has_length(self):
            disable_prefetch(self.pl_trainer)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self._is_epoch_exhausted:
            return
        position = self._begin_to_read()
        if position is not None and position.micro_batches >= self._batches_to_read:
            return
        windows = self._windows = WindowLoader(
            self.loader,
            accumulation=1 if self.count_items is None else self.args.gradient_accumulation_steps,
            micro_batches_per_epoch=self._batches_to_read,
            draw_window=self._draw_window,
            should_stop=lambda: False,
        )
        windows.progress = self.progress
        assert self._epoch is not None
        windows.start_epoch(self._epoch)
        self._window_start = position
        if position is not None:
            restore = functools.partial(_restore_random_states, position) if position.micro_batches else None
            self.progress.resume_at(position, restore)
        for micro_batch in windows:
            if not has_length(self) and micro_batch.is_last_drawn and self.progress.is_exhausted:
                end_epoch_after_batch(self.pl_trainer)
            if self.count_items is not None:
                self.handed_out = {windows.micro_batches_read - 1: replace(micro_batch, inputs=None)}
            yield micro_batch.inputs

    def _begin_to_read(self) -> DataPosition | None:
        position, self._position = self._position_to_resume() or self._position_counted_by_lightning(), None
        self._epoch = self._next_epoch if position is None else position.epoch
        self._epochs_begun = max(self._epochs_announced, self._epochs_begun + 1)
        return position

    def _position_counted_by_lightning(self) -> DataPosition | None:
        """Return the position after Lightning's count, for a checkpoint without position."""
        done = self._count.current.ready
        if self._epoch is not None or not done:
            return None
        logger.warning(
            "The checkpoint does not hold the state of its data. Training continues after %d micro-batches of epoch "
            "%d.",
            done,
            self._next_epoch,
        )
        return DataPosition(self._next_epoch, done, sizes=self.sizes)

    def _draw_window(self, batches: Iterator[Any], number: int) -> tuple[list[Any], Any]:
        windows = self._windows
        assert windows is not None and self._epoch is not None
        accumulation, done = self.args.gradient_accumulation_steps, windows.micro_batches_read
        # A resumed epoch's first window begins at the checkpoint.
        if accumulation > 1 and done % accumulation == 0 and self.progress.position is None:
            self._window_start = self._make_position(self._epoch, done, epoch_is_over=done == 0)
        window = list(itertools.islice(batches, number))
        return window, None if self.count_items is None or not window else self.count_items(window)


class EvaluationBatches:
    """The batches of an evaluation, with a loader for each iteration, unless workers persist."""

    def __init__(self, make_loader: Callable[[], PrefetchLoader]):
        self._make_loader = make_loader
        self.loader = make_loader()
        self._is_unread = True

    @property
    def batch_sampler(self) -> Any:
        return self.loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # Lightning creates iterators without reading them.
        if not self._is_unread and not self.loader.persistent_workers:
            self.loader = self._make_loader()
        self._is_unread = False
        yield from self.loader
