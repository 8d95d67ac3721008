"""How long a training is: epochs, optimizer steps and samples, from the arguments and the loader's length."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from littrainer.callbacks.lightning_callbacks import is_one_of
from littrainer.data.limits import HasKeywords, development_batches, further_keywords, limited_number
from littrainer.data.loaders import has_length
from littrainer.data.stream_end import check_equal_lengths

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class TrainingPlan(NamedTuple):
    """The length of a training.

    Parameters:
        num_train_epochs: passes over the data, the last one possibly partial; huge for a stream.
        optimizer_steps_per_epoch: a shorter last window counts as a step.
        num_examples: samples in an epoch.
        num_train_samples: samples in the whole training.
        total_train_batch_size: samples per optimizer step, over all devices.
        micro_batches_per_epoch: batches the loader gives in an epoch.
        max_steps: optimizer steps in the whole training.
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
        """Whether the data is a stream of unknown length, of which only `max_steps` ends the training."""
        return self.num_train_epochs == sys.maxsize


class HasCallbacks(HasKeywords, Protocol):
    """What Lightning callbacks, and keywords for `lightning.Trainer`, are given to; a Trainer is one."""

    lightning_callbacks: list[Any]


def plan_training(
    source: HasCallbacks, loader: Any, samples_per_step: int, count_examples: Callable[[Any], int]
) -> TrainingPlan:
    """Return the plan for a loader under `max_steps`, or `num_train_epochs` if that is not set.

    Parameters:
        source: has the arguments, and further keywords for Lightning.
        samples_per_step: samples of an optimizer step by the arguments, over all processes.
        count_examples: returns the samples in a loader.

    Raises:
        ValueError: the loader is empty, or has no length and `max_steps` is not set, or the processes have differently
            many batches.
    """
    args = source.args
    schedule = accumulation_schedule(source)
    accumulation = args.gradient_accumulation_steps if schedule is None else schedule(0)
    batch_size = samples_per_step
    if schedule is not None:
        # The argument is 1 then.
        batch_size *= accumulation
    check_equal_lengths(loader, "training data")
    # Of each epoch; the last batches of the data are not read.
    limit = limited_number(source, "training", loader)
    is_trial = development_batches(source) > 0
    num_train_samples: float
    if not has_length(loader):
        if args.max_steps <= 0:
            raise ValueError(
                "The length of the training data is not known, so neither is the number of optimizer steps: "
                "set max_steps."
            )
        micro_batches = args.max_steps * (accumulation if schedule is None else schedule.largest)
        if limit is not None:
            micro_batches = min(micro_batches, limit)
        max_steps = math.ceil(micro_batches / accumulation) if is_trial else args.max_steps
        samples = max_steps * batch_size
        return TrainingPlan(
            num_train_epochs=sys.maxsize,
            optimizer_steps_per_epoch=args.max_steps if limit is None else math.ceil(micro_batches / accumulation),
            num_examples=samples,
            num_train_samples=samples,
            total_train_batch_size=batch_size,
            micro_batches_per_epoch=micro_batches,
            max_steps=max_steps,
        )
    if len(loader) == 0:
        raise ValueError(why_empty(args, loader))
    micro_batches = len(loader) if limit is None else limit
    steps_per_epoch = math.ceil(micro_batches / accumulation)
    num_examples = count_examples(loader)
    if limit is not None:
        num_examples = min(num_examples, limit * batch_size // accumulation)
    if is_trial:
        max_steps, epochs, num_train_samples = steps_per_epoch, 1, float(num_examples)
    elif schedule is not None:
        max_steps, epochs = _scheduled_length(args, schedule, micro_batches)
        num_train_samples = num_examples * (args.num_train_epochs if args.max_steps <= 0 else epochs)
    elif args.max_steps > 0:
        max_steps, epochs = args.max_steps, math.ceil(args.max_steps / steps_per_epoch)
        num_train_samples = max_steps * batch_size
    else:
        # A max_steps of 0 is a limit too: training stops after its first step.
        max_steps = math.ceil(args.num_train_epochs * steps_per_epoch) if args.max_steps < 0 else 0
        epochs = math.ceil(args.num_train_epochs)
        # A subclass is asked once for an epoch and once for the training, as transformers does.
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


def _scheduled_length(args: Any, schedule: AccumulationSchedule, micro_batches: int) -> tuple[int, int]:
    """Optimizer steps and epochs of a training whose optimizer steps take other numbers of micro-batches in time."""
    if args.max_steps > 0:
        epoch, steps_into_epoch = schedule.place_of(args.max_steps, micro_batches)
        return args.max_steps, epoch + (steps_into_epoch > 0)
    steps = schedule.steps_of(args.num_train_epochs, micro_batches) if args.max_steps < 0 else 0
    return steps, math.ceil(args.num_train_epochs)


def why_empty(args: TrainingArguments, loader: Any) -> str:
    """What to say of a training loader without a batch."""
    samples = len(loader.dataset) if has_length(getattr(loader, "dataset", None)) else 0
    if samples and args.dataloader_drop_last:
        return (
            f"The training data gives no batch: {samples} samples are fewer than one batch of "
            f"{args.train_batch_size}, and dataloader_drop_last=True leaves incomplete ones out. Set it to "
            "False or lower per_device_train_batch_size."
        )
    return "The training DataLoader is empty (length 0): there is nothing to train on."


NAME = "GradientAccumulationScheduler"


class AccumulationSchedule:
    """The schedule of a `GradientAccumulationScheduler`, as a Trainer plans and draws by it.

    Parameters:
        callback: Lightning's callback, or one of a class that derives from it.
    """

    def __init__(self, callback: Any):
        self._callback = callback

    def __call__(self, epoch: int) -> int:
        """Micro-batches of an optimizer step in an epoch, counted from 0."""
        return int(self._callback.get_accumulate_grad_batches(epoch))

    @property
    def largest(self) -> int:
        """The largest number that the schedule names."""
        return max(self._callback.scheduling.values())

    def steps_in(self, epoch: int, micro_batches: int) -> int:
        """Optimizer steps of an epoch of so many micro-batches; a shorter last window counts as a step."""
        return math.ceil(micro_batches / self(epoch))

    def steps_of(self, epochs: float, micro_batches: int) -> int:
        """Optimizer steps of so many epochs, the last one possibly partial."""
        whole = math.floor(epochs)
        steps = sum(self.steps_in(epoch, micro_batches) for epoch in range(whole))
        return steps + math.ceil((epochs - whole) * self.steps_in(whole, micro_batches))

    def place_of(self, steps: int, micro_batches: int) -> tuple[int, int]:
        """The epoch that begins with or holds the step after so many, and the steps of it that are done."""
        epoch = 0
        while steps >= (in_epoch := self.steps_in(epoch, micro_batches)):
            steps -= in_epoch
            epoch += 1
        return epoch, steps


def accumulation_schedule(source: HasCallbacks) -> AccumulationSchedule | None:
    """Return the schedule among the Lightning callbacks; None if there is none.

    Raises:
        ValueError: there are two.
    """
    among_keywords = further_keywords(source).get("callbacks") or []
    others = among_keywords if isinstance(among_keywords, (list, tuple)) else [among_keywords]
    found = [callback for callback in (*source.lightning_callbacks, *others) if is_one_of(callback, NAME)]
    if len(found) > 1:
        raise ValueError(f"There are {len(found)} callbacks of the kind {NAME}, and one schedule counts: leave one.")
    return AccumulationSchedule(found[0]) if found else None
