"""The `state` and `gradient_state` of an accelerator."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.process import distributed_type, partial_state
from littrainer.arguments.sharding import get_fsdp_plugin_keywords, get_sharding_plan
from littrainer.data.loaders import current_loader
from littrainer.distributed.layout import get_process_layout

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


def build_parallelism_config(args: TrainingArguments) -> Any:
    """Return the argument `parallelism_config` as accelerate's ParallelismConfig; None for nothing."""
    given: Any = args.parallelism_config
    if given is not None and not isinstance(given, Mapping):
        return given
    layout = get_process_layout(args)
    if not layout.is_given:
        return None
    from accelerate import ParallelismConfig

    made = ParallelismConfig(dp_replicate_size=1, dp_shard_size=layout.shards, tp_size=layout.tensor_parallel)
    # Set afterwards, since the constructor refuses replicas of layers that are split, which train here.
    made._set_size("dp_replicate", layout.replicas)
    return made


class DelegatedAttribute:
    """An attribute that is read from and written to another object, which is an attribute too."""

    def __init__(self, holder: str) -> None:
        self.holder = holder

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(getattr(instance, self.holder), self.name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(getattr(instance, self.holder), self.name, value)


def shared_accelerator_state(args: TrainingArguments, load: bool = False) -> Any:
    """Return accelerate's AcceleratorState of the process, set up with these arguments, since libraries read it.

    None if accelerate is not loaded and `load` is false, or if it would wait for processes that have no group yet.
    """
    if partial_state(args, load) is None:
        return None
    accelerator_state: Any = sys.modules["accelerate.state"].AcceleratorState
    shared = accelerator_state._shared_state
    if shared and shared.get("_mixed_precision") != args.mixed_precision:
        accelerator_state._reset_state()
    if getattr(shared.get("deepspeed_plugins"), "hf_ds_config", None) is not getattr(args, "hf_deepspeed_config", None):
        accelerator_state._reset_state()
    if shared and (shared.get("fsdp_plugin") is None) != (get_sharding_plan(args) is None):
        accelerator_state._reset_state()
    if not shared:
        from accelerate.utils import TorchDynamoPlugin

        made = accelerator_state(
            mixed_precision=args.mixed_precision,
            cpu=args.device.type == "cpu",
            dynamo_plugin=TorchDynamoPlugin(),
            _from_accelerator=True,
        )
        if has_deepspeed(args):
            made.deepspeed_plugins = args.deepspeed_plugin
        plan = get_sharding_plan(args)
        if plan is not None:
            from accelerate import FullyShardedDataParallelPlugin

            made.fsdp_plugin = FullyShardedDataParallelPlugin(**get_fsdp_plugin_keywords(plan))
            made.distributed_type = distributed_type(args)
        made.parallelism_config = build_parallelism_config(args)
        return made
    return accelerator_state()


def _state_of_accelerate() -> Any:
    """Return the gradient state of a script's own Accelerator; None if there is none."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state() if state is not None and state._shared_state else None


class GradientView:
    """The state of a training within the window of an optimizer step, computed when it is read.

    Parameters:
        running: has `module`, which fit trains, and `evaluated_loader`; None each outside of that.
        plugin_kwargs: settings of the accumulation that differ from accelerate's defaults.
    """

    def __init__(self, running: Any, plugin_kwargs: dict[str, Any]):
        self._running = running
        self.plugin_kwargs = plugin_kwargs
        # A value that was set, and the micro-batch that it holds for.
        self._set_in: tuple[Any, bool] | None = None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last one of its optimizer step."""
        micro_batch = self._micro_batch
        if self._set_in is not None and self._set_in[0] is micro_batch:
            return self._set_in[1]
        return micro_batch is None or micro_batch.closes_window

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._set_in = (self._micro_batch, value)
        if (shared := _state_of_accelerate()) is not None:
            shared._set_sync_gradients(value)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def _micro_batch(self) -> Any:
        module = self._running.module
        return None if module is None else module.micro_batch

    # The divisor of `accelerator.backward`; 1 unless a script has set it.
    num_steps = property(lambda self: self.plugin_kwargs.get("num_steps", 1))
    # Whether a prepared schedule counts the micro-batches at which it does not step.
    adjust_scheduler = property(lambda self: self.plugin_kwargs.get("adjust_scheduler", False))
    # Whether the last batch of a loader ends an accumulation that a script does itself.
    sync_with_dataloader = property(lambda self: self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def active_dataloader(self) -> Any:
        """The loader that is being read: an evaluation's, else a script's own, else that of the training."""
        running = self._running
        if running.evaluated_loader is not None:
            return running.evaluated_loader
        own = current_loader()
        if own is not None:
            return own
        if running.module is None and (shared := _state_of_accelerate()) is not None:
            return shared.active_dataloader
        run = None if running.module is None else running.module.run
        return None if run is None or run.is_between_epochs else run.windows.loader

    in_dataloader = property(lambda self: self.active_dataloader is not None)
    # Whether the loader that is being read has handed out its last batch.
    end_of_dataloader = property(lambda self: getattr(self.active_dataloader, "end_of_dataloader", False))
    # Samples in the last, incomplete batch of all processes; 0 if it is complete, -1 if this is not known.
    remainder = property(lambda self: getattr(self.active_dataloader, "remainder", -1))
