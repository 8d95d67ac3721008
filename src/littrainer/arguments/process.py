"""Device, ranks and log level of the process, and accelerate's state."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from littrainer.arguments.accelerator_config import get_configured_device
from littrainer.arguments.choices import ParallelMode
from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.fields import ArgumentFields
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.distributed import environment

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)


@functools.cache
def _warn_of_idle_gpus(count: int) -> None:
    logger.warning(
        "This process trains on one of %d GPUs, where transformers would use DataParallel and a batch %d times as "
        "large. `littrainer run SCRIPT` trains on all of them, with a process for each.",
        count,
        count,
    )


class ProcessFacts(ArgumentFields):
    """Properties of TrainingArguments that depend on the process."""

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return environment.world_size()

    @property
    def process_index(self) -> int:
        """Return the rank of this process."""
        return environment.rank()

    @property
    def local_process_index(self) -> int:
        """Return the rank of this process on its node."""
        return environment.local_rank()

    @property
    def local_world_size(self) -> int:
        """Return the number of processes on this node."""
        return environment.local_world_size()

    @property
    def parallel_mode(self) -> ParallelMode:
        """Return `DISTRIBUTED` or `NOT_PARALLEL`; a process never uses several GPUs."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @functools.cached_property
    def device(self) -> torch.device:
        """Return the device of this process: CUDA, Metal, or the CPU."""
        return self._find_device()

    def _find_device(self) -> torch.device:
        import torch

        if getattr(self.accelerator_config, "use_configured_state", False):
            return get_configured_device()
        if self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in environment.TRUE_VALUES:
            return torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", self._get_gpu_index(torch.cuda.device_count()))
            if self.local_process_index > 0:
                # For scripts that call `.cuda()` without an index.
                torch.cuda.set_device(device)
            return device
        # Metal has no collectives.
        if torch.backends.mps.is_available() and self.world_size == 1:
            return torch.device("mps")
        return torch.device("cpu")

    def _get_gpu_index(self, visible: int) -> int:
        index = self.local_process_index
        # The launcher may have set CUDA_VISIBLE_DEVICES per process.
        if visible == 1:
            return 0
        if visible and index >= visible:
            raise ValueError(
                f"{self.local_world_size} processes on this node share {visible} GPUs, and process {index} has none. "
                f"Start at most {visible} (littrainer run --devices, torchrun --nproc-per-node), or set use_cpu=True."
            )
        return index

    @property
    def visible_device_count(self) -> int:
        """Return the devices that this process sees: those of the node's processes, or its GPU."""
        import torch

        count = self.local_world_size
        return min(count, torch.cuda.device_count()) if self.device.type == "cuda" else count

    def _warn_of_idle_gpus(self) -> None:
        if self.device.type == "cuda" and not environment.is_launched():
            import torch

            if torch.cuda.device_count() > 1:
                _warn_of_idle_gpus(torch.cuda.device_count())

    def _init_process_group(self) -> None:
        """Start the process group if the launcher has set its address."""
        if environment.is_launched():
            # For scripts written for transformers 4.
            self.local_rank = self.local_process_index
        if environment.get_rendezvous_point() is None:
            return
        from littrainer.distributed.group import ensure_process_group

        ensure_process_group(self)

    @property
    def _setup_devices(self) -> torch.device:
        return self.device

    @property
    def distributed_state(self) -> Any:
        """Return accelerate's PartialState of this process; None if accelerate is not installed."""
        return self.__dict__.get("_distributed_state") or partial_state(self, load=True)

    @distributed_state.setter
    def distributed_state(self, value: Any) -> None:
        self.__dict__["_distributed_state"] = value

    @property
    def n_gpu(self) -> int:
        """Return the GPUs of this process: 1, or 0 on a CPU."""
        return self._n_gpu

    @property
    def _n_gpu(self) -> int:
        return self.__dict__.get("_n_gpu", 0 if self.device.type == "cpu" else 1)

    @_n_gpu.setter
    def _n_gpu(self, value: int) -> None:
        self.__dict__["_n_gpu"] = value

    @property
    def train_batch_size(self) -> int:
        """Return the samples per training micro-batch of this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Return the samples per evaluation batch of this process."""
        return self.per_device_eval_batch_size

    @property
    def place_model_on_device(self) -> bool | None:
        """Return whether the Trainer moves the model; None lets it decide."""
        return None

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """Return `ddp_timeout` as a timedelta."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def should_log(self) -> bool:
        """Return whether this process logs."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Return whether this process writes models and checkpoints."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    def get_process_log_level(self) -> int:
        """Return the `logging` level of this process; for `passive` that of transformers' logger."""
        name = self.log_level if self.should_log else self.log_level_replica
        if name == "passive":
            return logging.getLogger("transformers").getEffectiveLevel()
        return logging.DEBUG if name == "detail" else getattr(logging, name.upper())

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run a block in the main process first, so that the others read its cache.

        Parameters:
            local: run first in the first process of each node.
            desc: description for the debug log.

        Raises:
            RuntimeError: several processes have no process group.
        """
        if self.world_size == 1:
            yield
            return
        barrier = self._barrier()
        is_first = (self.local_process_index if local else self.process_index) == 0
        if not is_first:
            logger.debug("Process %d waits for the main process: %s.", self.process_index, desc)
            barrier()
        try:
            yield
        finally:
            if is_first:
                logger.debug("Process %d is done and lets the others continue: %s.", self.process_index, desc)
                barrier()

    def _barrier(self, caller: str = "main_process_first") -> Any:
        import torch.distributed

        from littrainer.distributed.group import ensure_process_group

        try:
            ensure_process_group(self)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"{caller}: {self.world_size} processes have no process group to wait in. {error}"
            ) from error
        return torch.distributed.barrier

    def __getstate__(self) -> dict[str, Any]:
        excluded = ("device", "_distributed_state", "_layout_of_model", "_checkpoint_places")
        return {name: value for name, value in self.__dict__.items() if name not in excluded}


# ---- State of accelerate ---------------------------------------------------------------------------------------------


class DistributedType(str, Enum):
    """Subset of accelerate's DistributedType."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"

    __str__ = Enum.__str__
    __hash__ = str.__hash__


