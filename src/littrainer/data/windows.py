"""Windows: the micro-batches of one optimizer step.

Losses are normalised by the window's label tokens or number of micro-batches, so a window is drawn before its first
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from littrainer.data.resume.position import DataPosition
from littrainer.data.resume.progress import DataProgress
from littrainer.data.sharding import set_epoch_on

IGNORED_LABEL = -100


@dataclass(slots=True)
class MicroBatch:
    """Micro-batch with its position in the window of an optimizer step.

    Parameters:
        is_last_of_step: an optimizer step follows this micro-batch.
        window_size: number of micro-batches drawn together; a script may draw more or fewer than a step has.
        num_items_in_window: label tokens in the window, if the loss is divided by them.
        epoch_fraction: trained share of the epoch after this micro-batch.
        position: index in the drawn window.
    """

    inputs: Any
    is_first_of_step: bool
    is_last_of_step: bool
    window_size: int
    num_items_in_window: torch.Tensor | int | None
    epoch_fraction: float
    position: int = 0

    @property
    def is_last_drawn(self) -> bool:
        """True for the last micro-batch that was drawn, even if the optimizer does not step after it."""
        return self.position + 1 == self.window_size


class WindowLoader:
    """Training loader for `lightning.Trainer.fit`, which draws micro-batches from a DataLoader in windows.

    Parameters:
        accumulation: micro-batches in a full window; may change between epochs.
        draw_window: called with an iterator and a number; returns micro-batches and their label count.
        should_stop: called after each micro-batch; True ends the epoch early.
        skipped_windows: (epoch, first micro-batch) of windows that are drawn and skipped.
        has_unknown_epoch_length: the data is a stream without length, and `micro_batches_per_epoch` covers the whole
            training, so only the end of the data completes an epoch.

    Attributes:
        micro_batches_read: micro-batches of the epoch that were yielded or skipped.
        micro_batches_done: micro-batches of the epoch whose optimizer steps are complete.
    """

    def __init__(
        self,
        loader: Any,
        *,
        accumulation: int,
        micro_batches_per_epoch: int,
        draw_window: Callable[[Iterator[Any], int], tuple[list[Any], Any]],
        should_stop: Callable[[], bool],
        skipped_windows: Collection[tuple[int, int]] = (),
        has_unknown_epoch_length: bool = False,
    ):
        self.loader = loader
        self.accumulation = accumulation
        self.set_epoch_length(micro_batches_per_epoch)
        self.draw_window = draw_window
        self.should_stop = should_stop
        # A training sets `SpeedLog.enter`; the default, the builtin `id`, is a cheap function without effect.
        self.enter_section: Callable[[str], Any] = id
        self.skipped_windows = skipped_windows
        self.has_unknown_epoch_length = has_unknown_epoch_length
        self.progress = DataProgress(loader)
        self.epoch = 0
        self.micro_batches_read = 0
        self.micro_batches_done = 0
        # Micro-batches of the epoch that `draw_window` has returned.
        self._micro_batches_drawn = 0
        self._is_exhausted = False

    def __len__(self) -> int:
        # Without a length Lightning would prefetch a batch before training starts, which changes the random draws.
        return self.micro_batches_per_epoch

    def set_epoch_length(self, micro_batches_per_epoch: int) -> None:
        self.micro_batches_per_epoch = micro_batches_per_epoch
        # Fixed, as in transformers: if a callback lowers the accumulation, data is left unread.
        self._windows_per_epoch = -(-micro_batches_per_epoch // self.accumulation)

    def start_epoch(self, epoch: int) -> None:
        self.epoch = self.progress.epoch = epoch
        self.micro_batches_read = self.micro_batches_done = 0
        self._is_exhausted = self.progress.is_exhausted = False

    def find_rows(self, epoch: int, micro_batch: int) -> list[int] | None:
        return self.progress.find_batch_rows(epoch, micro_batch)

    @property
    def is_epoch_complete(self) -> bool:
        is_at_length = self.micro_batches_done >= self.micro_batches_per_epoch and not self.has_unknown_epoch_length
        # A prefetching loader detects a stream's end when it yields the last batch.
        is_at_end = self.progress.is_exhausted and self.micro_batches_done == self._micro_batches_drawn
        return is_at_length or self._is_exhausted or is_at_end

    def __iter__(self) -> Iterator[MicroBatch]:
        progress = self.progress
        position = progress.position or DataPosition(self.epoch)
        count, change = position.micro_batches, position.layout_change
        self.micro_batches_read = self.micro_batches_done = count
        self._is_exhausted = False
        loader = self.loader
        if hasattr(loader, "set_epoch"):
            set_epoch_on(self.epoch, loader)
        else:
            batches = getattr(loader, "batch_sampler", None)
            batches = loader if batches is None else batches
            set_epoch_on(self.epoch, batches, getattr(batches, "sampler", None), getattr(loader, "dataset", None))
        if hasattr(loader, "enter_section"):
            loader.enter_section = self.enter_section
        batches = progress.batches(loader)
        accumulation = self.accumulation
        last_window = self.micro_batches_per_epoch % accumulation or accumulation
        length = min(self.micro_batches_per_epoch, (self._windows_per_epoch - 1) * accumulation + last_window)
        # The number of windows does not depend on how many micro-batches `draw_window` returns. Windows are counted
        # from the epoch's first micro-batch or, if a resume has changed the layout, from the first micro-batch after it
        # (`offset`).
        offset, fraction, epoch_length = 0, 0.0, self.micro_batches_per_epoch
        if change is not None:
            offset, length = change.window, epoch_length
            # Rows trained before may not fill whole new micro-batches, so each remaining micro-batch counts as an equal
            # fraction of the rest of the epoch.
            fraction = (1 - change.share) / max(length - change.batches, 1) if change.rows else 0.0
        resumed_at = count
        done_in_window = (count - offset) % accumulation
        for start in range(count - done_in_window, length, accumulation):
            num_to_draw = min(accumulation, length - start) - done_in_window
            done_in_window = 0
            window, num_items = self.draw_window(batches, num_to_draw)
            if progress.position is not None:
                progress.finish_resuming()
            self._micro_batches_drawn = count + len(window)
            if not window:
                break
            if (self.epoch, count) in self.skipped_windows:
                count += len(window)
                self.micro_batches_read = count
                continue
            for index, inputs in enumerate(window):
                # A resume may begin within a window.
                is_first_of_step = (count - offset) % accumulation == 0 or count == resumed_at
                count += 1
                self.micro_batches_read = count
                yield MicroBatch(
                    inputs=inputs,
                    is_first_of_step=is_first_of_step,
                    is_last_of_step=(count - offset) % accumulation == 0 or count == self.micro_batches_per_epoch,
                    window_size=len(window),
                    num_items_in_window=num_items,
                    epoch_fraction=1 - fraction * (epoch_length - count) if fraction else count / epoch_length,
                    position=index,
                )
                if self.should_stop():
                    return
        self._is_exhausted = count < length or not self.has_unknown_epoch_length


def count_label_tokens(window: list[Any], loss_shifts_labels: bool) -> torch.Tensor | int | None:
    """Return the number of a window's labels other than -100; None if there are no countable labels.

    Parameters:
        loss_shifts_labels: the first label of a row is no target.
    """
    try:
        return sum(_get_targets(batch, loss_shifts_labels).ne(IGNORED_LABEL).sum() for batch in window)
    except (TypeError, AttributeError, KeyError):
        # Without tensors of labels (as in object detection) losses are averaged per micro-batch.
        return None


def _get_targets(batch: Any, loss_shifts_labels: bool) -> torch.Tensor:
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return batch["labels"][..., 1:] if loss_shifts_labels else batch["labels"]
