"""What the loss of a module's micro-batches depends on, read from its model and arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from littrainer.model_facts import facts_about
from littrainer.training.label_smoothing import smoother_for


@dataclass
class SharedLoss:
    """How processes share the label tokens of a window.

    Parameters:
        world_size: processes that train together.
        average_tokens_across_devices: whether tokens are counted over all of them.
    """

    world_size: int
    average_tokens_across_devices: bool


@dataclass
class ModuleLossSettings:
    """The `training.loss.LossSettings` of a module.

    Parameters:
        args: how processes share tokens.
        forward_arguments: names of what the model's forward takes.
        can_return_loss: it returns a loss without labels too.
        current_gradient_accumulation_steps: micro-batches in the window at hand.
        tensor_parallel_size: processes that compute each layer together.
    """

    args: SharedLoss
    compute_loss_func: Callable[..., Any] | None
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    label_names: list[str]
    forward_arguments: tuple[str, ...]
    can_return_loss: bool
    _loss_shifts_labels: bool
    loss_is_scaled_for_ga: bool | None = None
    current_gradient_accumulation_steps: int = 1
    tensor_parallel_size: int = 1

    def get_tp_size(self) -> int:
        """Processes that compute each layer together."""
        return self.tensor_parallel_size

    @property
    def shifts_labels(self) -> bool:
        """Whether the loss compares each label with the prediction one position before."""
        return self._loss_shifts_labels


def loss_settings_of(model: nn.Module, args: Any, compute_loss_func: Callable[..., Any] | None) -> ModuleLossSettings:
    """The loss settings of a model in one process.

    Parameters:
        args: training arguments; those about labels and tokens count.
    """
    facts = facts_about(model)
    return ModuleLossSettings(
        args=SharedLoss(1, args.average_tokens_across_devices),
        compute_loss_func=compute_loss_func,
        label_smoother=smoother_for(model, args.label_smoothing_factor),
        model_accepts_loss_kwargs=facts.accepts_loss_kwargs,
        label_names=facts.label_names if args.label_names is None else args.label_names,
        forward_arguments=facts.forward_arguments,
        can_return_loss=facts.can_return_loss,
        _loss_shifts_labels=facts.shifts_labels,
    )
