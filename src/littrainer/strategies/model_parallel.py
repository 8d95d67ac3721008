"""Model sharding in place: tensor parallelism, FSDP2, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from littrainer.arguments.sharding import get_sharding_plan
from littrainer.distributed.layout import (
    data_parallel_size,
    device_mesh,
    get_process_layout,
    get_sharding_sizes,
    tensor_parallel_size,
)
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.strategies.fsdp2 import find_ignored_parameters, shard
from littrainer.strategies.full_state import reshard_gathered, shard_like
from littrainer.strategies.model_wrapping import get_autocast_dtype
from littrainer.strategies.single_device import InPlaceStrategy, LaunchedProcesses, block_backward_sync

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.strategies.choice import TrainedModel

# Argument -> keyword of Lightning's strategy, and its value.
MODEL_PARALLEL_KEYWORDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "parallelism_config.tp_size": ("tensor_parallel_size", tensor_parallel_size),
    "parallelism_config.dp_replicate_size * dp_shard_size": ("data_parallel_size", data_parallel_size),
    "ddp_backend": ("process_group_backend", lambda args: args.ddp_backend),
    "ddp_timeout": ("timeout", lambda args: args.ddp_timeout_delta),
}


class ResidentModelParallelStrategy(InPlaceStrategy, ModelParallelStrategy):
    """ModelParallelStrategy for a Trainer's model, which is sharded in place.

    Raises:
        ValueError: the number of processes does not fit the requested layout.
    """

    # FastEpochLoop checks it: a micro-batch needs no other hook except `block_backward_sync`.
    has_only_post_backward_hooks = True
    block_backward_sync = block_backward_sync
    # Parameters that FSDP2 does not shard, and the groups to average their gradients over.
    _replicated: Sequence[nn.Parameter] = ()
    _groups: Sequence[Any] = ()

    def __init__(self, trained: TrainedModel):
        args = trained.args
        super().__init__(
            save_distributed_checkpoint=False,
            **{keyword: value(args) for keyword, value in MODEL_PARALLEL_KEYWORDS.values()},
        )
        self.cluster_environment = LaunchedProcesses(args)
        self.trained = trained
        self.plan = get_sharding_plan(args)
        layout = get_process_layout(args)
        self._sizes = (layout.replicas, layout.shards) if self.plan is None else get_sharding_sizes(args)

    def setup_environment(self) -> None:
        # Lightning's mesh has no dimension for replicas of a sharded model.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = device_mesh(self.trained.args, *self._sizes)
        module: Any = self.lightning_module
        module._device_mesh = self._device_mesh

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare a run without moving the parameters."""
        if trainer.state.fn == TrainerFn.FITTING:
            model = self.trained.model
            unsharded = set(model.parameters())
            if self.plan is not None:
                unsharded = find_ignored_parameters(model, self.plan.ignored_modules)
            # All processes need the same order.
            self._replicated = [parameter for parameter in model.parameters() if parameter in unsharded]
            meshes = [self.device_mesh[dimension] for dimension in ("dp_replicate", "dp_shard")]
            self._groups = [mesh.get_group() for mesh in meshes if mesh.size() > 1]
        self.set_up_in_place(trainer)

    def parallelize(self, model: nn.Module) -> None:
        """Shard the model and an existing optimizer, unless they are sharded; called before each run."""
        if is_a(model, "resharding module"):
            # Otherwise the optimizer would train gathered weights.
            reshard_gathered(model)
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        mesh, args = self.device_mesh, self.trained.args
        if tensor_parallel_size(args) > 1:
            from littrainer.strategies.tensor_parallel import parallelize_by_plan

            parallelize_by_plan(model, mesh["tp"])
        if self.plan is not None:
            data_mesh = mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
            shard(model, self.plan, data_mesh, args.device, get_autocast_dtype(args))
        if self.trained.optimizer is not None:
            replace_parameters(self.trained.optimizer, names, dict(model.named_parameters()))

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Average the gradients of replicated parameters after the last micro-batch of a window."""
        super().post_backward(closure_loss)
        module: Any = self.lightning_module
        if self._replicated and self._groups and module.should_sync_gradients:
            for group in self._groups:
                all_reduce_gradients(self._replicated, group)


def all_reduce_gradients(parameters: Iterable[nn.Parameter], group: Any) -> None:
    """Replace each gradient by its mean over the processes of a group; missing gradients count as 0."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    has_gradient = torch.ones(len(trained), dtype=torch.int32, device=trained[0].device)
    missing = [index for index, parameter in enumerate(trained) if parameter.grad is None]
    for index in missing:
        has_gradient[index] = 0
        trained[index].grad = torch.zeros_like(trained[index])
    operations = [dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=group, async_op=True)]
    for parameter in trained:
        gradient: Any = getattr(parameter.grad, "_local_tensor", parameter.grad)
        gradient /= dist.get_world_size(group)
        operations.append(dist.all_reduce(gradient, group=group, async_op=True))
    for operation in operations:
        operation.wait()
    # Restore None for gradients that all processes miss; reading waits for the device.
    for index, is_present in enumerate(has_gradient.tolist() if missing else ()):
        if not is_present:
            trained[index].grad = None


def replace_parameters(optimizer: Any, names: dict[int, str], sharded: dict[str, nn.Parameter]) -> None:
    """Replace an optimizer's parameters and states by shards.

    Parameters:
        names: names of the unsharded parameters, by `id`.
    """
    for group in optimizer.param_groups:
        group["params"] = [sharded.get(names.get(id(parameter), ""), parameter) for parameter in group["params"]]
    for parameter, state in list(optimizer.state.items()):
        replacement = sharded.get(names.get(id(parameter), ""))
        if replacement is not None and replacement is not parameter:
            del optimizer.state[parameter]
            optimizer.state[replacement] = {key: shard_like(replacement, value) for key, value in state.items()}
