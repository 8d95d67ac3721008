"""Losses of a module, divided by the label tokens of a window whose optimizer step Lightning decides on.

A window is known before its first forward pass: a `TrainerDataModule` hands it out, and of any other loader its batches
are looked at ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from littrainer.data.windows import MicroBatch
from littrainer.errors.notes import kind_of
from littrainer.model.facts import facts_about
from littrainer.training.loss import smoother_for
from littrainer.training.loss_normalization import UNKNOWN, LossHead


def model_inputs(batch: Any) -> dict[str, Any]:
    """The entries of a batch.

    Raises:
        TypeError: the batch is no mapping.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"TransformersModule was handed {kind_of(batch)} as a batch, and calls its model with the batch's entries "
            "as keywords: let the loader give dicts such as {'input_ids': ..., 'labels': ...}, for instance with "
            "DataLoader(..., collate_fn=littrainer.default_data_collator), or make it such a dict in the module's "
            "on_after_batch_transfer."
        )
    return dict(batch)


@dataclass
class ModuleLossSettings:
    """The `training.loss.LossSettings` of a module.

    Parameters:
        args: how processes share tokens: `world_size`, `average_tokens_across_devices` and `loss_normalization`.
        forward_arguments: names of what the model's forward takes.
        can_return_loss: it returns a loss without labels too.
        current_gradient_accumulation_steps: micro-batches in the current window.
        tensor_parallel_size: processes that compute each layer together.
    """

    args: Any
    compute_loss_func: Callable[..., Any] | None
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    label_names: list[str]
    forward_arguments: tuple[str, ...]
    can_return_loss: bool
    _loss_shifts_labels: bool
    loss_is_scaled_for_ga: bool | None = None
    _loss_head: LossHead = UNKNOWN
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
    """The loss settings of a model in one process, as training arguments have them."""
    facts = facts_about(model)
    return ModuleLossSettings(
        args=SimpleNamespace(
            world_size=1,
            average_tokens_across_devices=args.average_tokens_across_devices,
            loss_normalization=args.loss_normalization,
        ),
        compute_loss_func=compute_loss_func,
        label_smoother=smoother_for(model, args.label_smoothing_factor),
        model_accepts_loss_kwargs=facts.accepts_loss_kwargs,
        label_names=facts.label_names if args.label_names is None else args.label_names,
        forward_arguments=facts.forward_arguments,
        can_return_loss=facts.can_return_loss,
        _loss_shifts_labels=facts.shifts_labels,
    )


@dataclass
class Window:
    """The micro-batches of one optimizer step.

    Parameters:
        size: how many there are.
        number: what the sum of their losses is divided by; None if losses are means.
        loss: the sum of those so far as they go into the backward pass, on the device.
    """

    size: int
    number: torch.Tensor | int | None
    loss: Any = 0.0


def window_of(
    count: Callable[[list[Any]], Any], inputs: dict[str, Any], known: MicroBatch | None, upcoming: list[Any]
) -> Window:
    """The window that a micro-batch opens.

    Parameters:
        count: returns what the losses of these micro-batches are divided by.
        inputs: the micro-batch.
        known: its place in the window, if the loader hands out whole windows.
        upcoming: else the other micro-batches, as the loader made them.
    """
    if known is not None:
        return Window(known.window_size, known.num_items_in_window)
    number = count([inputs, *upcoming]) if all(isinstance(one, Mapping) for one in upcoming) else None
    return Window(1 + len(upcoming), number)
