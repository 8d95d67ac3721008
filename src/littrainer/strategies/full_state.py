"""Models and optimizers whose tensors are spread over processes, put together and spread again.

Everything here is called in all processes at once. What is whole is on the host, in the first process only; the others
have an empty dict for it. A parameter that is spread is one of torch's DTensors (FSDP2, tensor parallelism) or belongs
to a module of FSDP's first version.
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

from littrainer.distributed.collectives import get_full_tensor, get_rank, get_world_size
from littrainer.model.traversal import list_modules
from littrainer.optim.parameter_groups import GROUP_INDEX
from littrainer.runtime.lazy_isinstance import is_a, loaded_classes


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters of a model are spread over processes."""
    kinds = loaded_classes("sharded tensor")
    sharded = [kind for kind in set(map(type, model.parameters())) if issubclass(kind, kinds)]
    return bool(sharded) or has_flat_shards(model)


def has_flat_shards(model: nn.Module) -> bool:
    """Whether a model is spread by FSDP's first version, which joins parameters to flat ones."""
    kinds = loaded_classes("flat sharded module")
    return bool([kind for kind in set(map(type, list_modules(model))) if issubclass(kind, kinds)])


def reshard_gathered(model: nn.Module) -> None:
    """Let go of weights that FSDP has gathered for a forward pass and kept; they would hide the parts."""
    kinds: Any = loaded_classes("resharding module")
    for module in list_modules(model):
        if isinstance(module, kinds):
            module.reshard()


def get_full_state_dict(model: nn.Module) -> dict[str, Any]:
    """A sharded model's weights under the names that it has without wrappers."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    reshard_gathered(model)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=get_world_size() > 1))


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a sharded model the weights that the first process has; names that it lacks keep their values.

    Parameters:
        state: the weights under the model's names; read in the first process only.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    reshard_gathered(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=get_world_size() > 1, strict=False)
    set_model_state_dict(model, dict(state) if get_rank() == 0 else {}, options=options)


def get_full_optimizer_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The state of a sharded model's optimizer, with parameters' names instead of their numbers."""
    if has_flat_shards(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=get_world_size() > 1)
        return dict(get_optimizer_state_dict(model, optimizer, options=options))
    numbered = optimizer.state_dict()
    # All processes gather the same tensor at the same time.
    state = {
        number: {entry: _whole(value) for entry, value in entries.items()}
        for number, entries in sorted(numbered["state"].items())
    }
    return (
        key_by_name({**numbered, "state": state}, get_optimizer_parameter_names(model, optimizer))
        if get_rank() == 0
        else {}
    )


