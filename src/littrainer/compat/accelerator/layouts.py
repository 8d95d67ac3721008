"""What an accelerator and its state say about a model that is split between processes: plugins, sizes, ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from littrainer.arguments.process import accelerate_is_loaded
from littrainer.arguments.sharding import ShardingPlan, plugin_arguments, sharding_plan
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
