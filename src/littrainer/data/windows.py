"""Windows: the micro-batches of one optimizer step, which are drawn and counted together.

The loss of a micro-batch is normalised by the whole window (its label tokens, or its number of micro-batches), so the
window has to be drawn before its first forward pass.
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
    """One micro-batch and its position in the window of its optimizer step.

    Parameters:
        inputs: the batch, on the accelerator if the loader moves batches.
        opens_window: it is the first of its optimizer step.
        closes_window: it is the last, and the optimizer steps after its backward pass.
        window_size: micro-batches that were drawn together: those of the step, unless a script draws more or fewer.
        num_items_in_window: label tokens in the window, if the loss is divided by them.
        epoch_fraction: share of the epoch that is done after it.
        position: its index in the window.
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
        """Whether no other of its window follows; if the data ends within a window, it does not close the window."""
        return self.position + 1 == self.window_size


class WindowLoader:
    """The iterable of fit: micro-batches, drawn from a DataLoader in windows.

    Parameters:
        loader: the training DataLoader.
        accumulation: micro-batches in a full window; may be changed between epochs.
        micro_batches_per_epoch: length of an epoch; its last window may be shorter.
        draw_window: takes an iterator and a number, returns the micro-batches drawn and their label tokens.
        should_stop: called after each micro-batch; the epoch ends early if it returns true.
        left_out: windows that are drawn and skipped, each as its epoch and the number of its first micro-batch.
        is_length_of_training: the micro-batches of an epoch are all of the training, and the data may have more.
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
        is_length_of_training: bool = False,
    ):
        self.loader = loader
        self.accumulation = accumulation
        # The optimizer steps of an epoch are fixed, also if a smaller accumulation leaves a part of its data unread.
        self.set_epoch_length(micro_batches_per_epoch)
        self.draw_window = draw_window
        self.should_stop = should_stop
        self.enter_section: Callable[[str], Any] = id
        self.left_out = left_out
        self.is_length_of_training = is_length_of_training
        self.progress = DataProgress(loader)
        self.epoch = 0
        self.micro_batches_read = 0
        self.micro_batches_done = 0
        self._micro_batches_drawn = 0
        self._data_has_ended = False

    def __len__(self) -> int:
        # Also for a stream of unknown length: without a length Lightning would prefetch a batch before training starts,
        # and the order of random draws would change.
        return self.micro_batches_per_epoch

    def set_epoch_length(self, micro_batches_per_epoch: int) -> None:
        """Set the length of an epoch, before any epoch has begun."""
        self.micro_batches_per_epoch = micro_batches_per_epoch
        self._windows_per_epoch = -(-micro_batches_per_epoch // self.accumulation)

    def start_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = self.progress.epoch = epoch
        self.micro_batches_read = self.micro_batches_done = 0
        self._data_has_ended = self.progress.is_exhausted = False

    def find_rows(self, epoch: int, micro_batch: int) -> list[int] | None:
        """Return the indices in the dataset of the rows of a micro-batch that was read; None if unknown."""
        return self.progress.find_batch_rows(epoch, micro_batch)

    def count_optimizer_step(self) -> None:
        """Note that the optimizer has stepped with the micro-batches so far."""
        self.micro_batches_done = self.micro_batches_read

    @property
    def is_epoch_complete(self) -> bool:
        """Whether the optimizer has stepped with the last micro-batch of the epoch."""
        is_at_its_length = self.micro_batches_done >= self.micro_batches_per_epoch and not self.is_length_of_training
        if is_at_its_length or self._data_has_ended:
            return True
        # A loader that prefetches detects the end of a stream with its last batch.
        return self.progress.is_exhausted and self.micro_batches_done == self._micro_batches_drawn

    def __iter__(self) -> Iterator[MicroBatch]:
        progress = self.progress
        position = progress.position or DataPosition(self.epoch)
        seen, change = position.micro_batches, position.layout_change
        self.micro_batches_read = self.micro_batches_done = seen
        self._data_has_ended = False
        loader = self.loader
        if hasattr(loader, "set_epoch"):
            set_epoch_on(self.epoch, loader)
        else:
            # The plain DataLoader of a script has no `set_epoch`.
            batches = getattr(loader, "batch_sampler", None)
            batches = loader if batches is None else batches
            set_epoch_on(self.epoch, batches, getattr(batches, "sampler", None), getattr(loader, "dataset", None))
        if hasattr(loader, "enter_section"):
            loader.enter_section = self.enter_section
        batches = progress.batches(loader)
        accumulation = self.accumulation
        last_window = self.micro_batches_per_epoch % accumulation or accumulation
        length = min(self.micro_batches_per_epoch, (self._windows_per_epoch - 1) * accumulation + last_window)
        # Windows are counted from the epoch's beginning, whatever `draw_window` returns of them, or from the position
        # at which it was resumed with another layout.
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
            if progress.position is not None:
                progress.finish_resuming()
            self._micro_batches_drawn = seen + len(window)
            if not window:
                break
            if (self.epoch, seen) in self.left_out:
                seen += len(window)
                self.micro_batches_read = seen
                continue
            for number, inputs in enumerate(window):
                opens_window = (seen - first) % accumulation == 0 or seen == resumed_at
                seen += 1
                self.micro_batches_read = seen
                yield MicroBatch(
                    inputs=inputs,
                    opens_window=opens_window,
                    closes_window=(seen - first) % accumulation == 0 or seen == self.micro_batches_per_epoch,
                    window_size=len(window),
                    num_items_in_window=num_items,
                    epoch_fraction=1 - left * (length_of_epoch - seen) if left else seen / length_of_epoch,
                    position=number,
                )
                if self.should_stop():
                    return
        self._data_has_ended = seen < length or not self.is_length_of_training


def count_label_tokens(window: list[Any], labels_are_shifted: bool) -> torch.Tensor | int | None:
    """Return the labels of a window that count in the loss (all except -100); None if there are no countable labels.

    Parameters:
        labels_are_shifted: the loss predicts each position from the position before, so the first label of a row is no
            target.
    """
    try:
        return sum(_targets(batch, labels_are_shifted).ne(IGNORED_LABEL).sum() for batch in window)
    except (TypeError, AttributeError, KeyError):
        # No labels, or no tensors, as in object detection: such losses are averaged per micro-batch.
        return None


def _targets(batch: Any, labels_are_shifted: bool) -> torch.Tensor:
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return batch["labels"][..., 1:] if labels_are_shifted else batch["labels"]
