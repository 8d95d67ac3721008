"""Tensor parallelism: each process computes a slice of each layer, on the same data.

The model's attribute `tp_plan` maps names of layers, with `*` for layer numbers, to styles:
`{"layers.*.mlp.up_proj": "colwise"}`. Models of transformers have such a plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from littrainer.runtime.lazy_isinstance import is_a
from littrainer.strategies.full_state import is_sharded

logger = logging.getLogger(__name__)


class ReplicateWithGradAllReduce(ParallelStyle):
    """Style (sums gradients) of a replicated layer that each process applies to its slice, such as norms of heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        # Hook in forward: parameters may be replaced after parallelize_module.
        hooked: dict[str, nn.Parameter] = {}

        def sum_over_processes(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone()
            dist.all_reduce(total, group=group)
            return total

        def hook_parameters(module: nn.Module, inputs: Any) -> None:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and hooked.get(name) is not parameter:
                    hooked[name] = parameter
                    parameter.register_hook(sum_over_processes)

        module.register_forward_pre_hook(hook_parameters)
        return module


class Style(NamedTuple):
    """Style of a plan.

    Parameters:
        dimension: sharded dimension of the layer's weight; None: replicated.
        layer: class of layers that support the style.
        split: number of features, an attribute of the layer, that the number of processes must divide.
    """

    create: Callable[[], ParallelStyle]
    dimension: int | None
    layer: type[nn.Module] = nn.Linear
    split: str | None = None


# Names in plans of all releases of transformers.
STYLES: dict[str, Style] = {
    "colwise": Style(ColwiseParallel, 0, split="out_features"),
    "colwise_gather_output": Style(lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "colwise_rep": Style(lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "rowwise": Style(RowwiseParallel, 1, split="in_features"),
    "rowwise_split_input": Style(lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "rowwise_rep": Style(lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "embedding_rowwise": Style(lambda: RowwiseParallel(input_layouts=Replicate()), 0, nn.Embedding),
    "embedding_colwise": Style(lambda: ColwiseParallel(output_layouts=Replicate()), 1, nn.Embedding),
    "replicated_with_grad_allreduce": Style(ReplicateWithGradAllReduce, None, nn.Module),
}
# In errors: the alternative to tensor parallelism.
SHARDING_HINT = "fsdp (in a lightning.Trainer ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1))"
# Numbers in a model's config that the number of processes must divide.
SPLIT_HEADS = ("num_attention_heads", "num_key_value_heads")


def parallelize_by_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model's layers over a one-dimensional mesh, in place; a collective call.

    The first process's weights are broadcast. A sharded model is not changed.

    Raises:
        ValueError: the model has no plan, or the plan does not support this number of processes.
    """
    if is_sharded(model):
        return
    styles = find_layer_styles(model, get_tp_plan(model), mesh.size())
    ties = _find_tied_parameters(model)
    _broadcast_weights(model)
    for name in _drop_inconsistent_ties(styles, ties):
        # Without a source rank, each process slices its copy.
        parallelize_module(model.get_submodule(name), mesh, STYLES[styles[name]].create(), src_data_rank=None)
    _retie(model, ties)


def get_tp_plan(model: nn.Module) -> Mapping[str, str]:
    name = type(model).__name__
    if is_a(model, "peft model"):
        raise ValueError(
            f"parallelism_config has tp_size above 1, and adapters ({name}) have no plan for it. Leave tp_size at 1, "
            f"and use {SHARDING_HINT}; or train the model without adapters."
        )
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise ValueError(
            f"parallelism_config has tp_size above 1, and {name} has no plan of how to split its layers (tp_plan). "
            'Give it an attribute tp_plan such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, or leave '
            f"tp_size at 1 and use {SHARDING_HINT}."
        )
    return plan


def find_layer_styles(model: nn.Module, plan: Mapping[str, str], processes: int) -> dict[str, str]:
    """Return the style of each layer in a plan.

    Raises:
        ValueError: a style is unknown or does not fit its layer, or features or heads are not divisible.
    """
    _check_heads(model, processes)
    styles: dict[str, str] = {}
    unused = set(plan)
    for name, layer in model.named_modules():
        rule = next((rule for rule in (name, _replace_numbers(name)) if rule in plan), None)
        if rule is None:
            continue
        unused.discard(rule)
        _check_layer(name, layer, plan[rule], processes)
        styles[name] = plan[rule]
    parameters = {_replace_numbers(name) for name, _ in model.named_parameters()}
    for rule in sorted(unused & parameters):
        raise ValueError(_describe_unknown_style(f"the parameter {rule}", plan[rule]))
    if unused:
        logger.warning(
            "tp_plan names layers that %s does not have: %s.", type(model).__name__, ", ".join(sorted(unused))
        )
    return styles


def _replace_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _check_heads(model: nn.Module, processes: int) -> None:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in SPLIT_HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % processes:
            raise ValueError(
                f"parallelism_config has tp_size={processes}, which does not divide the {name}={heads} of "
                f"{type(model).__name__}. Choose a tp_size that does, or leave it at 1 and use {SHARDING_HINT}."
            )


def _check_layer(name: str, layer: nn.Module, style_name: str, processes: int) -> None:
    style = STYLES.get(style_name)
    if style is None:
        raise ValueError(_describe_unknown_style(name, style_name))
    if not isinstance(layer, style.layer):
        raise ValueError(
            f"tp_plan splits {name} by the style {style_name!r}, which is for {style.layer.__name__}, and it is a "
            f"{type(layer).__name__}. Correct the plan, or leave tp_size at 1."
        )
    features = processes if style.split is None else getattr(layer, style.split)
    if features % processes:
        raise ValueError(
            f"parallelism_config has tp_size={processes}, which does not divide the {style.split}={features} of "
            f"{name}. Choose a tp_size that does, or leave it at 1 and use {SHARDING_HINT}."
        )


def _describe_unknown_style(name: str, style: str) -> str:
    return (
        f"tp_plan splits {name} by the style {style!r}, and littrainer knows {', '.join(STYLES)}. Let transformers "
        "split the model when it is loaded: from_pretrained(..., distributed_config=DistributedConfig(tp_size=...)); "
        f"or leave tp_size at 1 and use {SHARDING_HINT}."
    )


def _find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _drop_inconsistent_ties(styles: Mapping[str, str], ties: Iterable[list[str]]) -> list[str]:
    """Return the layers to shard, without ties of different dimensions."""
    consistent = dict(styles)
    for tied in ties:
        layers = [name.rpartition(".")[0] for name in tied]
        dimensions = {STYLES[styles[layer]].dimension if layer in styles else None for layer in layers}
        if len(dimensions) > 1:
            for layer in layers:
                if consistent.pop(layer, None) is not None:
                    logger.info("%s shares its weight with a layer that is split otherwise, and stays whole.", layer)
    return list(consistent)


def _retie(model: nn.Module, ties: Iterable[list[str]]) -> None:
    for first, *aliases in ties:
        shared = model.get_parameter(first)
        for name in aliases:
            layer, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(layer), attribute, shared)


def _broadcast_weights(model: nn.Module) -> None:
    # As in DDP: the processes may have different seeds.
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor.data, src=0)