def is_accelerate_loaded() -> bool:
    return hasattr(sys.modules.get("accelerate.state"), "AcceleratorState")


def distributed_type(args: ProcessFacts) -> Any:
    kind = DistributedType.NO
    if has_deepspeed(args):
        kind = DistributedType.DEEPSPEED
    elif args.world_size > 1 and get_sharding_plan(args) is not None:
        kind = DistributedType.FSDP
    elif args.world_size > 1:
        kind = DistributedType.MULTI_CPU if args.device.type == "cpu" else DistributedType.MULTI_GPU
    return sys.modules["accelerate.state"].DistributedType(kind.value) if is_accelerate_loaded() else kind


def partial_state(args: ProcessFacts, load: bool = False) -> Any:
    """Return accelerate's PartialState, updated to the arguments; None if accelerate is not loaded, unless `load`."""
    if load:
        with contextlib.suppress(ImportError):
            importlib.import_module("accelerate.state")
    if not is_accelerate_loaded() or not (load or _can_skip_rendezvous(args)):
        return None
    state: Any = sys.modules["accelerate.state"]
    shared = state.PartialState._shared_state
    uses_deepspeed = has_deepspeed(args)
    # Not cached, since a script may still set use_cpu.
    on_cpu = (vars(args).get("device") or args._find_device()).type == "cpu"
    if shared and not getattr(args.accelerator_config, "use_configured_state", False):
        kind, device = shared.get("distributed_type"), getattr(shared.get("device"), "type", None)
        present = (shared.get("num_processes"), shared.get("process_index"), kind == "DEEPSPEED", device == "cpu")
        if present != (args.world_size, args.process_index, uses_deepspeed, on_cpu):
            state.AcceleratorState._reset_state(reset_partial_state=True)
    if args.world_size > 1:
        # accelerate assumes 1 if it is unset.
        os.environ[environment.LOCAL_WORLD_SIZE] = str(args.local_world_size)
    partial = state.PartialState(cpu=on_cpu, backend=args.ddp_backend, timeout=args.ddp_timeout_delta)
    if uses_deepspeed:
        shared["distributed_type"] = state.DistributedType.DEEPSPEED
    return partial


def _can_skip_rendezvous(args: ProcessFacts) -> bool:
    import torch.distributed

    # With a launcher's ranks, PartialState waits for the other processes.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    return args.world_size == 1 and ("LOCAL_RANK" not in os.environ or "MASTER_ADDR" in os.environ)


# ---- Hardware -------------------------------------------------------------------------------------------------------

# Compute capability of Ampere.
MIN_TF32_CAPABILITY = 8
# torch_compile_backend that compiles nothing.
NO_COMPILATION = "no"


def apply_hardware_choices(args: Any) -> None:
    if (args.bf16 or args.bf16_full_eval) and not args.use_cpu and not _has_bf16():
        name = "bf16" if args.bf16 else "bf16_full_eval"
        raise ValueError(
            f"{name}=True needs a GPU with bfloat16 (NVIDIA Ampere or newer), and there is none here. Set use_cpu=True "
            f"to compute in bfloat16 on the CPU, or {name}=False."
        )
    if args.mixed_precision == "fp16" and args.device.type == "cpu":
        warnings.warn(
            "fp16 has no effect on a CPU, which trains in the model's own precision; use bf16=True, or a GPU.",
            UserWarning,
            stacklevel=2,
        )
    if args.tf32 is not None or args.torch_compile:
        _set_tf32(args)


def _has_bf16() -> bool:
    import torch

    for device in (torch.cuda, torch.xpu):
        if device.is_available():
            return device.is_bf16_supported()
    return torch.backends.mps.is_available() and torch.backends.mps.is_macos_or_newer(14, 0)


def _set_tf32(args: Any) -> None:
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.version.cuda is not None else None
    if device is None or torch.cuda.get_device_properties(device).major < MIN_TF32_CAPABILITY:
        if args.tf32:
            raise ValueError(
                "tf32=True needs an NVIDIA GPU of the Ampere generation or newer, and there is none here; leave tf32 "
                "unset."
            )
        return
    allowed = args.tf32
    if allowed is None:
        if args.fp16 and not args.bf16:
            return
        logger.info("torch_compile=True lets matrix products run in TF32; set tf32=False to forbid it.")
        allowed = True
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "tf32" if allowed else "ieee"
    # Lightning reads these older switches, and torch 2.9 raises if they contradict the newer switch.
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def get_matmul_precision() -> str:
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # A script has set only the newer switch.
        return torch.backends.cuda.matmul.fp32_precision
