"""Parameters, gradients and optimizer states sharded over the processes (FSDP2), on GPUs and on CPUs.

The model is sharded in place: its modules stay the user's objects, and its parameters become torch's DTensors.
"""

from __future__ import annotations

import functools
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

# Marks a layer whose activations are computed again in the backward pass.
RECOMPUTES = "_littrainer_recomputes"

# Modules that only hold others: torch shards what has a forward pass.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


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

    layers, units = find_wrapped_layers(model, plan), find_units(model, plan)
    if plan.activation_checkpointing:
        checkpoint_activations(layers, plan)
    received = _Received(device, plan)
    for unit in [*units, Unit((model,))]:
        received.weights_of(unit.modules)
        # Parameters without values, of which some may be left out, have been replaced.
        keywords = get_fully_shard_keywords(model, plan, mesh, device, computes_in)
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


def get_fully_shard_keywords(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, device: torch.device, computes_in: torch.dtype | None
) -> dict[str, Any]:
    """The keywords of torch's `fully_shard` that a plan stands for."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    # Outputs stay as they come: the loss in the float32 that models compute it in.
    keywords: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=computes_in),
        # If the CPU computes, everything lies in the host's memory anyway.
        "offload_policy": CPUOffloadPolicy() if plan.cpu_offload and device.type != "cpu" else OffloadPolicy(),
    }
    ignored = find_ignored_parameters(model, plan.ignored_modules)
    if ignored:
        keywords["ignored_params"] = ignored
    return keywords


# ---- Activations -----------------------------------------------------------------------------------------------------


def checkpoint_activations(layers: Iterable[nn.Module], plan: ShardingPlan) -> None:
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


# ---- What is sharded each for itself ---------------------------------------------------------------------------------


class Unit(NamedTuple):
    """Modules whose parameters are gathered and freed together.

    Parameters:
        reshards: whether they are freed after the forward pass, if the plan says that any are.
    """

    modules: tuple[nn.Module, ...]
    reshards: bool = True


def find_wrapped_layers(model: nn.Module, plan: ShardingPlan) -> list[nn.Module]:
    """The layers that the plan wraps, inner ones first.

    Raises:
        ValueError: a class that it names is not in the model.
    """
    if plan.auto_wrap_policy == NO_WRAP:
        return []
    owned = _Owners(model)
    if plan.auto_wrap_policy == SIZE_BASED:
        return _by_size(model, plan.min_num_params, owned)
    classes = find_layer_classes(model, plan)
    return [
        module
        for module in bottom_up(model)
        if module is not model and type(module) in classes and owned.are_only_in([module])
    ]


def find_layer_classes(model: nn.Module, plan: ShardingPlan) -> set[type[nn.Module]]:
    """The classes of layers that the plan names, or of those that the model itself wants to be kept in one piece.

    Raises:
        ValueError: one that the plan names is not in the model.
    """
    known = {type(module).__name__: type(module) for module in model.modules()}
    named = plan.transformer_layer_cls_to_wrap
    if named is None:
        own: Any = getattr(model, "_no_split_modules", None) or ()
        return {known[name] for name in own if name in known}
    for name in named:
        if name not in known:
            raise ValueError(
                f"fsdp_config has transformer_layer_cls_to_wrap={name!r}, and {type(model).__name__} has no module of "
                f"that class ({suggest_name(name, known)})."
            )
    return {known[name] for name in named}


def find_units(model: nn.Module, plan: ShardingPlan) -> list[Unit]:
    """What is sharded each for itself, inner modules first; the model, with what is left of it, comes after them."""
    layers = find_wrapped_layers(model, plan)
    units = [Unit((layer,)) for layer in layers]
    if plan.auto_wrap_policy != TRANSFORMER_BASED or not layers:
        return units
    owned, within = _Owners(model), {id(part) for layer in layers for part in layer.modules()}
    embedding, head = (_embedding(model, name) for name in ("get_input_embeddings", "get_output_embeddings"))
    if embedding is not None and id(embedding) not in within and owned.are_only_in([embedding]):
        units.append(Unit((embedding,)))
    norm = _last_norm(model)
    if head is not None and norm is not None and not {id(head), id(norm)} & within and owned.are_only_in([head, norm]):
        # They are the last ones of the forward pass and the first ones of the backward pass. The norm runs first, also
        # where a loss reads the head's weight past its forward.
        units.append(Unit((norm, head), reshards=False))
    return units


def find_ignored_parameters(model: nn.Module, pattern: str | None) -> set[nn.Parameter]:
    """The parameters of modules whose names match; they stay whole in each process.

    Raises:
        ValueError: it is no regular expression, or matches nothing.
    """
    modules = [] if pattern is None else ignored_modules(model, pattern)
    return {parameter for module in modules for parameter in module.parameters()}


def ignored_modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    """The modules whose whole names match.

    Raises:
        ValueError: the pattern is no regular expression, or matches nothing.
    """
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


def bottom_up(model: nn.Module) -> Iterator[nn.Module]:
    """All modules, each once and after those in it."""
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child in module.children():
            yield from walk(child)
        yield module

    return walk(model)


class _Owners:
    """Which modules hold each parameter; one that is shared cannot be sharded with one of them alone."""

    def __init__(self, model: nn.Module):
        self._holders: dict[int, set[int]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), set()).add(id(module))

    def are_only_in(self, modules: Iterable[nn.Module]) -> bool:
        """Whether there are parameters in the modules, all of which nothing else holds."""
        modules = list(modules)
        inside = {id(part) for module in modules for part in module.modules()}
        held = [self._holders[id(parameter)] for module in modules for parameter in module.parameters()]
        return bool(held) and all(holders <= inside for holders in held)


def _by_size(model: nn.Module, smallest: int, owned: _Owners) -> list[nn.Module]:
    chosen: list[nn.Module] = []
    taken: set[int] = set()
    for module in bottom_up(model):
        if module is model or isinstance(module, CONTAINERS):
            continue
        left = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        if sum(parameter.numel() for parameter in left) >= smallest and owned.are_only_in([module]):
            chosen.append(module)
            taken.update(map(id, left))
    return chosen


def _embedding(model: nn.Module, method: str) -> nn.Module | None:
    try:
        found = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def _last_norm(model: Any) -> nn.Module | None:
    """The norm between the last layer and the head, a direct part of the model without its head."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    base = getattr(inner, getattr(inner, "base_model_prefix", "") or "", inner)
    norms = [part for part in base.children() if "norm" in type(part).__name__.lower()]
    return norms[-1] if norms else None
