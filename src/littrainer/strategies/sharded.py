"""Parameters, gradients and optimizer states sharded over the processes (FSDP2), on GPUs and on CPUs.

The model is sharded in place: its modules stay the user's objects, and its parameters become torch's DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from littrainer.arguments.sharding import ShardingPlan, sharding_plan
from littrainer.checkpoint.shards import free_gathered, spread_like
from littrainer.distributed.layout import sharding_sizes, tensor_parallel_size
from littrainer.ecosystem import is_a
from littrainer.mixed_precision import forward_type
from littrainer.strategies.model_parallel import ResidentModelParallelStrategy, average_gradients
from littrainer.strategies.set_up_alike import check_same_model
from littrainer.strategies.sharding_units import Unit, ignored_parameters, layers_of, units_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from littrainer.trainer import Trainer

# Marks a layer whose activations are computed again in the backward pass.
RECOMPUTES = "_littrainer_recomputes"


class ShardedStrategy(ResidentModelParallelStrategy):
    """FSDP2 for a Trainer's model, which stays sharded where it is."""

    _whole_parameters: Sequence[nn.Parameter] = ()

    def setup(self, trainer: Any) -> None:
        """Prepare a run as Lightning does; sharding has put each parameter where it belongs."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == "fit":
            self._whole_parameters = _not_sharded(trainer.lightning_module.owner)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Average gradients of what is not sharded when the last micro-batch of a window has been seen."""
        super().post_backward(closure_loss)
        module: Any = self.lightning_module
        if self._whole_parameters and module.exchanges_gradients:
            for dimension in ("dp_replicate", "dp_shard"):
                if self.device_mesh[dimension].size() > 1:
                    average_gradients(self._whole_parameters, self.device_mesh[dimension].get_group())

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A context in which gradients are added up in each process and not exchanged, unless each is to be."""
        module: Any = self.lightning_module
        model: Any = None if module is None or module.exchanges_gradients else module.owner.model
        if not is_a(model, "resharding module"):
            yield
            return
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


def sharded_strategy(trainer: Trainer) -> ShardedStrategy:
    """The strategy for a model that the processes share."""
    replicas, shards = sharding_sizes(trainer.args)
    return ShardedStrategy(trainer, functools.partial(shard_model_of, trainer), replicas, shards)


def shard_model_of(trainer: Trainer, model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a Trainer's model in place, and let an optimizer that was made before go on with its shards.

    A model that is sharded already lets go of what forward passes have gathered and kept: an optimizer would train
    that in the place of the shards.

    Parameters:
        mesh: all processes, with the dimensions of `processes.layout`.

    Raises:
        ValueError: as `shard`; or the processes have different models.
    """
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    if is_a(model, "resharding module"):
        free_gathered(model)
    else:
        plan = sharding_plan(trainer.args)
        assert plan is not None
        check_same_model(model)
        if tensor_parallel_size(trainer.args) > 1:
            from littrainer.strategies.tensor_parallel import split_layers

            split_layers(model, mesh)
        shard(model, plan, _data_parallel_dimensions(mesh), trainer.args.device, forward_type(trainer.args))
    if trainer.optimizer is not None:
        exchange_parameters(trainer.optimizer, before, dict(model.named_parameters()))


def shard(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, device: torch.device, computes_in: torch.dtype | None = None
) -> None:
    """Shard a model in place.

    Parameters:
        mesh: the processes to shard over; with two dimensions, the first one holds replicas.
        device: where the shards lie, unless they are offloaded.
        computes_in: what forward and backward compute in; None for the parameters' own format.

    Raises:
        ValueError: the plan names modules that the model does not have, or the first process has no weights to send.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    layers, units = layers_of(model, plan), units_of(model, plan)
    if plan.activation_checkpointing:
        recompute(layers, plan)
    received = _Received(device, plan)
    for unit in [*units, Unit((model,))]:
        received.weights_of(unit.modules)
        # Parameters without values, of which some may be left out, have been replaced.
        keywords = fully_shard_keywords(model, plan, mesh, device, computes_in)
        if computes_in is not None:
            _train_in_float32(unit.modules)
        if unit.modules == (model,):
            # torch keeps what the outermost module gathers until its backward pass, which comes at once.
            fully_shard(model, **{name: value for name, value in keywords.items() if name != "reshard_after_forward"})
        else:
            modules: Any = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            reshards = keywords["reshard_after_forward"] and unit.reshards
            fully_shard(modules, **{**keywords, "reshard_after_forward": reshards})
    if plan.forward_prefetch:
        _gather_ahead(layers)
    if hasattr(model, "generate"):
        # It may call a part of the model past the outermost module, whose parameters have to be whole then.
        register_fsdp_forward_method(model, "generate")


def fully_shard_keywords(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, device: torch.device, computes_in: torch.dtype | None
) -> dict[str, Any]:
    """The keywords of torch's `fully_shard` that a plan stands for."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    # Outputs stay as they come: the loss in the float32 that models compute it in.
    policy: dict[str, Any] = dict.fromkeys(("param_dtype", "reduce_dtype"), computes_in)
    if plan.mixed_precision_policy is not None:
        policy = {
            name: getattr(torch, value) if isinstance(value, str) else value
            for name, value in plan.mixed_precision_policy.items()
        }
    keywords: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(**policy),
        # Where the CPU computes, everything lies in the host's memory anyway.
        "offload_policy": CPUOffloadPolicy() if plan.cpu_offload and device.type != "cpu" else OffloadPolicy(),
    }
    ignored = ignored_parameters(model, plan.ignored_modules)
    if ignored:
        keywords["ignored_params"] = ignored
    return keywords


