"""Full state dicts of sharded models and optimizers.

All functions with state dicts are collective calls. Full state is on the host of the first process; the other processes
have an empty dict. Sharded parameters are DTensors (FSDP2, tensor parallelism) or belong to an FSDP1 module.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from littrainer.distributed.collectives import broadcast_object, get_full_tensor, get_rank, get_world_size
from littrainer.model.traversal import list_modules
from littrainer.optim.parameter_groups import GROUP_INDEX
from littrainer.runtime.lazy_isinstance import is_a, loaded_classes


def is_sharded(model: nn.Module) -> bool:
    kinds = (*loaded_classes("sharded tensor"), *loaded_classes("flat sharded module"))
    return bool([kind for kind in {*map(type, (*model.parameters(), *list_modules(model)))} if issubclass(kind, kinds)])


def has_flat_shards(model: nn.Module) -> bool:
    """Return whether FSDP1 shards the model."""
    kinds = loaded_classes("flat sharded module")
    return bool([kind for kind in set(map(type, list_modules(model))) if issubclass(kind, kinds)])


def reshard_gathered(model: nn.Module) -> None:
    """Free weights that FSDP2 gathered for a forward pass and kept; they hide the shards."""
    kinds: Any = loaded_classes("resharding module")
    for module in list_modules(model):
        if isinstance(module, kinds):
            module.reshard()


def get_full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return weights under their names without wrappers."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    reshard_gathered(model)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=get_world_size() > 1))


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the first process's weights; missing names keep their values."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    reshard_gathered(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=get_world_size() > 1, strict=False)
    set_model_state_dict(model, dict(state) if get_rank() == 0 else {}, options=options)


def get_full_optimizer_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's state, keyed by parameter names."""
    if has_flat_shards(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=get_world_size() > 1)
        return dict(get_optimizer_state_dict(model, optimizer, options=options))
    state_dict = optimizer.state_dict()
    # Sorted, so that all processes gather tensors in the same order.
    state = {
        param_id: {key: _gather_to_first(value) for key, value in entries.items()}
        for param_id, entries in sorted(state_dict["state"].items())
    }
    if get_rank() != 0:
        return {}
    return key_by_name({**state_dict, "state": state}, get_optimizer_parameter_names(model, optimizer))


