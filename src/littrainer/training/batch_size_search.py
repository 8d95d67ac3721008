"""Training again with smaller micro-batches when memory runs out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from littrainer.arguments.rules import fitting_batch_sizes, settle_global_batch_size
from littrainer.distributed.agreement import agreed, all_arrive, failing_together

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Share of the samples that the next try keeps.
KEPT_SHARE = 0.9
# Parts of the messages with which torch and its backends say that memory ran out.
OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    " out of memory.",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
)


# Optimizer steps of a try in which the processes agree on each forward pass; then the size is taken to fit.
STEPS_AGREED_ON = 100
# How much later than the first one the last process may run out of memory, where they have not agreed on it.
SECONDS_UNTIL_ALL_RAN_OUT = 60


class RanOutTogether(RuntimeError):
    """Memory ran out in a forward pass, and all processes know."""


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out."""
    if not isinstance(error, RuntimeError) or len(error.args) != 1:
        return isinstance(error, torch.cuda.OutOfMemoryError)
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(
        message in str(error.args[0]) for message in OUT_OF_MEMORY_MESSAGES
    )


def failures_agreed_on(args: TrainingArguments, steps: int, is_trial: bool) -> AbstractContextManager[Any]:
    """A context for a forward pass, after which all processes know of what training goes on after: together.

    That is memory that ran out where a size is searched for, in the first steps of a try, and in a trial of a
    hyperparameter search any error. With one process, or in another training, it does nothing.

    Parameters:
        steps: optimizer steps of this try.
        is_trial: whether it is one of a hyperparameter search.
    """
    searches_size = args.auto_find_batch_size and steps < STEPS_AGREED_ON
    if not (searches_size or is_trial) or args.world_size == 1:
        return nullcontext()
    contexts = ExitStack()
    if is_trial:
        contexts.enter_context(failing_together("a forward pass"))
    if searches_size:
        contexts.enter_context(_agreeing())
    return contexts


@contextmanager
def _agreeing() -> Iterator[None]:
    ran_out = False
    try:
        yield
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        ran_out = True
    if agreed(ran_out):
        raise RanOutTogether(f"{'This' if ran_out else 'Another'} process ran out of memory.")


def check_that_all_ran_out(args: TrainingArguments, error: Exception) -> None:
    """Make sure that all processes start over.

    Raises:
        RuntimeError: some have not run out of memory, and wait for gradients of this one.
    """
    if args.world_size == 1 or isinstance(error, RanOutTogether):
        return
    if not all_arrive(SECONDS_UNTIL_ALL_RAN_OUT):
        raise RuntimeError(
            f"auto_find_batch_size: memory ran out in process {args.process_index}, outside of a forward pass "
            f"or after {STEPS_AGREED_ON} steps, and not in all processes within {SECONDS_UNTIL_ALL_RAN_OUT} seconds; "
            "the others wait for its gradients and cannot start over. Lower per_device_train_batch_size."
        ) from error


def with_fitting_batch_size(trainer: Any, train: Callable[[], Result]) -> Result:
    """Call `train` with smaller and smaller micro-batches until it does not run out of memory.

    Each try sees the model and the optimizer as the one before left them. Without `auto_find_batch_size` there is one
    try. With `global_batch_size` the sizes are those that divide it, and an optimizer step has as many samples in each.

    Parameters:
        train: trains with micro-batches of `session.train_batch_size` samples per device.

    Raises:
        RuntimeError: not even one sample at a time fits.
    """
    if not trainer.args.auto_find_batch_size:
        return train()
    session = trainer.session
    first_size = session.train_batch_size
    free_memory(trainer)
    while session.train_batch_size > 0:
        size = session.train_batch_size
        settle_global_batch_size(trainer.args, size)
        try:
            result = train()
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            check_that_all_ran_out(trainer.args, error)
        else:
            if size != first_size:
                logger.warning(
                    "auto_find_batch_size found that micro-batches of %d samples fit; pass "
                    "per_device_train_batch_size=%d to start with them.",
                    size,
                    size,
                )
            return result
        # Outside of the except block, since the error's traceback holds the tensors that filled the memory.
        session.train_batch_size = int(size * KEPT_SHARE)
        if trainer.args.global_batch_size is not None:
            fitting = [one for one in fitting_batch_sizes(trainer.args) if one <= session.train_batch_size]
            session.train_batch_size = max(fitting, default=0)
        if session.train_batch_size:
            logger.warning(
                "Memory ran out with micro-batches of %d samples; training starts over with %d.",
                size,
                session.train_batch_size,
            )
        free_memory(trainer)
    raise RuntimeError(
        "auto_find_batch_size: memory runs out even with micro-batches of one sample. Use a smaller model or shorter "
        "samples, activation_checkpointing=True or bf16=True."
    )


def free_memory(trainer: Any) -> None:
    """Let go of what a try has made around the model."""
    trainer.session.lightning.trainer = None
    # With DDP around it, which would go on to exchange gradients.
    trainer.model_wrapped = trainer.model
    gc.collect()
    empty_device_cache()


def empty_device_cache() -> None:
    """Give memory that torch holds and does not use back to the accelerator; without one, do nothing."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()
