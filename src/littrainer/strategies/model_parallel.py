"""A model split between processes, in place: what its strategies have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import nn

from littrainer.distributed.layout import data_parallel_size, device_mesh, tensor_parallel_size
from littrainer.strategies.shards import spread_like
from littrainer.strategies.single_device import LaunchedProcesses, release_plugins

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from littrainer.strategies.choice import TrainedModel

# Argument -> keyword of Lightning's ModelParallelStrategy, and its value.
MODEL_PARALLEL_KEYWORDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "parallelism_config.tp_size": ("tensor_parallel_size", tensor_parallel_size),
    "parallelism_config.dp_replicate_size * dp_shard_size": ("data_parallel_size", data_parallel_size),
    "ddp_backend": ("process_group_backend", lambda args: args.ddp_backend),
    "ddp_timeout": ("timeout", lambda args: args.ddp_timeout_delta),
}


class ResidentModelParallelStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy over the layout of a Trainer's processes; the model stays where it is.

    Parameters:
        trained: the model, which subclasses split, and its optimizer.
        replicas, shards: sizes of the first two dimensions of the mesh.
    """

    # In a micro-batch, besides `block_backward_sync`: so FastEpochLoop carries it out.
    acts_behind_backward_passes_only = True

    def __init__(self, trained: TrainedModel, replicas: int, shards: int):
        args = trained.args
        super().__init__(
            save_distributed_checkpoint=False,
            **{keyword: value(args) for keyword, value in MODEL_PARALLEL_KEYWORDS.values()},
        )
        self.cluster_environment = LaunchedProcesses(args)
        self.trained = trained
        self._make_mesh = lambda: device_mesh(args, replicas, shards)

    def setup_environment(self) -> None:
        """Bring the process group up, and lay the processes out."""
        # Lightning's own mesh has two dimensions, and none for replicas of a sharded model.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = self._make_mesh()
        module: Any = self.lightning_module
        module._device_mesh = self._device_mesh

    def parallelize(self, model: nn.Module) -> None:
        """Split the model, unless it is split already, and let an optimizer that was made before go on with its parts.

        Lightning asks for it before each run.

        Raises:
            ValueError: it cannot be split as the arguments ask for.
        """
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        self.split(model, self.device_mesh)
        if self.trained.optimizer is not None:
            exchange_parameters(self.trained.optimizer, before, dict(model.named_parameters()))

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Split a model in place over a mesh with the dimensions of `distributed.layout`; leave a split one alone."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Release what the plugins hold, and leave the model where it is, split."""
        release_plugins(self)


def average_gradients(parameters: Iterable[nn.Parameter], group: Any) -> None:
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
            optimizer.state[now] = {entry: spread_like(now, value) for entry, value in entries.items()}
