"""FSDP2, in place: modules stay the user's objects, and parameters become DTensors."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from littrainer.arguments.did_you_mean import suggest_name
from littrainer.arguments.sharding import NO_WRAP, SIZE_BASED, TRANSFORMER_BASED, ShardingPlan
from littrainer.runtime.lazy_isinstance import is_a

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Attribute of layers with activation checkpointing.
CHECKPOINTED = "_littrainer_checkpointed"

# Modules without forward, which torch cannot shard.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def shard(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Shard a model in place.

    Parameters:
        mesh: the processes; with two dimensions, the first dimension holds replicas.
        dtype: dtype of forward and backward; None: that of the parameters.

    Raises:
        ValueError: the plan names modules that the model does not have, or the first process has no weights.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    layers, units = find_wrapped_layers(model, plan), find_units(model, plan)
    if plan.activation_checkpointing:
        checkpoint_activations(layers, plan)
    broadcaster = _WeightBroadcaster(device, plan)
    for unit in [*units, Unit((model,))]:
        broadcaster.broadcast(unit.modules)
        # Not before: the broadcast replaces meta parameters, which the plan may ignore.
        keywords = get_fully_shard_keywords(model, plan, mesh, device, dtype)
        if dtype is not None:
            _convert_trained_to_float32(unit.modules)
        if unit.modules == (model,):
            # The default keeps the root's parameters, since its backward follows at once.
            fully_shard(model, **{name: value for name, value in keywords.items() if name != "reshard_after_forward"})
        else:
            modules: Any = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            reshards = keywords["reshard_after_forward"] and unit.reshards
            fully_shard(modules, **{**keywords, "reshard_after_forward": reshards})
    if plan.forward_prefetch:
        _set_forward_prefetch(layers)
    if hasattr(model, "generate"):
        # `generate` may bypass the root's forward, which gathers the root's parameters.
        register_fsdp_forward_method(model, "generate")


def get_fully_shard_keywords(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype | None
) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    # No output_dtype: models compute their loss in float32.
    keywords: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "offload_policy": CPUOffloadPolicy() if plan.cpu_offload and device.type != "cpu" else OffloadPolicy(),
    }
    ignored = find_ignored_parameters(model, plan.ignored_modules)
    if ignored:
        keywords["ignored_params"] = ignored
    return keywords


# ---- Activations -----------------------------------------------------------------------------------------------------


def checkpoint_activations(layers: Iterable[nn.Module], plan: ShardingPlan) -> None:
    """Add activation checkpointing to layers, inside FSDP's hooks."""
    layers = list(layers)
    if not layers:
        raise ValueError(
            "fsdp_config has activation_checkpointing, which computes wrapped layers again, and no layer is wrapped. "
            "Name their classes in transformer_layer_cls_to_wrap, or give min_num_params."
        )
    for layer in layers:
        if not getattr(layer, CHECKPOINTED, False):
            layer.forward = _checkpoint_forward(layer.forward, plan.activation_checkpointing_offload)
            setattr(layer, CHECKPOINTED, True)


