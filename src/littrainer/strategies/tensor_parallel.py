"""Tensor parallelism: layers that several processes compute together, each a slice of them, on the same data.

A model's own plan says how: it maps names of layers, with `*` for the number of a layer, to styles:
`{"layers.*.mlp.up_proj": "colwise"}`. Models of transformers bring one (`model.tp_plan`), and any model may have an
attribute of that name.
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


class SummedGradients(ParallelStyle):
    """A layer that each process has as a whole and applies to its own slice of the activations.

    The gradients of its parameters are sums over the slices of all processes. As a plan has it for norms of single
    attention heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        # The parameters may be replaced after this, by others that hold the same weights.
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
    """How a layer is split.

    Parameters:
        make: makes torch's style for it.
        dimension: the one of the layer's weight that is split; None for a whole one.
        layer: the kind of layer that can be split in this way.
        split: the attribute of the layer, as a number of features, that has to divide by the number of processes.
    """

    make: Callable[[], ParallelStyle]
    dimension: int | None
    layer: type[nn.Module] = nn.Linear
    split: str | None = None


# Style of a plan -> what it is in torch. Both releases' names of transformers.
STYLES: dict[str, Style] = {
    "colwise": Style(ColwiseParallel, 0, split="out_features"),
    "colwise_gather_output": Style(lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "colwise_rep": Style(lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "rowwise": Style(RowwiseParallel, 1, split="in_features"),
    "rowwise_split_input": Style(lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "rowwise_rep": Style(lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "embedding_rowwise": Style(lambda: RowwiseParallel(input_layouts=Replicate()), 0, nn.Embedding),
    "embedding_colwise": Style(lambda: ColwiseParallel(output_layouts=Replicate()), 1, nn.Embedding),
    "replicated_with_grad_allreduce": Style(SummedGradients, None, nn.Module),
}
# In errors, what is left to a model whose layers cannot be split.
SHARDING = "fsdp (in a lightning.Trainer ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1))"
# Numbers in a model's config that a process has its share of.
SPLIT_HEADS = ("num_attention_heads", "num_key_value_heads")


def parallelize_by_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model's layers over a mesh of one dimension, in place; a collective call.

    All processes go on with the weights of the first. A model that holds split parameters already is left as it is.

    Raises:
        ValueError: the model has no plan, or the plan cannot be carried out for this number of processes.
    """
    if is_sharded(model):
        return
    styles = find_layer_styles(model, get_tp_plan(model), mesh.size())
    ties = _ties(model)
    _take_over_from_first(model)
    for name in _without_ties_that_would_break(styles, ties):
        # The weights are the same everywhere by now, so that each process takes its slice of what it has.
        parallelize_module(model.get_submodule(name), mesh, STYLES[styles[name]].make(), src_data_rank=None)
    _tie_again(model, ties)


def get_tp_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan that a model brings.

    Raises:
        ValueError: it brings none, or is wrapped so that its plan does not fit.
    """
    name = type(model).__name__
    if is_a(model, "peft model"):
        raise ValueError(
            f"parallelism_config has tp_size above 1, and adapters ({name}) have no plan for it. Leave tp_size at 1, "
            f"and use {SHARDING}; or train the model without adapters."
        )
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise ValueError(
            f"parallelism_config has tp_size above 1, and {name} has no plan of how to split its layers (tp_plan). "
            'Give it an attribute tp_plan such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, or leave '
            f"tp_size at 1 and use {SHARDING}."
        )
    return plan


def find_layer_styles(model: nn.Module, plan: Mapping[str, str], processes: int) -> dict[str, str]:
    """The style of each layer that a plan is about.

    Parameters:
        processes: number of processes that are to share each layer.

    Raises:
        ValueError: a style is unknown, a layer is not of its kind or does not divide, or heads do not.
    """
    _check_heads(model, processes)
    found: dict[str, str] = {}
    unused = set(plan)
    for name, layer in model.named_modules():
        rule = next((rule for rule in (name, _with_wildcards(name)) if rule in plan), None)
        if rule is None:
            continue
        unused.discard(rule)
        _check_layer(name, layer, plan[rule], processes)
        found[name] = plan[rule]
    parameters = {_with_wildcards(name) for name, _ in model.named_parameters()}
    for rule in sorted(unused & parameters):
        raise ValueError(_cannot_split(f"the parameter {rule}", plan[rule]))
    if unused:
        logger.warning(
            "tp_plan names layers that %s does not have: %s.", type(model).__name__, ", ".join(sorted(unused))
        )
    return found


def _with_wildcards(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _check_heads(model: nn.Module, processes: int) -> None:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in SPLIT_HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % processes:
            raise ValueError(
                f"parallelism_config has tp_size={processes}, which does not divide the {name}={heads} of "
                f"{type(model).__name__}. Choose a tp_size that does, or leave it at 1 and use {SHARDING}."
            )


def _check_layer(name: str, layer: nn.Module, style: str, processes: int) -> None:
    known = STYLES.get(style)
    if known is None:
        raise ValueError(_cannot_split(name, style))
    if not isinstance(layer, known.layer):
        raise ValueError(
            f"tp_plan splits {name} by the style {style!r}, which is for {known.layer.__name__}, and it is a "
            f"{type(layer).__name__}. Correct the plan, or leave tp_size at 1."
        )
    features = processes if known.split is None else getattr(layer, known.split)
    if features % processes:
        raise ValueError(
            f"parallelism_config has tp_size={processes}, which does not divide the {known.split}={features} of "
            f"{name}. Choose a tp_size that does, or leave it at 1 and use {SHARDING}."
        )


def _cannot_split(what: str, style: str) -> str:
    return (
        f"tp_plan splits {what} by the style {style!r}, and littrainer knows {', '.join(STYLES)}. Let transformers "
        "split the model when it is loaded: from_pretrained(..., distributed_config=DistributedConfig(tp_size=...)); "
        f"or leave tp_size at 1 and use {SHARDING}."
    )


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same, for each such parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _without_ties_that_would_break(styles: Mapping[str, str], ties: Iterable[list[str]]) -> list[str]:
    """The layers to split: of those that share a parameter, all in the same dimension of it, or none."""
    kept = dict(styles)
    for tied in ties:
        layers = [name.rpartition(".")[0] for name in tied]
        dimensions = {STYLES[styles[layer]].dimension if layer in styles else None for layer in layers}
        if len(dimensions) > 1:
            for layer in layers:
                if kept.pop(layer, None) is not None:
                    logger.info("%s shares its weight with a layer that is split otherwise, and stays whole.", layer)
    return list(kept)


def _tie_again(model: nn.Module, ties: Iterable[list[str]]) -> None:
    for first, *others in ties:
        shared = model.get_parameter(first)
        for name in others:
            layer, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(layer), attribute, shared)


def _take_over_from_first(model: nn.Module) -> None:
    # As DDP does: a script may have seeded its processes differently.
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor.data, src=0)
