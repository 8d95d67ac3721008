"""Tensor parallelism: processes that compute each layer together, on the same data."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.distributed.layout import process_layout
from littrainer.strategies.model_parallel import ResidentModelParallelStrategy, average_gradients
from littrainer.strategies.sharded import exchange_parameters
from littrainer.strategies.tensor_parallel_plan import parallelize_by_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from littrainer.trainer import Trainer


class TensorParallelStrategy(ResidentModelParallelStrategy):
    """Layers split by a model's plan; where there are several such groups of processes, gradients are averaged."""

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Average gradients over the groups when the last micro-batch of a window has been seen."""
        super().post_backward(closure_loss)
        module: Any = self.lightning_module
        if self.device_mesh["dp_replicate"].size() > 1 and module.exchanges_gradients:
            average_gradients(module.owner.model.parameters(), self.device_mesh["dp_replicate"].get_group())


def tensor_parallel_strategy(trainer: Trainer) -> TensorParallelStrategy:
    """The strategy for layers that several processes compute together."""
    layout = process_layout(trainer.args)
    return TensorParallelStrategy(trainer, functools.partial(split_model_of, trainer), layout.replicas, layout.shards)


def split_model_of(trainer: Trainer, model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a Trainer's model in place, and let an optimizer that was made before go on with its slices.

    Raises:
        ValueError: the model has no plan, or it cannot be carried out.
    """
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    split_layers(model, mesh)
    if trainer.optimizer is not None:
        exchange_parameters(trainer.optimizer, before, dict(model.named_parameters()))


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model's layers by its plan, over the last dimension of a mesh of all processes."""
    parallelize_by_plan(model, mesh["tp"])
