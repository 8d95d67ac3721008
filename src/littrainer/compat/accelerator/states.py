"""The `state` and `gradient_state` of an accelerator: what libraries read of a run's set-up and of its accumulation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from littrainer.arguments.deepspeed import asks_for_deepspeed
from littrainer.arguments.process import distributed_type, partial_state
from littrainer.arguments.sharding import sharding_plan
from littrainer.compat.accelerator.layouts import SplitModels, sharding_plugin
from littrainer.compat.accelerator.processes import ProcessMembers
from littrainer.data.loaders import innermost_loader

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.compat.accelerator.facade import AcceleratorFacade


def shared_accelerator_state(args: TrainingArguments) -> Any:
    """accelerate's own AcceleratorState with the facts of these arguments.

    None where accelerate is not loaded, or where making it would wait for processes that have no group yet. It is one
    for the whole process. Libraries make it anew without arguments, and callbacks read it.
    """
    if partial_state(args) is None:
        return None
    accelerator_state: Any = sys.modules["accelerate.state"].AcceleratorState
    shared = accelerator_state._shared_state
    if shared and shared.get("_mixed_precision") != args.mixed_precision:
        accelerator_state._reset_state()
    if getattr(shared.get("deepspeed_plugins"), "hf_ds_config", None) is not getattr(args, "hf_deepspeed_config", None):
        accelerator_state._reset_state()
    if shared and (shared.get("fsdp_plugin") is None) != (sharding_plan(args) is None):
        accelerator_state._reset_state()
    if not shared:
        from accelerate.utils import TorchDynamoPlugin

        made = accelerator_state(
            mixed_precision=args.mixed_precision,
            cpu=args.device.type == "cpu",
            dynamo_plugin=TorchDynamoPlugin(),
            _from_accelerator=True,
        )
        if asks_for_deepspeed(args):
            made.deepspeed_plugins = args.deepspeed_plugin
        plugin = sharding_plugin(args)
        if plugin is not None:
            made.fsdp_plugin = plugin
            made.distributed_type = distributed_type(args)
        made.parallelism_config = SplitModels(args).parallelism_config
        return made
    return accelerator_state()


class AcceleratorStateView(ProcessMembers, SplitModels):
    """Stands for accelerate's AcceleratorState where accelerate is not loaded."""

    initialized = True
    debug = fork_launched = False
    # Engines of accelerate's own, none of which runs here.
    megatron_lm_plugin = torch_tp_plugin = dynamo_plugin = device_mesh = None

    @property
    def fsdp_plugin(self) -> Any:
        """How the model is sharded, where it is; else None."""
        return sharding_plugin(self._args)

    @property
    def deepspeed_plugin(self) -> Any:
        """What DeepSpeed is told, where it carries the training out."""
        return self._args.deepspeed_plugin

    @property
    def deepspeed_plugins(self) -> Any:
        """The same; there is one of them."""
        return self._args.deepspeed_plugin

    @property
    def mixed_precision(self) -> str:
        """What the forward pass computes in: `no`, `bf16` or `fp16`."""
        return self._args.mixed_precision

    @property
    def backend(self) -> str | None:
        """Backend of the process group that is up; None where there is none."""
        import torch.distributed as dist

        return dist.get_backend() if dist.is_available() and dist.is_initialized() else None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.accelerator.state has no {name!r}: littrainer trains on Lightning, and tells of its state what "
            "the processes and the precision are. Ask trainer.lightning_trainer instead."
        )


class GradientView:
    """Where a training stands within the window of an optimizer step, read when somebody asks.

    Parameters:
        accelerator: the facade it belongs to.
        plugin_kwargs: settings of the accumulation that differ from accelerate's defaults. `num_steps` stays 1, since
            the Trainer accumulates; whoever sets it has `accelerator.backward` divide by it.
    """

    initialized = True
    is_xla_gradients_synced = False

    def __init__(self, accelerator: AcceleratorFacade, plugin_kwargs: dict[str, Any]):
        self._accelerator = accelerator
        self.plugin_kwargs = plugin_kwargs
        # A value that somebody has set, and the micro-batch it was set in; it holds for that one.
        self._set_in: tuple[Any, bool] | None = None

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch at hand is the last one of its optimizer step."""
        micro_batch = self._micro_batch
        if self._set_in is not None and self._set_in[0] is micro_batch:
            return self._set_in[1]
        return micro_batch is None or micro_batch.closes_window

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._set_in = (self._micro_batch, value)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def _micro_batch(self) -> Any:
        module = self._accelerator.module
        return None if module is None else module.micro_batch

    @property
    def num_steps(self) -> int:
        """What `accelerator.backward` divides by; 1 unless somebody has set it."""
        return self.plugin_kwargs.get("num_steps", 1)

    @property
    def adjust_scheduler(self) -> bool:
        """Whether a prepared schedule counts the micro-batches at which it does not step."""
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends an accumulation of one's own."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def active_dataloader(self) -> Any:
        """The loader that is read right now: an evaluation's, else a script's own, else that of the training."""
        accelerator = self._accelerator
        if accelerator.evaluated_loader is not None:
            return accelerator.evaluated_loader
        own = innermost_loader()
        if own is not None:
            return own
        run = None if accelerator.module is None else accelerator.module.run
        return None if run is None or run.is_between_epochs else run.windows.loader_being_read

    @property
    def dataloader_references(self) -> list[Any]:
        """None, and after it the loaders that are being read."""
        active = self.active_dataloader
        return [None] if active is None else [None, active]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the loader that is being read has handed out its last batch."""
        return getattr(self.active_dataloader, "end_of_dataloader", False)

    @property
    def remainder(self) -> int:
        """Samples in the last, incomplete batch of all processes; 0 where it is complete, -1 where nobody knows."""
        count = getattr(self.active_dataloader, "samples_of_incomplete_batch", None)
        return -1 if count is None else count()

    def __repr__(self) -> str:
        return (
            f"GradientView(sync_gradients={self.sync_gradients}, end_of_dataloader={self.end_of_dataloader}, "
            f"remainder={self.remainder}, plugin_kwargs={self.plugin_kwargs})"
        )
