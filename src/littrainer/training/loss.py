"""The loss of a micro-batch, and how it is normalised over the window of its optimizer step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from littrainer.data.windows import count_label_tokens

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)


def loss_and_outputs(
    trainer: Trainer, model: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None
) -> tuple[torch.Tensor, Any]:
    """Run the model on a micro-batch and take the loss from its outputs, or from `compute_loss_func`.

    Parameters:
        num_items_in_batch: label tokens in the window; models and loss functions that take it divide by it.

    Raises:
        ValueError: the model returned no loss.
    """
    labels = None
    if trainer.compute_loss_func is not None and "labels" in inputs:
        labels = inputs.pop("labels")
    if trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
        inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
    outputs = model(**inputs)
    if trainer.compute_loss_func is not None:
        if labels is None:
            logger.warning("compute_loss_func is called with labels=None: the batch has no 'labels'.")
        return trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch), outputs
    return _loss_in(outputs, model, inputs, trainer.label_names), outputs


def _loss_in(outputs: Any, model: Any, inputs: dict[str, Any], label_names: list[str]) -> torch.Tensor:
    loss: Any
    if isinstance(outputs, dict):
        loss, returned = outputs.get("loss"), f"only {', '.join(outputs)}"
        found = isinstance(loss, torch.Tensor)
    else:
        loss = outputs[0] if not isinstance(outputs, torch.Tensor) and len(outputs) else outputs
        found = isinstance(loss, torch.Tensor) and loss is not outputs and loss.numel() == 1
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        returned = f"a {type(outputs).__name__} that begins with a {type(loss).__name__}{shape}"
    if found:
        return loss
    missing = [name for name in label_names if name not in inputs]
    hint = (
        f"The batch has no {' or '.join(missing)} (it has {', '.join(inputs)}): add labels to the dataset"
        if missing
        else "Return the loss under the key 'loss' or as the first element of a tuple"
    )
    raise ValueError(
        f"{type(model).__name__}.forward returned no loss, {returned}. {hint}, or override compute_loss, or pass "
        "compute_loss_func."
    )


def normalised(trainer: Trainer, loss: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
    """The loss as it goes into the backward pass.

    One that was already divided by the label tokens of the window stays as it is; a mean over the micro-batch is
    divided by the number of micro-batches in the window.
    """
    is_divided = trainer.loss_is_scaled_for_ga
    if is_divided is None:
        by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        is_divided = by_model or trainer.compute_loss_func is not None
    return loss if is_divided else loss / trainer.current_gradient_accumulation_steps


def items_in_window(trainer: Trainer, window: list[Any], device: torch.device) -> torch.Tensor | int | None:
    """Label tokens of a window, where the loss is divided by them; None where it is not."""
    takes_number = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if not takes_number or not window or "labels" not in window[0]:
        return None
    number = count_label_tokens(window, trainer._loss_shifts_labels)
    # Divided, as on several devices that share a batch, so that it is a float and losses keep their dtype.
    return number.to(device) / 1 if isinstance(number, torch.Tensor) else number


def add_to_running_loss(
    running: torch.Tensor, loss: torch.Tensor, steps_since_logging: int, filter_non_finite: bool
) -> None:
    """Add a micro-batch's loss to the running sum in place, without a device sync.

    Parameters:
        steps_since_logging: optimizer steps in the sum so far.
        filter_non_finite: a nan or infinite loss counts as the mean of the sum so far.
    """
    if filter_non_finite:
        loss = torch.where(torch.isfinite(loss), loss, running / (1 + steps_since_logging))
    running += loss
