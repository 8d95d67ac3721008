"""Out-of-memory errors: detection, freeing memory, and smaller batches (auto_find_batch_size)."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from littrainer.arguments.rules import apply_global_batch_size, list_valid_batch_sizes
from littrainer.distributed.collectives import any_rank, barrier_with_timeout, raise_on_all_ranks

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    " out of memory.",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
)
SHRINK_FACTOR = 0.9
# Optimizer steps in which processes synchronize out-of-memory errors of forward passes.
MAX_AGREED_STEPS = 100
FAILURE_TIMEOUT_S = 60


class OutOfMemoryOnAnyRank(RuntimeError):
    """An error that all processes raise if memory ran out in a forward pass of any process."""


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.cuda.OutOfMemoryError | OutOfMemoryOnAnyRank):
        return True
    is_plain = isinstance(error, RuntimeError) and len(error.args) == 1
    return is_plain and any(message in str(error.args[0]) for message in OUT_OF_MEMORY_MESSAGES)


def empty_device_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()


def free_memory() -> None:
    """Free unreferenced objects; errors must be out of scope, since their tracebacks refer to tensors."""
    gc.collect()
    empty_device_cache()


def has_memory_for(args: TrainingArguments, run: Callable[[], object]) -> bool:
    """Call a function, and return False, after freeing memory, if memory ran out.

    Raises:
        RuntimeError: other processes have not run out of memory, and wait for gradients.
    """
    try:
        run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        is_synced = args.world_size == 1 or isinstance(error, OutOfMemoryOnAnyRank)
        if not is_synced and not barrier_with_timeout(FAILURE_TIMEOUT_S):
            raise RuntimeError(
                f"auto_find_batch_size: memory ran out in process {args.process_index}, outside of a forward pass "
                f"or after {MAX_AGREED_STEPS} steps, and not in all processes within {FAILURE_TIMEOUT_S} "
                "seconds; the others wait for its gradients and cannot start over. Lower per_device_train_batch_size."
            ) from error
    else:
        return True
    free_memory()
    return False


@contextmanager
def sync_forward_failures(args: TrainingArguments, steps: int, is_trial: bool) -> Iterator[None]:
    """Raise errors of a forward pass in all processes, if training continues after them.

    These are out-of-memory errors of the first steps under `auto_find_batch_size`, and all errors in a trial of a
    hyperparameter search.
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


class RestartedTrainer(Protocol):
    args: Any
    model: Any
    model_wrapped: Any
    session: Any


def train_with_auto_batch_size(trainer: RestartedTrainer, train: Callable[[], Result]) -> Result:
    """Call `train`, with `auto_find_batch_size` repeatedly with smaller micro-batches until memory suffices.

    Each attempt continues with the current model and optimizer. With `global_batch_size` only divisors of it are
    tried, so that an optimizer step keeps its samples.

    Raises:
        RuntimeError: a single sample does not fit.
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


def drop_training_objects(trainer: RestartedTrainer) -> None:
    trainer.session.lightning.trainer = None
    # A DDP wrapper would continue to all-reduce gradients.
    trainer.model_wrapped = trainer.model
    free_memory()