def _checkpoint_forward(forward: Callable[..., Any], offloads: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not offloads:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed_forward


def _set_forward_prefetch(layers: list[nn.Module]) -> None:
    sharded: list[Any] = [layer for layer in layers if is_a(layer, "resharding module")]
    for layer, next_layer in pairwise(sharded):
        layer.set_modules_to_forward_prefetch([next_layer])


# ---- Weights ---------------------------------------------------------------------------------------------------------


class _WeightBroadcaster:
    """Broadcaster of the first process's unsharded weights."""

    def __init__(self, device: torch.device, plan: ShardingPlan):
        self._device = device
        self._plan = plan
        # Buffers are not sharded, so that modules of several units can share them.
        self._buffers: dict[int, tuple[Any, Any]] = {}

    def broadcast(self, modules: Iterable[nn.Module]) -> None:
        # A unit contains all holders of its parameters. Keeping full parameters for longer would waste memory.
        parameters: dict[int, tuple[Any, Any]] = {}
        for module in itertools.chain.from_iterable(module.modules() for module in modules):
            for tensors, results in ((module._parameters, parameters), (module._buffers, self._buffers)):
                for name, tensor in tensors.items():
                    if tensor is not None and not is_a(tensor, "sharded tensor"):
                        if id(tensor) not in results:
                            result = self._broadcast_tensor(tensor, name)
                            # Keep both tensors alive, so that their ids stay unique.
                            results[id(tensor)] = results[id(result)] = tensor, result
                        tensors[name] = results[id(tensor)][1]

    def _broadcast_tensor(self, tensor: Any, name: str) -> Any:
        result = tensor
        if tensor.is_meta:
            if dist.get_rank() == 0 or not self._plan.sync_module_states:
                raise ValueError(
                    f"The model's parameter {name} has no values (device meta) in process {dist.get_rank()}, so there "
                    "is nothing to shard. Load the weights, or give the parameters values by to_empty() and an "
                    "initialisation."
                )
            empty = torch.empty_like(tensor, device=self._device)
            result = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        if self._plan.sync_module_states and dist.get_world_size() > 1:
            data = result.data.to(self._device).contiguous()
            dist.broadcast(data, src=0)
            result.data = data
        return result


def _convert_trained_to_float32(modules: Iterable[nn.Module]) -> None:
    # Gradients are reduced, and weights updated, in the parameters' dtype.
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_floating_point() and not is_a(parameter, "sharded tensor"):
                parameter.data = parameter.data.float()


# ---- Units of sharding -----------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """Modules whose parameters are gathered together, and freed after forward if `reshards` and the plan allow it."""

    modules: tuple[nn.Module, ...]
    reshards: bool = True


def find_wrapped_layers(model: nn.Module, plan: ShardingPlan) -> list[nn.Module]:
    """Return the layers that the plan wraps, inner layers first."""
    if plan.auto_wrap_policy == NO_WRAP:
        return []
    are_exclusive = _find_exclusive(model)
    if plan.auto_wrap_policy == SIZE_BASED:
        return _choose_by_size(model, plan.min_num_params, are_exclusive)
    classes = find_layer_classes(model, plan)
    return [
        module
        for module in iterate_bottom_up(model)
        if module is not model and type(module) in classes and are_exclusive(module)
    ]


def find_layer_classes(model: nn.Module, plan: ShardingPlan) -> set[type[nn.Module]]:
    """Return the layer classes that the plan names; default: the model's `_no_split_modules`."""
    classes = {type(module).__name__: type(module) for module in model.modules()}
    names = plan.transformer_layer_cls_to_wrap
    if names is None:
        default_names: Any = getattr(model, "_no_split_modules", None) or ()
        return {classes[name] for name in default_names if name in classes}
    for name in names:
        if name not in classes:
            raise ValueError(
                f"fsdp_config has transformer_layer_cls_to_wrap={name!r}, and {type(model).__name__} has no module of "
                f"that class ({suggest_name(name, classes)})."
            )
    return {classes[name] for name in names}


def find_units(model: nn.Module, plan: ShardingPlan) -> list[Unit]:
    """Return the modules to shard separately, inner modules first, without the root."""
    layers = find_wrapped_layers(model, plan)
    units = [Unit((layer,)) for layer in layers]
    if plan.auto_wrap_policy != TRANSFORMER_BASED or not layers:
        return units
    are_exclusive = _find_exclusive(model)
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    embedding = _get_embedding(model, "get_input_embeddings")
    if embedding is not None and id(embedding) not in in_layers and are_exclusive(embedding):
        units.append(Unit((embedding,)))
    norm, head = _find_last_norm(model), _get_embedding(model, "get_output_embeddings")
    if norm is None or head is None or {id(head), id(norm)} & in_layers or not are_exclusive(head, norm):
        return units
    # Forward ends, and backward begins, with this unit, so it does not reshard. The norm's forward gathers the head's
    # weight, which some losses read without calling the head.
    return [*units, Unit((norm, head), reshards=False)]


def find_ignored_parameters(model: nn.Module, pattern: str | None) -> set[nn.Parameter]:
    """Return the parameters of matching modules, which stay replicated."""
    modules = [] if pattern is None else find_ignored_modules(model, pattern)
    return {parameter for module in modules for parameter in module.parameters()}


def find_ignored_modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    try:
        matches = re.compile(pattern).fullmatch
    except re.error as error:
        raise ValueError(
            f"fsdp_config has ignored_modules={pattern!r}, which is no regular expression: {error}."
        ) from error
    modules = [module for name, module in model.named_modules() if matches(name)]
    if not modules:
        raise ValueError(
            f"fsdp_config has ignored_modules={pattern!r}, which matches the whole name of no module of "
            f"{type(model).__name__}. Write it for names as model.named_modules() has them, such as 'encoder.*'."
        )
    return modules


def iterate_bottom_up(model: nn.Module) -> Iterator[nn.Module]:
    visited: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in visited:
            return
        visited.add(id(module))
        for child in module.children():
            yield from walk(child)
        yield module

    return walk(model)


def _find_exclusive(model: nn.Module) -> Callable[..., bool]:
    """Return a function whether modules have parameters that no other module holds, as those of a unit must."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), set()).add(id(module))

    def are_exclusive(*modules: nn.Module) -> bool:
        inside = {id(submodule) for module in modules for submodule in module.modules()}
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return bool(parameters) and all(holders[id(parameter)] <= inside for parameter in parameters)

    return are_exclusive


def _choose_by_size(model: nn.Module, min_elements: int, are_exclusive: Callable[..., bool]) -> list[nn.Module]:
    chosen: list[nn.Module] = []
    covered: set[int] = set()
    for module in iterate_bottom_up(model):
        if module is model or isinstance(module, CONTAINERS):
            continue
        remaining = [parameter for parameter in module.parameters() if id(parameter) not in covered]
        if sum(parameter.numel() for parameter in remaining) >= min_elements and are_exclusive(module):
            chosen.append(module)
            covered.update(map(id, remaining))
    return chosen


def _get_embedding(model: nn.Module, method: str) -> nn.Module | None:
    try:
        embedding = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return embedding if isinstance(embedding, nn.Module) else None


def _find_last_norm(model: Any) -> nn.Module | None:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    base = getattr(inner, getattr(inner, "base_model_prefix", "") or "", inner)
    norms = [module for module in base.children() if "norm" in type(module).__name__.lower()]
    return norms[-1] if norms else None
