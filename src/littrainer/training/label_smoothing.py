"""Cross entropy against labels whose probability is spread a little over all classes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.data.windows import IGNORED_LABEL
from littrainer.model_facts import predicts_next_token, users_model

if TYPE_CHECKING:
    from littrainer.training.loss import LossSettings


class LabelSmoother:
    """Computes the smoothed loss from a model's logits.

    Parameters:
        epsilon: probability taken from the true label and spread evenly over all labels.
        ignore_index: labels of this value do not count.
    """

    def __init__(self, epsilon: float = 0.1, ignore_index: int = IGNORED_LABEL):
        self.epsilon = epsilon
        self.ignore_index = ignore_index

    def __call__(
        self,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """The loss, divided by `num_items_in_batch`, or by the labels of this micro-batch that count.

        Parameters:
            model_output: holds the logits under `"logits"` or as its first element.
            shift_labels: each position predicts the label of the next one.
        """
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        surprise = -nn.functional.log_softmax(logits, dim=-1)
        if labels.dim() < surprise.dim():
            labels = labels.unsqueeze(-1)
        ignored = labels.eq(self.ignore_index)
        # An ignored label is no index, and what is picked for it is masked.
        of_label = surprise.gather(dim=-1, index=labels.clamp(min=0)).masked_fill(ignored, 0.0)
        # Summed in float32, since half precision overflows over a large vocabulary.
        of_all = surprise.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)
        count: Any = num_items_in_batch
        if count is None:
            count = ignored.numel() - ignored.long().sum()
        elif isinstance(count, torch.Tensor):
            count = count.to(of_label.device)
        exact = of_label.sum() / count
        spread = of_all.sum() / (count * surprise.shape[-1])
        return (1 - self.epsilon) * exact + self.epsilon * spread


def smoother_for(model: nn.Module, factor: float) -> LabelSmoother | None:
    """What computes the smoothed loss of a model; None where labels are not smoothed.

    Several labels that are true at once have no probability to spread: a model for them trains unsmoothed, with a
    warning.
    """
    if factor == 0:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        warnings.warn(
            "Label smoothing is not compatible with multi-label classification (config.problem_type), so "
            f"label_smoothing_factor={factor} has no effect.",
            UserWarning,
            stacklevel=2,
        )
        return None
    return LabelSmoother(epsilon=factor)


def smoothed_loss(
    trainer: LossSettings,
    model: Any,
    outputs: Any,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None,
) -> torch.Tensor:
    """The smoothed loss of a micro-batch; a causal language model's labels are shifted by one position."""
    shifted = predicts_next_token(users_model(model))
    return trainer.label_smoother(outputs, labels, shift_labels=shifted, num_items_in_batch=num_items_in_batch)
