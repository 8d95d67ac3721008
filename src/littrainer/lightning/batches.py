"""What a lightning.Trainer iterates: the batches of a training, or of an evaluation.

None of it is a torch DataLoader, so that Lightning neither rebuilds it nor divides it between processes once more.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from littrainer.checkpoint.lightning_format import DATA_VERSION
from littrainer.checkpoint.random_state import (
    capture_random_states,
    portable_states,
    set_random_states,
    states_of_portable,
)
from littrainer.data.loaders import LookaheadLoader, count_examples, has_length
from littrainer.data.position import DataProgress, ResumePoint, epoch_seeded_sampler
from littrainer.data.windows import MicroBatch, WindowLoader
from littrainer.distributed.agreement import from_first
from littrainer.engine.lightning_internals import begin_next_epoch, end_epoch_with_this_batch, read_nothing_ahead
from littrainer.training.resuming import SIZES

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.lightning.arguments import ArgumentsUnderLightning


logger = logging.getLogger(__name__)

# Says how many items the loss of a window is divided by.
CountItems = Callable[[list[Any]], Any]


@dataclass
class PlaceInData:
    """Where one process goes on reading.

    Parameters:
        epoch: the epoch, counted from 0.
        micro_batches: micro-batches of it whose optimizer steps are done.
        sizes: those of the data and of its batches, which have to be the same for the place to mean the same; None
            if they are not known.
        data: what `DataProgress.state()` returned; None if only the number of micro-batches is known.
        random: the states of all random generators, as `portable_states` has them; None leaves them alone.
        order_seed: with the epoch it makes the random order of an epoch; None if that is drawn in another way.
    """

    epoch: int
    micro_batches: int
    sizes: dict[str, int | None] | None
    data: dict[str, Any] | None = None
    random: dict[str, Any] | None = None
    order_seed: int | None = None

    def restore_random_states(self) -> None:
        """Put the generators back where they stood."""
        if self.random is not None:
            set_random_states(states_of_portable(self.random))


def places_in(state: dict[str, Any]) -> list[PlaceInData]:
    """The places of all processes, by rank, that the state of a `TrainerDataModule` holds.

    Raises:
        ValueError: the state is of another version, or none of a TrainerDataModule.
    """
    if state.get("version") != DATA_VERSION:
        raise ValueError(
            f"The state of the data has version {state.get('version')!r}, and this littrainer reads version "
            f"{DATA_VERSION}. Use the littrainer that wrote it, or resume without TrainerDataModule."
        )
    # Earlier checkpoints of streams hold one entry more.
    known = [field.name for field in fields(PlaceInData)]
    return [PlaceInData(**{name: place[name] for name in known if name in place}) for place in state["processes"]]


def random_states() -> dict[str, Any]:
    """Where all random generators of this process stand, the current GPU's too."""
    return portable_states(capture_random_states())


