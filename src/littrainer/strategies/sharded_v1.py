"""Sharding by FSDP's first version, which torch has for GPUs, through Lightning's FSDPStrategy.

The user's model is wrapped and not Lightning's module: that is what subclasses of a Trainer are handed, and what
checkpoints take their names from.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from littrainer.arguments.sharding import SIZE_BASED, TRANSFORMER_BASED, ShardingPlan, sharding_plan
from littrainer.distributed.layout import sharding_sizes
from littrainer.ecosystem import is_a
from littrainer.mixed_precision import forward_type, run_forward_in
from littrainer.strategies.launched import LaunchedProcesses
from littrainer.strategies.resident import release_plugins
from littrainer.strategies.sharding_units import ignored_modules, layer_classes

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class FirstVersionStrategy(FSDPStrategy):
    """Lightning's FSDPStrategy for a Trainer's model, which stays wrapped where it is.

    Parameters:
        trainer: the Trainer.
        keywords: for Lightning's strategy.
    """

    def __init__(self, trainer: Trainer, keywords: dict[str, Any]):
        super().__init__(cluster_environment=LaunchedProcesses(trainer.args), **keywords)
        self._trainer = trainer

    def parallelize(self, model: nn.Module) -> None:
        """Wrap the Trainer's model, unless an earlier run has; Lightning asks for it before each run."""
        trainer = self._trainer
        if is_a(trainer.model_wrapped, "flat sharded module"):
            return
        dtype = forward_type(trainer.args)
        if dtype is not None:
            run_forward_in(model, trainer.args.device.type, dtype)
        trainer.model_wrapped = self._setup_model(model)

    def setup(self, trainer: Any) -> None:
        """Prepare a run as Lightning does, without wrapping its module."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == "fit":
            # Version 1 keeps the parameters' own objects, or the Trainer makes its optimizer from the wrapper's.
            self._reset_optimizers_and_schedulers()
            super(FSDPStrategy, self).setup_optimizers(trainer)
        self.setup_precision_plugin()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch, by the module itself: the wrapper is within it."""
        return self._module_itself().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of an evaluation, by the module itself, which calls the wrapped model."""
        self._evaluate_wrapped_model()
        return self._module_itself().validation_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of a prediction, by the module itself, which calls the wrapped model."""
        self._evaluate_wrapped_model()
        return self._module_itself().predict_step(*args, **kwargs)

    def _module_itself(self) -> Any:
        module = self.lightning_module
        assert module is not None
        return module

    def _evaluate_wrapped_model(self) -> None:
        # The pass has begun before an evaluation that comes first has wrapped the model.
        evaluation_pass = self._module_itself().evaluation_pass
        if evaluation_pass.model is self._trainer.model:
            evaluation_pass.model = self._trainer.model_wrapped

    def block_backward_sync(self) -> Any:
        """A context in which gradients are added up in each process and not exchanged, unless each is to be."""
        module: Any = self.lightning_module
        no_sync = getattr(self._trainer.model_wrapped, "no_sync", None)
        if module is None or module.exchanges_gradients or no_sync is None:
            return contextlib.nullcontext()
        return no_sync()

    def teardown(self) -> None:
        """Release what the plugins hold, and leave the model where it is, wrapped."""
        release_plugins(self)


def first_version_strategy(trainer: Trainer) -> FirstVersionStrategy:
    """The strategy for a model that the processes share, by FSDP's first version.

    Raises:
        ValueError: it does not go with something else that is asked for.
    """
    plan = sharding_plan(trainer.args)
    assert plan is not None
    if trainer.optimizer is not None and trainer.training_run is None:
        raise ValueError(
            "`optimizers` were made with the parameters of a whole model, and FSDP version 1 puts others in their "
            "place. Override create_optimizer, pass `optimizer_cls_and_kwargs`, or set fsdp_config={'version': 2}."
        )
    return FirstVersionStrategy(trainer, first_version_keywords(trainer, plan))


def first_version_keywords(trainer: Trainer, plan: ShardingPlan) -> dict[str, Any]:
    """The keywords of Lightning's FSDPStrategy that the arguments stand for."""
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

    args, model = trainer.args, trainer.model
    policy = _wrap_policy(model, plan)
    keywords: dict[str, Any] = {
        "process_group_backend": args.ddp_backend,
        "timeout": args.ddp_timeout_delta,
        "sharding_strategy": plan.reshard_after_forward,
        "cpu_offload": plan.cpu_offload,
        "auto_wrap_policy": policy,
        "state_dict_type": "sharded" if plan.saves_shards else "full",
        "sync_module_states": plan.sync_module_states or plan.cpu_ram_efficient_loading,
        "forward_prefetch": plan.forward_prefetch,
        "backward_prefetch": getattr(BackwardPrefetch, plan.backward_prefetch, None),
        "limit_all_gathers": plan.limit_all_gathers,
        "use_orig_params": plan.use_orig_params,
    }
    replicas, shards = sharding_sizes(args)
    if str(plan.reshard_after_forward).startswith("HYBRID") and replicas > 1:
        keywords["device_mesh"] = (replicas, shards)
    if plan.activation_checkpointing:
        keywords["activation_checkpointing_policy"] = policy if policy is not None else {type(model)}
    if plan.ignored_modules is not None:
        keywords["ignored_modules"] = ignored_modules(model, plan.ignored_modules)
    if plan.mixed_precision_policy is not None:
        keywords["mixed_precision"] = MixedPrecision(
            **{
                {"cast_forward_inputs": "cast_root_forward_inputs"}.get(name, name): (
                    getattr(torch, value) if isinstance(value, str) else value
                )
                for name, value in plan.mixed_precision_policy.items()
            }
        )
    else:
        dtype = forward_type(args)
        if dtype is not None:
            keywords["mixed_precision"] = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    if plan.cpu_ram_efficient_loading:
        keywords["param_init_fn"] = functools.partial(_without_values, device=args.device)
    return keywords


def _without_values(module: nn.Module, device: torch.device) -> None:
    # The first process sends them their values.
    module.to_empty(device=device, recurse=False)


def _wrap_policy(model: nn.Module, plan: ShardingPlan) -> Any:
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

    if plan.auto_wrap_policy == SIZE_BASED:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=plan.min_num_params)
    if plan.auto_wrap_policy != TRANSFORMER_BASED:
        return None
    classes = layer_classes(model, plan)
    if is_a(model, "peft model"):
        return CustomPolicy(_layers_and_adapters(classes))
    return ModuleWrapPolicy(classes) if classes else None


def _layers_and_adapters(classes: set[type[nn.Module]]) -> Callable[[nn.Module], bool]:
    """Wrap layers, and what is trained of an adapter each for itself, so that frozen weights are not joined to it."""

    def is_wrapped(module: nn.Module) -> bool:
        if type(module) in classes:
            return True
        weight = getattr(module, "weight", None)
        return not list(module.children()) and isinstance(weight, nn.Parameter) and weight.requires_grad

    return is_wrapped