def load_full_optimizer_state(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> None:
    """Give a sharded model's optimizer the state that the first process has.

    Parameters:
        state: with the names of parameters or with their numbers; read in the first process only.
    """
    if has_flat_shards(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=get_world_size() > 1)
        given = key_by_name(state, get_optimizer_parameter_names(model, optimizer)) if get_rank() == 0 else {}
        set_optimizer_state_dict(model, optimizer, given, options=options)
        return
    numbered = convert_to_param_ids(model, optimizer, state) if get_rank() == 0 else {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    received = _sent_without_tensors(numbered)
    for number, entries in received["state"].items():
        parameter = parameters[number]
        for entry, value in entries.items():
            if isinstance(value, _Tensor):
                full = _sent(numbered["state"][number][entry] if get_rank() == 0 else None, value, parameter)
                entries[entry] = shard_like(parameter, full)
    optimizer.load_state_dict(received)


# ---- Names and numbers of parameters ---------------------------------------------------------------------------------


def get_optimizer_parameter_names(model: nn.Module, optimizer: Any) -> list[str]:
    """The names of an optimizer's parameters in the order of its groups; a number for one that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(id(parameter), str(number)) for number, parameter in enumerate(parameters)]


def is_keyed_by_name(state: Any) -> bool:
    """Whether an optimizer's state has names of parameters, as that of a sharded model has in a checkpoint."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    members = [member for group in groups for member in group["params"]] if isinstance(groups, list) else []
    return any(isinstance(member, str) for member in members)


def key_by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state with the names of parameters.

    Parameters:
        names: of the optimizer's parameters, in the order of its groups.
    """
    if is_keyed_by_name(state):
        return dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return _with_other_keys(state, dict(zip(numbers, names, strict=True)))


def by_number(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state with the numbers of parameters, as torch's optimizers load it.

    Parameters:
        names: of the optimizer's parameters, in the order of its groups.

    Raises:
        ValueError: it is the state of other parameters.
    """
    if not is_keyed_by_name(state):
        return dict(state)
    stored = [name for group in state["param_groups"] for name in group["params"]]
    others = sorted(set(stored) ^ set(names))
    if others:
        raise ValueError(
            f"The optimizer's state is that of other parameters: {', '.join(others[:5])} "
            f"{'is' if len(others) == 1 else 'are'} only on one side. Set up the model as it was when the checkpoint "
            "was written, or load its model and start a new training."
        )
    return _with_other_keys(state, {name: number for number, name in enumerate(names)})


def _with_other_keys(state: Mapping[str, Any], key_of: Mapping[Any, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [key_of[key] for key in group["params"]]} for group in state["param_groups"]]
    entries = {key_of[key]: entries for key, entries in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def convert_to_param_ids(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with the numbers of parameters, in the groups that the optimizer has them in.

    If a model is split between processes, split parameters and whole ones are in different groups.

    Parameters:
        state: with the names of parameters or with their numbers.

    Raises:
        ValueError: it is the state of other parameters.
    """
    groups = optimizer.param_groups
    if not is_keyed_by_name(state):
        whole = _groups_of_whole_parameters(model, groups)
        stored = state.get("param_groups")
        if not isinstance(stored, list) or [len(names) for names in whole] != [_members(group) for group in stored]:
            return dict(state)
        state = key_by_name(state, [name for names in whole for name in names])
    numbered = by_number(state, get_optimizer_parameter_names(model, optimizer))
    regrouped = _regrouped(numbered["param_groups"], [len(group["params"]) for group in groups])
    if regrouped is None:
        return numbered
    marks = [{GROUP_INDEX: group[GROUP_INDEX]} if GROUP_INDEX in group else {} for group in groups]
    return {**numbered, "param_groups": [{**group, **mark} for group, mark in zip(regrouped, marks, strict=True)]}


def convert_to_unsharded_param_ids(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """A sharded model's optimizer state with the numbers and groups that parameters have if none is split."""
    groups = _groups_of_whole_parameters(model, optimizer.param_groups)
    numbered = by_number(state, [name for names in groups for name in names])
    regrouped = _regrouped(numbered["param_groups"], [len(names) for names in groups])
    return {**numbered, "param_groups": regrouped or numbered["param_groups"]}


def _groups_of_whole_parameters(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    """Names of parameters by group, in the model's order if a group is in parts."""
    place_and_name = {id(one): (place, name) for place, (name, one) in enumerate(model.named_parameters())}
    number = itertools.count()
    joined: list[list[tuple[int, str]]] = []
    part_of = None
    for group in groups:
        members = [
            place_and_name.get(id(one), (sys.maxsize, str(n))) for one, n in zip(group["params"], number, strict=False)
        ]
        if part_of is not None and group.get(GROUP_INDEX) == part_of:
            joined[-1] = sorted(joined[-1] + members)
        else:
            joined.append(members)
        part_of = group.get(GROUP_INDEX)
    return [[name for _, name in members] for members in joined]


def _regrouped(groups: list[dict[str, Any]], sizes: list[int]) -> list[dict[str, Any]] | None:
    """Groups of other sizes, each with the settings that its parameters had; None if these had several."""
    holder = {number: index for index, group in enumerate(groups) for number in group["params"]}
    made: list[dict[str, Any]] = []
    first = 0
    for size in sizes:
        numbers = list(range(first, first + size))
        found = [_settings(groups[index]) for index in sorted({holder[number] for number in numbers})]
        if not numbers:
            found = [_settings(group) for group in groups[len(made) : len(made) + 1]]
        if not found or any(settings != found[0] for settings in found):
            return None
        made.append({**found[0], "params": numbers})
        first += size
    return made


def _members(group: Any) -> int | None:
    return len(group["params"]) if isinstance(group, Mapping) and isinstance(group.get("params"), list) else None


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", GROUP_INDEX)}


# ---- Tensors ---------------------------------------------------------------------------------------------------------


def shard_like(parameter: torch.Tensor, full: Any) -> Any:
    """A tensor that all processes have, kept in the parts in which a parameter is; another shape is kept whole."""
    if not is_a(parameter, "sharded tensor") or not isinstance(full, torch.Tensor) or full.dim() == 0:
        return full
    from torch.distributed.tensor import Replicate, distribute_tensor

    spread: Any = parameter
    placements = spread.placements if full.shape == spread.shape else [Replicate()] * spread.device_mesh.ndim
    # Releases of torch without this option let the first process send each its part.
    can_be_told = "src_data_rank" in inspect.signature(distribute_tensor).parameters
    keywords: dict[str, Any] = {"src_data_rank": None} if can_be_told else {}
    return distribute_tensor(full.to(spread.device_mesh.device_type), spread.device_mesh, placements, **keywords)


def _whole(value: Any) -> Any:
    full = get_full_tensor(value)
    if get_rank() != 0:
        return None
    return full.detach().cpu() if isinstance(full, torch.Tensor) else full


class _Tensor(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


def _sent_without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The first process's state in all of them, each of its tensors replaced by what is known of it."""
    skeleton = {
        **state,
        "state": {
            number: {
                entry: _Tensor(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
                for entry, value in entries.items()
            }
            for number, entries in state.get("state", {}).items()
        },
    }
    box: list[Any] = [skeleton]
    if get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _sent(value: torch.Tensor | None, known: _Tensor, parameter: torch.Tensor) -> torch.Tensor:
    mesh: Any = getattr(parameter, "device_mesh", None)
    device = torch.device(parameter.device.type if mesh is None else mesh.device_type)
    full = (
        torch.empty(known.shape, dtype=known.dtype, device=device) if value is None else value.to(device).contiguous()
    )
    if get_world_size() > 1:
        dist.broadcast(full, src=0)
    return full
