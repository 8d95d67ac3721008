"""The micro-batches of one optimizer step: drawn together, counted together, handed out one by one.

The loss of a micro-batch is normalised by the whole window (its label tokens, or its number of micro-batches), so the
window has to be drawn before its first forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from littrainer.data.position import DataProgress, ResumePoint
from littrainer.data.sharding import tell_epoch

IGNORED_LABEL = -100


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch and its place in the window of its optimizer step.

    Parameters:
        inputs: what the collator made; where the loader has it so, on the accelerator already.
        opens_window: the first one of its optimizer step.
        closes_window: the last one; the optimizer steps after its backward pass.
        window_size: micro-batches that were drawn together: those of the step, unless a script draws more or fewer.
        num_items_in_window: label tokens in the window, where the loss is divided by them.
        epoch_fraction: share of the epoch done once this micro-batch is.
        position: place in the window, from 0.
    """

    inputs: Any
    opens_window: bool
    closes_window: bool
    window_size: int
    num_items_in_window: torch.Tensor | int | None
    epoch_fraction: float
    position: int = 0

    @property
    def is_last_drawn(self) -> bool:
        """Whether no other one of its window follows; where the data ends within a window, it does not close it."""
        return self.position + 1 == self.window_size


class WindowLoader:
    """What Lightning iterates in fit: micro-batches, drawn from a DataLoader in windows.

    Parameters:
        loader: the training DataLoader.
        accumulation: micro-batches in a full window; may be changed between epochs.
        micro_batches_per_epoch: length of an epoch; the last window of it may be shorter.
        draw_window: takes an iterator and a number, returns the micro-batches drawn and their label tokens.
        should_stop: asked after each micro-batch; the epoch ends early when it says so.
        left_out: windows that are drawn and not handed out, each as its epoch and the number of its first micro-batch.
    """

    def __init__(
        self,
        loader: Any,
        *,
        accumulation: int,
        micro_batches_per_epoch: int,
        draw_window: Callable[[Iterator[Any], int], tuple[list[Any], Any]],
        should_stop: Callable[[], bool],
        left_out: Collection[tuple[int, int]] = (),
    ):
        self.loader = loader
        # The same one, or in an epoch that is resumed one that begins later.
        self.loader_being_read = loader
        self.accumulation = accumulation
        # As many optimizer steps has an epoch, also where a smaller accumulation leaves a part of its data unread.
        self.lengthen(micro_batches_per_epoch)
        self.draw_window = draw_window
        self.should_stop = should_stop
        self.enter_part: Callable[[str], Any] = id
        self.left_out = left_out
        self.progress = DataProgress(loader)
        self.epoch = 0
        self.micro_batches_seen = 0
        self.micro_batches_done = 0
        self._micro_batches_drawn = 0
        self._data_has_ended = False

    def __len__(self) -> int:
        # Also for a stream of unknown length: without a length Lightning would look one batch ahead before training
        # starts, and the order of random draws would change.
        return self.micro_batches_per_epoch

    def lengthen(self, micro_batches_per_epoch: int) -> None:
        """Hand out a stream for longer, before any epoch has begun."""
        self.micro_batches_per_epoch = micro_batches_per_epoch
        self._windows_per_epoch = -(-micro_batches_per_epoch // self.accumulation)

    def resume_at(self, point: ResumePoint) -> None:
        """Let the next epoch begin behind the micro-batches that an interrupted training has done."""
        self.progress.point = point

    def start_epoch(self, epoch: int) -> None:
        """Choose the epoch whose micro-batches the next iteration hands out."""
        self.epoch = epoch
        self.micro_batches_seen = self.micro_batches_done = 0
        self._data_has_ended = self.progress.data_has_ended = False

    def rows_of(self, epoch: int, micro_batch: int) -> list[int] | None:
        """The indices in the dataset of a micro-batch's rows, of this or an earlier epoch; None if not known."""
        return self.progress.rows_of_batch(epoch, micro_batch, is_current=epoch == self.epoch)

    def count_optimizer_step(self) -> None:
        """The optimizer has stepped with the micro-batches handed out so far."""
        self.micro_batches_done = self.micro_batches_seen

    @property
    def epoch_is_complete(self) -> bool:
        """Whether the optimizer has stepped with the last micro-batch of the epoch."""
        if self.micro_batches_done >= self.micro_batches_per_epoch or self._data_has_ended:
            return True
        # A loader that looks ahead knows the last batch of a stream when it hands it out.
        return self.progress.data_has_ended and self.micro_batches_done == self._micro_batches_drawn

    def __iter__(self) -> Iterator[MicroBatch]:
        progress = self.progress
        seen = progress.point.batches if progress.point is not None else 0
        change = progress.point.change if progress.point is not None else None
        self.micro_batches_seen = self.micro_batches_done = seen
        self._data_has_ended = False
        loader = progress.resumed_loader(self.loader)
        self.loader_being_read = loader
        if getattr(loader, "persistent_workers", False):
            self.loader = loader
        tell_epoch(self.epoch, loader)
        if hasattr(loader, "enter_part"):
            loader.enter_part = self.enter_part
        batches = progress.batches(loader)
        accumulation = self.accumulation
        last_window = self.micro_batches_per_epoch % accumulation or accumulation
        length = min(self.micro_batches_per_epoch, (self._windows_per_epoch - 1) * accumulation + last_window)
        # Windows stand where they would stand from the epoch's beginning on, whatever `draw_window` returns of them; or
        # from where it was resumed with another layout.
        first, left, length_of_epoch = 0, 0.0, self.micro_batches_per_epoch
        if change is not None:
            first, length = change.window, length_of_epoch
            # The rows that were trained before need not make whole micro-batches.
            left = (1 - change.share) / max(length - change.batches, 1) if change.rows else 0.0
        resumed_at, behind_in_window = seen, (seen - first) % accumulation
        for beginning in range(seen - behind_in_window, length, accumulation):
            wanted = min(accumulation, length - beginning) - behind_in_window
            behind_in_window = 0
            window, num_items = self.draw_window(batches, wanted)
            if progress.point is not None:
                progress.finish_resuming(progress.point)
            self._micro_batches_drawn = seen + len(window)
            if not window:
                break
            if (self.epoch, seen) in self.left_out:
                seen += len(window)
                self.micro_batches_seen = seen
                continue
            for position, inputs in enumerate(window):
                opens_window = (seen - first) % accumulation == 0 or seen == resumed_at
                seen += 1
                self.micro_batches_seen = seen
                yield MicroBatch(
                    inputs=inputs,
                    opens_window=opens_window,
                    closes_window=(seen - first) % accumulation == 0 or seen == self.micro_batches_per_epoch,
                    window_size=len(window),
                    num_items_in_window=num_items,
                    epoch_fraction=1 - left * (length_of_epoch - seen) if left else seen / length_of_epoch,
                    position=position,
                )
                if self.should_stop():
                    return
        self._data_has_ended = True


def count_label_tokens(window: list[Any], labels_are_shifted: bool) -> torch.Tensor | int | None:
    """Labels of a window that count in the loss (all but -100).

    Parameters:
        window: the micro-batches.
        labels_are_shifted: the loss predicts each position from the one before, so the first label of a row is no
            target.

    Returns:
        The number, or None where the micro-batches hold no countable labels.
    """
    try:
        return sum(_targets(batch, labels_are_shifted).ne(IGNORED_LABEL).sum() for batch in window)
    except (TypeError, AttributeError, KeyError):
        # Labels that are no tensors, as in object detection, or not there: such losses are averaged per micro-batch.
        return None


def _targets(batch: Any, labels_are_shifted: bool) -> torch.Tensor:
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return batch["labels"][..., 1:] if labels_are_shifted else batch["labels"]
