"""What the arguments say about the process they are read in: device, rank, log level, who goes first."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from littrainer.arguments.accelerate_state import partial_state
from littrainer.arguments.accelerator_config import configured_device
from littrainer.arguments.choices import ParallelMode
from littrainer.arguments.fields import ArgumentFields
from littrainer.processes import environment

if TYPE_CHECKING:
    import torch

LOG_LEVEL_NUMBERS = {
    "critical": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "detail": logging.DEBUG,
}

# Truths as launchers write them.
TRUE_WORDS = ("1", "true", "yes", "on", "y", "t")


@functools.cache
def _warn_of_idle_gpus(count: int) -> None:
    if count > 1:
        logging.getLogger(__name__).warning(
            "This process trains on one of %d GPUs, where transformers would use DataParallel and a batch %d times as "
            "large. `littrainer run SCRIPT` trains on all of them, with a process for each.",
            count,
            count,
        )


class ProcessFacts(ArgumentFields):
    """Properties of TrainingArguments that depend on the process, computed when they are asked for."""

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return environment.world_size()

    @property
    def process_index(self) -> int:
        """Rank of this process among all processes."""
        return environment.rank()

    @property
    def local_process_index(self) -> int:
        """Rank of this process among those of its node."""
        return environment.local_rank()

    @property
    def local_world_size(self) -> int:
        """Number of processes on this node."""
        return environment.local_world_size()

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether this process trains alone or with others; several GPUs never share one process."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def device(self) -> torch.device:
        """Device of this process, found when first asked for: CUDA or Metal if there, and the CPU if wanted or else."""
        if "_device" not in self.__dict__:
            self._device = self._find_device()
        return self._device

    def _find_device(self) -> torch.device:
        import torch

        if getattr(self.accelerator_config, "use_configured_state", False):
            return configured_device()
        if self.use_cpu or self.wants_cpu_by_environment():
            return torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", self._gpu_of_this_process(torch.cuda.device_count()))
            if self.local_process_index > 0:
                # Scripts call `.cuda()` without an index and mean their own GPU.
                torch.cuda.set_device(device)
            return device
        # No library connects processes on Metal.
        if torch.backends.mps.is_available() and self.world_size == 1:
            return torch.device("mps")
        return torch.device("cpu")

    @staticmethod
    def wants_cpu_by_environment() -> bool:
        """Whether a launcher asks for the CPU."""
        return os.environ.get("ACCELERATE_USE_CPU", "").lower() in TRUE_WORDS

    def _gpu_of_this_process(self, visible: int) -> int:
        index = self.local_process_index
        # A launcher that shows each process a GPU of its own numbers it 0.
        if visible == 1:
            return 0
        if visible and index >= visible:
            raise ValueError(
                f"{self.local_world_size} processes on this node share {visible} GPUs, and process {index} has none of "
                f"its own. Start at most {visible} (littrainer run --devices, torchrun --nproc-per-node), or set "
                "use_cpu=True."
            )
        return index

    @property
    def visible_device_count(self) -> int:
        """How many of the devices of this node's processes this process sees: all of them, or its own GPU alone."""
        import torch

        count = self.local_world_size
        return min(count, torch.cuda.device_count()) if self.device.type == "cuda" else count

    def _warn_of_idle_gpus(self) -> None:
        """Say once how to train on all GPUs, if no launcher has started this process and it uses one of several."""
        if self.device.type == "cuda" and not environment.is_launched():
            import torch

            _warn_of_idle_gpus(torch.cuda.device_count())

    def _join_other_processes(self) -> None:
        """Connect with the processes that a launcher has started together with this one, if it says where they meet."""
        from littrainer.processes.parent_watch import end_with_starter

        end_with_starter()
        if environment.is_launched():
            # Scripts written for transformers 4 read it.
            self.local_rank = self.local_process_index
        if environment.meeting_point() is None:
            return
        from littrainer.processes.group import ensure_process_group

        ensure_process_group(self)

    @property
    def _setup_devices(self) -> torch.device:
        return self.device

    @property
    def distributed_state(self) -> Any:
        """accelerate's PartialState with the facts of this process; None where accelerate is not installed."""
        return self.__dict__.get("_distributed_state") or partial_state(self, load=True)

    @distributed_state.setter
    def distributed_state(self, value: Any) -> None:
        self.__dict__["_distributed_state"] = value

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: 1, or 0 on a CPU."""
        return self._n_gpu

    @property
    def _n_gpu(self) -> int:
        return self.__dict__.get("_n_gpu", 0 if self.device.type == "cpu" else 1)

    @_n_gpu.setter
    def _n_gpu(self, value: int) -> None:
        self.__dict__["_n_gpu"] = value

    @property
    def train_batch_size(self) -> int:
        """Samples in one training micro-batch of this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples in one evaluation batch of this process."""
        return self.per_device_eval_batch_size

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the model; None lets the Trainer decide, subclasses may say."""
        return None

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout`, given in seconds, as the timedelta that torch.distributed takes."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def should_log(self) -> bool:
        """Whether this process is one that logs."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process is one that writes models and checkpoints."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    def get_process_log_level(self) -> int:
        """The `logging` level this process should use.

        Returns:
            The number for `log_level` in a process that logs and for `log_level_replica` in others; for `passive`
            the level transformers' logger has now, which is WARNING if nobody changed it.
        """
        name = self.log_level if self.should_log else self.log_level_replica
        if name == "passive":
            return logging.getLogger("transformers").getEffectiveLevel()
        return LOG_LEVEL_NUMBERS[name]

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run a block in the main process first and in the others after it, so that they find its cache.

        Parameters:
            local: the first process of each node goes first; false: only that of the first node.
            desc: what the block does, for the debug log.

        Raises:
            RuntimeError: there are several processes and no process group in which they could wait.
        """
        if self.world_size == 1:
            yield
            return
        barrier = self._barrier()
        goes_first = (self.local_process_index if local else self.process_index) == 0
        logger = logging.getLogger(__name__)
        if not goes_first:
            logger.debug("Process %d waits for the main process: %s.", self.process_index, desc)
            barrier()
        try:
            yield
        finally:
            if goes_first:
                logger.debug("Process %d is done and lets the others go on: %s.", self.process_index, desc)
                barrier()

    def _barrier(self, caller: str = "main_process_first") -> Any:
        import torch.distributed

        from littrainer.processes.group import ensure_process_group

        try:
            ensure_process_group(self)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"{caller}: {self.world_size} processes have no process group to wait in. {error}"
            ) from error
        return torch.distributed.barrier

    def __getstate__(self) -> dict[str, Any]:
        # They belong to the process that found them.
        own = ("_device", "_distributed_state", "_layout_of_model", "_checkpoint_places")
        return {name: value for name, value in self.__dict__.items() if name not in own}
