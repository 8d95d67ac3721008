"""Splitting a module's model between processes, under Lightning's ModelParallelStrategy."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from littrainer.arguments.sharding import sharding_plan
from littrainer.ecosystem import is_a
from littrainer.mixed_precision import FORWARD_TYPES

DATA, TENSOR = "data_parallel", "tensor_parallel"


def split_model(model: nn.Module, strategy: Any, args: Any) -> int:
    """Split a model in place: its layers by its tensor parallel plan, and what is left of them by FSDP2.

    A model that is split already is left as it is. Other strategies do without.

    Parameters:
        strategy: that of the lightning.Trainer; its data and tensor parallel sizes say over how many processes.
        args: training arguments; `fsdp` and `fsdp_config` say which layers are sharded each for itself.

    Returns:
        processes that compute each layer together.
    """
    if not isinstance(strategy, ModelParallelStrategy):
        return 1
    mesh: Any = strategy.device_mesh
    shards, together = mesh[DATA].size(), mesh[TENSOR].size()
    if together > 1:
        from littrainer.strategies.tensor_parallel import parallelize_by_plan

        parallelize_by_plan(model, mesh[TENSOR])
    if shards > 1 and not is_a(model, "resharding module"):
        from littrainer.strategies.consistency_checks import check_same_model
        from littrainer.strategies.sharded import shard

        check_same_model(model)
        computes_in = FORWARD_TYPES.get(strategy.precision_plugin.precision)
        shard(model, plan_of(args), mesh[DATA], strategy.root_device, computes_in)
    return together


def plan_of(args: Any) -> Any:
    """The plan of sharding that arguments ask for; where they do not, that of `fsdp=True`."""
    import copy

    plan = sharding_plan(args)
    if plan is not None:
        return plan
    asking = copy.copy(args)
    asking.fsdp, asking.fsdp_config = True, args.fsdp_config or {"version": 2}
    return sharding_plan(asking)