def load_full_optimizer_state(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the first process's optimizer state, keyed by parameter names or ids."""
    is_first = get_rank() == 0
    if has_flat_shards(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=get_world_size() > 1)
        named = key_by_name(state, get_optimizer_parameter_names(model, optimizer)) if is_first else {}
        set_optimizer_state_dict(model, optimizer, named, options=options)
        return
    full = convert_to_param_ids(model, optimizer, state) if is_first else {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    loaded = _broadcast_without_tensors(full)
    for param_id, entries in loaded["state"].items():
        for key, value in entries.items():
            if isinstance(value, _TensorSpec):
                tensor = full["state"][param_id][key] if is_first else None
                parameter = parameters[param_id]
                entries[key] = shard_like(parameter, _broadcast_tensor(tensor, value, parameter))
    optimizer.load_state_dict(loaded)


# ---- Names and ids of parameters -------------------------------------------------------------------------------------


def get_optimizer_parameter_names(model: nn.Module, optimizer: Any) -> list[str]:
    """Return names in the optimizer's order; numbers for parameters not in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(id(parameter), str(index)) for index, parameter in enumerate(parameters)]


def is_keyed_by_name(state: Any) -> bool:
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    members = [member for group in groups for member in group["params"]] if isinstance(groups, list) else []
    return any(isinstance(member, str) for member in members)


def key_by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the state with `names`, in the order of the groups, in place of ids."""
    if is_keyed_by_name(state):
        return dict(state)
    param_ids = [param_id for group in state["param_groups"] for param_id in group["params"]]
    return _replace_keys(state, dict(zip(param_ids, names, strict=True)))


def key_by_id(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the state with ids in place of names, as torch's optimizers load it.

    Raises:
        ValueError: the state has other parameters.
    """
    if not is_keyed_by_name(state):
        return dict(state)
    stored = [name for group in state["param_groups"] for name in group["params"]]
    unmatched = sorted(set(stored) ^ set(names))
    if unmatched:
        raise ValueError(
            f"The optimizer's state is that of other parameters: {', '.join(unmatched[:5])} "
            f"{'is' if len(unmatched) == 1 else 'are'} only on one side. Set up the model as it was when the "
            "checkpoint was written, or load its model and start a new training."
        )
    return _replace_keys(state, {name: param_id for param_id, name in enumerate(names)})


def _replace_keys(state: Mapping[str, Any], new_keys: Mapping[Any, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [new_keys[key] for key in group["params"]]} for group in state["param_groups"]]
    entries = {new_keys[key]: entries for key, entries in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def convert_to_param_ids(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state, keyed by names or ids, to the optimizer's parameter ids and groups.

    Sharded and replicated parameters of a sharded model are in separate groups.

    Raises:
        ValueError: the state has other parameters.
    """
    groups = optimizer.param_groups
    if not is_keyed_by_name(state):
        names_by_group = _get_unsharded_groups(model, groups)
        stored = state.get("param_groups") or ()
        if [len(names) for names in names_by_group] != [len(group["params"]) for group in stored]:
            return dict(state)
        state = key_by_name(state, [name for names in names_by_group for name in names])
    converted = key_by_id(state, get_optimizer_parameter_names(model, optimizer))
    regrouped = _regroup(converted["param_groups"], [len(group["params"]) for group in groups])
    if regrouped is None:
        return converted
    marks = [{GROUP_INDEX: group[GROUP_INDEX]} if GROUP_INDEX in group else {} for group in groups]
    return {**converted, "param_groups": [{**group, **mark} for group, mark in zip(regrouped, marks, strict=True)]}


def convert_to_unsharded_param_ids(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state to the parameter ids and groups of the unsharded model."""
    groups = _get_unsharded_groups(model, optimizer.param_groups)
    converted = key_by_id(state, [name for names in groups for name in names])
    regrouped = _regroup(converted["param_groups"], [len(names) for names in groups])
    return {**converted, "param_groups": regrouped or converted["param_groups"]}


def _get_unsharded_groups(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    order_and_name = {id(parameter): (index, name) for index, (name, parameter) in enumerate(model.named_parameters())}
    number = itertools.count()
    merged: list[list[tuple[int, str]]] = []
    part_of = None
    for group in groups:
        members = [
            order_and_name.get(id(parameter), (sys.maxsize, str(n)))
            for parameter, n in zip(group["params"], number, strict=False)
        ]
        if part_of is not None and group.get(GROUP_INDEX) == part_of:
            merged[-1] = sorted(merged[-1] + members)
        else:
            merged.append(members)
        part_of = group.get(GROUP_INDEX)
    return [[name for _, name in members] for members in merged]


def _regroup(groups: list[dict[str, Any]], sizes: list[int]) -> list[dict[str, Any]] | None:
    """Return groups of other sizes; None if the parameters of a group differ in settings."""
    group_of = {param_id: index for index, group in enumerate(groups) for param_id in group["params"]}
    regrouped: list[dict[str, Any]] = []
    first = 0
    for size in sizes:
        param_ids = list(range(first, first + size))
        settings = [_get_settings(groups[index]) for index in sorted({group_of[param_id] for param_id in param_ids})]
        if not param_ids:
            settings = [_get_settings(group) for group in groups[len(regrouped) : len(regrouped) + 1]]
        if not settings or any(other != settings[0] for other in settings):
            return None
        regrouped.append({**settings[0], "params": param_ids})
        first += size
    return regrouped


def _get_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", GROUP_INDEX)}


# ---- Tensors ---------------------------------------------------------------------------------------------------------


def shard_like(parameter: torch.Tensor, full: Any) -> Any:
    """Shard a replicated tensor like a parameter; tensors of other shapes stay replicated."""
    if not is_a(parameter, "sharded tensor") or not isinstance(full, torch.Tensor) or full.dim() == 0:
        return full
    from torch.distributed.tensor import Replicate, distribute_tensor

    sharded: Any = parameter
    placements = sharded.placements if full.shape == sharded.shape else [Replicate()] * sharded.device_mesh.ndim
    # Without src_data_rank, older releases of torch scatter from the first process.
    has_src_data_rank = "src_data_rank" in inspect.signature(distribute_tensor).parameters
    keywords: dict[str, Any] = {"src_data_rank": None} if has_src_data_rank else {}
    return distribute_tensor(full.to(sharded.device_mesh.device_type), sharded.device_mesh, placements, **keywords)


def _gather_to_first(value: Any) -> Any:
    full = get_full_tensor(value)
    if get_rank() != 0:
        return None
    return full.detach().cpu() if isinstance(full, torch.Tensor) else full


class _TensorSpec(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


def _broadcast_without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Broadcast the first process's state, with specs in place of tensors."""
    skeleton = {
        **state,
        "state": {
            param_id: {
                key: _TensorSpec(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
                for key, value in entries.items()
            }
            for param_id, entries in state.get("state", {}).items()
        },
    }
    return broadcast_object(skeleton)


def _broadcast_tensor(value: torch.Tensor | None, spec: _TensorSpec, parameter: torch.Tensor) -> torch.Tensor:
    mesh: Any = getattr(parameter, "device_mesh", None)
    device = torch.device(parameter.device.type if mesh is None else mesh.device_type)
    full = torch.empty(spec.shape, dtype=spec.dtype, device=device) if value is None else value.to(device).contiguous()
    if get_world_size() > 1:
        dist.broadcast(full, src=0)
    return full
