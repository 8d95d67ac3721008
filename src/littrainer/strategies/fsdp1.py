"""FSDP version 1 around the user's model, through Lightning's FSDPStrategy; torch supports it on GPUs only."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from littrainer.arguments.sharding import SIZE_BASED, TRANSFORMER_BASED, ShardingPlan, get_sharding_plan
from littrainer.distributed.layout import get_sharding_sizes
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.strategies.fsdp2 import find_ignored_modules, find_layer_classes
from littrainer.strategies.model_wrapping import autocast_forward, get_autocast_dtype
from littrainer.strategies.single_device import InPlaceStrategy, LaunchedProcesses, block_backward_sync

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.strategies.choice import TrainedModel


class ResidentFSDP1Strategy(InPlaceStrategy, FSDPStrategy):
    """FSDPStrategy for a Trainer's model, which stays wrapped after a run.

    Raises:
        ValueError: the Trainer's optimizer has the parameters of the unwrapped model.
    """

    block_backward_sync = block_backward_sync

    def __init__(self, trained: TrainedModel):
        if trained.optimizer is not None and not is_a(trained.model_wrapped, "flat sharded module"):
            raise ValueError(
                "`optimizers` were made with the parameters of a whole model, and FSDP version 1 puts others in their "
                "place. Override create_optimizer, pass `optimizer_cls_and_kwargs`, or set fsdp_config={'version': 2}."
            )
        keywords = get_fsdp1_keywords(trained.args, trained.model)
        super().__init__(cluster_environment=LaunchedProcesses(trained.args), **keywords)
        self._trained = trained

    def parallelize(self, model: nn.Module) -> None:
        """Wrap the Trainer's model, unless it is wrapped; called before each run."""
        trained = self._trained
        if is_a(trained.model_wrapped, "flat sharded module"):
            return
        dtype = get_autocast_dtype(trained.args)
        if dtype is not None:
            autocast_forward(model, trained.args.device.type, dtype)
        trained.model_wrapped = self._setup_model(model)

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare a run as Lightning does, without wrapping its module."""
        self.set_up_in_place(trainer)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the optimizer without Lightning's check for flat parameters."""
        self._reset_optimizers_and_schedulers()
        super(FSDPStrategy, self).setup_optimizers(trainer)


def get_fsdp1_keywords(args: Any, model: nn.Module) -> dict[str, Any]:
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

    plan = get_sharding_plan(args)
    assert plan is not None
    policy = _wrap_policy(model, plan)
    keywords: dict[str, Any] = {
        "process_group_backend": args.ddp_backend,
        "timeout": args.ddp_timeout_delta,
        "sharding_strategy": plan.reshard_after_forward,
        "cpu_offload": plan.cpu_offload,
        "auto_wrap_policy": policy,
        "state_dict_type": "sharded" if plan.has_sharded_checkpoints else "full",
        "sync_module_states": plan.sync_module_states or plan.cpu_ram_efficient_loading,
        "forward_prefetch": plan.forward_prefetch,
        "backward_prefetch": getattr(BackwardPrefetch, plan.backward_prefetch, None),
        "limit_all_gathers": plan.limit_all_gathers,
        "use_orig_params": plan.use_orig_params,
    }
    replicas, shards = get_sharding_sizes(args)
    if str(plan.reshard_after_forward).startswith("HYBRID") and replicas > 1:
        keywords["device_mesh"] = (replicas, shards)
    if plan.activation_checkpointing:
        keywords["activation_checkpointing_policy"] = policy if policy is not None else {type(model)}
    if plan.ignored_modules is not None:
        keywords["ignored_modules"] = find_ignored_modules(model, plan.ignored_modules)
    dtype = get_autocast_dtype(args)
    if dtype is not None:
        keywords["mixed_precision"] = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    if plan.cpu_ram_efficient_loading:
        keywords["param_init_fn"] = functools.partial(_allocate, device=args.device)
    return keywords


def _allocate(module: nn.Module, device: torch.device) -> None:
    # The first process broadcasts the values later.
    module.to_empty(device=device, recurse=False)


def _wrap_policy(model: nn.Module, plan: ShardingPlan) -> Any:
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

    if plan.auto_wrap_policy == SIZE_BASED:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=plan.min_num_params)
    if plan.auto_wrap_policy != TRANSFORMER_BASED:
        return None
    classes = find_layer_classes(model, plan)
    if not is_a(model, "peft model"):
        return ModuleWrapPolicy(classes) if classes else None

    def is_wrapped(module: nn.Module) -> bool:
        # Wrap adapters separately from frozen weights: FSDP1 flattens parameters, which must be trained uniformly.
        weight = getattr(module, "weight", None)
        is_trained = not list(module.children()) and isinstance(weight, nn.Parameter) and weight.requires_grad
        return type(module) in classes or is_trained

    return CustomPolicy(is_wrapped)
