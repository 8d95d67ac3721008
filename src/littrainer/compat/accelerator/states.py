"""The `state` and `gradient_state` of an accelerator, and what both say about a model split between processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from littrainer.arguments.deepspeed import asks_for_deepspeed
from littrainer.arguments.process import accelerate_is_loaded, distributed_type, partial_state
from littrainer.arguments.sharding import ShardingPlan, plugin_arguments, sharding_plan
from littrainer.compat.accelerator.processes import ProcessMembers
from littrainer.data.loaders import innermost_loader
from littrainer.distributed.layout import process_layout, tensor_parallel_rank

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class ShardingView:
    """Stands where libraries expect accelerate's FullyShardedDataParallelPlugin, where accelerate is not loaded.

    Parameters:
        plan: how parameters are sharded; each of its fields is an attribute, beside those that the plugin names
            otherwise.
    """

    # Of two names of one setting accelerate leaves the earlier one empty.
    sharding_strategy = param_init_fn = None

    def __init__(self, plan: ShardingPlan):
        self._plan = plan
        vars(self).update(plugin_arguments(plan))

    def __getattr__(self, name: str) -> Any:
        if name == "_plan":
            raise AttributeError(name)
        try:
            return getattr(self._plan, name)
        except AttributeError:
            raise AttributeError(f"the FSDP plugin has no {name!r}; args.fsdp_config says how it shards.") from None

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Do nothing: the strategy finds the layers of the model that it shards."""

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Do nothing: the strategy shards for the precision that the arguments ask for."""


def sharding_plugin(args: TrainingArguments) -> Any:
    """accelerate's plugin with the settings of `fsdp_config`, or one like it where accelerate is not loaded.

    None where nothing is sharded.
    """
    plan = sharding_plan(args)
    if plan is None:
        return None
    if not accelerate_is_loaded():
        return ShardingView(plan)
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(**plugin_arguments(plan))


class LayoutView:
    """Stands where libraries expect accelerate's ParallelismConfig, for sizes that were given as a dict.

    Parameters:
        args: the arguments, whose layout of processes this shows.
    """

    cp_size = sp_size = 1

    def __init__(self, args: TrainingArguments):
        layout = process_layout(args)
        self.dp_replicate_size = layout.replicas
        self.dp_shard_size = layout.shards
        self.tp_size = layout.tensor_parallel

    def __getattr__(self, name: str) -> Any:
        dimension = name.removesuffix("_enabled")
        if dimension == name or f"{dimension}_size" not in (*vars(self), "cp_size", "sp_size"):
            raise AttributeError(f"parallelism_config has no {name!r}; it has the sizes of the layout of processes.")
        return getattr(self, f"{dimension}_size") > 1

    @property
    def data_parallel_size(self) -> int:
        """Parts into which the data is split."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that have the same data."""
        return self.tp_size

    @property
    def total_size(self) -> int:
        """Number of processes."""
        return self.data_parallel_size * self.tp_size


class SplitModels:
    """Members about models that are split between processes.

    Parameters:
        args: the training arguments, which know how.
    """

    def __init__(self, args: TrainingArguments):
        self._args = args

    @property
    def is_fsdp2(self) -> bool:
        """Whether the model is sharded by version 2 of FSDP."""
        plan = sharding_plan(self._args)
        return plan is not None and plan.version == 2 and self._args.world_size > 1

    @property
    def parallelism_config(self) -> Any:
        """What `parallelism_config` asks for, with the attributes of accelerate's; None for nothing."""
        given: Any = self._args.parallelism_config
        if given is not None and not isinstance(given, Mapping):
            return given
        return LayoutView(self._args) if process_layout(self._args).is_given else None


class SplitModelsOfAccelerator(SplitModels):
    """The same for an accelerator, which knows its place in the layout too."""

    module: Any

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are torch's DTensors by FSDP."""
        return self.is_fsdp2

    @property
    def torch_device_mesh(self) -> Any:
        """While a training goes on that splits the model, all processes by the dimensions of its layout; else None."""
        return None if self.module is None else getattr(self.module.trainer.strategy, "_device_mesh", None)

    @property
    def data_parallel_rank(self) -> int:
        """Which replica of the model is this process's; the rank where each process has one."""
        layout = process_layout(self._args)
        return self._args.process_index // (layout.shards * layout.tensor_parallel)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which shard of the layout is this process's; 0 where `parallelism_config` names no shards."""
        layout = process_layout(self._args)
        return self._args.process_index // layout.tensor_parallel % layout.shards

    @property
    def tensor_parallel_rank(self) -> int:
        """Which slice of each layer is this process's; 0 where layers are whole."""
        return tensor_parallel_rank(self._args)


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

    def __init__(self, accelerator: Any, plugin_kwargs: dict[str, Any]):
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
