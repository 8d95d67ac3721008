"""The length of a training in epochs, optimizer steps and samples."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.data.limits import KeywordSource, count_development_batches, get_batch_limit
from littrainer.data.sharding import get_length
from littrainer.data.stream_end import check_equal_lengths

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class TrainingPlan(NamedTuple):
    """The length of a training.

    Parameters:
        num_train_epochs: epochs, of which the last may be partial; `sys.maxsize` for a stream.
        optimizer_steps_per_epoch: optimizer steps, including a shorter last window.
        num_examples: samples in an epoch.
        total_train_batch_size: samples per optimizer step, over all devices.
    """

    num_train_epochs: int
    optimizer_steps_per_epoch: int
    num_examples: int
    num_train_samples: float
    total_train_batch_size: int
    micro_batches_per_epoch: int
    max_steps: int

    @property
    def is_endless(self) -> bool:
        """True for a stream of unknown length, which `max_steps` ends."""
        return self.num_train_epochs == sys.maxsize

    def skip_windows(self, number: int, args: TrainingArguments) -> TrainingPlan:
        """Return a plan that skips the data of some optimizer steps, and reads more data to reach `max_steps`."""
        if args.max_steps <= 0 or not number:
            return self._replace(max_steps=self.max_steps - number)
        if self.is_endless:
            extra_batches = number * args.gradient_accumulation_steps
            return self._replace(micro_batches_per_epoch=self.micro_batches_per_epoch + extra_batches)
        extra_epochs = math.ceil(number / self.optimizer_steps_per_epoch)
        return self._replace(num_train_epochs=self.num_train_epochs + extra_epochs)

    def add_surplus_steps(self, number: int, args: TrainingArguments) -> TrainingPlan:
        """Return the plan after extra optimizer steps, taken with a smaller global batch before a resume."""
        if not number or self.is_endless:
            return self
        if args.max_steps < 0:
            return self._replace(max_steps=self.max_steps + number)
        epochs = math.ceil((self.max_steps - number) / self.optimizer_steps_per_epoch)
        return self._replace(num_train_epochs=epochs)


def plan_training(
    source: KeywordSource, loader: Any, samples_per_step: int, count_examples: Callable[[Any], int]
) -> TrainingPlan:
    """Return the plan for a loader, by `max_steps` or else by `num_train_epochs`.

    Raises:
        ValueError: the loader is empty, has no length without `max_steps`, or differs in length between processes.
    """
    args = source.args
    accumulation, batch_size = args.gradient_accumulation_steps, samples_per_step
    check_equal_lengths(loader, "training data")
    limit = get_batch_limit(source, "training", loader)
    is_trial = count_development_batches(source) > 0
    num_train_samples: float
    length = get_length(loader)
    if length is None and args.max_steps <= 0:
        raise ValueError(
            "The length of the training data is not known, so neither is the number of optimizer steps: set max_steps."
        )
    if length == 0:
        raise ValueError(describe_empty_loader(args, loader))
    micro_batches = args.max_steps * accumulation if length is None else length
    micro_batches = micro_batches if limit is None else min(micro_batches, limit)
    steps_per_epoch = math.ceil(micro_batches / accumulation)
    num_examples = 0 if length is None else count_examples(loader)
    if length is not None and args.max_tokens_per_batch:
        # The mean, since the samples of a step depend on their lengths.
        batch_size = max(1, round(num_examples / math.ceil(length / accumulation)))
    if limit is not None:
        num_examples = min(num_examples, limit * batch_size // accumulation)
    if length is None:
        max_steps, epochs = steps_per_epoch if is_trial else args.max_steps, sys.maxsize
        num_examples = max_steps * batch_size
        num_train_samples = num_examples
    elif is_trial:
        max_steps, epochs, num_train_samples = steps_per_epoch, 1, float(num_examples)
    elif args.max_steps > 0:
        max_steps, epochs = args.max_steps, math.ceil(args.max_steps / steps_per_epoch)
        num_train_samples = max_steps * batch_size
    else:
        # max_steps=0 stops training after its first step.
        max_steps = math.ceil(args.num_train_epochs * steps_per_epoch) if args.max_steps < 0 else 0
        epochs = math.ceil(args.num_train_epochs)
        # transformers calls a subclass's `num_examples` twice too.
        samples_per_epoch = count_examples(loader) if limit is None else num_examples
        num_train_samples = samples_per_epoch * args.num_train_epochs
    return TrainingPlan(
        num_train_epochs=epochs,
        optimizer_steps_per_epoch=steps_per_epoch,
        num_examples=num_examples,
        num_train_samples=num_train_samples,
        total_train_batch_size=batch_size,
        micro_batches_per_epoch=micro_batches,
        max_steps=max_steps,
    )


def describe_empty_loader(args: TrainingArguments, loader: Any) -> str:
    samples = get_length(getattr(loader, "dataset", None))
    if samples and args.dataloader_drop_last:
        return (
            f"The training data gives no batch: {samples} samples are fewer than one batch of "
            f"{args.train_batch_size}, and dataloader_drop_last=True leaves incomplete ones out. Set it to "
            "False or lower per_device_train_batch_size."
        )
    return "The training DataLoader is empty (length 0): there is nothing to train on."
