"""Which optimizer class, with which keywords, an `optim` name stands for, and the optimizer made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from littrainer.arguments.choices import OptimizerNames
from littrainer.optim.built_in import BUILT_IN
from littrainer.optim.entries import Keywords, OptimizerEntry, Request
from littrainer.optim.low_rank import one_optimizer_for_each_parameter, parameter_groups_with_projection
from littrainer.optim.optimizer_arguments import read_optim_args
from littrainer.optim.third_party import THIRD_PARTY

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

OPTIMIZERS: dict[OptimizerNames, OptimizerEntry] = {**BUILT_IN, **THIRD_PARTY}

# What an entry, or an overriding get_optimizer_cls_and_kwargs, puts in the place of the usual parameter groups.
INSTEAD_OF_GROUPS = ("params", "model", "optimizer_dict")


def optimizer_class_and_keywords(args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, Keywords]:
    """The class and constructor keywords that `args.optim` names.

    Parameters:
        model: needed by the low-rank optimizers and LOMO, whose keywords hold its parameters.

    Raises:
        ImportError: the library that has this optimizer is not installed.
        ValueError: `optim_args` or `optim_target_modules` do not fit the optimizer.
    """
    name = OptimizerNames(args.optim)
    entry = OPTIMIZERS[name]
    settings = read_optim_args(name.value, args.optim_args, entry.settings)
    optimizer_class = entry.load_class(name.value)
    request = Request(name.value, args, settings, model)
    keywords = entry.keywords(request)
    if not entry.projects:
        return optimizer_class, keywords
    groups = parameter_groups_with_projection(request)
    if entry.is_layerwise:
        optimizer_class, keywords = one_optimizer_for_each_parameter(optimizer_class, keywords, groups, request)
    return optimizer_class, {**keywords, "params": groups}


def build_optimizer(model: nn.Module, groups: list[dict[str, Any]], optimizer_class: Any, keywords: Keywords) -> Any:
    """The optimizer of a model.

    Parameters:
        groups: parameter groups, unless the keywords hold something in their place.
        optimizer_class: a class of optimizers; or one whose instance, called with model and keywords, makes one.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        return optimizer_class()(model, **keywords)
    keywords = dict(keywords)
    first: Any = groups
    for name in INSTEAD_OF_GROUPS:
        first = keywords.pop(name, first)
    optimizer = optimizer_class(first, **keywords)
    if "bitsandbytes" in optimizer_class.__module__ and keywords.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(model)
    return optimizer


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    # State in 8 bits makes training of embeddings unstable; bitsandbytes advises to leave them out.
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
