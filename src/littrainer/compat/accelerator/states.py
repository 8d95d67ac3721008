"""`state` and `gradient_state` of an accelerator."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.process import distributed_type, partial_state
from littrainer.arguments.sharding import get_fsdp_plugin_keywords, get_sharding_plan
from littrainer.data.loaders import current_loader
from littrainer.distributed.layout import get_process_layout, get_requested_sizes

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


def build_parallelism_config(args: TrainingArguments) -> Any:
    """Return accelerate's ParallelismConfig; None without a layout."""
    config: Any = args.parallelism_config
    if config is not None and not isinstance(config, Mapping):
        return config
    layout = get_process_layout(args)
    if not layout.is_given:
        return None
    from accelerate import ParallelismConfig

    config = ParallelismConfig(dp_replicate_size=1, dp_shard_size=layout.shards, tp_size=layout.tensor_parallel)
    sizes = get_requested_sizes(args)[1]
    for name in ("cp", "sp"):
        # Releases without these names accept the default.
        if sizes[f"{name}_size"] > 1:
            config._set_size(name, sizes[f"{name}_size"])
    # The constructor rejects replicas with tensor parallelism.
    config._set_size("dp_replicate", layout.replicas)
    return config


class DelegatedAttribute:
    """Descriptor of an attribute of another attribute."""

    def __init__(self, holder: str) -> None:
        self.holder = holder

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(getattr(instance, self.holder), self.name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(getattr(instance, self.holder), self.name, value)


def shared_accelerator_state(args: TrainingArguments, load: bool = False) -> Any:
    """Return accelerate's AcceleratorState; None if it cannot be set up now."""
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

        state = accelerator_state(
            mixed_precision=args.mixed_precision,
            cpu=args.device.type == "cpu",
            dynamo_plugin=TorchDynamoPlugin(),
            _from_accelerator=True,
        )
        if has_deepspeed(args):
            state.deepspeed_plugins = args.deepspeed_plugin
        plan = get_sharding_plan(args)
        if plan is not None:
            from accelerate import FullyShardedDataParallelPlugin

            state.fsdp_plugin = FullyShardedDataParallelPlugin(**get_fsdp_plugin_keywords(plan))
            state.distributed_type = distributed_type(args)
        state.parallelism_config = build_parallelism_config(args)
        return state
    return accelerator_state()


def _get_accelerate_gradient_state() -> Any:
    state: Any = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state() if state is not None and state._shared_state else None


class GradientView:
    """Gradient state of a training, computed on access.

    Parameters:
        running: has `module`, None outside fit, and `evaluated_loader`, None outside evaluations.
        plugin_kwargs: accumulation settings that differ from accelerate's defaults.
    """

    def __init__(self, running: Any, plugin_kwargs: dict[str, Any]):
        self._running = running
        self.plugin_kwargs = plugin_kwargs
        # Micro-batch and value of the last set `sync_gradients`.
        self._override: tuple[Any, bool] | None = None

    @property
    def sync_gradients(self) -> bool:
        micro_batch = self._micro_batch
        if self._override is not None and self._override[0] is micro_batch:
            return self._override[1]
        return micro_batch is None or micro_batch.is_last_of_step

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._override = (self._micro_batch, value)
        if (shared := _get_accelerate_gradient_state()) is not None:
            shared._set_sync_gradients(value)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def _micro_batch(self) -> Any:
        module = self._running.module
        return None if module is None else module.micro_batch

    # Divisor of `accelerator.backward`.
    num_steps = property(lambda self: self.plugin_kwargs.get("num_steps", 1))
    # True lets prepared schedules count micro-batches without a step.
    adjust_scheduler = property(lambda self: self.plugin_kwargs.get("adjust_scheduler", False))
    # True ends a script's accumulation at the last batch of a loader.
    sync_with_dataloader = property(lambda self: self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def active_dataloader(self) -> Any:
        """Return the loader being read: of an evaluation, else of a script, else of the training."""
        running = self._running
        if running.evaluated_loader is not None:
            return running.evaluated_loader
        loader = current_loader()
        if loader is not None:
            return loader
        if running.module is None and (shared := _get_accelerate_gradient_state()) is not None:
            return shared.active_dataloader
        run = None if running.module is None else running.module.run
        return None if run is None or run.is_between_epochs else run.windows.loader

    in_dataloader = property(lambda self: self.active_dataloader is not None)
    end_of_dataloader = property(lambda self: getattr(self.active_dataloader, "end_of_dataloader", False))
    # Samples in the last, incomplete batch of all processes; 0 if complete, -1 if unknown.
    remainder = property(lambda self: getattr(self.active_dataloader, "remainder", -1))