class TrainingBatches:
    """The training's batches, epoch by epoch; Lightning iterates it once in each.

    Parameters:
        loader: the training DataLoader.
        args: asked for the sizes of batches and processes.
        pl_trainer: says how many micro-batches an optimizer step has, and how many of an epoch are read.
        count_items: counts a window's items when it has been drawn; None draws batches one by one.
        take_place: called when reading begins; gives the place of a checkpoint once, and None else.
    """

    def __init__(
        self,
        loader: LookaheadLoader,
        args: ArgumentsUnderLightning,
        pl_trainer: pl.Trainer,
        *,
        count_items: CountItems | None,
        take_place: Callable[[], PlaceInData | None],
    ):
        self.loader: Any = loader
        sampler = epoch_seeded_sampler(loader)
        if sampler is not None:
            # If nobody has seeded them, each process would have another order, and some samples would come twice.
            sampler.initial_seed = from_first(sampler.initial_seed)
        self.args = args
        self.pl_trainer = pl_trainer
        self.count_items = count_items
        self.progress = DataProgress()
        self.batch_sampler = _AnnouncedEpochs(self)
        self._take_place = take_place
        # Where a checkpoint lets reading begin, until it has begun; and whether its epoch is still to be announced.
        self._place: PlaceInData | None = None
        self._is_unannounced = False
        # Whether a checkpoint stands behind the last batch that the epoch has by the sizes of today.
        self._nothing_is_left = False
        self._windows: WindowLoader | None = None
        # The epoch that is read or was read last; None before the first.
        self._epoch: int | None = None
        # Each epoch is announced and begun to be read, in this order or the other.
        self._epochs_announced = self._epochs_begun = 0
        # The places at which the windows that were drawn last begin, by their micro-batches.
        self._window_starts: dict[int, PlaceInData] = {}
        # Where the batch handed out last, by `batch_idx`, stands in a window with items.
        self.handed_out: dict[int, MicroBatch] = {}

    def __len__(self) -> int:
        # What is read of an epoch may be less, as Lightning's limits say; it asks for the length to find that out.
        return len(self.loader)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Sizes that have to be the same for a place in the data to mean the same."""
        is_sized = has_length(self.loader)
        return {
            "micro_batch": self.args.train_batch_size,
            "world_size": self.args.world_size,
            "epoch_length": self._batches_to_read if is_sized else None,
            "num_examples": count_examples(self.loader, self.args.train_batch_size) if is_sized else None,
        }

    @property
    def _batches_to_read(self) -> int:
        """Batches of an epoch up to Lightning's limit; a number out of reach if nobody knows."""
        known = len(self) if has_length(self) else sys.maxsize
        return int(min(known, self.pl_trainer.num_training_batches))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning asks for it to see that reading can be resumed; the data module keeps the place."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` has returned."""

    # ---- Where reading stands ----------------------------------------------------------------------------------------

    def place(self) -> PlaceInData:
        """Where a training goes on that is resumed from a checkpoint of this moment.

        Gradients are not kept, so within a window it is the window's beginning.
        """
        place, windows = self._place_to_resume(), self._windows
        if place is not None:
            return place
        if windows is None or self._epoch is None:
            return self._place_between_epochs(self._next_epoch)
        done = windows.micro_batches_done = self._count.current.processed
        is_read = windows.epoch_is_complete and done == windows.micro_batches_seen
        if self._epochs_announced > self._epochs_begun or is_read:
            return self._place_between_epochs(self._epoch + 1)
        in_window = done % self.args.gradient_accumulation_steps
        start = self._window_starts.get(done - in_window)
        return start if in_window and start is not None else self._place_in_epoch(done)

    def _place_between_epochs(self, next_epoch: int) -> PlaceInData:
        data = None if self._epoch is None else self.progress.state(0, epoch_is_over=True)
        return self._place_at(next_epoch, 0, data)

    def _place_in_epoch(self, done: int) -> PlaceInData:
        assert self._epoch is not None
        data = self.progress.state(done, epoch_is_over=False)
        return self._place_at(self._epoch, done, data)

    def _place_at(self, epoch: int, micro_batches: int, data: dict[str, Any] | None) -> PlaceInData:
        sampler = epoch_seeded_sampler(self.loader)
        seed = None if sampler is None else sampler.initial_seed
        return PlaceInData(epoch, micro_batches, self.sizes, data, random_states(), seed)

    @property
    def _count(self) -> Any:
        """Micro-batches as Lightning counts them."""
        return self.pl_trainer.fit_loop.epoch_loop.batch_progress

    @property
    def _next_epoch(self) -> int:
        # Counted here, since Lightning may count the epoch that it resumes at its end once more.
        if self._epoch is not None:
            return self._epoch + 1
        return self._epoch_of_lightning

    @property
    def _epoch_of_lightning(self) -> int:
        progress: Any = self.pl_trainer.fit_loop.epoch_progress
        return progress.current.processed

    # ---- Going on from a checkpoint ----------------------------------------------------------------------------------

    def _place_to_resume(self) -> PlaceInData | None:
        place = self._take_place()
        if place is not None:
            self._place = self._fitting(place)
            self._is_unannounced = True
            sampler = epoch_seeded_sampler(self.loader)
            if sampler is not None and place.order_seed is not None:
                # A program that is started again need not have the same seed.
                sampler.initial_seed = place.order_seed
        return self._place

    def _fitting(self, place: PlaceInData) -> PlaceInData:
        # In batches of today's sizes, without what means nothing if they were others.
        now, then = self.sizes, {**dict.fromkeys(SIZES), **(place.sizes or {})}
        # As many batches of the same size are the same data, whatever the last one holds.
        known = [name for name in now if name != "num_examples" and None not in (now[name], then[name])]
        changed = [name for name in known if now[name] != then[name]]
        if not changed:
            return place
        same_processes = "world_size" not in changed
        micro_batches = self._as_many_samples(place.micro_batches, then)
        if place.micro_batches or not same_processes:
            found = ", ".join(f"{now[name]} {SIZES[name]} ({then[name]})" for name in changed)
            logger.warning(
                "The checkpoint was written with other data: there are now %s. Training goes on behind %d of these "
                "micro-batches in epoch %d%s.%s",
                found,
                micro_batches,
                place.epoch,
                ", of which nothing is left" if micro_batches >= self._batches_to_read else "",
                "" if same_processes else " Random numbers go on from the seed.",
            )
        return replace(place, micro_batches=micro_batches, data=None, random=place.random if same_processes else None)

    def _as_many_samples(self, micro_batches: int, then: dict[str, int | None]) -> int:
        # In whole windows; or all of an epoch.
        for name, now in (("micro_batch", self.args.train_batch_size), ("world_size", self.args.world_size)):
            micro_batches = micro_batches * (then[name] or now)
        micro_batches //= self.args.train_batch_size * self.args.world_size
        if micro_batches >= self._batches_to_read:
            return self._batches_to_read
        return micro_batches - micro_batches % self.args.gradient_accumulation_steps

    def announce_epoch(self) -> None:
        """An epoch comes next, or a resumed one goes on; its hooks have not been called yet."""
        self._epochs_announced += 1
        self._nothing_is_left = False
        place, is_new = self._place_to_resume(), self._is_unannounced
        self._is_unannounced = False
        if place is None or not is_new:
            return
        if not place.micro_batches:
            # Its order is drawn from where the checkpoint left the generators, and so is what callbacks draw before it.
            place.restore_random_states()
        self._let_lightning_count_from(place)
        if place.micro_batches >= self._batches_to_read:
            # Lightning ends the epoch, and may do so without asking for a batch.
            place.restore_random_states()
            self._place, self._epoch, self._nothing_is_left = None, place.epoch, True

    def _let_lightning_count_from(self, place: PlaceInData) -> None:
        count = self._count
        if not place.micro_batches:
            if self._is_at_an_end_unknown_to_lightning():
                begin_next_epoch(self.pl_trainer)
                return
            is_sized = has_length(self.loader)
            if not is_sized and count.is_last_batch and self.pl_trainer.fit_loop.restarted_mid_epoch:
                # It announces the epoch behind whose validation the checkpoint was written, and ends it unread.
                self._epochs_announced -= 1
        # What Lightning has counted of an epoch that is over stays, since it ends that epoch by it.
        is_in_first_window = 0 < count.current.processed < self.args.gradient_accumulation_steps
        is_at_its_beginning = is_in_first_window and not count.is_last_batch and place.epoch == self._epoch_of_lightning
        if place.micro_batches or is_at_its_beginning or self.pl_trainer.fit_loop.restarted_on_epoch_start:
            count.increment_by(place.micro_batches - count.current.processed)

    def _is_at_an_end_unknown_to_lightning(self) -> bool:
        fit_loop, count = self.pl_trainer.fit_loop, self._count
        if has_length(self.loader):
            # With as many micro-batches in an epoch as then it finds out itself, unless `max_steps` makes it restart an
            # epoch that its hooks have ended.
            is_as_long = count.current.ready == self._batches_to_read and not fit_loop.restarted_on_epoch_end
            is_known = is_as_long or fit_loop.restarted_on_epoch_start
            return fit_loop.epoch_loop.restarting and count.is_last_batch and not is_known
        # It ends the epoch by its last batch, but for a checkpoint which it takes for one in the middle of it.
        return count.is_last_batch and (
            fit_loop.epoch_loop.restarted_on_train_batch_end or fit_loop.restarted_on_epoch_end
        )

    # ---- Reading -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if not has_length(self):
            # It would do so to see where the data ends, which is known here.
            read_nothing_ahead(self.pl_trainer)
        return self._read()

    def _read(self) -> Iterator[Any]:
        if self._nothing_is_left:
            return
        place = self._begin_to_read()
        if place is not None and place.micro_batches >= self._batches_to_read:
            return
        if self._windows is not None:
            # If an epoch was resumed, the one whose workers live on.
            self.loader = self._windows.loader
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
        self._window_starts = {} if place is None else {place.micro_batches: place}
        if place is not None:
            restore = place.restore_random_states if place.micro_batches else lambda: None
            windows.resume_at(ResumePoint(place.micro_batches, place.data, restore))
        for micro_batch in windows:
            if not has_length(self) and micro_batch.is_last_drawn and self.progress.data_has_ended:
                end_epoch_with_this_batch(self.pl_trainer)
            if self.count_items is not None:
                self.handed_out = {windows.micro_batches_seen - 1: replace(micro_batch, inputs=None)}
            yield micro_batch.inputs

    def _begin_to_read(self) -> PlaceInData | None:
        """Note which epoch is read, and return the place where it goes on."""
        place, self._place = self._place_to_resume() or self._place_that_lightning_counts(), None
        self._epoch = self._next_epoch if place is None else place.epoch
        self._epochs_begun = max(self._epochs_announced, self._epochs_begun + 1)
        return place

    def _place_that_lightning_counts(self) -> PlaceInData | None:
        """The place of a checkpoint that holds none, as if its data came from another loader."""
        behind = self._count.current.ready
        if self._epoch is not None or not behind:
            return None
        logger.warning(
            "The checkpoint does not hold the state of its data. Training goes on behind %d micro-batches of epoch %d.",
            behind,
            self._next_epoch,
        )
        return PlaceInData(self._next_epoch, behind, self.sizes)

    def _draw_window(self, batches: Iterator[Any], number: int) -> tuple[list[Any], Any]:
        windows = self._windows
        assert windows is not None and self._epoch is not None
        accumulation, behind = self.args.gradient_accumulation_steps, windows.micro_batches_seen
        begins = behind % accumulation == 0 and self.progress.point is None
        # In the first window of a resumed epoch it is the place of the checkpoint.
        if begins and accumulation > 1:
            start = self._place_in_epoch(behind) if behind else self._place_between_epochs(self._epoch)
            self._window_starts = {behind: start}
        window = list(itertools.islice(batches, number))
        return window, None if self.count_items is None or not window else self.count_items(window)


class _AnnouncedEpochs:
    """What Lightning takes for the order of samples, and calls before each epoch.

    Parameters:
        batches: whose `announce_epoch` is called.
    """

    def __init__(self, batches: TrainingBatches):
        self._batches = batches

    @property
    def sampler(self) -> _AnnouncedEpochs:
        """Where Lightning looks for `set_epoch`."""
        return self

    @property
    def batch_size(self) -> int:
        """Samples in one batch of this process, which DeepSpeed asks for."""
        return self._batches.args.train_batch_size

    def set_epoch(self, epoch: int) -> None:
        """An epoch comes next. Which one the data is at is counted where it is read."""
        self._batches.announce_epoch()


class EvaluationBatches:
    """The batches of a validation, a test or a prediction; each iteration reads a new loader, as the Trainer's do.

    Parameters:
        make_loader: makes a loader; one whose workers live on is read again.
    """

    def __init__(self, make_loader: Callable[[], LookaheadLoader]):
        self._make_loader = make_loader
        self.loader = make_loader()
        self._is_unread = True

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # Lightning asks for an iterator more often than it reads one.
        if not self._is_unread and not self.loader.persistent_workers:
            self.loader = self._make_loader()
        self._is_unread = False
        yield from self.loader
