"""Which optimizer class, with which keywords, an `optim` name stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.choices import OptimizerNames

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

Keywords = dict[str, Any]


def _adamw_keywords(args: TrainingArguments) -> Keywords:
    keywords: Keywords = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        keywords["fused"] = True
    return keywords


def _learning_rate_only(args: TrainingArguments) -> Keywords:
    return {"lr": args.learning_rate}


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Callable[[Any], Keywords]]] = {
    OptimizerNames.ADAMW_TORCH.value: (torch.optim.AdamW, _adamw_keywords),
    OptimizerNames.ADAMW_TORCH_FUSED.value: (torch.optim.AdamW, _adamw_keywords),
    OptimizerNames.SGD.value: (torch.optim.SGD, _learning_rate_only),
    OptimizerNames.ADAGRAD.value: (torch.optim.Adagrad, _learning_rate_only),
    OptimizerNames.RMSPROP.value: (torch.optim.RMSprop, _learning_rate_only),
}


def optimizer_class_and_keywords(args: TrainingArguments) -> tuple[type[torch.optim.Optimizer], Keywords]:
    """The class and constructor keywords that `args.optim` names.

    Raises:
        ValueError: `args.optim` names an optimizer this table does not hold.
    """
    name = OptimizerNames(args.optim).value
    if name not in OPTIMIZERS:
        raise ValueError(f"optim={name!r} is not available; choose one of {', '.join(sorted(OPTIMIZERS))}.")
    optimizer_class, keywords_from = OPTIMIZERS[name]
    return optimizer_class, keywords_from(args)
