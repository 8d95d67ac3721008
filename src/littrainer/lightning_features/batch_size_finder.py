"""`Trainer.scale_batch_size`: the largest micro-batch that a few optimizer steps have memory for."""

from __future__ import annotations

import gc
import logging
import math
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.base import TrainerCallback
from littrainer.data.limits import development_batches
from littrainer.data.loaders import first_dimension, has_length
from littrainer.distributed.layout import data_parallel_size
from littrainer.lightning_features.trial_steps import check_can_try, is_number, left_as_found, take_steps
from littrainer.training.accumulation_schedule import accumulation_schedule
from littrainer.training.batch_size_search import check_that_all_ran_out, ran_out_of_memory
from littrainer.training.device_memory import empty_device_cache

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

MODES = ("power", "binsearch")
# The second micro-batch of a step finds the gradients of the first in memory; further ones take no more.
MICRO_BATCHES_THAT_MATTER = 2


class _StepLimit(TrainerCallback):
    """Ends the trial after some optimizer steps.

    Parameters:
        trainer: the Trainer that is tried out.
        size: samples in a micro-batch, as they are asked for.
        steps: optimizer steps.
    """

    def __init__(self, trainer: Trainer, size: int, steps: int):
        self.trainer, self.size, self.steps = trainer, size, steps
        self._looks_at_rows = False

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        if self.trainer._own_methods("get_train_dataloader"):
            told = getattr(train_dataloader, "batch_size", None)
            self._looks_at_rows = told is None
            self._check(self.size if told is None else told)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look_at_rows()
        control.should_training_stop = state.global_step >= self.steps

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look_at_rows()

    def _look_at_rows(self) -> None:
        if self._looks_at_rows:
            # At the first micro-batch: the last one of the data may be smaller.
            self._looks_at_rows = False
            self._check(first_dimension(self.trainer.lightning_module.micro_batch.inputs))

    def _check(self, found: int | None) -> None:
        if found not in (None, self.size):
            raise ValueError(
                f"scale_batch_size asked for micro-batches of {self.size} samples, and get_train_dataloader() made "
                f"some of {found}: let it read self._train_batch_size."
            )


def scale_batch_size(
    trainer: Trainer, mode: str, steps_per_trial: int, init_val: int, max_trials: int, margin: float, max_val: int
) -> int:
    """Try larger and larger micro-batches, as `Trainer.scale_batch_size` describes it."""
    _check(mode, steps_per_trial, init_val, max_trials, margin, max_val)
    check_can_try(trainer, "scale_batch_size")
    if development_batches(trainer):
        logger.warning("scale_batch_size tries nothing with fast_dev_run: it keeps %d.", trainer._train_batch_size)
        return trainer._train_batch_size
    schedule = accumulation_schedule(trainer)
    accumulation = trainer.args.gradient_accumulation_steps if schedule is None else schedule.largest
    largest = min(max_val, _samples_for_one_process(trainer))
    fits, fails, size = 0, largest + 1, min(init_val, largest)
    for _ in range(max_trials):
        if _has_memory_for(trainer, size, steps_per_trial, min(accumulation, MICRO_BATCHES_THAT_MATTER)):
            logger.info("Micro-batches of %d samples fit.", size)
            fits = size
        else:
            logger.info("Memory runs out with micro-batches of %d samples.", size)
            fails = size
        has_failed = fails <= largest
        if fails - fits <= 1 or (mode == "power" and fits and has_failed):
            break
        if has_failed:
            size = (fits + fails) // 2 if mode == "binsearch" and fits else max(fails // 2, 1)
        else:
            size = min(2 * fits, largest)
    if not fits:
        raise RuntimeError(
            f"scale_batch_size: memory runs out with micro-batches of {fails} samples too, the smallest that were "
            "tried. Use a smaller model or shorter samples, activation_checkpointing=True or bf16=True, or begin with "
            "a smaller init_val."
        )
    return max(math.floor(fits * (1 - margin)), 1) if mode == "binsearch" and fails <= largest else fits


def _samples_for_one_process(trainer: Trainer) -> int:
    dataset: Any = trainer.train_dataset
    if not has_length(dataset):
        return 2**62
    samples, processes = len(dataset), data_parallel_size(trainer.args)
    return max(samples // processes if trainer.args.dataloader_drop_last else math.ceil(samples / processes), 1)


def _has_memory_for(trainer: Trainer, size: int, steps: int, accumulation: int) -> bool:
    has_memory = True
    try:
        with left_as_found(trainer):
            # So the processes tell each other of what happens in a forward pass.
            trainer.args.auto_find_batch_size = True
            trainer._train_batch_size = size
            take_steps(trainer, steps, _StepLimit(trainer, size, steps), accumulation)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        check_that_all_ran_out(trainer, error)
        has_memory = False
    # Outside of the except block, whose error holds the tensors that filled the memory.
    gc.collect()
    empty_device_cache()
    return has_memory


def _check(mode: Any, steps_per_trial: Any, init_val: Any, max_trials: Any, margin: Any, max_val: Any) -> None:
    if mode not in MODES:
        raise ValueError(f"scale_batch_size(mode={mode!r}): give {' or '.join(map(repr, MODES))}.")
    numbers = {
        "steps_per_trial": steps_per_trial,
        "init_val": init_val,
        "max_trials": max_trials,
        "max_val": max_val,
    }
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"scale_batch_size({name}={value!r}): give a whole number from 1 up.")
    if not is_number(margin) or not 0 <= margin < 1:
        raise ValueError(f"scale_batch_size(margin={margin!r}): give the share to take off, from 0 up and below 1.")