def exchange_parameters(optimizer: Any, names: dict[int, str], sharded: dict[str, nn.Parameter]) -> None:
    """Put sharded parameters, and shards of their states, in the place of those that an optimizer was made with.

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


# ---- Activations -----------------------------------------------------------------------------------------------------


def recompute(layers: Iterable[nn.Module], plan: ShardingPlan) -> None:
    """Let layers compute their activations again in the backward pass, within what gathers their parameters.

    Raises:
        ValueError: there are no layers.
    """
    layers = list(layers)
    if not layers:
        raise ValueError(
            "fsdp_config has activation_checkpointing, which computes wrapped layers again, and no layer is wrapped. "
            "Name their classes in transformer_layer_cls_to_wrap, or give min_num_params."
        )
    for layer in layers:
        if not getattr(layer, RECOMPUTES, False):
            layer.forward = _recomputing(layer.forward, plan.activation_checkpointing_offload)
            setattr(layer, RECOMPUTES, True)


def _recomputing(forward: Callable[..., Any], offloads: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_that_is_computed_again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not offloads:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return forward_that_is_computed_again


def _gather_ahead(layers: list[nn.Module]) -> None:
    sharded: list[Any] = [layer for layer in layers if is_a(layer, "resharding module")]
    for layer, following in pairwise(sharded):
        layer.set_modules_to_forward_prefetch([following])


# ---- Weights ---------------------------------------------------------------------------------------------------------


class _Received:
    """Gives all processes the weights of the first one, module by module, before these are sharded.

    Parameters:
        device: where what the processes send each other lies.
        plan: whether they do, and whether only the first one has weights.
    """

    def __init__(self, device: torch.device, plan: ShardingPlan):
        self._device = device
        self._plan = plan
        self._is_alone = dist.get_world_size() == 1
        # They stay whole, so that several modules may share one.
        self._buffers: dict[int, tuple[Any, Any]] = {}

    def weights_of(self, modules: Iterable[nn.Module]) -> None:
        """Receive the parameters and buffers of modules that are not sharded yet.

        Raises:
            ValueError: the first process has none.
        """
        # Modules that share a parameter come here together; to know it for longer would keep it whole.
        parameters: dict[int, tuple[Any, Any]] = {}
        for module in (part for one in modules for part in one.modules()):
            for tensors, known in ((module._parameters, parameters), (module._buffers, self._buffers)):
                for name, tensor in tensors.items():
                    if tensor is not None and not is_a(tensor, "sharded tensor"):
                        if id(tensor) not in known:
                            made = self._received(tensor, name)
                            # Both are kept here, so that no other tensor gets the id of one.
                            known[id(tensor)] = known[id(made)] = tensor, made
                        tensors[name] = known[id(tensor)][1]

    def _received(self, tensor: Any, name: str) -> Any:
        made = tensor
        if tensor.is_meta:
            if dist.get_rank() == 0 or not self._plan.sync_module_states:
                raise ValueError(
                    f"The model's parameter {name} has no values (device meta) in process {dist.get_rank()}, so there "
                    "is nothing to shard. Load the weights, or give the parameters values by to_empty() and an "
                    "initialisation."
                )
            empty = torch.empty_like(tensor, device=self._device)
            made = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        if self._plan.sync_module_states and not self._is_alone:
            sent = made.data.to(self._device).contiguous()
            dist.broadcast(sent, src=0)
            made.data = sent
        return made


def _train_in_float32(modules: Iterable[nn.Module]) -> None:
    # Gradients are exchanged, and weights updated, in the format of the parameters.
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_floating_point() and not is_a(parameter, "sharded tensor"):
                parameter.data = parameter.data.float()


def _not_sharded(trainer: Trainer) -> list[nn.Parameter]:
    """Parameters of modules that the plan leaves out, in an order that is the same in all processes."""
    plan = sharding_plan(trainer.args)
    assert plan is not None
    ignored = {id(parameter) for parameter in ignored_parameters(trainer.model, plan.ignored_modules)}
    return [parameter for parameter in trainer.model.parameters() if id(parameter) in ignored]


def _data_parallel_dimensions(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
