"""A model split between processes, in place: by layers (tensor parallelism), by parameters (FSDP2), or both."""

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
from littrainer.strategies.mixed_precision import get_autocast_dtype
from littrainer.strategies.single_device import InPlaceStrategy, LaunchedProcesses, block_backward_sync

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.strategies.choice import TrainedModel

# Argument -> keyword of Lightning's ModelParallelStrategy, and its value.
MODEL_PARALLEL_KEYWORDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "parallelism_config.tp_size": ("tensor_parallel_size", tensor_parallel_size),
    "parallelism_config.dp_replicate_size * dp_shard_size": ("data_parallel_size", data_parallel_size),
    "ddp_backend": ("process_group_backend", lambda args: args.ddp_backend),
    "ddp_timeout": ("timeout", lambda args: args.ddp_timeout_delta),
}


class ResidentModelParallelStrategy(InPlaceStrategy, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy for a Trainer's model: tensor parallelism, FSDP2, or both.

    Parameters:
        trained: the model, which is split in place and stays so, its optimizer, and the arguments.

    Raises:
        ValueError: the processes cannot be laid out as the arguments ask for.
    """

    # In a micro-batch, besides `block_backward_sync`: so FastEpochLoop carries it out.
    has_only_post_backward_hooks = True
    block_backward_sync = block_backward_sync
    # Parameters whose gradients are those of this process alone, and the groups of processes to average them over.
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
        """Bring the process group up, and lay the processes out."""
        # Lightning's own mesh has two dimensions, and none for replicas of a sharded model.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = device_mesh(self.trained.args, *self._sizes)
        module: Any = self.lightning_module
        module._device_mesh = self._device_mesh

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare a run as Lightning does; splitting has put each parameter where it belongs."""
        if trainer.state.fn == TrainerFn.FITTING:
            model = self.trained.model
            left_out = set(model.parameters())
            if self.plan is not None:
                left_out = find_ignored_parameters(model, self.plan.ignored_modules)
            # In an order that is the same in all processes.
            self._replicated = [parameter for parameter in model.parameters() if parameter in left_out]
            meshes = [self.device_mesh[dimension] for dimension in ("dp_replicate", "dp_shard")]
            self._groups = [mesh.get_group() for mesh in meshes if mesh.size() > 1]
        self.set_up_in_place(trainer)

    def parallelize(self, model: nn.Module) -> None:
        """Split the model, unless it is split already, and let an optimizer that was made before go on with its parts.

        Lightning asks for it before each run.

        Raises:
            ValueError: it cannot be split as the arguments ask for.
        """
        if is_a(model, "resharding module"):
            # An optimizer would train what forward passes have gathered and kept, instead of the shards.
            reshard_gathered(model)
            return
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        mesh, args = self.device_mesh, self.trained.args
        if tensor_parallel_size(args) > 1:
            from littrainer.strategies.tensor_parallel import parallelize_by_plan

            parallelize_by_plan(model, mesh["tp"])
        if self.plan is not None:
            over = mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
            shard(model, self.plan, over, args.device, get_autocast_dtype(args))
        if self.trained.optimizer is not None:
            exchange_parameters(self.trained.optimizer, before, dict(model.named_parameters()))

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Average gradients of what is not sharded when the last micro-batch of a window has been seen."""
        super().post_backward(closure_loss)
        module: Any = self.lightning_module
        if self._replicated and self._groups and module.should_sync_gradients:
            for group in self._groups:
                all_reduce_gradients(self._replicated, group)


def all_reduce_gradients(parameters: Iterable[nn.Parameter], group: Any) -> None:
    """Replace each gradient by its mean over the processes of a group, all of which hold the same slices."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    # A process whose samples left a parameter out counts as one that has found a gradient of 0.
    found = torch.ones(len(trained), dtype=torch.int32, device=trained[0].device)
    left_out = [index for index, parameter in enumerate(trained) if parameter.grad is None]
    for index in left_out:
        found[index] = 0
        trained[index].grad = torch.zeros_like(trained[index])
    waiting = [dist.all_reduce(found, dist.ReduceOp.MAX, group=group, async_op=True)]
    for parameter in trained:
        gradient: Any = getattr(parameter.grad, "_local_tensor", parameter.grad)
        gradient /= dist.get_world_size(group)
        waiting.append(dist.all_reduce(gradient, group=group, async_op=True))
    for work in waiting:
        work.wait()
    # Only who has left one out reads whether all have, since that waits for the device.
    for index, is_found in enumerate(found.tolist() if left_out else ()):
        if not is_found:
            trained[index].grad = None


def exchange_parameters(optimizer: Any, names: dict[int, str], sharded: dict[str, nn.Parameter]) -> None:
    """Let an optimizer hold the parts of its parameters, and of their states, instead of the whole ones.

    Parameters:
        names: of the parameters before, by `id`.
        sharded: the parameters by name.
    """
    for group in optimizer.param_groups:
        group["params"] = [sharded.get(names.get(id(one), ""), one) for one in group["params"]]
    for parameter, entries in list(optimizer.state.items()):
        now = sharded.get(names.get(id(parameter), ""))
        if now is not None and now is not parameter:
            del optimizer.state[parameter]
            optimizer.state[now] = {entry: shard_like(now, value) for entry, value in entries.items()}
