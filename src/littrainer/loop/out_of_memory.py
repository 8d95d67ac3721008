"""Memory that runs out: errors that say so, what is freed after them, and smaller batches (auto_find_batch_size)."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from littrainer.arguments.rules import apply_global_batch_size, list_valid_batch_sizes
from littrainer.distributed.collectives import any_rank, barrier_with_timeout, raise_on_all_ranks

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Parts of the messages by which torch and its backends report that memory ran out.
OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    " out of memory.",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
)
# `auto_find_batch_size`: the next try has this share of the samples.
SHRINK_FACTOR = 0.9
# The processes agree on each forward pass of a training's first optimizer steps; then its batch size is taken to fit.
MAX_AGREED_STEPS = 100
# After the first of several processes ran out of memory, where they have not agreed on it.
MAX_WAIT_FOR_FAILURES_S = 60


class OutOfMemoryOnAnyRank(RuntimeError):
    """Memory ran out in a forward pass of some process, and all processes raise this."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error reports that memory ran out."""
    if isinstance(error, torch.cuda.OutOfMemoryError | OutOfMemoryOnAnyRank):
        return True
    is_plain = isinstance(error, RuntimeError) and len(error.args) == 1
    return is_plain and any(message in str(error.args[0]) for message in OUT_OF_MEMORY_MESSAGES)


def empty_device_cache() -> None:
    """Return memory that torch holds and does not use to the accelerator; without an accelerator, do nothing."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()


def free_memory() -> None:
    """Free what nothing refers to any more, objects that refer to each other among it, on the accelerator too.

    An error has to be out of scope: the frames of its traceback refer to the tensors that filled the memory.
    """
    gc.collect()
    empty_device_cache()


def has_memory_for(args: TrainingArguments, run: Callable[[], object]) -> bool:
    """Call a function, and return whether it did not run out of memory, in which case memory has been freed.

    Raises:
        RuntimeError: some processes have not run out of memory, and wait for gradients of this process.
        Exception: another error of the function.
    """
    try:
        run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        is_agreed = args.world_size == 1 or isinstance(error, OutOfMemoryOnAnyRank)
        if not is_agreed and not barrier_with_timeout(MAX_WAIT_FOR_FAILURES_S):
            raise RuntimeError(
                f"auto_find_batch_size: memory ran out in process {args.process_index}, outside of a forward pass "
                f"or after {MAX_AGREED_STEPS} steps, and not in all processes within {MAX_WAIT_FOR_FAILURES_S} "
                "seconds; the others wait for its gradients and cannot start over. Lower per_device_train_batch_size."
            ) from error
    else:
        return True
    free_memory()
    return False


@contextmanager
def sync_forward_failures(args: TrainingArguments, steps: int, is_trial: bool) -> Iterator[None]:
    """Let all processes fail together in a forward pass, if training continues after the error.

    These are errors of memory in the first steps with a batch size that is searched for, and all errors in a trial of a
    hyperparameter search. With one process, or in another training, the block is left alone.

    Parameters:
        steps: optimizer steps since the training began, or began again.
        is_trial: whether it is a trial of a hyperparameter search.
    """
    searches_size = args.auto_find_batch_size and steps < MAX_AGREED_STEPS
    if not (searches_size or is_trial) or args.world_size == 1:
        yield
        return
    ran_out = False
    with raise_on_all_ranks("a forward pass") if is_trial else nullcontext():
        try:
            yield
        except Exception as error:
            if not (searches_size and is_out_of_memory(error)):
                raise
            ran_out = True
        if searches_size and any_rank(ran_out):
            raise OutOfMemoryOnAnyRank(f"{'This' if ran_out else 'Another'} process ran out of memory.")


def train_with_auto_batch_size(trainer: Any, train: Callable[[], Result]) -> Result:
    """Call `train` with smaller and smaller micro-batches until it does not run out of memory.

    Each try begins with the model and the optimizer as the one before left them. Without `auto_find_batch_size` there
    is one try. With `global_batch_size` the sizes are those that divide it, and an optimizer step keeps its samples.

    Parameters:
        train: trains with micro-batches of `session.train_batch_size` samples per device.

    Raises:
        RuntimeError: a single sample does not fit either.
    """
    args, session = trainer.args, trainer.session
    if not args.auto_find_batch_size:
        return train()
    first_size = session.train_batch_size
    results: list[Result] = []
    drop_training_objects(trainer)
    while session.train_batch_size > 0:
        size = session.train_batch_size
        apply_global_batch_size(args, size)
        if has_memory_for(args, lambda: results.append(train())):
            if size != first_size:
                logger.warning(
                    "auto_find_batch_size found that micro-batches of %d samples fit; pass "
                    "per_device_train_batch_size=%d to start with them.",
                    *(size, size),
                )
            return results[0]
        session.train_batch_size = int(size * SHRINK_FACTOR)
        if args.global_batch_size is not None:
            smaller = [divisor for divisor in list_valid_batch_sizes(args) if divisor <= session.train_batch_size]
            session.train_batch_size = max(smaller, default=0)
        if session.train_batch_size:
            logger.warning(
                "Memory ran out with micro-batches of %d samples; training starts over with %d.",
                *(size, session.train_batch_size),
            )
        drop_training_objects(trainer)
    raise RuntimeError(
        "auto_find_batch_size: memory runs out even with micro-batches of one sample. Use a smaller model or shorter "
        "samples, activation_checkpointing=True or bf16=True."
    )


def drop_training_objects(trainer: Any) -> None:
    """Drop what a training has made around the model, and free its memory."""
    trainer.session.lightning.trainer = None
    # DDP around the model would continue to exchange gradients.
    trainer.model_wrapped = trainer.model
    free_memory()
