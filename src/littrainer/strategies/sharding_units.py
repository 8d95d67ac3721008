"""Which modules of a model are sharded each for itself, so that only one of them is whole at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from littrainer.arguments.did_you_mean import suggestion
from littrainer.arguments.sharding import NO_WRAP, SIZE_BASED, TRANSFORMER_BASED, ShardingPlan

# Modules that only hold others: torch shards what has a forward pass.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Unit(NamedTuple):
    """Modules whose parameters are gathered and freed together.

    Parameters:
        reshards: whether they are freed after the forward pass, where the plan says that they are at all.
    """

    modules: tuple[nn.Module, ...]
    reshards: bool = True


def layers_of(model: nn.Module, plan: ShardingPlan) -> list[nn.Module]:
    """The layers that the plan wraps, inner ones first.

    Raises:
        ValueError: a class that it names is not in the model.
    """
    if plan.auto_wrap_policy == NO_WRAP:
        return []
    owned = _Owners(model)
    if plan.auto_wrap_policy == SIZE_BASED:
        return _by_size(model, plan.min_num_params, owned)
    classes = layer_classes(model, plan)
    return [
        module
        for module in bottom_up(model)
        if module is not model and type(module) in classes and owned.are_only_in([module])
    ]


def layer_classes(model: nn.Module, plan: ShardingPlan) -> set[type[nn.Module]]:
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
                f"that class ({suggestion(name, known)})."
            )
    return {known[name] for name in named}


def units_of(model: nn.Module, plan: ShardingPlan) -> list[Unit]:
    """What is sharded each for itself, inner modules first; the model, with what is left of it, comes after them."""
    layers = layers_of(model, plan)
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


def ignored_parameters(model: nn.Module, pattern: str | None) -> set[nn.Parameter]:
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
